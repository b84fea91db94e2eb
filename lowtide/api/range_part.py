"""A part of the range for which one capture holds, with the programs that serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from lowtide.api.variant import Variant
from lowtide.capture.data.facts import at_numbers
from lowtide.capture.trace import CapturedStep
from lowtide.cost.laboratory import Laboratory
from lowtide.errors import CaptureError, FormatError
from lowtide.ir.graph import Value
from lowtide.ir.result_specs import same_strides
from lowtide.ir.shapes.conditions import Condition, Holds, all_hold, part_of_range, steps_of_range
from lowtide.ir.shapes.dimension import Dimension, Dimensions
from lowtide.ir.shapes.points import CompiledSizes, compiled, size_at
from lowtide.ir.sizes import Size
from lowtide.planning.machine import Machine
from lowtide.planning.request import Request
from lowtide.ranges.candidate import all_ranged
from lowtide.ranges.family import Member, PlanFamily
from lowtide.ranges.planner import RangePlanner
from lowtide.ranges.save import WrittenPart, planner_of
from lowtide.runtime.premises import Premises

_SHOWN = 3  # conditions in a message


@dataclass(frozen=True, eq=False)
class RangePart:
    """Programs that were captured together, for as many states of the optimizer's; the last is the one that most steps run."""

    captured: tuple[CapturedStep, ...]
    fixed: Mapping[str, int]  # the numbers of dimensions that are none here: 0 and 1 are captured apart
    premises: Premises  # what they take for granted
    planner: RangePlanner  # it keeps what it has searched
    is_timed: bool  # whether it knows what operators take

    @classmethod
    def of(
        cls,
        captured: tuple[CapturedStep, ...],
        point: Mapping[str, int],
        premises: Premises,
        machine: Machine,
        laboratory: Laboratory,
        *,
        timed: bool,
        exact: bool,
    ) -> RangePart:
        """What was captured around a point of the whole range. Raises CaptureError where the programs are not for all of their part."""
        programs = all_ranged(captured, machine, laboratory, timed=timed, exact=exact)
        return cls(captured, _fixed(captured, point), premises, RangePlanner(programs), timed)

    @classmethod
    def of_saved(
        cls,
        captured: tuple[CapturedStep, ...],
        point: Mapping[str, int],
        premises: Premises,
        saved: WrittenPart,
        request: Request,
        *,
        timed: bool,
    ) -> RangePart:
        """The same with what was saved for these programs: nothing is measured. Raises FormatError where that is not for them."""
        planner = planner_of(saved, [(each.graph, each.held_storages) for each in captured], request, limited=timed)
        return cls(captured, _fixed(captured, point), premises, planner, timed)

    def timed(self, machine: Machine, trains: bool, *, exact: bool) -> RangePart:
        if self.is_timed:
            return self
        with machine.laboratory(trains) as laboratory:
            programs = all_ranged(self.captured, machine, laboratory, timed=True, exact=exact)
        return replace(self, planner=RangePlanner(programs), is_timed=True)

    @property
    def dimensions(self) -> Dimensions:
        """The part of the range around which it was captured."""
        return self.captured[-1].graph.dimensions

    @property
    def why(self) -> str:
        """What keeps these programs from other batches."""
        rests, condition = f"; the latest is for {', '.join(map(str, self.dimensions)) or 'one shape'}", what_on(self.captured)
        return f"each with a program of its own{rests}" + (f", as the program rests on {condition}" if condition else "")

    def takes(self, point: Mapping[str, int], leaves: Sequence[Any]) -> bool:
        """Whether these are the programs for a batch at a point, given its leaves, whatever the caller's objects are."""
        inside = all(each.least <= point[each.name] <= each.most for each in self.dimensions)
        if not inside or any(point[name] != number for name, number in self.fixed.items()) or not self._conditions(point):
            return False
        strides = iter(self._strides(*(point[each.name] for each in self.dimensions)))
        for leaf in self._inputs:
            tensor = leaves[leaf]
            if not same_strides(tensor.shape, tensor.stride(), [next(strides) for _ in tensor.shape]):
                return False
        return True

    @cached_property
    def _inputs(self) -> dict[int, Value]:
        pairs = zip(self.captured[-1].slots, self.captured[-1].graph.inputs, strict=True)
        return {int(slot.path[0]): value for slot, value in pairs if slot.table == "batch"}

    @cached_property
    def _strides(self) -> CompiledSizes:
        return compiled(tuple(step for value in self._inputs.values() for step in value.stride), self.dimensions)

    @cached_property
    def _conditions(self) -> Holds:
        return all_hold([each for captured in self.captured for each in captured.conditions], self.dimensions)

    def own(self, point: Mapping[str, int]) -> dict[str, int]:
        return {each.name: point[each.name] for each in self.dimensions}


