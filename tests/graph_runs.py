"""Captured graphs run on any data: a training step as a graph, and what it leaves in the hands of whoever runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.api.captures import Captures
from lowtide.base.messages import Stages
from lowtide.capture.program import TrainingProgram
from lowtide.cost.laboratory import Laboratory
from lowtide.ir.graph import Graph, Value
from lowtide.lower.python import lower
from lowtide.plan.plan import Plan, Provenance
from lowtide.planning.candidate import Candidate
from lowtide.planning.request import Request
from lowtide.runtime.program import Program
from tests.planned import plan

NOWHERE = Provenance("", "", "cpu", "", 1)
ODD = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45, 6e-8, 65504.0, 1.0, -1.0)


def inference_graph(model: nn.Module, batch: tuple[Any, ...]) -> Graph:
    """A call without gradients."""
    capturing = Captures(model, None, torch.device("cpu"), Stages(None, False))
    with Laboratory(gradients=False, tries=False) as laboratory:
        return capturing.programs(batch, {}, laboratory)[-1].graph


def training_graph(model: nn.Module, batch: tuple[Any, ...], loss: Callable[..., Any], after_backward: Any = None) -> Graph:
    """A step with plain SGD."""
    program = TrainingProgram(model, loss, torch.optim.SGD(model.parameters(), 0.1), after_backward, 1, None)
    capturing = Captures(model, program, torch.device("cpu"), Stages(None, False))
    with Laboratory(gradients=True, tries=False) as laboratory:
        return capturing.programs(batch, {}, laboratory)[-1].graph


def planned(graph: Graph) -> Plan:
    """In the order of least peak, with all reuses that this permits."""
    return plan([Candidate(graph, (0,) * len(graph.nodes))], Request(NOWHERE))


def run(graph: Graph, inputs: list[Any], seed: int = 0) -> list[Tensor]:
    """What a graph returns and what its inputs are then, by the program that is lowered from its plan."""
    given = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    torch.manual_seed(seed)
    outputs = Program(lower(planned(graph)))(given)
    return [each for each in (*outputs, *given) if isinstance(each, Tensor)]


def odd_inputs(graph: Graph, generator: torch.Generator) -> list[Any]:
    """Random numbers, some of them odd, for every float that a graph is given, small ones for integers."""
    return [_input(value, generator) for value in graph.inputs]


def _input(value: Value, generator: torch.Generator) -> Any:
    if value.dtype == "scalar":
        return 0.125
    shape, dtype = tuple(map(int, value.shape)), getattr(torch, value.dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    if numbers.numel() > 40:
        places = torch.randperm(numbers.numel(), generator=generator)[: 2 * len(ODD)]
        numbers.view(-1)[places] = torch.tensor(ODD * 2, dtype=torch.float64)
    return numbers.to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits; a NaN is a NaN, whatever its own bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    nan = torch.full((), float("nan"), dtype=one.dtype)
    first, second = (torch.where(each.isnan(), nan, each).contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)
