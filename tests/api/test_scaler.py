"""A gradient scaler within the step: scale, skip and update are eager's, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.amp import GradScaler
from torch.nn import functional

import lowtide
from bench.in_values import in_values
from tests.training import differences


class Net(nn.Module):
    """Batch statistics move in steps that are skipped, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (functional.cross_entropy(model(x), y, reduction="none") * weight).mean()


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


OPTIMIZERS = {
    "SGD": lambda parameters: optim.SGD(parameters, 0.1, momentum=0.9, foreach=False),
    "AdamW": lambda parameters: optim.AdamW(parameters, 0.1, foreach=False),
    "RAdam": lambda parameters: optim.RAdam(parameters, 0.1, foreach=False),
}


def trained(captured: bool, rule: str, infinite: tuple[int, ...], half: bool = False, after: Any = None, **settings: Any) -> Any:
    """What nine steps leave behind, of which those in `infinite` are to be skipped."""
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16 if half else torch.float32)
    optimizer = OPTIMIZERS[rule](model.parameters())
    scaler = GradScaler("cpu", **{"init_scale": 1000.0, "growth_interval": 2, "growth_factor": 1.7, **settings})
    x, y, weight = torch.randn(4, 6).to(model.unused.dtype), torch.randint(0, 3, (4,)), torch.ones(4)
    options = {"loss": cross_entropy, "optimizer": optimizer, "scaler": scaler, "after_backward": after, "workspaces": False}
    step = lowtide.optimize(model, (x, y, weight), **in_values(**options)) if captured else None
    left = []
    for turn in range(9):
        weight[1] = torch.inf if turn in infinite else 1.0
        left.append((_eager(model, optimizer, scaler, after, x, y, weight) if step is None else step(x, y, weight)).clone())
        left.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        left.append({key: dict(entries) for key, entries in optimizer.state_dict()["state"].items()})
        left.append(scaler.state_dict())
    return left, torch.get_rng_state(), optimizer.state_dict()


def _eager(model: nn.Module, optimizer: Any, scaler: GradScaler, after: Any, x: Any, y: Any, weight: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = cross_entropy(model, x, y, weight)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if after is not None:
        after(model)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("infinite", [(), (0, 1), (3, 4, 7)], ids=str)
def test_steps_are_scaled_and_skipped_as_in_eager(rule, infinite):
    assert not (told := differences(trained(False, rule, infinite), trained(True, rule, infinite))), told[:4]


@pytest.mark.parametrize(
    "settings", [{"half": True}, {"after": clip}, {"enabled": False}, {"init_scale": 1.0}], ids=["half", "after", "off", "scale"]
)
def test_other_dtypes_and_hooks_and_a_scaler_that_is_off(settings):
    infinite = () if "enabled" in settings else (2,)
    assert not (told := differences(trained(False, "AdamW", infinite, **settings), trained(True, "AdamW", infinite, **settings))), told[:4]


def test_a_skipped_step_runs_no_hook_and_a_scheduler_does_not_count_it():
    model = nn.Linear(3, 2)
    optimizer, seen = optim.SGD(model.parameters(), 0.1), []
    optimizer.register_step_post_hook(lambda *given: seen.append(1))
    x = torch.ones(4, 3)
    step = lowtide.optimize(
        model,
        (x,),
        loss=lambda model, x: model(x).sum(),
        optimizer=optimizer,
        training=lowtide.Training(scaler=GradScaler("cpu")),
        planning=lowtide.Planning(workspaces=False),
    )
    step(x * torch.inf)
    assert not seen
    step(x)
    assert seen == [1]


def test_a_plan_with_a_scaler_is_saved_and_read(tmp_path):
    model = nn.Linear(3, 2)
    optimizer, x = optim.SGD(model.parameters(), 0.1), torch.ones(4, 3)
    options = {"loss": lambda model, x: model(x).sum(), "optimizer": optimizer, "scaler": GradScaler("cpu"), "workspaces": False}
    lowtide.optimize(model, (x,), **in_values(**options)).plan.save(tmp_path / "plan.json")
    again = lowtide.optimize(model, (x,), plan=tmp_path / "plan.json", **in_values(**options))
    before = model.weight.detach().clone()
    again(x * torch.inf)
    assert torch.equal(before, model.weight)
    again(x)
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("place", ["loss", "after_backward"])
def test_a_scaler_within_the_users_functions_is_refused_and_stays_usable(place):
    model = nn.Linear(3, 2)
    optimizer, scaler, x = optim.SGD(model.parameters(), 0.1), GradScaler("cpu"), torch.ones(4, 3)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        total = model(x).sum()
        return scaler.scale(total) if place == "loss" else total

    def after(model: nn.Module) -> None:
        scaler.unscale_(optimizer)

    with pytest.raises(lowtide.CaptureError, match=r"a GradScaler is used at .*test_scaler\.py:\d+: .*`Training\(scaler=scaler\)`"):
        lowtide.optimize(
            model,
            (x,),
            loss=loss,
            optimizer=optimizer,
            planning=lowtide.Planning(workspaces=False),
            training=lowtide.Training(after_backward=after if place == "after_backward" else None),
        )
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_what_cannot_be_a_scaler():
    model = nn.Linear(3, 2)
    optimizer, x = optim.SGD(model.parameters(), 0.1), torch.ones(4, 3)
    with pytest.raises(TypeError, match=r"scaler: expected a torch\.amp\.GradScaler, got a int"):
        lowtide.optimize(model, (x,), loss=lambda model, x: model(x).sum(), optimizer=optimizer, training=lowtide.Training(scaler=3))
    with pytest.raises(TypeError, match="scaler belong to training"):
        lowtide.optimize(model, (x,), training=lowtide.Training(scaler=GradScaler("cpu")))
