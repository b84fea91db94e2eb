"""Hooks: what they do to tensors is in the graph, and what they do beside is done by each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

import lowtide
from tests.training import Settings, Snapshot, eager_step

HERE = r"\S*test_hooks\.py:\d+"


class Net(nn.Module):
    """Runs what it is given on its hidden layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))
        self.largest: Any = None
        self.within: Callable[[Tensor], Any] = lambda hidden: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.within(hidden)
        return self.second(hidden.tanh()).square().sum()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def trained(hooked: Callable[[Net], Any], optimized: bool) -> Net:
    torch.manual_seed(0)
    model = Net()
    hooked(model)
    optimizer = optim.SGD(model.parameters(), 0.1)
    x = torch.randn(5, 3)
    before = Snapshot.of(model, optimizer)
    step = lowtide.optimize(model, x, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False)) if optimized else None
    before.assert_same(model, optimizer)
    for _ in range(3):
        step(x) if step else eager_step(model, loss, optimizer, (x,), {}, Settings())
    return model


def scale_in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


def note_in_buffer(model: Net) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        model.seen.copy_(gradient.abs().sum(0))

    return hook


def note_in_attribute(model: Net) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        model.largest = gradient.max()

    return hook


class Weighs:
    """An old style pre-hook: it makes an attribute of the module anew."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        module.scaled = module.weight * 2


class ByKeyword(nn.Module):
    """Takes and gives tensors by name."""

    def forward(self, *, hidden: Tensor) -> dict[str, Tensor]:
        return {"hidden": hidden * 2}


def by_keyword(model: Net, register: Callable[[nn.Module], Any]) -> None:
    """Have the model run such a module with hooks on it; what comes out is what the next layer reads."""
    model.named = ByKeyword()
    register(model.named)
    model.first.register_forward_hook(lambda module, args, output: model.named(hidden=output)["hidden"])


def replace_entry(module: nn.Module, args: Any, output: dict[str, Tensor]) -> None:
    output["hidden"] = output["hidden"] + 1


def write_keyword(module: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> None:
    kwargs["hidden"].mul_(3)


PURE = {
    "on a parameter": lambda model: model.first.weight.register_hook(lambda gradient: gradient * 3),
    "in place": lambda model: model.first.weight.register_hook(scale_in_place),
    "within": lambda model: setattr(model, "within", lambda hidden: hidden.register_hook(lambda gradient: gradient.clamp(max=0.1))),
    "within, into a buffer": lambda model: setattr(model, "within", lambda hidden: hidden.register_hook(note_in_buffer(model))),
    "into an attribute": lambda model: model.first.bias.register_hook(note_in_attribute(model)),
    "retain_grad": lambda model: setattr(model, "within", lambda hidden: hidden.retain_grad()),
    "of a module": lambda model: model.second.register_full_backward_hook(lambda module, given, taken: (given[0] * 2,)),
    "before a module": lambda model: model.second.register_forward_pre_hook(Weighs()),
    "after a module": lambda model: model.second.register_forward_hook(lambda module, args, output: output + 1),
    "an entry of what comes out": lambda model: by_keyword(model, lambda named: named.register_forward_hook(replace_entry)),
    "a keyword in place": lambda model: by_keyword(model, lambda named: named.register_forward_pre_hook(write_keyword, with_kwargs=True)),
}


@pytest.mark.parametrize("hooked", PURE.values(), ids=PURE.keys())
def test_what_hooks_do_to_tensors_is_done_in_each_step(hooked):
    one, two = trained(hooked, False), trained(hooked, True)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name
    assert one.largest is None or torch.equal(one.largest, two.largest)


class Meter:
    """What hooks leave beside tensors."""

    def __init__(self) -> None:
        self.calls, self.shapes, self.by_name, self.last = 0, [], {"calls": 0}, 0.0

    def notes(self, *given: Any) -> None:
        self.calls += 1
        self.shapes.append([tuple(each.shape) for each in tree_leaves(given) if isinstance(each, Tensor)])
        self.by_name["calls"] += 1
        print("a hook ran", self.calls)

    def keeps_a_number(self, *given: Any) -> None:
        self.last = next(each for each in tree_leaves(given) if isinstance(each, Tensor)).sum().item()

    def checks(self, *given: Any) -> None:
        for each in tree_leaves(given):
            if isinstance(each, Tensor) and each.isnan().any():
                raise ValueError("not a number")


KINDS = {
    "on a parameter": lambda model, hook: model.first.weight.register_hook(hook),
    "within": lambda model, hook: setattr(model, "within", lambda hidden: hidden.register_hook(hook)),
    "before a module": lambda model, hook: model.second.register_forward_pre_hook(hook),
    "after a module": lambda model, hook: model.second.register_forward_hook(hook),
    "of keywords": lambda model, hook: by_keyword(model, lambda named: named.register_forward_hook(hook)),
    "behind a module": lambda model, hook: model.second.register_full_backward_hook(hook),
    "before all": lambda model, hook: torch_module.register_module_forward_pre_hook(hook),
    "after all": lambda model, hook: torch_module.register_module_forward_hook(hook),
    "before all backward": lambda model, hook: torch_module.register_module_full_backward_pre_hook(hook),
    "behind all backward": lambda model, hook: torch_module.register_module_full_backward_hook(hook),
}
EFFECTS = [Meter.notes, Meter.keeps_a_number, Meter.checks]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the model's batch needs no gradients
@pytest.mark.parametrize("effect", EFFECTS, ids=[effect.__name__ for effect in EFFECTS])
@pytest.mark.parametrize("register", KINDS.values(), ids=KINDS.keys())
def test_what_hooks_do_beside_is_done_in_each_step(register, effect, capsys):
    left = []
    for optimized in (False, True):
        meter, handles = Meter(), []
        capsys.readouterr()
        try:
            model = trained(lambda model: handles.append(register(model, partial(effect, meter))), optimized)  # noqa: B023
        finally:
            for handle in filter(None, handles):
                handle.remove()
        left.append((vars(meter), capsys.readouterr().out, [each.tolist() for each in model.state_dict().values()]))
    assert left[0] == left[1]


gradients: list[Tensor] = []


@pytest.mark.usefixtures("all_is_looked_at")
def test_a_method_of_pythons_that_keeps_gradients_is_refused():
    with pytest.raises(lowtide.CaptureError, match="the global 'gradients' of test_hooks"):
        trained(lambda model: model.first.weight.register_hook(gradients.append), True)
    assert gradients == []


def test_a_hook_after_accumulation_that_the_program_registers_is_refused():
    model = Net()
    model.within = lambda hidden: model.first.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(lowtide.CaptureError, match=rf"after a gradient is accumulated, at {HERE}.*use after_backward"):
        lowtide.optimize(
            model, torch.ones(5, 3), loss=loss, optimizer=optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
        )


def test_a_hook_that_runs_a_backward_pass_of_its_own():
    """As losses do that cache gradients of embeddings: the network runs again in the backward pass, and gives its parameters theirs."""

    def cached(model: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = model.first(x)
        hidden.requires_grad_()
        value = hidden.tanh().square().sum()
        (gradient,) = torch.autograd.grad(value, hidden)

        def again(scale: Tensor) -> None:
            with torch.enable_grad():
                (model.first(x) * gradient * scale).sum().backward()

        value = value.detach().requires_grad_()
        value.register_hook(again)
        return value

    found = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model, x = Net(), torch.randn(5, 3)
        optimizer = optim.SGD(model.first.parameters(), 0.1)
        step = (
            lowtide.optimize(model, x, loss=cached, optimizer=optimizer, planning=lowtide.Planning(workspaces=False)) if optimized else None
        )
        for _ in range(2):
            step(x) if step else eager_step(model, cached, optimizer, (x,), {}, Settings())
        found.append(model.first.weight.detach())
    assert torch.equal(*found)


def test_hooks_that_a_forward_adds_are_gone_after_a_capture():
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not self.inner._forward_hooks:
                self.inner.register_forward_hook(lambda module, args, output: output * 2)
            return self.inner(x)

    model, x = Adds(), torch.ones(1, 2)
    step = lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False))
    assert not model.inner._forward_hooks
    with torch.no_grad():
        assert torch.equal(step(x), model(x))


class Adapted(nn.Module):
    """Hands its layers what a call is for by hooks that live as long as the call, as adapters that route by tasks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        handles: list[Any] = []

        def pre_hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            handles.append(module.register_forward_hook(lambda module, args, output: output + task))
            return (args[0] * task,)

        handle = self.linear.register_forward_pre_hook(pre_hook)
        try:
            return self.linear(x)
        finally:
            for each in (handle, *handles):
                each.remove()


@pytest.mark.parametrize("trains", [True, False])
def test_a_hook_that_lives_for_one_call_may_hold_what_it_computes(trains: bool) -> None:
    torch.manual_seed(0)
    x, task = torch.randn(2, 3), torch.tensor([2.0, 0.5, 1.0])
    models = [Adapted() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    if not trains:
        assert torch.equal(lowtide.optimize(models[0], (x, task), planning=lowtide.Planning(workspaces=False))(x, task), models[1](x, task))
        return

    def of_task(model: nn.Module, x: Tensor, task: Tensor) -> Tensor:
        return model(x, task).square().sum()

    mine, eagers = (optim.SGD(model.parameters(), 0.1) for model in models)
    step = lowtide.optimize(models[0], (x, task), loss=of_task, optimizer=mine, planning=lowtide.Planning(workspaces=False))
    for _ in range(2):
        step(x, task)
        eager_step(models[1], of_task, eagers, (x, task), {}, Settings())
    assert torch.equal(models[0].linear.weight, models[1].linear.weight)
