"""Who shares memory with whom: every sharing that eager PyTorch shows, a captured program shows too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.training import Snapshot, check, differences


class Calls(nn.Module):
    """Runs a function on itself and the batch."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = [function]
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4) - 5)
        self.register_buffer("whole", torch.arange(8.0))
        self.register_buffer("part", self.whole[2:6].view(2, 2))

    def forward(self, *batch: Tensor, **named: Tensor) -> object:
        return self.function[0](self, *batch, **named)


def optimized(function: Callable[..., object], *batch: Tensor) -> tuple[Calls, lowtide.Step]:
    model = Calls(function)
    return model, lowtide.optimize(model, batch, planning=lowtide.Planning(workspaces=False))


def test_an_output_that_is_an_input():
    _, step = optimized(lambda model, x: x, torch.ones(2))
    given = torch.zeros(2)
    assert step(given) is given


def test_an_output_that_is_a_view_of_a_parameter():
    model, step = optimized(lambda model, x: (model.weight.t(), model.part), torch.ones(2))
    view, part = step(torch.ones(2))
    with torch.no_grad():
        model.weight.zero_()
        model.whole.fill_(7)
    assert view.shape == (4, 3)
    assert not view.any()
    assert (part == 7).all()


def test_two_results_on_one_memory():
    _, step = optimized(lambda model, x: (y := x + 1, y.view(-1), y), torch.ones(2, 2))
    first, flat, again = step(torch.zeros(2, 2))
    flat[0] = 5
    assert first[0, 0] == again[0, 0] == 5


def test_a_result_read_before_a_later_write_keeps_its_value():
    def function(model, x):
        y = x * 2
        copied, seen = y.clone(), y[0]
        y.add_(1)
        return copied, seen, y

    _, step = optimized(function, torch.ones(2, 2))
    assert not differences(function(None, torch.ones(2, 2)), step(torch.ones(2, 2)))


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1), lambda x: x[0].mul_(3), lambda x: x.t()[1:].zero_(), lambda x: x.view(-1)[::2].fill_(4)]
)
def test_a_batch_written_in_place_is_the_callers(write):
    def function(model, x):
        before = x * 1
        write(x)
        return before

    _, step = optimized(function, torch.ones(3, 4))
    given = torch.rand(3, 4)
    expected = given.clone()
    function(None, expected)
    step(given)
    assert torch.equal(given, expected)


def test_two_arguments_that_are_one_tensor_at_capture_only():
    x = torch.ones(3)
    _, step = optimized(lambda model, x, y: x - 2 * y, x, x)
    assert step(torch.full((3,), 5.0), torch.ones(3)).tolist() == [3.0] * 3
    assert step(x, x).tolist() == [-1.0] * 3


def test_two_arguments_on_one_memory_of_which_one_is_written():
    _, step = optimized(lambda model, x, y: x.add_(1) * y, torch.ones(3), torch.ones(3))
    both = torch.zeros(4)
    with pytest.raises(lowtide.BatchError, match=r"batch 1 shares its memory with batch 0.*pass a copy"):
        step(both[1:], both[:3])
    assert not both.any()


def test_a_batch_that_shares_memory_with_what_the_step_trains():
    model = nn.Linear(3, 3)
    step = lowtide.optimize(
        model,
        torch.ones(3, 3),
        loss=lambda model, x: model(x).sum(),
        optimizer=optim.SGD(model.parameters(), 0.1),
        planning=lowtide.Planning(workspaces=False),
    )
    before = Snapshot.of(model)
    with pytest.raises(lowtide.BatchError, match="batch 0 shares its memory with parameter weight"):
        step(model.weight.detach())
    before.assert_same(model)


def test_buffers_on_one_memory():
    def function(model, x):
        model.part.mul_(2)
        model.whole[3:] += x
        return model.part + 0, model.whole.sum()

    model, step = optimized(function, torch.ones(5))
    twin = Calls(function)
    for _ in range(2):
        assert not differences(twin(torch.ones(5)), step(torch.ones(5)))
    assert torch.equal(model.whole, twin.whole)
    for each in (model, twin):
        each.part = torch.zeros(6)[2:].view(2, 2)  # on memory of its own now
    assert not differences(twin(torch.ones(5)), step(torch.ones(5)))
    assert torch.equal(model.whole, twin.whole)


def test_a_buffer_moved_within_its_storage():
    def function(model, x):
        model.whole[2:4].add_(x)
        return model.whole.view(2, 4) * 1

    model, twin = Calls(function), Calls(function)
    del model.part, twin.part
    step = lowtide.optimize(model, torch.ones(2), planning=lowtide.Planning(workspaces=False))
    model.whole, twin.whole = torch.arange(9.0)[1:], torch.arange(9.0)[1:]
    assert not differences(twin(torch.ones(2)), step(torch.ones(2)))
    assert torch.equal(model.whole, twin.whole)


