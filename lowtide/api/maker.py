"""From a program to variants that run: capture it, say what its operators need, ask planning; now, and again when it has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lowtide.api.arguments import detached
from lowtide.api.captures import Captures
from lowtide.api.processes import agreed_plans, compare_programs
from lowtide.api.variant import Variant
from lowtide.base.messages import Stages, bytes_text
from lowtide.base.process import collected_seldom
from lowtide.capture.batches import with_stand_ins
from lowtide.capture.care.failures import programs_own
from lowtide.capture.care.turns import interrupts_that_can_be_taken
from lowtide.capture.difference import difference
from lowtide.capture.trace import CapturedStep
from lowtide.cost.laboratory import Laboratory
from lowtide.cpu.comparison import measured_ns
from lowtide.cpu.networks import networks_of
from lowtide.cpu.stages import Attention, Batched, Convolution, KernelStage, Map, Pad, Product, RowBlock, RowReduction, Windows, Winograd
from lowtide.cuda.forecast import arena_peak_bytes
from lowtide.errors import BudgetError, CaptureError
from lowtide.ir.bodies import Region, is_by_inductor, is_region
from lowtide.ir.graph import Graph
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.shapes.dimension import Varying
from lowtide.plan.cost_report import GeneratedRegion, Kernel
from lowtide.plan.plan import Plan
from lowtide.planning.candidate import Candidate
from lowtide.planning.machine import Machine
from lowtide.planning.planner import Planner
from lowtide.planning.replan import SavedStep, as_saved
from lowtide.planning.request import Budget, Limit, Request
from lowtide.planning.warm_up import compile_ahead, load_ahead, warm_up_planning
from lowtide.regions.compilation import times_ns
from lowtide.regions.inductor import begun_ahead
from lowtide.remat.sweep import Sweep
from lowtide.runtime.graphs.capturable import graph_bytes
from lowtide.runtime.premises import Premises
from lowtide.runtime.ranks import SinglePeer
from lowtide.schedule import Solver

_SCHEMES: dict[type, str] = {
    Product: "register tiles", Convolution: "register tiles", Winograd: "transformed tiles", Batched: "register tiles",
    Attention: "rows of scores", Windows: "windows", RowReduction: "row by row", Map: "element by element", Pad: "element by element",
}  # fmt: skip


def with_generated(plan: Plan) -> Plan:
    """A plan that tells what its regions are here; it must be able to run here. Raises NativeError."""
    if not any(map(is_region, plan.graph.nodes)):
        return plan
    regions = [_by_inductor(Region.of(node)) for node in plan.graph.nodes if is_by_inductor(node)]
    for region, its in networks_of(plan.graph):
        generated_ns, torch_ns = measured_ns(region.body, its.source) or (None, None)
        kernels = tuple(Kernel(_scheme(stage), tuple(_name(node.op) for node in stage.nodes)) for stage in its.stages)
        us, by_torch_us = (None if ns is None else ns / 1e3 for ns in (generated_ns, torch_ns))
        name = region.node.results[0].name
        regions.append(GeneratedRegion(name, kernels, region.arena_bytes, region.packed_bytes, us, by_torch_us))
    return replace(plan, generated=tuple(regions))


def _by_inductor(region: Region) -> GeneratedRegion:
    kernels = (Kernel(region.by, tuple(_name(node.op) for node in region.body.nodes if not is_view(node))),)
    us, torch_us = (None if ns is None else ns / 1e3 for ns in times_ns(region.body) or (None, None))
    return GeneratedRegion(region.node.results[0].name, kernels, region.arena_bytes, 0, us, torch_us, by=region.by)


def _scheme(stage: KernelStage) -> str:
    if isinstance(stage, RowBlock):
        return "rows through a ring" if stage.first is not None else "row by row"
    return _SCHEMES[type(stage)]


def _name(op: str) -> str:
    return op.split(".")[1] if "." in op else op


_LEANER = 16  # plans that are asked for, one leaner than the other, before the limit falls by all that is lacking


@dataclass(frozen=True)
class PlanningSettings:
    """What is asked of planning, whatever the program is."""

    limit: Limit
    swap_state: bool  # parameters and optimizer state may be swapped, too
    solver: Solver
    sweeps: tuple[Sweep, ...]  # how far to look
    exact: bool = True  # eager's numbers, to the last bit
    kernels: str = "auto"  # what runs operators, as `Run` has it
    graph: bool = False  # whether the step may be a CUDA graph, whose copies have their part of a limit
    arena: bool = False  # whether inference has an arena on a CUDA device: a limit holds with results beside a block that stays


@dataclass(frozen=True)
class CapturedProgram:
    captured: CapturedStep
    granule_bytes: int
    candidates: tuple[Candidate, ...]
    saved: Plan | None = None  # the plan that was saved for it: then nothing is measured

    def answers(self, limit: Limit) -> bool:
        """Whether all is known that planning within the limit takes."""
        return self.saved is None and (not limit.is_limit or bool(self.candidates[0].node_us))

    @property
    def eager_peak_bytes(self) -> int:
        return self.candidates[0].eager(self.granule_bytes).peak_bytes if self.saved is None else self.saved.eager_peak_bytes


@dataclass(frozen=True)
class Family:
    """Programs that were captured together, for as many states of the optimizer's; the last is the one that most steps run."""

    programs: tuple[CapturedProgram, ...]
    premises: Premises  # what they take for granted
    planner: Planner  # of those that no plan was saved for; it keeps what it has searched
    variants: list[Variant] = field(default_factory=list)  # by program
    number: int = field(default=0, kw_only=True)  # of those of a step, in the order in which they were captured: the same on all ranks


