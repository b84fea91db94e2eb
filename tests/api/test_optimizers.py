"""Every optimizer, and every way in which its settings and state change between steps, trains as eager does."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import lowtide
from tests.api.small_net import made
from tests.training import Settings as Plain
from tests.training import check, eager_step, varied

OPTIMIZERS = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    (optim.SGD, {"lr": torch.tensor(0.1)}),
    (optim.Adam, {"lr": 0.01}),
    (optim.Adam, {"lr": torch.tensor(0.01)}),
    (optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True, "betas": (0.8, 0.9)}),
    (optim.AdamW, {"lr": 0.01}),
    (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.01, "weight_decay": 0.0, "maximize": True}),
    (optim.RMSprop, {"lr": 0.01}),
    (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.Adadelta, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.RAdam, {"lr": 0.01}),
    (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.8, 0.9)}),
    (optim.ASGD, {"lr": 0.01, "t0": 3, "weight_decay": 0.1}),
    (optim.Rprop, {"lr": 0.01, "etas": (0.4, 1.3)}),
    (optim.Adafactor, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.Adafactor, {"lr": 0.4, "eps": (None, 0.5)}),  # each of its maxima and minima comes out both ways
]


@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS, ids=lambda item: getattr(item, "__name__", None) or ",".join(item))
def test_optimizer(optimizer, settings):
    check(made(optimizer, **settings), steps=10)


_LAST = {optimizer: settings for optimizer, settings in OPTIMIZERS if not isinstance(settings["lr"], torch.Tensor)}
BY_LISTS = [  # `bench.optimizers_db` has all settings, for 300 steps
    *((optimizer, {**settings, "foreach": True}) for optimizer, settings in _LAST.items()),
    *(
        (optimizer, {**settings, "fused": True})
        for optimizer, settings in _LAST.items()
        if "fused" in inspect.signature(optimizer).parameters
    ),
    (optim.Adam, {"lr": torch.tensor(0.01), "fused": True}),
    (optim.SGD, {"lr": 0.1, "fused": True}),
]


@pytest.mark.parametrize(("optimizer", "settings"), BY_LISTS, ids=lambda item: getattr(item, "__name__", None) or ",".join(item))
def test_it_trains_as_it_is_written_over_lists_or_fused(optimizer, settings):
    check(made(optimizer, **settings), steps=10)


@pytest.mark.parametrize("then", [None, False])
def test_another_way_to_update_is_taken_when_it_is_told(then):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 37), nn.ReLU(), nn.Linear(37, 8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, optimizer = (optim.AdamW(model.parameters(), fused=True) for model in models)
    step = lowtide.optimize(models[1], (torch.ones(4, 8),), loss=_squares, optimizer=optimizer)
    for turn in range(6):
        if turn == 3:
            assert "_fused_adamw_" in step.source
            plain.param_groups[0]["fused"] = optimizer.param_groups[0]["fused"] = then
        x = torch.randn(4, 8)
        plain.zero_grad()
        _squares(models[0], x).backward()
        plain.step()
        step(x)
    assert "_fused_adamw_" not in step.source
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_step_keeps_to_clipping_and_a_scaler(scaled):
    def after_backward(model):
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=True)

    def losses(captured):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 37), nn.ReLU(), nn.Linear(37, 8))
        optimizer = optim.AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=scaled)
        batches = [torch.randn(4, 8) * (float("inf") if scaled and turn == 4 else 1) for turn in range(8)]
        if captured:
            training = lowtide.Training(after_backward=after_backward, scaler=scaler if scaled else None)
            step = lowtide.optimize(model, (batches[0],), loss=_squares, optimizer=optimizer, training=training)
            found = [step(batch)[0].item() for batch in batches]
        else:
            found = [_scaled_step(model, optimizer, scaler, batch, after_backward) for batch in batches]
        return found, [parameter.clone() for parameter in model.parameters()], scaler.get_scale()

    (one, theirs, scale), (two, ours, now) = losses(False), losses(True)
    assert (repr(one), scale) == (repr(two), now)
    assert all(map(torch.equal, theirs, ours))


def _squares(model, x):
    return model(x).square().mean()


def _scaled_step(model, optimizer, scaler, batch, after_backward):
    optimizer.zero_grad()
    loss = _squares(model, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    after_backward(model)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def test_a_fused_step_needs_no_more_memory_than_gradients_one_by_one():
    """Each gradient is used and let go as soon as it exists, though eager's kernel takes them all at once."""

    def peak(**flags):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **flags)
        return lowtide.optimize(model, (torch.randn(2, 64),), loss=_squares, optimizer=optimizer).plan.peak_bytes

    assert peak(fused=True) == peak(foreach=True) == peak(foreach=False)