def test_parameters_on_one_flat_memory():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(20)
            self.a, self.b = nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[12:16])

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.a + self.b) * self.b

    def make():
        model = Flat()
        return model, torch.randn(5, 3), lambda model, x: model(x).sum(), optim.SGD(model.parameters(), 0.1, momentum=0.9)

    check(make)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("later", ["apart", "elsewhere in one memory", "back again"])
def test_weights_on_one_memory_that_lie_apart_later(trained, later):
    """The other's updates reach a weight only as long as it lies there, which each call asks anew."""

    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[2].weight.requires_grad_(trained)
        model[0].weight.data = model[2].weight.data = torch.randn(3, 4, 4)[0]
        return model, torch.randn(5, 4), lambda model, x: model(x).square().sum(), optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def between(model, _):
        memory = torch.randn(3, 4, 4)

        def lie(turn: int) -> None:
            if turn == 1:
                model[0].weight.data = memory[0]
                model[2].weight.data = memory[1] if later == "elsewhere in one memory" else memory[1].clone()
            if turn == 3 and later == "back again":
                model[2].weight.data = model[0].weight.data

        return lie

    check(make, steps=6, between=between)


def test_weights_on_one_memory_that_lie_apart_in_a_later_call():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.data = model[1].weight.data
    step, x = lowtide.optimize(model, torch.ones(2, 4)), torch.randn(2, 4)
    for weight in (model[0].weight.data * 2, model[0].weight.data):
        model[1].weight.data = weight
        assert not differences(model(x).detach(), step(x).detach())


@pytest.mark.parametrize(
    "layout", [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x.contiguous(memory_format=torch.channels_last), lambda x: x[1:]]
)
@pytest.mark.parametrize("draw", [nn.functional.dropout, nn.functional.alpha_dropout, lambda x: torch.empty_like(x).bernoulli_(0.3) * x])
def test_random_masks_on_any_layout(layout, draw):
    def make():
        model = nn.Conv2d(4, 4, 1)
        return model, torch.randn(4, 4, 6, 6), lambda model, x: draw(layout(model(x))).square().sum(), optim.SGD(model.parameters(), 0.1)

    check(make)


def test_a_plain_tensor_that_a_module_keeps_from_step_to_step():
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.memory, self.last = nn.Linear(4, 4), torch.zeros(2, 4), None

        def forward(self, x: Tensor) -> Tensor:
            start = self.memory if self.last is None else self.memory + self.last
            y = self.linear(x + start)
            self.memory, self.last = y.detach(), x.detach() * 0.5
            return y

    seen: list[object] = []

    def make():
        model = Remembers()
        seen.append(model)
        return model, torch.randn(2, 4), lambda model, x: model(x).square().sum(), optim.SGD(model.parameters(), 0.1)

    check(make, steps=4)
    one, two = seen
    assert not differences((one.memory, one.last), (two.memory, two.last))


def trained(model: nn.Module, scale: float) -> lowtide.Step:
    optimizer = optim.Adam(model.parameters(), 0.1, foreach=False)
    return lowtide.optimize(
        model,
        torch.ones(2, 3),
        loss=lambda model, x: (model(x) * scale).square().sum(),
        optimizer=optimizer,
        planning=lowtide.Planning(workspaces=False),
    )


def test_one_model_optimized_twice_and_two_steps_in_turn():
    def run(optimized: bool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3))
        if optimized:
            steps = [trained(model, 1.0), trained(model, -2.0), trained(model, 1.0)]
        else:
            steps = [eager(model, 1.0), eager(model, -2.0), eager(model, 1.0)]
        return [float(steps[turn % 3](torch.rand(2, 3))) for turn in range(7)], dict(model.state_dict())

    assert not differences(run(False), run(True))


def eager(model: nn.Module, scale: float) -> Callable[[Tensor], Tensor]:
    optimizer = optim.Adam(model.parameters(), 0.1, foreach=False)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = (model(x) * scale).square().sum()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def test_a_write_on_an_expanded_tensor_is_refused_as_by_eager():
    with pytest.raises(lowtide.CaptureError, match=r"aten.add_.Tensor at .*test_aliasing.py:\d+ writes to an expanded tensor: clone"):
        optimized(lambda model, x: (x * 1).expand(3, 2).add_(1), torch.ones(2))


def test_out_arguments():
    def function(model, x):
        row = torch.empty(2, 3)
        torch.mul(x, 2, out=row[1])
        grown = torch.empty(0)
        torch.add(x, 1, out=grown)
        best, place = torch.empty(()), torch.empty((), dtype=torch.int64)
        torch.max(x, 0, out=(best, place))
        row[0] = grown
        return row, best, place

    _, step = optimized(function, torch.ones(3))
    assert not differences(function(None, torch.arange(3.0)), step(torch.arange(3.0)))


