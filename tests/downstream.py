"""A user's program, as his own mypy reads it: `make test` has it checked in strict mode, and `tests/test_downstream.py` runs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import lowtide


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def train() -> float:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    explanation = lowtide.explain(model, batch, loss=loss, optimizer=optimizer, memory="1GiB")
    assert_type(explanation, lowtide.Explanation)
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(progress=False))
    assert_type(step, lowtide.Step)
    assert_type(step.plan, lowtide.Plan)
    assert_type(step.plan.peak_bytes, int)
    assert_type(step.at("1GiB"), lowtide.Step)
    value: Tensor = step(*batch)
    return value.item()


def infer() -> lowtide.Step:
    return lowtide.optimize(nn.Linear(4, 3), torch.randn(2, 4))


def bare() -> tuple[int, int]:
    tasks = [lowtide.Task("a", makes=(0,)), lowtide.Task("b", makes=(1,), reads=(0,))]
    schedule = lowtide.order(lowtide.OrderProblem.of([8, 4], tasks, kept=[1]))
    assert_type(schedule, lowtide.Schedule)
    assert_type(schedule.status, lowtide.Status)
    return schedule.peak_bytes, schedule.lower_bound_bytes
