"""What a step answers of itself: what one run of it took, and how far its numbers are from eager's.

This stands beside how far eager's numbers are from the right ones.

Three programs run on copies of what the caller holds, so that nothing of it changes: the captured one, which is eager's to the last bit;
the step's own; and the captured one in double precision, given the random numbers that eager drew. A result that rounds otherwise is as
good as eager's where the first distance is about the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide.api.variant import Variant
from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.symbolic import symbolic_problem
from lowtide.ir.graph import Arg, Atom, Graph, Node, Value
from lowtide.ir.operators.nodes import is_random
from lowtide.kernels.draws import draws_apart
from lowtide.lower.python import lower
from lowtide.plan.contents import Decision


@dataclass(frozen=True)
class MeasuredStep:
    """What one step took, as the allocator counts; each number means what the plan's of the same name does."""

    peak_bytes: int  # with what is resident
    resident_bytes: int  # of it what the caller holds throughout: parameters, buffers, optimizer state, the batch
    end_bytes: int  # what the step left, with its results, beside what was there
    pinned_bytes: int = 0  # of the host: the buffers that its copies there were given

    @property
    def above_bytes(self) -> int:
        """The peak above what is resident."""
        return self.peak_bytes - self.resident_bytes


_NARROW = ("float16", "bfloat16", "float32")
_SHOWN = 8  # gradients


@dataclass(frozen=True)
class Deviation:
    """One result: distances, each the norm of the difference over the norm of what is right (eager's where that is not known)."""

    name: str
    from_eager: float  # the step's
    eagers_own: float | None  # eager's from the result in double precision; None where that is not known

    @property
    def ratio(self) -> float | None:
        """The one over the other; None where eager's own is not known. Both 0: 0."""
        if self.eagers_own is None:
            return None
        return self.from_eager / self.eagers_own if self.eagers_own else (math.inf if self.from_eager else 0.0)


@dataclass(frozen=True)
class Verification:
    """How far a step's results are from eager's."""

    results: tuple[Deviation, ...]  # what the step returns, the loss first
    gradients: tuple[Deviation, ...]  # of the parameters, in the model's order
    apart: tuple[str, ...] = ()  # parameters whose gradients are never there as a whole: each part is used up at once
    unknown: str = ""  # why there is no result in double precision; "" where there is one

    @property
    def bit_equal(self) -> bool:
        """Whether all that could be compared is eager's to the last bit."""
        return all(each.from_eager == 0 for each in (*self.results, *self.gradients))

    @property
    def worst(self) -> Deviation:
        """The one that is farthest from eager, measured by eager's own distance where that is known."""
        return max((*self.results, *self.gradients), key=lambda each: (each.ratio or 0.0, each.from_eager))

    def within(self, times: float = 4.0) -> bool:
        """Whether all gradients together, and each result, are at most `times` as far from eager as eager is from float64.

        A single number may be right by chance: it counts as if it were off by one rounding in float32. False if eager's own distances
        are not known, unless nothing differs.
        """
        if self.bit_equal:
            return True
        if self.unknown:
            return False
        return all(_near(each, times) for each in (*self.results, *self.gradients))

    def __str__(self) -> str:
        if self.bit_equal:
            return f"bit-equal to eager: {len(self.results)} results and {len(self.gradients)} gradients"
        lines = [f"{'relative deviation of':<44}{'step from eager':>17}{'eager from float64':>20}{'ratio':>8}"]
        worst = sorted(self.gradients, key=lambda each: (-(each.ratio or 0.0), -each.from_eager))
        lines += [_line(each) for each in (*self.results, *worst[:_SHOWN])]
        if len(worst) > _SHOWN:
            lines.append(f"and {len(worst) - _SHOWN} more gradients, which deviate less")
        if self.apart:
            lines.append(f"never there as a whole, so not compared: the gradients of {', '.join(self.apart)}")
        return "\n".join([*lines, *([f"nothing to compare eager with: {self.unknown}"] if self.unknown else [])])


def _near(each: Deviation, times: float) -> bool:
    return each.from_eager <= times * max(each.eagers_own or 0.0, torch.finfo(torch.float32).eps)


def _line(each: Deviation) -> str:
    own, ratio = ("", "") if each.eagers_own is None else (f"{each.eagers_own:.1e}", f"{each.ratio:.2f}")
    return f"{each.name:<44}{each.from_eager:>17.1e}{own:>20}{ratio:>8}".rstrip()