def test_a_decision_on_a_step_count_is_captured_anew_once(monkeypatch):
    captures = count_captures(monkeypatch)
    check(made(optim.RAdam, lr=0.01), steps=12)
    assert captures == [2]  # from the sixth step on, RAdam's formula is another


@pytest.mark.parametrize("optimizer", [optim.RAdam, optim.ASGD, optim.Adafactor, optim.Rprop])
def test_a_schedule_for_an_optimizer_that_decides(optimizer, monkeypatch):
    captures = count_captures(monkeypatch)

    def between(model, optimizer):
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return lambda step: schedule.step()

    check(made(optimizer, lr=0.1), steps=12, between=between)
    assert captures[0] <= 2


def test_parameters_whose_step_counts_differ():
    def make():
        model, batch, loss, _ = made(optim.SGD, lr=0.1)()
        return model, batch, loss, optim.RAdam(model.parameters(), lr=0.1, betas=(0.5, 0.9))

    def between(model, optimizer):
        return lambda step: model.last.requires_grad_(step != 2)

    check(make, steps=12, between=between)


class Periodic(optim.Optimizer):
    """Counts in its groups, keeps flags and texts, and looks at a slow average every third step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "dtype": torch.float32, "shape": abs})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(started=True, mean=parameter.to(group["dtype"]).clone(), note="slow", last=None)
                parameter.sub_(parameter.grad, alpha=group["shape"](group["lr"]))
                if group["count"] % 3 == 0:
                    parameter.lerp_(state["mean"], 0.5)
                    state["mean"].copy_(parameter)
                    state["last"] = group["count"]


def test_an_optimizer_that_counts_in_its_groups_and_keeps_flags(monkeypatch):
    captures = count_captures(monkeypatch)
    check(made(Periodic, lr=0.1), steps=9)
    assert captures[0] <= 3  # programs are found again where a decision comes out as before


class Starts(optim.Optimizer):
    """Moves nothing in its first step, and starts over from state that is still zero."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["norm"] = torch.zeros([])
                if state["norm"] == 0:
                    state["norm"].copy_(parameter.grad.norm())
                else:
                    parameter.sub_(parameter.grad / state["norm"], alpha=group["lr"])


def test_a_decision_on_state_that_the_first_step_makes():
    check(made(Starts, lr=0.1), steps=4)


class Lags(optim.Optimizer):
    """Decides on its count as it was before it is written, and as it is then."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                count = self.state[parameter].setdefault("count", torch.zeros([]))
                before = count * 2
                count += 1
                after = count * 2
                if before.item() < after.item():
                    parameter.sub_(parameter.grad, alpha=group["lr"])
                if after.item() > 6:
                    parameter.mul_(0.9)


def test_a_decision_on_state_as_it_was_before_it_is_written():
    check(made(Lags, lr=0.1), steps=6)


class Kept(optim.SGD):
    """Removes what it kept."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state[self.param_groups[0]["params"][0]].pop("momentum_buffer", None)


def test_state_that_is_removed_again_is_refused():
    model, batch, loss, optimizer = made(Kept, lr=0.1, momentum=0.9)()
    for _ in range(2):
        optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"] = torch.zeros(8)
        with pytest.raises(lowtide.CaptureError, match="removes 'momentum_buffer' from its state of frozen"):
            lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))


def test_groups_with_settings_of_their_own():
    def make():
        model, batch, loss, _ = made(optim.SGD, lr=0.1)()
        groups = [
            {"params": model.first.parameters(), "momentum": 0.9, "nesterov": True},
            {"params": model.norm.parameters(), "lr": 0.01},
            {"params": [*model.last.parameters(), model.unused], "momentum": 0.5, "weight_decay": 0.1, "maximize": True},
        ]
        return model, batch, loss, optim.SGD(groups, lr=0.1)

    check(make)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 4),  # from a learning rate of 0
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", [optim.AdamW, lambda parameters, lr: optim.SGD(parameters, lr, momentum=0.9)], ids=["AdamW", "SGD"])
def test_schedulers_change_settings_at_no_new_capture(optimizer, scheduler, monkeypatch):
    captures = count_captures(monkeypatch)

    def between(model, optimizer):
        schedule = SCHEDULERS[scheduler](optimizer)  # warns, which is an error here, if it does not see steps
        return lambda step: schedule.step()

    check(made(optimizer, lr=0.1), steps=5, between=between)
    assert captures == [1]


