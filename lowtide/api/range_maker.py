"""From a program and the range of its batches to variants for each shape: captured once for a part of the range, planned once for a limit.

takes   a maker for single shapes, and the example
leaves  families of variants, one for each shape that is asked for, in microseconds where the shape lies in a part that is known
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from lowtide.api.captures import Captures
from lowtide.api.maker import Family, PlanningSettings, StepMaker
from lowtide.api.notation import Seen, fixed_beside, guessed, shapes_of
from lowtide.api.range_part import LimitedRange, RangePart, bounded, in_steps, narrowed, what_on
from lowtide.base.files import write_whole
from lowtide.base.messages import Stages, warn
from lowtide.capture.batches import largest
from lowtide.capture.care.turns import interrupts_that_can_be_taken
from lowtide.capture.data.facts import Facts
from lowtide.capture.sizes.probes import is_dense
from lowtide.capture.sizes.symbols import FixedError
from lowtide.capture.trace import CapturedStep
from lowtide.cost.laboratory import Laboratory
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.ir.shapes.dimension import FIXED, Dimensions, Varying
from lowtide.plan.plan import Plan
from lowtide.planning.machine import Machine
from lowtide.planning.planner import Planner
from lowtide.planning.request import Limit
from lowtide.planning.warm_up import compile_ahead, warm_up_planning
from lowtide.ranges.save import WrittenRange, part_for, refuse_other, written_range
from lowtide.remat.sweep import Sweep
from lowtide.runtime.premises import Premises

Batch: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

_MANY = 4  # parts of a range that are captured apart, before that is told


@dataclass(frozen=True)
class RangeFamily(Family):
    """The programs for batches of one shape of a range."""

    captured: tuple[CapturedStep, ...] = ()
    point: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TracedPrograms:
    """Programs as they were captured around a point of the range, before it is known for which part of it they are."""

    captured: tuple[CapturedStep, ...]
    premises: Premises
    point: Mapping[str, int]


class RangeMaker:
    """Does for every shape of a range what `StepMaker` does for one.

    The part of the range with the largest shapes is captured when it is made; other parts (a convolution lays out small batches otherwise)
    and other states of the model are captured when the first batch of theirs comes.
    """

    saved: Plan | None = None  # a plan of one shape is for no range

    def __init__(self, maker: StepMaker, example: Batch, saved: WrittenRange | None = None) -> None:
        """`maker` captures for the range. `saved` is what was planned for it earlier."""
        self._maker, self._saved, self._shapes = maker, saved, shapes_of(*example)
        self._example: Batch | None = example  # until the range is captured: a step holds on to no batch
        self._served: list[LimitedRange] = []  # newest first

    @property
    def capturing(self) -> Captures:
        return self._maker.capturing

    @property
    def machine(self) -> Machine:
        return self._maker.machine

    @property
    def settings(self) -> PlanningSettings:
        return self._maker.settings

    @property
    def stages(self) -> Stages:
        return self._maker.stages

    @classmethod
    def guessing(cls, maker: StepMaker, seen: Sequence[Seen], args: tuple[Any, ...], kwargs: dict[str, Any]) -> RangeMaker | None:
        """A maker for the range that batches of these shapes show, with the latest of them; None where they show none."""
        varying = guessed(seen, [leaf.where for leaf in tree.flatten((args, kwargs))[0]])
        return cls(maker.for_range(varying), (args, kwargs)) if varying else None

    @property
    def _varying(self) -> Varying:
        return self.capturing.varying

    @property
    def lines(self) -> list[str]:
        """What it has for each part of the range that is captured so far, the program that most steps run, in words."""
        return [str(served.families[-1]) for served in reversed(self._served)]

    @property
    def extents(self) -> str:
        return ", ".join(each.ranged for each in self._varying.dimensions)

    def covers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a batch, otherwise like the example, lies in the range, and no tensor that varies is a part of another one.

        Raises ShapeError where it breaks a tie.
        """
        shapes, varying = shapes_of(args, kwargs), self._varying
        if not varying.is_elsewhere_alike(shapes, self._shapes) or not varying.has(shapes):
            return False
        leaves = _leaves(args, kwargs)
        return all(is_dense(leaves[axis.leaf]) for axis in varying.axes)

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, as_saved: bool = False) -> RangeFamily:
        """The programs for a batch's shape and the caller's objects as they are now. Raises BudgetError where the shape does not fit."""
        if self._example is not None:
            if self._saved is None:
                compile_ahead(self.settings.solver, limited=self.settings.limit.is_limit)
            self._begin(*self._example)
            self._example = None
        leaves, point = _leaves(args, kwargs), self._varying.point(shapes_of(args, kwargs))
        for served in self._served:
            if served.region.takes(point, leaves) and served.region.premises.holds():
                family = _family(served, point)
                if self._is_for_now(family, leaves):
                    return family
        return _family(self._add(args, kwargs), point)

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RangeFamily | None:
        """What is captured and planned for a batch's shape, of the programs those for the optimizer's state as it is, and the last.

        For a shape that is met: a step looks itself whether a program is for all else that the caller holds, and asks `make` where none
        is. None where nothing is known. Raises BudgetError where the shape does not fit.
        """
        leaves, point = _leaves(args, kwargs), self._varying.point(shapes_of(args, kwargs))
        there = [served for served in self._served if served.region.takes(point, leaves)]
        if len(there) > 1:
            there = [served for served in there if served.region.premises.holds()]
        return _family(there[0], point, self.capturing.caller.state_entries) if there else None

    def at(self, limit: Limit, family: Family, sweeps: tuple[Sweep, ...] = ()) -> tuple[RangeMaker, RangeFamily]:
        """The same under another limit, for the shape of a family's batches; what was captured and searched is kept."""
        assert isinstance(family, RangeFamily), "a step for a range has such families"
        other = copy.copy(self)
        other._maker, other._served = self._maker.under(limit, sweeps), []
        for served in reversed(self._served):  # the oldest has the largest shapes, of which a share counts
            timed = limit.is_limit and served.region.timed(other.machine, self.capturing.trains, exact=self.settings.exact)
            other._plan(timed or served.region)
        served = next(each for each in other._served if each.region.captured is family.captured)
        return other, _family(served, family.point)

    def for_other_shapes(self, family: Family) -> StepMaker:
        """The maker for batches out of the range, within as many bytes."""
        return self._maker.for_range(FIXED)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._maker.machine.laboratory(self.capturing.trains) as laboratory:
            try:
                traced = self._first(args, kwargs, laboratory)
            except CaptureError as error:
                if not (fixed := fixed_beside(self._varying, tree.flatten((args, kwargs))[0])):
                    raise
                raise CaptureError(f"{error}. Note: {fixed}") from error.__cause__
            self._plan(self._region(traced, laboratory))

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory) -> TracedPrograms:
        """The program for the largest shapes. Where it is for a part of the range alone, the range is that from here on."""
        try:
            traced = self._traced(*largest(args, kwargs, self._varying), laboratory)
        except CaptureError as error:
            return self._less(args, kwargs, laboratory, error)
        return self._traced(*largest(args, kwargs, self._varying), laboratory) if self._take_steps(traced) else traced

    def _less(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory, error: CaptureError) -> TracedPrograms:
        """The same where there is no program for the largest shapes: the example may show where the range has to end, and its steps.

        Such as that of a program that looks positions up in a table, or halves an odd extent. Raises the error where it shows neither.
        """
        try:
            traced = self._traced(args, kwargs, laboratory)
        except CaptureError:
            raise error from error.__cause__
        if self._take_steps(traced):
            with suppress(CaptureError):
                return self._traced(*largest(args, kwargs, self._varying), laboratory)
        before = self._maker
        for dimensions in _ended(traced, self._varying.dimensions):
            self._maker = before.for_range(replace(before.capturing.varying, dimensions=dimensions))
            with suppress(CaptureError):
                programs = self._traced(*largest(args, kwargs, self._varying), laboratory)
                _tell_ends(before.capturing.varying.dimensions, dimensions, traced)
                return programs
        self._maker = before
        raise error from error.__cause__

    def _take_steps(self, traced: TracedPrograms) -> bool:
        """Take the range in the steps that a program needs, and tell; whether it needs any."""
        dimensions = self._varying.dimensions
        stepped = in_steps(traced.captured, traced.point, dimensions)
        for before, after in zip(dimensions, stepped, strict=True):
            if after.steps is not None and before != after:
                entry = f'("{after.extent_name}", {after.extent(after.least)}, {after.extent(after.most)}, {after.steps.step})'
                warn(
                    f"dimension {after.extent_name}: the range is {after.extents}, as the program rests on {what_on(traced.captured)}; a "
                    f"batch in between is one out of the range. {entry} in `dynamic` says so"
                )
        self._maker = self._maker.for_range(replace(self._varying, dimensions=stepped))
        return stepped != dimensions

    def _add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LimitedRange:
        """Capture the program for the part of the range around a batch, and plan it."""
        with self._maker.machine.laboratory(self.capturing.trains) as laboratory:
            region = self._region(self._around(args, kwargs, laboratory), laboratory)
        served = self._plan(region)
        if len(self._served) == _MANY:
            warn(f"lowtide has captured {_MANY} parts of the range apart, {region.why}")
        return served

    def _around(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory) -> TracedPrograms:
        """The programs around a batch. Where they are for one number of a dimension alone (`if len(x) == 1`), that is none of theirs."""
        maker, point = self._maker, self._varying.point(shapes_of(args, kwargs))
        while True:
            try:
                return TracedPrograms(*maker.capturing.as_it_is(args, kwargs, laboratory), point)
            except FixedError as error:
                varying = maker.capturing.varying.without(error.name)
                if varying == maker.capturing.varying:
                    raise
                maker = maker.for_range(varying)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory) -> TracedPrograms:
        captured, premises = self.capturing.as_it_is(args, kwargs, laboratory)
        return TracedPrograms(captured, premises, self._varying.point(shapes_of(args, kwargs)))

    def _region(self, traced: TracedPrograms, laboratory: Laboratory) -> RangePart:
        part = narrowed(traced.captured, traced.point)
        if (saved := self._region_saved(part, traced)) is not None:
            return saved
        settings = {"timed": self.settings.limit.is_limit, "exact": self.settings.exact}
        return RangePart.of(part, traced.point, traced.premises, self._maker.machine, laboratory, **settings)

    def _region_saved(self, captured: tuple[CapturedStep, ...], traced: TracedPrograms) -> RangePart | None:
        """The part of the range that was saved; None where that was not. Raises FormatError where it has to be."""
        saved = self._saved
        if saved is None or (self.settings.limit.is_limit and not saved.is_limited):
            return None
        request, graphs = self._maker.request(captured[-1], self.settings.limit.budget(0)), [each.graph for each in captured]
        if not self._served:
            refuse_other(saved, graphs, request)
        part = part_for(saved, graphs, request)
        if part is None:
            return None
        return RangePart.of_saved(captured, traced.point, traced.premises, part, request, timed=saved.is_limited)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was planned for the parts of the range that are captured so far, to be used by `optimize(..., plan=path)`."""
        served = list(reversed(self._served))
        parts = [([each.graph for each in one.region.captured], one.families) for one in served]
        write_whole(path, written_range(parts).to_json())

    @interrupts_that_can_be_taken()
    def _plan(self, region: RangePart) -> LimitedRange:
        """Plan a region within the limit: a share is of eager's peak for the largest shapes, those that came first."""
        self._fix_share(region)
        captured = region.captured[-1]
        budget = self.settings.limit.budget(0)
        with self.stages.stage("compile", "loading compiled kernels, or compiling them for the first time"):
            warm_up_planning(self.settings.solver, limited=budget.is_limit)
        with self.stages.stage("order", f"ordering {len(captured.graph.nodes)} operators for a range of shapes"):
            families = region.planner.families(self._maker.request(captured, budget))
        self._served.insert(0, LimitedRange(region, tuple(families), self.capturing.trains))
        return self._served[0]

    def _fix_share(self, region: RangePart) -> None:
        if self.settings.limit.share is not None:
            granule_bytes = self._maker.machine.granule_bytes(region.captured[-1])
            self._maker = self._maker.with_share_of(region.planner.eager_peak_bytes(granule_bytes))

    def _is_for_now(self, family: RangeFamily, leaves: Sequence[Any]) -> bool:
        """Whether one of the programs is that for what the caller holds now."""
        now = self.capturing.caller.view(leaves)
        facts = Facts(now.read)
        return any(variant.fits(now, facts) for variant in reversed(family.variants))


def _ended(traced: TracedPrograms, dimensions: Dimensions) -> Iterator[Dimensions]:
    """The whole range, ending where a program around a point of it does: in one of its dimensions, then in all."""
    ends = bounded(traced.captured, traced.point, dimensions)
    sooner = [place for place, (one, other) in enumerate(zip(dimensions, ends, strict=True)) if one != other]
    for place in sooner if len(sooner) > 1 else ():
        yield (*dimensions[:place], ends[place], *dimensions[place + 1 :])
    if sooner:
        yield ends


def _tell_ends(before: Dimensions, after: Dimensions, traced: TracedPrograms) -> None:
    for was, now in zip(before, after, strict=True):
        if was != now:
            warn(
                f"dimension {now.extent_name}: the range is {now.extents}, as the program rests on {what_on(traced.captured, now.name)}; "
                "a batch beyond is one out of the range"
            )


def _family(served: LimitedRange, point: Mapping[str, int], state_entries: int | None = None) -> RangeFamily:
    return RangeFamily((), served.region.premises, Planner([]), served.variants(point, state_entries), served.region.captured, point)


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [leaf.value for leaf in tree.flatten((args, kwargs))[0]]