def verified(variant: Variant, inputs: Sequence[Any]) -> Verification:
    """The deviations of one step's results; `inputs` are what the program reads, of which nothing is changed."""
    captured, plan = variant.captured, variant.decision
    results = captured.graph.outputs[: len(captured.graph.outputs) - len(captured.assigned)]
    wanted = [*results, *captured.gradients]
    drawn = [value for node in captured.graph.nodes if is_random(node) for value in node.outputs if value is not None]
    eager = _run(variant, replace(captured.graph, outputs=(*wanted, *drawn)), _copies(inputs))
    right, unknown = _in_double(variant, wanted, inputs, dict(zip(drawn, eager[len(wanted) :], strict=True)))
    values_of_plan = {value for node in plan.graph.nodes for value in node.results} | set(plan.graph.inputs)
    there = [position for position, value in enumerate(wanted) if position < len(results) or value in values_of_plan]
    outputs = (*plan.graph.outputs[: len(results)], *(wanted[position] for position in there[len(results) :]))
    own = dict(zip(there, _run(variant, replace(plan.graph, outputs=outputs), _copies(inputs), plan.order), strict=True))
    names = [*_names(len(results), variant.program.gradients), *(f"gradient of {name}" for name in captured.trained)]
    deviations = {position: _deviation(names[position], own[position], eager[position], right[position]) for position in there}
    kept = {position: each for position, each in deviations.items() if each is not None}
    return Verification(
        tuple(each for position, each in kept.items() if position < len(results)),
        tuple(each for position, each in kept.items() if position >= len(results)),
        tuple(captured.trained[position - len(results)] for position in range(len(results), len(wanted)) if position not in own),
        unknown,
    )


def _names(count: int, trains: bool) -> Iterator[str]:
    return ("loss" if trains and not position else f"result {position}" for position in range(count))


def _deviation(name: str, own: Any, eager: Any, right: Any) -> Deviation | None:
    """Of one result; None where it is no tensor, or was not made in this step."""
    if not isinstance(own, torch.Tensor) or not isinstance(eager, torch.Tensor):
        return None
    if torch.equal(own, eager):
        away = 0.0
    elif not (own.is_floating_point() or own.is_complex()):
        away = math.inf
    else:
        away = _distance(own, eager, right if isinstance(right, torch.Tensor) else eager)
    return Deviation(name, away, _distance(eager, right, right) if isinstance(right, torch.Tensor) else None)


def _distance(one: torch.Tensor, other: torch.Tensor, unit: torch.Tensor) -> float:
    """The norm of a difference over a norm; what is not a number in both is no difference."""
    a, b = (each.detach().to(torch.complex128 if each.is_complex() else torch.float64) for each in (one, other))
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(a), a - b)
    norm = torch.linalg.vector_norm(unit.detach().to(a.dtype).nan_to_num(0.0, 0.0, 0.0)).item()
    away = torch.linalg.vector_norm(difference).item()
    return math.inf if math.isnan(away) else away / norm if norm else (math.inf if away else 0.0)


def _in_double(variant: Variant, wanted: Sequence[Value], inputs: Sequence[Any], drawn: Mapping[Value, Any]) -> tuple[list[Any], str]:
    """The captured program's results in double precision, with these random numbers; else nothing, and why."""
    graph = variant.captured.graph
    kept = [node for node in graph.nodes if not any(value in drawn for value in node.outputs)]
    wide = Graph((*graph.inputs, *drawn), tuple(map(_widened, kept)), tuple(wanted), graph.dimensions)
    try:
        return _run(variant, wide, [*_copies(inputs, wide=True), *(_copies(list(drawn.values()), wide=True))]), ""
    except (RuntimeError, TypeError, NotImplementedError) as error:  # how torch says that an operator has no kernel for float64
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return [None] * len(wanted), f"the program does not run in float64: {reason[:200]}"


def _widened(node: Node) -> Node:
    """A node whose floating-point results are in double precision; on its own, without control edges."""
    kwargs = tuple((name, _wide(arg)) for name, arg in node.kwargs)
    return replace(node, args=tuple(map(_wide, node.args)), kwargs=kwargs, after=(), inplace=())


def _wide(arg: Arg) -> Arg:
    if isinstance(arg, tuple):
        return tuple(map(_wide, arg))
    return Atom("dtype", "float64") if isinstance(arg, Atom) and arg.kind == "dtype" and arg.name in _NARROW else arg


def _run(variant: Variant, graph: Graph, given: list[Any], order: Sequence[int] | None = None) -> list[Any]:
    """What a program returns for copies of what it reads; the random generators are left as they are."""
    steps = tuple(range(len(graph.nodes)) if order is None else order)
    problem = symbolic_problem(graph).structure if graph.dimensions else order_problem(graph)
    reuses = [-1] * len(steps) if order is None else simulate(problem, steps).reuses.tolist()
    devices = {value.storage.device for value in graph.inputs if value.storage.device.startswith("cuda")}
    with draws_apart(devices):
        return list(replace(variant.program, source=lower(Decision(graph, steps, tuple(reuses))))(given))


def _copies(inputs: Sequence[Any], *, wide: bool = False) -> list[Any]:
    """Generators in the same states; tensors laid out as these, that share memory where these do; `wide`: floating point in float64."""
    bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    copies: list[Any] = []
    for item in inputs:
        if not isinstance(item, torch.Tensor):
            copies.append(item.clone_state() if isinstance(item, torch.Generator) else item)
            continue
        item = item.detach()
        key = (item.untyped_storage().data_ptr(), item.dtype if wide else torch.uint8)
        if key not in bases:
            whole = torch.empty(0, dtype=item.dtype, device=item.device).set_(item.untyped_storage())
            bases[key] = whole.double() if wide and item.is_floating_point() else whole.clone()
        base = bases[key]
        copy = torch.empty(0, dtype=base.dtype if wide else item.dtype, device=item.device)
        copies.append(copy.set_(base.untyped_storage(), item.storage_offset(), item.shape, item.stride()))
    return copies