def test_a_setting_that_turns_a_part_on_and_off_is_captured_anew_once(monkeypatch):
    captures = count_captures(monkeypatch)
    decays = (0.1, 0.2, 0.0, 0.1, 0.0)

    def between(model, optimizer):
        return lambda step: optimizer.param_groups[0].update(weight_decay=decays[step])

    check(made(optim.Adam, lr=0.01), steps=5, between=between)
    assert captures == [2]


@pytest.mark.parametrize("change", [{"nesterov": True}, {"maximize": True}, {"momentum": 0.0}, {"momentum": 0.5}, {"dampening": 0.5}])
def test_a_setting_changed_between_steps(change):
    def between(model, optimizer):
        return lambda step: optimizer.param_groups[0].update(change) if step == 1 else None

    check(made(optim.SGD, lr=0.1, momentum=0.9), steps=4, between=between)


@pytest.mark.parametrize(("optimizer", "settings"), [(optim.AdamW, {}), (optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.Adagrad, {})])
def test_resumed_after_eager_steps(optimizer, settings):
    check(made(optimizer, **settings), steps_before=2)


def test_state_dicts_loaded_between_steps():
    def between(model, optimizer):
        start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

        def rewind(step):
            if step == 1:
                model.load_state_dict(start[0])
                optimizer.load_state_dict(start[1])  # without any state: as at the start

        return rewind

    check(made(optim.AdamW, lr=0.1), steps=4, between=between)


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_saved_and_restored(assign):
    def between(model, optimizer):
        file = io.BytesIO()

        def keep_or_restore(step):
            file.seek(0)
            if step == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            elif step == 2:
                saved = torch.load(file)
                # `assign` puts other tensors into the model, which the optimizer would not know: their data is what is exchanged
                for name, tensor in saved["model"].items() if assign else ():
                    model.get_parameter(name).data = tensor
                if not assign:
                    model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])

        return keep_or_restore

    check(made(optim.Adam, lr=0.1), steps=5, between=between)


@pytest.mark.filterwarnings("ignore:the optimizer does not hold")
def test_parameters_added_and_taken_away_between_steps():
    def make():
        model, batch, loss, _ = made(optim.SGD, lr=0.1)()
        return model, batch, loss, optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def between(model, optimizer):
        def add(step):
            if step == 1:
                optimizer.add_param_group({"params": list(model.first.parameters()), "foreach": False})

        return add

    check(make, steps=4, between=between)


def test_eager_and_optimized_steps_in_turn():
    def run(optimized: bool):
        torch.manual_seed(0)
        model, batch, loss, optimizer = made(optim.Adam, lr=0.1, foreach=False)()
        step = (
            lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
            if optimized
            else None
        )
        for turn in range(5):
            if optimized and turn % 2:
                step(*varied(batch, turn))
            else:
                eager_step(model, loss, optimizer, varied(batch, turn), {}, Plain())
        return model.state_dict(), optimizer.state_dict()["state"]

    assert repr(run(True)) == repr(run(False))


class Counted(optim.Optimizer):
    """Keeps a Python number in its state, as optimizers did before torch 1.12."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 1 / state["step"])
                parameter.sub_(state["mean"], alpha=group["lr"] * (1 - 0.5 ** state["step"]))


def test_an_optimizer_of_ones_own_that_counts_in_python():
    check(made(Counted, lr=0.1), steps=4)


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a training step was captured to be run, in a list of one number: looks at whether it is still the same do not count."""
    module = importlib.import_module("lowtide.api.captures")
    count, capture = [0], module.capture_training

    def counting(*arguments: Any, put_back: bool = False, **more: Any) -> Any:
        count[0] += not put_back
        return capture(*arguments, put_back=put_back, **more)

    monkeypatch.setattr(module, "capture_training", counting)
    return count