def test_factories_write_into_what_the_step_made():
    def function(model, x):
        like, turned = torch.eye(*x.shape, out=torch.empty_like(x)), torch.empty(4, 3)
        torch.eye(3, 4, out=turned.t())
        torch.arange(3, out=turned[0])
        filled = torch.zeros(5, out=torch.empty(5)), torch.full((2,), 7.0, out=torch.empty(2)), torch.ones(2, out=torch.empty(0))
        return like + x, turned, *filled, torch.linspace(0, 1, 5, out=torch.empty(5)), torch.randn(3, out=torch.empty(3))

    _, step = optimized(function, torch.ones(3, 4))
    x = torch.rand(3, 4)
    torch.manual_seed(0)
    expected = function(None, x)
    torch.manual_seed(0)
    assert not differences(expected, step(x))


def test_out_arguments_that_resize_what_the_caller_owns_are_refused():
    into = torch.empty(0)

    def function(model, x):
        torch.mm(x, x.t(), out=into)
        return x

    with pytest.raises(
        lowtide.CaptureError, match=r"aten.mm.out at .*test_aliasing.py:\d+ gives a tensor of the caller another size: make it"
    ):
        optimized(function, torch.ones(3, 4))


def test_arithmetic_into_another_layout():
    def function(model, x):
        wide, turned = torch.zeros(3, 7), torch.zeros(4, 3)
        torch.mul(x, 3.7, out=wide[:, 1:5])
        torch.div(x, x + 3, out=turned.t())
        torch.add(x, turned.t(), out=wide.narrow(1, 3, 4))
        return wide, turned

    _, step = optimized(function, torch.rand(3, 4))
    x = torch.rand(3, 4)
    assert not differences(function(None, x), step(x))


PRODUCTS = {
    "addmm_": lambda out, one, two: out.addmm_(one, two, alpha=0.7),
    "baddbmm_": lambda out, one, two: out[None].baddbmm_(one[None], two[None]),
    "addbmm_": lambda out, one, two: out.addbmm_(one[None], two[None], beta=0.3),
    "mm": lambda out, one, two: torch.mm(one, two, out=out),
    "bmm": lambda out, one, two: torch.bmm(one[None], two[None], out=out[None]),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_into_another_layout_round_as_they_do_there(name, turned):
    """A kernel that writes a transposed matrix adds up otherwise."""
    one, two = torch.rand(171, 93, dtype=torch.float64), torch.rand(151, 93, dtype=torch.float64).t()

    def function(model, one, two):
        whole = torch.ones(154, 171, dtype=one.dtype).t() if turned else torch.ones(171, 154, dtype=one.dtype)
        PRODUCTS[name](whole[:, 2:153], one, two)
        return whole

    _, step = optimized(function, one, two)
    assert not differences(function(None, one, two), step(one, two))


def test_arithmetic_with_a_factor_into_another_layout_is_refused():
    with pytest.raises(lowtide.CaptureError, match=r"aten.add.out at .* writes into another layout or dtype"):
        optimized(lambda model, x: torch.add(x, x, alpha=0.3, out=torch.empty(4, 3).t()) * 1, torch.ones(3, 4))


@pytest.mark.parametrize("write", [lambda x, out: torch.sigmoid(x, out=out.t()), lambda x, out: torch.sum(x, 0, out=out[0].double())])
def test_out_arguments_that_change_how_a_kernel_runs_are_refused(write):
    def function(model, x):
        out = torch.empty(3, 3)
        write(x, out)
        return out

    with pytest.raises(lowtide.CaptureError, match=r"aten.s.*out at .*test_aliasing.py:\d+ writes into another layout or dtype"):
        optimized(function, torch.ones(3, 3))


def test_a_tensor_reshaped_in_place():
    def function(model, x):
        y = x * 2
        y.t_()
        y[0].add_(1)
        z = y.unsqueeze(0).squeeze_(0).transpose_(0, 1)
        return y, z + 1

    _, step = optimized(function, torch.ones(2, 3))
    assert not differences(function(None, torch.ones(2, 3)), step(torch.ones(2, 3)))


def test_the_callers_tensor_reshaped_in_place_is_refused():
    with pytest.raises(lowtide.CaptureError, match=r"aten.t_.default at .*test_aliasing.py:\d+ reshapes a tensor of the caller"):
        optimized(lambda model, x: x.t_() * 1, torch.ones(2, 3))


class Shows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.which = nn.Linear(3, 3), 0
        self.register_buffer("one", torch.ones(3))
        self.register_buffer("two", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.one.mul_(0.9), self.two.mul_(0.8)
        self.last = self.two if self.which else self.one
        return self.linear(x) * self.one


def test_a_buffer_that_is_an_attribute_from_the_first_step_on_is_no_change_of_the_program() -> None:
    """A warning would be an error here."""
    model, x = Shows(), torch.ones(2, 3)
    optimizer = optim.SGD(model.parameters(), 0.1)
    step = lowtide.optimize(model, (x,), loss=lambda model, x: model(x).sum(), optimizer=optimizer)
    for which in (0, 0, 0, 1, 1):
        model.which = which
        step(x)
        assert model.last is (model.two if which else model.one)
