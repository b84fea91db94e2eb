"""The peak of an order over a range: the largest of few expressions, evaluated in microseconds.

Each step's footprint is a sum of sizes. A step whose footprint is over the whole range at most that of another drops out; what is left is
compiled. The peak at a point is what `simulate` says of the problem there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lowtide.cost.memory import lifetimes
from lowtide.cost.symbolic import SymbolicProblem
from lowtide.ir.shapes.compare import sign_of
from lowtide.ir.shapes.dimension import Dimensions, checked_point
from lowtide.ir.shapes.evaluate import Compiled, compiled
from lowtide.ir.shapes.polynomial import Polynomial, total
from lowtide.ir.shapes.sign import Sign
from lowtide.ir.sizes import Size


@dataclass(frozen=True)
class SymbolicPeak:
    """What an order takes at its highest, at any point of a range."""

    dimensions: Dimensions
    footprint_bytes: tuple[Size, ...]  # with what is resident: none is proven to be nowhere above another one

    def at(self, point: Mapping[str, int]) -> int:
        """Bytes at a point. Raises ShapeError for a wrong point."""
        return max(self._footprints_at(*checked_point(self.dimensions, point).values()))

    @cached_property
    def _footprints_at(self) -> Compiled:
        return compiled(self.footprint_bytes, self.dimensions)


def symbolic_peak(problem: SymbolicProblem, order: Sequence[int]) -> SymbolicPeak:
    """The peak of an order of node indices. Raises CheckError unless it is a topological order."""
    footprints = list(dict.fromkeys(_footprints(problem, order)))
    at_most = compiled(tuple(each.size for each in footprints), problem.dimensions)(*(each.most for each in problem.dimensions))
    kept: list[Polynomial] = []
    for _, position in sorted(((nbytes, -position) for position, nbytes in enumerate(at_most)), reverse=True):
        each = footprints[-position]
        if not any(sign_of(each - other, problem.dimensions) in (Sign.NOT_POSITIVE, Sign.ZERO) for other in kept):
            kept = [other for other in kept if sign_of(other - each, problem.dimensions) is not Sign.NOT_POSITIVE]
            kept.append(each)
    return SymbolicPeak(problem.dimensions, tuple(each.size for each in kept))


def _footprints(problem: SymbolicProblem, order: Sequence[int]) -> list[Polynomial]:
    """By step: the bytes of all that is alive, of the workspace and of what is resident. Without steps: of what is there from the start."""
    sizes = problem.rounded_polynomials
    live, events = total(problem.rounded_resident), defaultdict[int, list[Polynomial]](list)
    for tensor, (start, end) in enumerate(zip(*map(list, lifetimes(problem.structure, order)), strict=True)):
        if start < end:
            events[int(start)].append(sizes[tensor])
            events[int(end)].append(sizes[tensor].scaled(-1))
    found = []
    for step, node in enumerate(order):
        live = total((live, *events[step]))
        found.append(live + Polynomial.of(problem.workspace_bytes[node]))
    return found or [live + total(sizes[tensor] for tensor in range(len(sizes)) if problem.structure.uses[tensor])]
