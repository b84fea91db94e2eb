"""What stands around a torch optimizer's step: frameworks' wrappers, hooks, replaced steps, gradients left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import lowtide
from bench import torchvision_shim
from bench.in_values import in_values
from tests.api.networks import cross_entropy
from tests.api.small_net import Net, made
from tests.training import check, differences


class LightningOptimizer:
    """Lightning's: takes over the attributes of the optimizer within but its step, and becomes a subclass of its class."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.__dict__ = {key: item for key, item in optimizer.__dict__.items() if key != "step"}
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self._optimizer = optimizer

    @property
    def optimizer(self) -> optim.Optimizer:
        return self._optimizer

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        return self._optimizer.step(closure)


class AcceleratedOptimizer(optim.Optimizer):
    """Accelerate's: an optimizer by inheritance alone, whose tables are those of the one within."""

    def __init__(self, optimizer: optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self.optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


WRAPPERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "Lightning": LightningOptimizer,
    "Accelerate": AcceleratedOptimizer,
    "both": lambda optimizer: AcceleratedOptimizer(LightningOptimizer(optimizer)),
}


def trained(wrap: Callable[[Any], Any], rule: type[optim.Optimizer], steps: int = 3) -> Any:
    """What training leaves behind with the optimizer wrapped; without a wrapper, eagerly."""
    torch.manual_seed(0)
    model, batch, loss, inner = made(rule, lr=0.1, foreach=False)()
    schedule = optim.lr_scheduler.StepLR(inner, 1, 0.5)
    step = lowtide.optimize(model, batch, loss=loss, optimizer=wrap(inner), planning=lowtide.Planning(workspaces=False)) if wrap else None
    for _ in range(steps):
        if step:
            step(*batch)
        else:
            inner.zero_grad()
            loss(model, *batch).backward()
            inner.step()
        schedule.step()
    return model.state_dict(), inner.state_dict()


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("rule", [optim.SGD, optim.AdamW])
def test_wrappers_of_frameworks_train_what_they_hold(wrap, rule):
    assert not (told := differences(trained(None, rule), trained(WRAPPERS[wrap], rule))), told[:4]


def refused(model: nn.Module, optimizer: Any, message: str, **arguments: Any) -> None:
    with pytest.raises(lowtide.CaptureError, match=message):
        lowtide.optimize(
            model,
            (torch.randn(4, 6), torch.randint(0, 3, (4,))),
            loss=cross_entropy,
            optimizer=optimizer,
            **in_values(workspaces=False, **arguments),
        )


def test_a_wrapper_that_leads_nowhere():
    wrapper = AcceleratedOptimizer(optim.SGD(Net().parameters(), 0.1))
    wrapper.optimizer = wrapper
    refused(Net(), wrapper, "no optimizer was found within this AcceleratedOptimizer")


