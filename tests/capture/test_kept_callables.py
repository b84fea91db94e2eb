"""What a module keeps and calls: objects, methods and functions in its attributes leave what eager leaves, no more."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.training import Settings, eager_step


class Meter:
    def __init__(self) -> None:
        self.calls, self.list, self.by_name = 0, [], {"calls": 0}

    def update(self, *given: Any) -> None:
        self.calls += 1
        self.list.append("called")
        self.by_name["calls"] += 1


class Owner:
    def __init__(self, meter: Meter) -> None:
        self.meter, self.method, self.methods = meter, meter.update, [meter.update]


class Caller:
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def __call__(self, *given: Any) -> None:
        self.meter.update()


@dataclasses.dataclass
class Record:
    method: Any


class Slotted:
    __slots__ = ("method",)

    def __init__(self, method: Any) -> None:
        self.method = method


Pair = namedtuple("Pair", "first second")


class Net(nn.Module):
    def __init__(self, kept: Any, call: Any) -> None:
        super().__init__()
        self.linear, self.kept, self.call = nn.Linear(3, 1), kept, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.call(self.kept, h)
        return h.square().mean()


KEPT = {
    "an object": (lambda meter: meter, lambda kept, h: kept.update()),
    "an object's object": (Owner, lambda kept, h: kept.meter.update()),
    "an object's method": (Owner, lambda kept, h: kept.method()),
    "an object's list": (Owner, lambda kept, h: kept.methods[0]()),
    "an object that is called": (Caller, lambda kept, h: kept(h)),
    "a method": (lambda meter: meter.update, lambda kept, h: kept(h)),
    "a partial": (lambda meter: partial(Meter.update, meter), lambda kept, h: kept(h)),
    "a closure": (lambda meter: lambda h: meter.update(), lambda kept, h: kept(h)),
    "a tuple": (lambda meter: (meter.update,), lambda kept, h: kept[0](h)),
    "a named tuple": (lambda meter: Pair(meter.update, None), lambda kept, h: kept.first(h)),
    "a list": (lambda meter: [meter.update], lambda kept, h: kept[0](h)),
    "a record": (lambda meter: Record(meter.update), lambda kept, h: kept.method(h)),
    "slots": (lambda meter: Slotted(meter.update), lambda kept, h: kept.method(h)),
    "a hook": (lambda meter: meter.update, lambda kept, h: h.register_hook(kept)),
    "a hook around it": (lambda meter: meter.update, lambda kept, h: h.register_hook(lambda gradient: kept())),
}


PLANNING = lowtide.Planning(workspaces=False)


@pytest.mark.parametrize(("kept", "call"), KEPT.values(), ids=KEPT.keys())
def test_what_is_kept_leaves_what_eager_leaves(kept, call):
    left = []
    for optimized in (False, True):
        torch.manual_seed(0)
        meter = Meter()
        model = Net(kept(meter), call)
        optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 3)
        loss = lambda model, x: model(x)  # noqa: E731
        step = (
            lowtide.optimize(model, x, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False)) if optimized else None
        )
        for _ in range(3):
            step(x) if step else eager_step(model, loss, optimizer, (x,), {}, Settings())
        left.append((vars(meter), [each.tolist() for each in model.parameters()]))
    assert left[0] == left[1]
