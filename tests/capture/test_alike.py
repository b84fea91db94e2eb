"""An optimizer's step that is made of a recording for a few parameters is what a recording for all of them is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.capture import updates
from lowtide.capture.optimizers.alike import Few
from lowtide.capture.optimizers.derived_numbers import Branch
from lowtide.capture.program import TrainingProgram, capture_training
from lowtide.capture.trace import CapturedStep, Given
from lowtide.cost.presets import preset
from lowtide.cuda.absent import standing_in
from lowtide.errors import CaptureError
from lowtide.ir.text.graph_text import to_text
from lowtide.kernels.optimizers import Optimizers

OPTIMIZERS: dict[str, Any] = {
    "SGD": torch.optim.SGD,
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD maximize": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1, maximize=True),
    "Adam": torch.optim.Adam,
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


class Net(nn.Module):
    """Layers that repeat themselves, of several kinds, and parameters that nothing trains."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 8, bias=False)) for _ in range(5)
        ]
        self.blocks, self.head, self.idle = nn.Sequential(*blocks), nn.Linear(8, 3), nn.Linear(8, 8)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(8, dtype=dtype)) for _ in range(4)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for scale in self.scale:
            values = values * scale.to(values.dtype).abs()
        return self.head(self.blocks(values))


def in_groups(model: nn.Module) -> Any:
    decays = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": decays, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}]


def said(step: CapturedStep) -> dict[str, Any]:
    eager = step.eager
    return {
        "graph": to_text(step.graph),
        "slots": step.slots,
        "assigned": step.assigned,
        "constants": step.constants_assigned,
        "guards": {_fact(each) for each in step.guards},
        "until": dict(eager.until),
        "summed": eager.summed,
        "beside": None if eager.program is None else to_text(eager.program),
        "entries": step.state_entries,
    }


def _fact(fact: Any) -> Any:
    return (fact.formula, fact.compare, fact.outcome, frozenset(fact.applied)) if isinstance(fact, Branch) else fact


def captures(model: nn.Module, optimizer: torch.optim.Optimizer, after: Any = None) -> Any:
    """Of a model on the meta device as on a GPU."""
    on_meta = model.head.weight.is_meta
    given = Given((torch.randn(2, 8, device="meta" if on_meta else "cpu"),), {}, torch.device("cuda" if on_meta else "cpu"))
    training = TrainingProgram(model, lambda model, values: model(values).sum(), optimizer, after)
    try:
        with standing_in(given.device, preset("h100") if on_meta else None):
            return [said(step) for step in capture_training(training, given)]
    except CaptureError as error:
        return type(error), str(error)


def unlike(short: Any, long: Any) -> list[str]:
    """In what two captures differ: few words, as pytest compares long texts letter by letter."""
    if isinstance(short, tuple) or isinstance(long, tuple) or len(short) != len(long):
        return [] if short == long else [str(short)[:300], str(long)[:300]]
    return [
        f"{number}: {key}" for number, pair in enumerate(zip(short, long, strict=True)) for key in pair[0] if pair[0][key] != pair[1][key]
    ]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is captured in the short way and in the long one, and how often the short one was taken."""

    def both(*program_parts: Any) -> tuple[Any, Any, int]:
        ended = [0]
        plain = updates.copied

        def counted(*args: Any) -> Any:
            result = plain(*args)
            ended[0] += 1
            return result

        with monkeypatch.context() as patch:
            patch.setattr(updates, "copied", counted)
            short = captures(*program_parts)
        with monkeypatch.context() as patch:
            patch.setattr(Few, "of", lambda keys: None)
            return short, captures(*program_parts), ended[0]

    return both


class Wide(Net):
    """Some parameters are small enough for a device to update them in one call, others not."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList([nn.Linear(8, 4096) for _ in range(6)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values).sum() + sum(layer(values).square().sum() for layer in self.wide)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_calls_over_lists_on_a_device_are_made_of_a_few_tensors_too(both, name, grouped):
    with torch.device("meta"):
        model = Wide()
    optimizer = OPTIMIZERS[name](in_groups(model) if grouped else model.parameters())
    short, long, copied = both(model, optimizer)
    assert unlike(short, long) == []
    as_on_a_cpu = {"Adagrad": 0, "ASGD": 2, "Adafactor": 2 if grouped else 0}  # what adds numbers to lists, or reads several
    assert copied == as_on_a_cpu.get(name, len(long))


def test_a_device_updates_small_parameters_in_one_call_and_large_ones_by_themselves(both):
    with torch.device("meta"):
        model = Wide()
    short, long, _ = both(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    assert unlike(short, long) == []
    lengths = [line.count(",") for line in short[-1]["graph"].splitlines() if "_foreach_mul_" in line]
    assert len({*lengths}) > 1


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("grouped", "steps"), [(False, 0), (True, 2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_short_way_is_the_long_way(both, name, grouped, steps):
    model = Net()
    optimizer = OPTIMIZERS[name](in_groups(model) if grouped else model.parameters())
    stepped(model, optimizer, steps)
    short, long, copied = both(model, optimizer)
    assert copied or name == "Adafactor"  # which holds what it makes of matrices until the next matrix
    assert not unlike(short, long)


@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "AdamW fused"])
def test_parameters_of_two_dtypes(both, name):
    model = Net(torch.bfloat16)
    short, long, copied = both(model, OPTIMIZERS[name](model.parameters()))
    assert copied
    assert not unlike(short, long)


def test_gradients_that_are_clipped_in_place(both):
    model = Net()
    clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    short, long, copied = both(model, torch.optim.AdamW(model.parameters()), clip)
    assert copied
    assert not unlike(short, long)


def test_several_optimizers(both):
    model = Net()
    stepped(model, torch.optim.SGD(model.parameters()), 1)
    first, second = in_groups(model)
    optimizers = Optimizers([torch.optim.AdamW([first]), torch.optim.SGD([second], momentum=0.9)])
    short, long, copied = both(model, optimizers)
    assert copied
    assert not unlike(short, long)


def test_state_of_some_parameters(both):
    """Those that were frozen until now have none."""
    model = Net()
    model.blocks[1:4].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer, 2)
    model.blocks.requires_grad_(True)
    short, long, copied = both(model, optimizer)
    assert copied
    assert not unlike(short, long)


class Tied(Net):
    """A parameter in two places, and parameters that lie on one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][1].weight = self.blocks[0][1].weight
        flat = torch.randn(64)
        for number, block in enumerate(self.blocks[2:4]):
            block[2].weight = nn.Parameter(flat[8 * number : 8 * number + 8])


@pytest.mark.parametrize("name", ["Adam", "SGD momentum"])
def test_parameters_that_share_memory(both, name):
    model = Tied()
    short, long, copied = both(model, OPTIMIZERS[name](model.parameters()))
    assert not copied
    assert not unlike(short, long)


class OneForAll(torch.optim.Optimizer):
    """Steps all parameters by the length of all gradients together."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            length = torch.stack([each.grad.norm() for each in trained]).norm()
            for each in trained:
                each.sub_(each.grad / length * group["lr"])


OneForAll.__module__ = "torch.optim.tests"


def test_an_optimizer_that_reads_several_parameters_together_is_recorded_whole(both):
    model = Net()
    short, long, copied = both(model, OneForAll(model.parameters()))
    assert not copied
    assert not unlike(short, long)