class Sharpness(optim.Optimizer):
    """Another optimizer's step between two of its own doing."""

    def __init__(self, parameters: Any, base: optim.Optimizer) -> None:
        super().__init__(parameters, {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_an_optimizer_around_another_whose_own_step_nobody_knows():
    model = Net()
    base = optim.SGD(model.parameters(), 0.1)
    refused(model, Sharpness(model.parameters(), base), r"this Sharpness steps another optimizer.*'base'.*give what is within")


class ZeroRedundancyOptimizer(Sharpness):
    """By its name torch's: the optimizer within is for a part of the parameters."""


def test_state_in_parts_is_asked_for_otherwise():
    model = Net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD([next(model.parameters())], 0.1))
    refused(model, optimizer, r'for all of them, and give lowtide\.optimize parallel=lowtide\.Parallel\(shard="optimizer"\)')


def test_timms_lookahead_is_refused():
    torchvision_shim.install()  # timm imports torchvision
    lookahead = pytest.importorskip("timm.optim.lookahead").Lookahead
    model = Net()
    refused(model, lookahead(optim.SGD(model.parameters(), 0.1)), r"this Lookahead steps another optimizer.*'_base_optimizer'")


def test_a_step_replaced_on_the_instance():
    model = Net()
    optimizer = optim.SGD(model.parameters(), 0.1)
    original = optimizer.step
    optimizer.step = lambda *given: original(*given)
    refused(model, optimizer, "the step of this SGD was replaced")


def test_a_step_replaced_after_capture():
    model, batch, loss, optimizer = made(optim.SGD, lr=0.1)()
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    step(*batch)
    optimizer.step = lambda: None
    with pytest.raises(lowtide.CaptureError, match="was replaced"):
        step(*batch)


def test_an_optimizer_that_trains_nothing():
    model = Net()
    refused(model, optim.SGD([model.unused], 0.1), "the step of SGD changes no parameter")


class Idle(optim.SGD):
    def step(self, closure: Any = None) -> None:
        return None


def test_a_step_that_does_nothing():
    model = Net()
    refused(model, Idle(model.parameters(), 0.1), "the step of Idle changes no parameter")


class Replaces(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


def test_a_step_that_gives_parameters_other_memory():
    model = Net()
    refused(model, Replaces(model.parameters(), 0.1), r"the optimizer gives .* other memory.*copy_")


def test_hooks_run_with_every_step_as_in_eager():
    def hooked(optimized: bool) -> Any:
        torch.manual_seed(0)
        model, batch, loss, optimizer = made(optim.AdamW, lr=0.1, foreach=False)()
        averages, seen = [parameter.detach().clone() for parameter in model.parameters()], []

        def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
            seen.append(("before", len(args), kwargs))
            optimizer.param_groups[0]["lr"] *= 0.5

        @torch.no_grad()
        def average(optimizer: Any, args: Any, kwargs: Any) -> None:
            seen.append(("after", args[0] is optimizer, len(optimizer.state)))
            for mean, parameter in zip(averages, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
                parameter.clamp_(-0.2, 0.2)

        handles = [
            optimizer.register_step_pre_hook(halve),
            optimizer.register_step_post_hook(average),
            register_optimizer_step_post_hook(lambda *given: seen.append("everywhere")),
        ]
        try:
            step = (
                lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
                if optimized
                else None
            )
            assert not seen
            for _ in range(3):
                if step:
                    step(*batch)
                else:
                    optimizer.zero_grad()
                    loss(model, *batch).backward()
                    optimizer.step()
        finally:
            for handle in handles:
                handle.remove()
        return averages, seen, model.state_dict(), optimizer.state_dict()

    assert not (told := differences(hooked(False), hooked(True))), told[:4]


def parameters_clamped(optimizer: optim.Optimizer, *given: Any) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda optimizer, *given: optimizer.param_groups[0]["params"][0].grad, "reads a parameter's gradient.*after_backward"),
        (lambda optimizer, *given: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0), "reads a parameter's gradient"),
        (parameters_clamped, "before the step of SGD changes parameters.*after_backward"),
        (lambda *given: torch.randn(1) and None, "before the step of SGD changes .*random generator"),
        (lambda optimizer, args, kwargs: (args, kwargs), "returns other arguments"),
    ],
    ids=range(5),
)
def test_hooks_that_come_at_another_time_than_in_eager(hook, message):
    model, batch, loss, optimizer = made(optim.SGD, lr=0.1)()
    optimizer.register_step_pre_hook(hook)
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    with pytest.raises(lowtide.StepError, match=message):
        step(*batch)


def test_gradients_left_from_an_eager_backward_are_freed():
    model, batch, loss, optimizer = made(optim.SGD, lr=0.1)()
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    loss(model, *batch).backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    step(*batch)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("rule", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("before", [0.1, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)], ids=repr)
@pytest.mark.parametrize("after", [0.05, torch.tensor(0.05), torch.tensor(0.05, dtype=torch.float64)], ids=repr)
def test_a_learning_rate_that_becomes_a_tensor_or_a_number(rule, before, after):
    def between(model, optimizer):
        return lambda step: optimizer.param_groups[0].update(lr=after) if step == 1 else None

    check(made(rule, lr=before), steps=4, between=between)
