"""What is recorded as an earlier call was is what the long way records: of torch's operators, of random programs, of training."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lowtide.capture.program import capture_inference
from lowtide.capture.repeats import Repeats
from lowtide.capture.trace import CapturedStep, Given
from lowtide.errors import CaptureError
from lowtide.ir.text.graph_text import to_text
from tests import programs
from tests.captures import captured
from tests.programs import Script, Scripted

DTYPES = (torch.float32, torch.int64, torch.bool)
PARTS = int(os.environ.get("LOWTIDE_LOOKS_PARTS", "60"))  # one of them is tried; all operators where a bench asks for 1


class Twice(nn.Module):
    """Calls a function two times, the second time on what lies elsewhere."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        given = [(each, each.clone(memory_format=torch.preserve_format)) for each in tensors]
        return [each for out in (self.call(*several) for several in zip(*given, strict=True)) for each in tree_leaves(out)]


@pytest.fixture
def compared(monkeypatch):
    """Captures as ever and on the long way alone; what both are, and how many calls were recorded as earlier ones."""
    plain, counts = Repeats.call, [0]

    def counted(*args: Any) -> Any:
        call = plain(*args)
        counts[0] += call is not None and call.earlier is not None
        return call

    def both(capture: Any) -> tuple[Any, Any, int]:
        counts[0] = 0
        monkeypatch.setattr(Repeats, "call", counted)
        short = _said(capture)
        monkeypatch.setattr(Repeats, "call", lambda *args: None)
        return short, _said(capture), counts[0]

    return both


def _said(capture: Any) -> Any:
    try:
        return [_text(each) for each in capture()]
    except (CaptureError, RuntimeError, TypeError, ValueError, IndexError) as error:
        return type(error), str(error)


def _text(step: CapturedStep) -> tuple[Any, ...]:
    held = step.held_storages
    return to_text(step.graph), step.slots, step.assigned, step.guards, [each.name for each in held.values], held.until, held.summed


def _inference(model: nn.Module, *tensors: torch.Tensor) -> list[CapturedStep]:
    with torch.no_grad():
        return [capture_inference(model, Given(tensors, {}, torch.device("cpu")))]


def _operators() -> list[Any]:
    flags = torch.backends
    before = flags.__allow_nonbracketed_mutation_flag  # which torch's own tests switch off for good
    from torch.testing._internal.common_methods_invocations import op_db

    flags.__allow_nonbracketed_mutation_flag = before
    names = sorted({each.name for each in op_db})
    chosen = {*random.Random(1).sample(names, len(names) // PARTS)}
    return [each for each in op_db if each.name in chosen]


@pytest.mark.filterwarnings("ignore")  # of torch's samples
def test_samples_of_torchs_operators(compared):
    repeated = 0
    for op, dtype in itertools.product(_operators(), DTYPES):
        if not op.supports_dtype(dtype, "cpu"):
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", dtype), 3):
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            for call in filter(None, (op, op.inplace_variant)):

                def called(*tensors: torch.Tensor, call=call, leaves=leaves, spec=spec, at=at) -> Any:
                    filled = list(leaves)
                    for index, tensor in zip(at, tensors, strict=True):
                        filled[index] = tensor
                    first, args, kwargs = tree_unflatten(filled, spec)
                    return call(first, *args, **kwargs)

                short, long, count = compared(lambda called=called: _inference(Twice(called), *(leaves[index] for index in at)))  # noqa: B023
                assert short == long, (op.name, dtype, sample)
                repeated += count
    assert repeated > 5  # which of torch's operators are drawn depends on how many it has


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(programs.scripts(training=False))
def test_programs_of_views_and_writes(compared, script: Script):
    class TwiceScripted(Scripted):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            return [*super().forward(x, y), *super().forward(x * 2, (y.t() * 2).t())]

    short, long, count = compared(lambda: _inference(TwiceScripted(script), *programs.batch()))
    assert short == long
    event(f"repeats: {count > 0}")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        self.head = nn.Linear(3, 3)
        self.head.weight = self.layers[0][0].weight  # gradients that autograd sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x)
            x = x + h.mul_(0.5).clamp_(-1, 1)
        return self.head(x)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RAdam, torch.optim.SGD, torch.optim.Adafactor])
def test_training(compared, optimizer):
    settings = {"momentum": 0.9, "nesterov": True} if optimizer is torch.optim.SGD else {}
    make = lambda parameters, rate: optimizer(parameters, rate, **settings)  # noqa: E731
    short, long, count = compared(lambda: captured(Layers(), optimizer=make))
    assert isinstance(short, list)
    assert short == long
    assert count > 100
