"""Is one order best over a whole range? A proof by minimum cuts at Bernstein's control points, for sizes that are polynomials.

What a node needs after a downset is a sum of sizes: a polynomial over the range, for each downset another. Take the Bernstein coefficients
of all sizes, of common degrees. At one control point they are the bytes of an ordering problem of the same structure, though perhaps
of no shape; the footprint of a step there is the coefficient of that step's footprint, since both are sums of the same sizes. So:

1. Where at all control points the minimum cut of a node equals its footprint in the order, every downset's difference to it has no negative
   coefficient, hence is nowhere negative: whatever the order, that node needs as much, at every point of the range.
2. Where the footprint of every step is at all control points at most that of one such node's, none is above it anywhere.

Then the order's peak is at every point the footprint of some such node, and no order has less. Where this fails, the range is cut in two,
a bounded number of times. A yes is a proof; a no says only that there is none of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.memory import lifetimes, simulate
from lowtide.cost.symbolic import SymbolicProblem
from lowtide.errors import ShapeError
from lowtide.ir.shapes.bernstein import elevated
from lowtide.ir.shapes.dimension import Dimension, Dimensions
from lowtide.ir.shapes.polynomial import Polynomial
from lowtide.problems.order import OrderProblem
from lowtide.schedule.cuts import least_need

_MOST_POINTS = 64  # control points of one box
_MOST_NODES = 64  # whose cuts are looked at, in one box


def is_best_everywhere(problem: SymbolicProblem, order: Sequence[int], *, max_boxes: int = 8) -> bool:
    """Whether `order` is proven to have the least peak of all orders at every point of the range.

    False where it is not so, where some size is no polynomial or is rounded, and where the proof would take more than `max_boxes` parts of
    the range. Raises CheckError unless `order` is a topological order.
    """
    simulate(problem.structure, order)
    sizes = _polynomials(problem)
    if sizes is None:
        return False
    pending, boxes = [problem.dimensions], 0
    while pending:
        box, boxes = pending.pop(), boxes + 1
        if _is_best_within(problem, order, sizes, box):
            continue
        halves = _halves(box)
        if not halves or boxes + len(pending) + len(halves) > max_boxes:
            return False
        pending += halves
    return True


def gap_bytes_everywhere(problem: SymbolicProblem, order: Sequence[int], *, max_boxes: int = 8) -> int | None:
    """By how many bytes the peak of `order` is at most above the least, at every point of the range: proven. None where nothing is.

    Sizes that are rounded by no polynomial are looked at as they are before rounding: where the order is best for those, it loses at most
    what rounding adds to the tensors that are alive at one step, less than `round_to` each. Raises CheckError as above.
    """
    if is_best_everywhere(problem, order, max_boxes=max_boxes):
        return 0
    if problem.round_to == 1 or not is_best_everywhere(replace(problem, round_to=1), order, max_boxes=max_boxes):
        return None
    lives = lifetimes(problem.structure, order)
    change = np.zeros(len(order) + 1, np.int64)
    rounded = np.array([one != other for one, other in zip(problem.tensor_polynomials, problem.rounded_polynomials, strict=True)], np.bool_)
    np.add.at(change, lives.start[rounded], 1)
    np.add.at(change, lives.end[rounded], -1)
    return int(change.cumsum().max(initial=0)) * (problem.round_to - 1)


def _polynomials(problem: SymbolicProblem) -> tuple[Polynomial, ...] | None:
    """The sizes of tensors, of workspaces, and of all that is resident, as the allocator rounds them; None where one is no polynomial."""
    sizes = (*problem.rounded_polynomials, *map(Polynomial.of, problem.workspace_bytes), *problem.rounded_resident)
    names = {each.name for each in problem.dimensions}
    return sizes if all(names.issuperset(size.generators) and _is_whole(size) for size in set(sizes)) else None


def _is_whole(size: Polynomial) -> bool:
    return all(each.denominator == 1 and all(power > 0 for _, power in monomial) for monomial, each in size.terms)


def _is_best_within(problem: SymbolicProblem, order: Sequence[int], sizes: tuple[Polynomial, ...], box: Dimensions) -> bool:
    try:
        controls = list(_controls(problem, sizes, box))
    except ShapeError:  # a coefficient below 0, or too large to count
        return False
    footprints = np.array([simulate(each, order).footprint_bytes for each in controls])  # [control points, steps]
    if not controls or not len(order):
        return bool(controls)
    highest = _highest(footprints)
    if len(highest) > _MOST_NODES:
        return False
    return all(_is_least(controls, order, footprints, step) for step in highest)


def _controls(problem: SymbolicProblem, sizes: tuple[Polynomial, ...], box: Dimensions) -> Iterator[OrderProblem]:
    """The problem at each control point, all sizes by one common factor; none where there are too many. Raises ShapeError."""
    ranges = {each.name: (each.least, each.most) for each in box}
    degrees = {name: max((dict(monomial).get(name, 0) for size in sizes for monomial, _ in size.terms), default=0) for name in ranges}
    if prod(degree + 1 for degree in degrees.values()) > _MOST_POINTS:
        return
    known = {size: elevated(size, ranges, degrees) for size in set(sizes)}
    m, n = len(problem.tensor_bytes), len(problem.workspace_bytes)
    for point in product(*(range(degree + 1) for degree in degrees.values())):
        found = [int(known[size][point]) for size in sizes]
        yield problem.of_sizes(found[:m], found[m : m + n], sum(found[m + n :]), "at a control point")


def _highest(footprints: NDArray[np.int64]) -> list[int]:
    """Steps such that every other step's footprint is at all control points at most that of one of them."""
    kept: list[int] = []
    for step in np.argsort(-footprints.sum(axis=0), kind="stable"):
        if not any((footprints[:, step] <= footprints[:, other]).all() for other in kept):
            kept.append(int(step))
        if len(kept) > _MOST_NODES:
            break
    return kept


def _is_least(controls: Sequence[OrderProblem], order: Sequence[int], footprints: NDArray[np.int64], step: int) -> bool:
    """Whether what runs at a step, or at another of the same footprints, needs as much after every downset."""
    same = np.flatnonzero((footprints == footprints[:, [step]]).all(axis=0))
    return any(
        all(least_need(each, int(order[other])).need_bytes == row[step] for each, row in zip(controls, footprints, strict=True))
        for other in same[:4]
    )


def _halves(box: Dimensions) -> list[Dimensions]:
    """A box cut in two between whole numbers, where its longest side has half of its length in factors; none for a single point."""
    longest = max(box, key=lambda each: each.most / max(each.least, 1), default=None)
    if longest is None or longest.least == longest.most:
        return []
    middle = min(max(int((max(longest.least, 1) * longest.most) ** 0.5), longest.least), longest.most - 1)
    ends = (Dimension(longest.name, longest.least, middle), Dimension(longest.name, middle + 1, longest.most))
    return [tuple(end if each is longest else each for each in box) for end in ends]