def _fixed(captured: Sequence[CapturedStep], point: Mapping[str, int]) -> dict[str, int]:
    """The numbers at a point of what is no dimension of these programs."""
    own = {each.name for each in captured[-1].graph.dimensions}
    return {name: number for name, number in point.items() if name not in own}


def what_on(programs: Sequence[CapturedStep], name: str | None = None) -> str:
    """What programs take for granted of dimensions (of one of them), and where: the first few; "" where that is nothing."""
    conditions = [each for captured in programs for each in captured.conditions]
    lines = dict.fromkeys(
        f"{each.relation} at {each.where}" for each in conditions if name in (None, *map(str, each.relation.free_symbols))
    )
    return "; ".join(list(lines)[:_SHOWN])


def in_steps(programs: Sequence[CapturedStep], point: Mapping[str, int], dimensions: Dimensions) -> Dimensions:
    """The dimensions of the whole range, in steps around a point where programs are for these alone."""
    own, conditions = programs[-1].graph.dimensions, [each for captured in programs for each in captured.conditions]
    _refuse_unreadable(conditions, own)
    here = {each.name: point[each.name] for each in own}
    steps = steps_of_range(conditions, own, all_hold(conditions, own), here)

    def stepped(each: Dimension) -> Dimension:
        if each.name not in steps or each.steps is not None:
            return each
        least = each.least + (here[each.name] - each.least) % steps[each.name]
        return Dimension.of_extents(each.name, least, each.most, steps[each.name])

    return tuple(map(stepped, dimensions))


def bounded(programs: Sequence[CapturedStep], point: Mapping[str, int], dimensions: Dimensions) -> Dimensions:
    """The dimensions of the whole range, each ending where programs that were captured at a point of it do."""
    part = {each.name: each.most for each in narrowed(programs, point)[-1].graph.dimensions}
    return tuple(replace(each, most=min(each.most, part.get(each.name, each.most))) for each in dimensions)


def narrowed(captured: Sequence[CapturedStep], point: Mapping[str, int]) -> tuple[CapturedStep, ...]:
    """The programs over the part of the range in which what they rest on holds, as far as one dimension says.

    Raises CaptureError for a condition that cannot be checked at each batch.
    """
    dimensions = captured[-1].graph.dimensions
    conditions = [each for one in captured for each in one.conditions]
    _refuse_unreadable(conditions, dimensions)
    holds = all_hold(conditions, dimensions)
    part = part_of_range(dimensions, holds, {each.name: point[each.name] for each in dimensions})
    return tuple(replace(one, graph=replace(one.graph, dimensions=part)) for one in captured)


def _refuse_unreadable(conditions: Sequence[Condition], dimensions: Dimensions) -> None:
    for each in conditions:
        try:
            all_hold([each], dimensions)
        except FormatError as error:
            names = ", ".join(dimension.name for dimension in dimensions)
            raise CaptureError(
                f"the program rests on a relation of {names} at {each.where} that cannot be checked for each batch ({error}): leave one of "
                "them out of `dynamic`, or compute there with sizes that follow from one of them"
            ) from error


@dataclass(frozen=True, eq=False)
class LimitedRange:
    """A region under one limit: families of plans, and the programs of theirs that are compiled so far."""

    region: RangePart
    families: tuple[PlanFamily, ...]  # by program
    trains: bool
    _compiled: dict[tuple[int, int], Variant] = field(default_factory=dict)  # by program and member

    def variants(self, point: Mapping[str, int], state_entries: int | None = None) -> list[Variant]:
        """By program what runs batches of a point; where the optimizer's state is told, of those for it, and the last.

        Raises BudgetError where a program does not fit there.
        """
        own, last = self.region.own(point), len(self.families) - 1
        entries = [each.state_entries for each in self.region.captured]
        wanted = [which for which in range(last + 1) if which == last or state_entries in (None, entries[which])]
        return [self._variant(which, self.families[which].choose(own), own) for which in wanted]

    def _variant(self, which: int, member: Member, point: Mapping[str, int]) -> Variant:
        key = which, id(member)  # the family holds its members
        family = self.families[which]
        if key not in self._compiled:
            captured, premises = self.region.captured[which], self.region.premises
            self._compiled[key] = Variant.of(captured, member.decision, premises, self.trains, partial(family.plan, point))
        compiled = self._compiled[key]

        def number(size: Size) -> int:
            return size_at(size, family.dimensions, point)

        readings = tuple(at_numbers(reading, number) for reading in compiled.captured.readings)
        captured = replace(compiled.captured, readings=readings) if readings else compiled.captured
        shape = tuple(point.values())
        return replace(compiled, captured=captured, planned=partial(family.plan, point), shape=shape)
