"""What a step leaves of tensors and their flags is what eager leaves: which are trained, and which are the caller's own."""

from __future__ import annotations

from collections import UserDict, UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from bench.in_values import in_values
from tests.programs import RandomOrder
from tests.training import differences

Loss = Callable[[nn.Module, Tensor], Any]
PLAIN = lowtide.Planning(workspaces=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(loss: Loss, place: Any, eagerly: bool, frozen: bool = False, steps: int = 4) -> list[Any]:
    """What each step leaves: weights, flags, and how what lies in `place` is tied to the model."""
    torch.manual_seed(0)
    model = Net()
    model.first.requires_grad_(not frozen)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.rand(5, 3) for _ in range(steps)]
    step = None if eagerly else lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer, planning=PLAIN)
    left = []
    for x in batches:
        if step is None:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
        else:
            step(x)
        parameters = dict(model.named_parameters())
        flags = {name: each.requires_grad for name, each in parameters.items()}
        left.append([{name: each.detach().clone() for name, each in parameters.items()}, flags, tied(place(model), model, x)])
    return left


def tied(items: dict[str, Tensor], model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Of each tensor its class and flag, whose memory it lies on, and whose very tensor it is."""
    own = {**model.state_dict(keep_vars=True), "x": x}
    where = {tensor.untyped_storage().data_ptr(): name for name, tensor in own.items()}
    return {
        key: [
            type(item).__name__,
            item.requires_grad,
            where.get(item.untyped_storage().data_ptr()),
            next((name for name, tensor in own.items() if tensor is item), None),
            item.detach().clone(),
        ]
        for key, item in items.items()
    }


def check(loss: Loss, place: Any = lambda model: {}, **options: Any) -> None:
    expected = trained(loss, place, True, **options)
    found = trained(loss, place, False, **options)
    assert not (told := differences(expected, found)), "\n".join(told[:5])


def frozen_before(model: nn.Module, x: Tensor) -> Tensor:
    model.first.requires_grad_(False)
    return square(model, x)


def frozen_behind(model: nn.Module, x: Tensor) -> Tensor:
    loss = square(model, x)
    model.first.weight.requires_grad = False
    return loss


def frozen_meanwhile(model: nn.Module, x: Tensor) -> Tensor:
    model.first.requires_grad_(False)
    loss = square(model, x)
    model.first.requires_grad_(True)
    return loss


def thawed(model: nn.Module, x: Tensor) -> Tensor:
    model.first.requires_grad_(True)
    return square(model, x)


@pytest.mark.parametrize("loss", [frozen_before, frozen_behind, frozen_meanwhile, thawed])
def test_what_a_step_freezes_or_thaws_stays_so(loss: Loss) -> None:
    check(loss, frozen=loss is thawed)


def test_a_scaler_that_skips_the_update_leaves_what_was_frozen() -> None:
    torch.manual_seed(0)
    model, scaler = Net(), torch.amp.GradScaler("cpu")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    training = lowtide.Training(scaler=scaler)
    step = lowtide.optimize(model, torch.ones(5, 3), loss=frozen_before, optimizer=optimizer, training=training, planning=PLAIN)
    step(torch.full((5, 3), float("inf")))
    assert not model.first.weight.requires_grad


def of_the_batch(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    return square(model, x)


def of_a_buffer(model: nn.Module, x: Tensor) -> Tensor:
    model.scale.requires_grad = True
    return square(model, x)


def of_a_copy(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = model(x)
    return out.square().mean() + torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().mean()


def of_a_buffer_whose_gradient_is_read(model: nn.Module, x: Tensor) -> Tensor:
    last = model.scale.grad
    return of_a_buffer(model, x) * (1 if last is None else 1 - last.sum())


def of_a_buffer_whose_flag_is_read(model: nn.Module, x: Tensor) -> Tensor:
    return of_a_buffer(model, x * 2 if model.scale.requires_grad else x)


@pytest.mark.parametrize("loss", [of_a_buffer_whose_gradient_is_read, of_a_buffer_whose_flag_is_read])
def test_a_gradient_that_a_step_would_read_of_a_buffer_is_refused_and_the_remedy_trains(loss: Loss) -> None:
    model, x = Net(), torch.rand(5, 3)
    remedy = r"has scale require gradients.*x = x\.detach\(\)\.requires_grad_\(\)"
    with pytest.raises(lowtide.CaptureError, match=remedy):
        lowtide.optimize(model, x, loss=loss, optimizer=optim.SGD(model.parameters(), lr=0.1), planning=PLAIN)
    assert not model.scale.requires_grad
    check(of_a_copy)


def test_one_that_eager_would_leave_on_a_buffer_is_told() -> None:
    with pytest.warns(UserWarning, match=r"has scale require gradients.*neither that nor a gradient"):
        check(of_a_buffer)


def test_one_that_eager_would_leave_on_the_batch_is_told() -> None:
    model, x = Net(), torch.rand(5, 3)
    with pytest.warns(UserWarning, match=r"has batch\[0\]\[0\] require gradients.*neither that nor a gradient"):
        step = lowtide.optimize(model, x, loss=of_the_batch, optimizer=optim.SGD(model.parameters(), lr=0.1), planning=PLAIN)
    step(x)
    assert not x.requires_grad
    assert x.grad is None


def keeping(put: Callable[[dict[str, Any], nn.Module, Tensor], object]) -> tuple[Loss, dict[str, Any]]:
    kept: dict[str, Any] = {}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        put(kept, model, x)
        return square(model, x)

    return loss, kept


KEPT: dict[str, Callable[[dict[str, Any], Any, Tensor], object]] = {
    "data": lambda kept, model, x: kept.update(w=model.first.weight.data),
    "detached": lambda kept, model, x: kept.update(w=model.first.weight.detach(), v=model.scale.detach(), x=x.detach()),
    "a part": lambda kept, model, x: kept.update(w=model.first.weight.detach()[:2].T),
    "state_dict": lambda kept, model, x: kept.update(model.state_dict()),
    "the very tensors": lambda kept, model, x: kept.update(w=model.first.weight, v=model.scale, x=x),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_of_the_callers_is_the_tensor_or_one_on_its_memory_as_in_eager(kind: str) -> None:
    kept: list[dict[str, Any]] = []
    for eagerly in (True, False):
        loss, place = keeping(KEPT[kind])
        kept.append(trained(loss, lambda model, place=place: place, eagerly, steps=2))  # type: ignore[misc]
    assert not (told := differences(*kept)), "\n".join(told[:5])


def test_what_a_module_keeps_and_what_is_returned_is_detached_too() -> None:
    def loss(model: Any, x: Tensor) -> Any:
        model.kept = model.first.weight.detach()
        return square(model, x), model.first.weight

    model = Net()
    step = lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters(), lr=0.1), planning=PLAIN)
    _, weight = step(torch.rand(5, 3))
    for each in (model.kept, weight):
        assert (type(each), each.requires_grad, each.data_ptr()) == (Tensor, False, model.first.weight.data_ptr())


def test_a_call_without_gradients_gives_a_detached_weight_as_a_tensor() -> None:
    class Gives(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.first.weight.detach()

    model = Gives()
    for call in (model, lowtide.optimize(model, torch.rand(5, 3), planning=PLAIN)):
        for _ in range(2):
            assert type(call(torch.rand(5, 3))[1]) is Tensor


@pytest.mark.parametrize("kind", [UserDict, UserList])
def test_pythons_own_containers_to_derive_from_are_filled_by_each_step(kind: type) -> None:
    left = []
    for eagerly in (True, False):
        kept: Any = kind() if kind is UserDict else kind([None])

        def loss(model: nn.Module, x: Tensor, kept: Any = kept) -> Tensor:
            value = square(model, x)
            kept[0] = value.detach()
            return value

        left.append([trained(loss, lambda model: {}, eagerly), kept[0]])
    assert not differences(*left)


def test_gradients_that_no_step_keeps_are_told_once() -> None:
    model, x = Net(), torch.rand(5, 3)
    optimizer = optim.SGD(model.last.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"not hold 2 parameters that get gradients \(first\.weight, \.\.\.\).*requires_grad_") as told:
        step = lowtide.optimize(model, x, loss=square, optimizer=optimizer, planning=PLAIN)
    assert [each.filename for each in told] == [__file__]
    step(x), step(x)
    assert model.first.weight.grad is None
    model.first.requires_grad_(False)
    lowtide.optimize(model, x, loss=square, optimizer=optimizer, planning=PLAIN)(x)  # any warning is an error here


def finite(model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.grad.isfinite().all():  # type: ignore[union-attr]
            raise ValueError("not finite")


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("look", "error"), [(finite, ValueError), (clipped, RuntimeError)])
def test_a_check_of_gradients_that_fails_leaves_parameters_and_state(look: Any, error: type, seed: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]), torch.rand(5, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = in_values(after_backward=look, workspaces=False, solver=RandomOrder(seed))
    step = lowtide.optimize(model, x, loss=lambda model, x: (model(x) * x.sum()).sum(), optimizer=optimizer, **options)
    step(x)
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    before = [each.detach().clone() for each in (*model.parameters(), *states)]
    with pytest.raises(error, match="finite"):
        step(x * float("inf"))
    assert all(map(torch.equal, before, (*model.parameters(), *states)))


def test_a_batch_of_one_tensor_twice_that_loss_writes_is_refused_with_what_helps() -> None:
    def loss(out_of_place: bool) -> Any:
        return lambda model, x, y: (model(x + 1 if out_of_place else x.add_(1)) - y.mean()).square().mean()

    model, x = Net(), torch.rand(5, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = lowtide.optimize(model, (x, x), loss=loss(False), optimizer=optimizer, planning=PLAIN)
    with pytest.raises(lowtide.BatchError, match=r"batch 1 shares its memory with batch 0.* writes batch 0.*x = x \+ 1.*clone"):
        step(x, x)
    step(x, x.clone())
    lowtide.optimize(model, (x, x), loss=loss(True), optimizer=optimizer, planning=PLAIN)(x, x)


def test_values_of_a_batch_that_are_no_tensors_are_refused_in_short_and_texts_with_where_to_put_them() -> None:
    settings = {"way": "a"}

    def loss(model: nn.Module, x: Tensor, given: Any = None) -> Tensor:
        way = settings["way"] if given is None or not isinstance(given, str) else given
        return square(model, x + (0 if given is None or isinstance(given, str) else torch.as_tensor(given))) * (1 if way == "a" else 2)

    model, x = Net(), torch.rand(5, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    step = lowtide.optimize(model, (x, "a"), loss=loss, optimizer=optimizer, planning=PLAIN)
    with pytest.raises(lowtide.BatchError, match=r"'a', got 'b'.* put a text that it reads into a dictionary"):
        step(x, "b")
    step = lowtide.optimize(model, (x,), loss=loss, optimizer=optimizer, planning=PLAIN)
    values = []
    for settings["way"] in ("a", "b", "a"):
        values.append(step(x).item())
    assert values == [values[0], 2 * values[0], values[0]]
    numbers = x.numpy()
    step = lowtide.optimize(model, (x, numbers), loss=loss, optimizer=optimizer, planning=PLAIN)
    with pytest.raises(lowtide.BatchError, match=r"a NumPy array of float32\[5, 3\], got another;.*torch\.as_tensor"):
        step(x, numbers + 1)


class Remembers(nn.Module):
    """Scales by what its last call has drawn, which lies in a table in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[str, Any] = {}
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(()) if self.last is None else self.last[1]["scale"]
        self.drawn = {"scale": torch.rand(()), "of": x.shape}
        self.last = (x.shape, self.drawn)
        return x * scale


def test_a_table_in_a_tuple_is_the_callers_again_after_each_attempt() -> None:
    remembering, model, x = Remembers(), nn.Linear(3, 3), torch.ones(2, 3)
    remembering(x)
    before = remembering.last
    with pytest.raises(lowtide.CaptureError, match="reads attribute 'last' of a Remembers, which an earlier step has put there"):
        lowtide.optimize(model, (x,), loss=lambda model, x: model(remembering(x)).sum(), optimizer=optim.SGD(model.parameters(), 0.1))
    assert remembering.last is before
    assert type(before[1]) is dict
    assert before[1] is remembering.drawn