@dataclass(frozen=True)
class StepMaker:
    """Captures, and asks; planning decides."""

    capturing: Captures
    machine: Machine
    settings: PlanningSettings
    saved: SavedStep | None
    stages: Stages

    @collected_seldom()
    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, as_saved: bool = False) -> Family:
        """Capture and plan the program as the caller's objects and this batch are now.

        Raises FormatError where it has to be `as_saved` and is not.
        """
        capturing = self.capturing
        if self.saved is None:
            compile_ahead(self.settings.solver, limited=self._is_limited)
            capturing = replace(capturing, meanwhile=partial(load_ahead, self.settings.solver, limited=self._is_limited))
        with self._compiling_ahead(), self.machine.laboratory(self.capturing.trains) as laboratory:
            laboratory.expect(self.machine.device)
            captured, premises = self.peers.together(lambda: capturing.as_it_is(args, kwargs, laboratory))
            compare_programs(self.peers, captured)
            if as_saved and self.saved is not None and not any(map(self._saved_for, captured)):
                raise self.saved.refusal(self.machine.provenance(captured[-1]))  # before anything is measured
            programs = self.peers.together(lambda: self._programs(captured, laboratory))
        return self._planned(Family(programs, premises, _planner(programs)))

    def _compiling_ahead(self) -> AbstractContextManager[object]:
        """What compiling needs that is the same for every program, before one is known."""
        compiles = self.settings.kernels == "compiled" and self.saved is None and self.peers.leads
        return begun_ahead(self.machine.device) if compiles else nullcontext()

    @collected_seldom()
    def at(self, limit: Limit, family: Family, sweeps: tuple[Sweep, ...] = ()) -> tuple[StepMaker, Family]:
        """The same programs planned under another limit, and the maker that goes on with that; what was searched for them is kept."""
        other = self.under(limit, sweeps)
        if not all(program.answers(limit) for program in family.programs):
            with other.machine.laboratory(self.capturing.trains) as laboratory:
                programs = self.peers.together(lambda: other._programs([each.captured for each in family.programs], laboratory))
            family = Family(programs, family.premises, _planner(programs))
        return other, other._planned(family)

    def under(self, limit: Limit, sweeps: tuple[Sweep, ...]) -> StepMaker:
        """The maker that goes on under another limit. `sweeps` is how far to look, as far as this one does where empty."""
        stages = replace(self.stages, seconds={})
        capturing, machine = replace(self.capturing, stages=stages), replace(self.machine, stages=stages)
        return StepMaker(capturing, machine, replace(self.settings, limit=limit, sweeps=sweeps or self.settings.sweeps), None, stages)

    def for_range(self, varying: Varying) -> StepMaker:
        """The maker that captures for batches whose dimensions are these."""
        return replace(self, capturing=replace(self.capturing, varying=varying))

    def difference(self, captured: CapturedStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bool]:
        """What the program does otherwise now than when it was captured, in words, "" where that is nothing; and whether it counts."""
        if captured.flags.is_pending:
            return "", False
        with replace(self.machine, tries=False).laboratory(self.capturing.trains) as laboratory:
            try:
                now = self.capturing.again(*detached(args, kwargs), laboratory, captured)
            except CaptureError as error:
                return "" if programs_own(error) is not None else f"it can be captured no more: {error}", False
        counted = now.counted or next(map(str, now.flags.memos), "")
        return (counted, True) if counted else (difference(captured, now), False)

    def reads(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: Set[str]) -> bool:
        """Whether the program does anything with these leaves of a batch, which are no tensors."""
        args, kwargs = detached(args, kwargs)
        touched: list[str] = []
        with replace(self.machine, tries=False).laboratory(self.capturing.trains) as laboratory:
            try:
                now = self.capturing.again(args, kwargs, laboratory)
                blind = self.capturing.again(*with_stand_ins(args, kwargs, where, touched), laboratory)
            except CaptureError:
                return True
        return bool(touched or difference(now, blind))

    def for_other_shapes(self, family: Family) -> StepMaker:
        """The maker for batches of other shapes: a share of eager's peak is as many bytes as it is for this family."""
        return self.with_share_of(family.programs[-1].eager_peak_bytes)

    def with_share_of(self, eager_peak_bytes: int) -> StepMaker:
        """The maker under a limit of bytes in the place of a share of so many."""
        return replace(self, settings=replace(self.settings, limit=self.settings.limit.fixed(eager_peak_bytes)))

    @interrupts_that_can_be_taken()
    def _planned(self, family: Family) -> Family:
        trains, captured = self.capturing.trains, [program.captured for program in family.programs]
        graphs = [each.graph for each in captured]
        plans = agreed_plans(self.peers, lambda: self._plans(family), graphs, lambda at, plan: self._as_saved(captured[at], plan))
        if not self.peers.leads:
            programs = tuple(replace(each, saved=plan) for each, plan in zip(family.programs, plans, strict=True))
            family = replace(family, programs=programs)
        pairs = list(zip(captured, plans, strict=True))
        variants = self.peers.together(lambda: [_variant(each, with_generated(plan), family.premises, trains) for each, plan in pairs])
        return replace(family, variants=variants)

    def _as_saved(self, captured: CapturedStep, saved: Plan) -> Plan:
        """A plan from elsewhere for a captured program. Raises FormatError where it is of another one."""
        return as_saved(saved, captured.graph, exact=self.settings.exact, generated=self._as_compiled(captured, saved.graph))

    def plan_of_most_steps(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Candidate, Plan]:
        """The program that most steps run, and its plan; nothing is made ready to run."""
        compile_ahead(self.settings.solver, limited=self._is_limited)
        with self.machine.laboratory(self.capturing.trains) as laboratory:
            program = self._program(self.capturing.programs(args, kwargs, laboratory)[-1], laboratory)
        budget = self.settings.limit.budget(program.eager_peak_bytes)
        return program.candidates[0], self._asked(_planner([program]), program.captured, budget)[-1]

    def peak_by_order_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The peak of the program that most steps run, by order alone; no plan is made."""
        with self.machine.laboratory(self.capturing.trains) as laboratory:
            program = self._program(self.capturing.programs(args, kwargs, laboratory)[-1], laboratory)
        return _planner([program]).peak_by_order_bytes(self.request(program.captured, Budget()))

    def _programs(self, captured: Sequence[CapturedStep], laboratory: Laboratory) -> tuple[CapturedProgram, ...]:
        """Programs of one step, with what planning has to know: the others run as the last does, which most steps run, what both have."""
        main = self._program(captured[-1], laboratory, self.settings.kernels)
        kernels = self.settings.kernels if main.candidates else "auto"
        return *(self._program(each, laboratory, kernels, main.candidates) for each in captured[:-1]), main

    def _program(
        self, captured: CapturedStep, laboratory: Laboratory, kernels: str = "auto", like: Sequence[Candidate] = ()
    ) -> CapturedProgram:
        """A captured program with what planning has to know of it; of one that a saved plan is for, that plan.

        Only for what most steps run is it worth while to have regions compiled; others have those of the one `like` them.
        """
        if not self.peers.leads:
            return CapturedProgram(captured, self.machine.granule_bytes(captured), ())  # what rank 0 plans
        if (saved := self._saved_for(captured)) is not None:
            return CapturedProgram(captured, self.machine.granule_bytes(captured), (), self._as_saved(captured, saved))
        candidates = self.machine.candidates(
            captured, laboratory, exact=self.settings.exact, limited=self._is_limited, kernels=kernels, like=like
        )
        if self._is_limited:
            candidates = self.machine.timed(captured, candidates, laboratory)
        return CapturedProgram(captured, self.machine.granule_bytes(captured), candidates)

    def _as_compiled(self, captured: CapturedStep, saved: Graph) -> Graph | None:
        """The captured program with the regions that a saved graph has; None where that has none."""
        if any(map(is_by_inductor, saved.nodes)):
            return self.machine.compiled_as_chosen(captured, saved)
        return self.machine.networked(captured, saved) if any(map(is_region, saved.nodes)) else None

    @property
    def peers(self) -> SinglePeer:
        return self.capturing.peers

    @property
    def _is_limited(self) -> bool:
        """Whether there is something to keep to, so that times matter."""
        return self.settings.limit.is_limit or (self.saved is not None and self.saved.is_limited)

    def _saved_for(self, captured: CapturedStep) -> Plan | None:
        """What was saved for this program, an optimizer's first step or a later one."""
        torch, granule_bytes = self.machine.provenance(captured).torch, self.machine.granule_bytes(captured)
        return None if self.saved is None else self.saved.plan_of(captured.graph, torch, granule_bytes)

    def _plans(self, family: Family) -> list[Plan]:
        """A plan for each program: the saved one where that is of it."""
        # A share is of the peak of the program that most steps run, the last; an optimizer's first step keeps to the same bytes.
        last = family.programs[-1]
        budget = self.settings.limit.budget(last.eager_peak_bytes) if self.saved is None else self.saved.budget
        if self.settings.graph and self.saved is None and budget.memory_bytes is not None:
            budget = replace(budget, memory_bytes=budget.memory_bytes - graph_bytes(last.captured.graph))
        new_plans = iter(self._asked_with_arena(family.planner, last.captured, budget))
        return [next(new_plans) if program.saved is None else program.saved for program in family.programs]

    def _asked_with_arena(self, planner: Planner, captured: CapturedStep, budget: Budget) -> list[Plan]:
        """Plans within the budget, counted as memory is taken where inference has an arena: results lie beside it throughout."""
        plans, within, tries = self._asked(planner, captured, budget), budget, 0
        if not self.settings.arena or self.saved is not None or budget.memory_bytes is None or not plans:
            return plans
        while (over_bytes := arena_peak_bytes(worst := max(plans, key=arena_peak_bytes)) - budget.memory_bytes) > 0:
            # One leaner plan after another, which were all searched at once, as the next one may lose less; not for ever.
            within = replace(within, memory_bytes=worst.peak_bytes - (1 if tries < _LEANER else over_bytes))
            tries += 1
            try:
                plans = self._asked(planner, captured, within)
            except BudgetError as error:
                plans = planner.plans_near(self.request(captured, within))
                if (needed_bytes := max(map(arena_peak_bytes, plans))) > budget.memory_bytes:
                    raise _with_results(error, needed_bytes, budget.memory_bytes) from None
        return plans

    def _asked(self, planner: Planner, captured: CapturedStep, budget: Budget) -> list[Plan]:
        if not planner.programs:
            return []
        with self.stages.stage("compile", "loading compiled kernels, or compiling them for the first time"):
            warm_up_planning(self.settings.solver, limited=budget.is_limit)
        request = self.request(captured, budget)
        with self.stages.stage("order", f"ordering {len(captured.graph.nodes)} operators") as say:
            request = replace(request, watcher=say if self.stages.progress else None)
            return planner.plans(request) if self.saved is None else planner.plans_near(request)

    def request(self, captured: CapturedStep, budget: Budget) -> Request:
        request = Request(
            self.machine.provenance(captured),
            budget,
            granule_bytes=self.machine.granule_bytes(captured),
            solver=self.settings.solver,
            sweeps=self.settings.sweeps,
            swap_state=self.settings.swap_state,
            exact=self.settings.exact,
        )
        return replace(request, links=self.machine.links(captured)) if budget.is_limit else request


