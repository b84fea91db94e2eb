"""Addresses over time: where the tensors of a step would lie in one block of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.base.units import bytes_text
from lowtide.ir.graph import Kind
from lowtide.placement import Portfolio, place
from lowtide.plan.kinds import kind_text
from lowtide.plan.snapshot import LiveTensor
from lowtide.problems.placement import PlaceProblem
from lowtide.report.chart import Band, Scale
from lowtide.report.course import Course, begins

_ALIGN_BYTES = 64
_MOST = 4000  # rectangles, the largest ones


@dataclass(frozen=True)
class AddressChart:
    """Rectangles by kind, in a square of 1000 by 1000."""

    bands: tuple[Band, ...]
    arena: str  # its size, for people
    above: str  # how much that is above the most that lives at once
    left_out: int  # tensors too small to be shown
    scale: Scale


@dataclass(frozen=True)
class Placed:
    """The tensors that a step makes, each at an offset in one block."""

    tensors: tuple[LiveTensor, ...]
    offsets: tuple[int, ...]  # bytes
    arena_bytes: int
    bound_bytes: int  # no arena can be smaller


def placed(course: Course) -> Placed:
    """What the step makes, by greedy placement. What the caller holds lies elsewhere."""
    made = tuple(each for each in course.tensors if each.op and each.start < each.end)
    sizes, starts, ends = [each.nbytes for each in made], [each.start for each in made], [each.end for each in made]
    found = place(PlaceProblem.of(sizes, starts, ends, align_bytes=_ALIGN_BYTES), Portfolio())
    return Placed(made, tuple(map(int, found.offsets)), int(found.arena_bytes), int(found.lower_bound_bytes))


def addresses(course: Course, scale: Scale) -> AddressChart | None:
    """The tensors that the step makes, drawn; None where it makes none."""
    found = placed(course)
    if not found.tensors:
        return None
    own = Scale(scale.most_x, found.arena_bytes, scale.by_time)
    at, shown = begins(course.timeline, scale.by_time), list(zip(found.tensors, found.offsets, strict=True))[:_MOST]
    kinds = dict.fromkeys(each.kind for each, _ in shown)
    bands = tuple(_band(kind, [pair for pair in shown if pair[0].kind is kind], at, own) for kind in kinds)
    excess = found.arena_bytes / found.bound_bytes - 1 if found.bound_bytes else 0.0
    return AddressChart(bands, bytes_text(found.arena_bytes), f"{excess:.1%}", len(found.tensors) - len(shown), own)


def _band(kind: Kind, placed: Sequence[tuple[LiveTensor, int]], at: Sequence[float], scale: Scale) -> Band:
    path = "".join(_rectangle(each, offset, at, scale) for each, offset in placed)
    return Band(kind_text(kind), kind.value, path, bytes_text(max(each.nbytes for each, _ in placed)))


def _rectangle(tensor: LiveTensor, offset: int, at: Sequence[float], scale: Scale) -> str:
    left, right = 10 * scale.x(at[tensor.start]), 10 * scale.x(at[tensor.end])
    top, bottom = 1000 - 10 * scale.y(offset + tensor.nbytes), 1000 - 10 * scale.y(offset)
    return f"M{left:.1f} {bottom:.1f}H{right:.1f}V{top:.1f}H{left:.1f}Z"