def captured(make: Callable[..., Family], args: tuple[Any, ...], kwargs: dict[str, Any], *, own: bool = True) -> Family:
    """What a maker makes of the caller's objects and this batch as they are now. `own`: what the program itself raises is raised."""
    try:
        return make(*detached(args, kwargs))
    except CaptureError as error:
        its_own = programs_own(error) if own else None
        if its_own is None:
            raise
    raise its_own


def _with_results(error: BudgetError, needed_bytes: int, memory_bytes: int) -> BudgetError:
    """The same error, of what the leanest plan takes with results that lie beside the step's arena."""
    line = (
        f"with its results, which lie beside an arena that stays taken, the step needs {needed_bytes} bytes ({bytes_text(needed_bytes)}); "
        f"got {memory_bytes} bytes ({bytes_text(memory_bytes)})"
    )
    return BudgetError(f"memory: {line}\n{error}", needed_bytes, smallest_host_bytes=error.smallest_host_bytes)


def _variant(captured: CapturedStep, plan: Plan, premises: Premises, trains: bool) -> Variant:
    return Variant.of(captured, plan, premises, trains, lambda: plan, plan.host_bytes)


def _planner(programs: Sequence[CapturedProgram]) -> Planner:
    return Planner([program.candidates for program in programs if program.saved is None])
