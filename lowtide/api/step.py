"""What `optimize` hands back: a callable that does what the captured program does."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from lowtide.api.arguments import check_memories
from lowtide.api.frozen import UNLIKE, Frozen, RepeatedCalls
from lowtide.api.home import fetch, refuse_steps_without_state
from lowtide.api.lookup import Lookup, Prepared
from lowtide.api.maker import Family, StepMaker
from lowtide.api.notation import Seen
from lowtide.api.other_shapes import OtherShapes, run_eagerly
from lowtide.api.range_maker import RangeMaker
from lowtide.api.save import freeze, save
from lowtide.api.step_memory import ArenaReport, NewMemory, StepMemory
from lowtide.api.variant import Variant
from lowtide.api.verify import MeasuredStep, Verification, verified
from lowtide.base.files import write_whole
from lowtide.base.messages import warn
from lowtide.cost.profiler import measure_memory
from lowtide.errors import StepError
from lowtide.kernels.data_shapes import CHECK
from lowtide.plan.cost_report import FrontierPoint
from lowtide.plan.plan import Plan
from lowtide.plan.summary import one_line
from lowtide.planning.request import Limit, MemoryLimits, sweeps_of
from lowtide.report import save as save_report
from lowtide.report import svg
from lowtide.runtime.batch import BatchSpec, NewShapeError, shape_of
from lowtide.runtime.graphs.steps import GraphReport, StepGraphs
from lowtide.runtime.program import undisturbed
from lowtide.runtime.ranks import Peers, gathered

if TYPE_CHECKING:
    from lowtide.api.checkpoint import Trained

T = TypeVar("T")
_TRAINS = "step.measure trains: parameters and optimizer state are now one step further, as after any call of the step"


class Step:
    """A training step, or an inference call, in less memory. Call it as the loop would: `loss = step(*batch)`.

    At each call it reads parameters, buffers, optimizer state and hyper-parameters from the caller's own objects, and advances them in
    place. What it was planned for may change between calls. A learning rate changes at no cost. A flag (frozen layers, `model.eval()`,
    a weight decay that becomes zero) costs one more capture. So does a value that the program reads from its data (whether a mask is
    all ones).
    """

    def __init__(
        self,
        maker: StepMaker | RangeMaker,
        batch: BatchSpec,
        family: Family,
        obstacle: str,
        memory: NewMemory,
        on_new_shape: str | None = None,
        seen: Sequence[Seen] = (),
        check: str = "auto",
    ) -> None:
        """`memory` makes the step's own. `seen` are the shapes from which ranges are guessed, as other batches come; or none."""
        self._maker, self._obstacle, self._new_memory = maker, obstacle, memory
        self._caller, self._peers = maker.capturing.caller, maker.capturing.peers
        program = maker.capturing.program
        self._between_steps = program is not None and program.between_steps
        if self._between_steps and self._caller.optimizer is not None and not obstacle:
            refuse_steps_without_state(self._caller.optimizer)
        self._memory = memory(maker.stages, maker.settings.limit.is_limit)
        self._measured: tuple[Variant, MeasuredStep] | None = None
        self._others = OtherShapes[Step](
            maker, on_new_shape, seen, training=batch.training, make=partial(_on_same, obstacle, self._memory, check)
        )
        self._lookup = Lookup(maker, batch, family, check, obstacle, limited=self._others.limited)
        self._again: RepeatedCalls | None = None  # calls like the last one
        self._turns = threading.RLock() if maker.capturing.trains else None  # a step may be of other shapes within
        self.seconds = maker.stages.seconds  # by stage: "capture", "measure", "compile", "order", "arena"

    @property
    def plan(self) -> Plan:
        """The plan that most steps run. The first step of most optimizers, which makes their state, has one of its own."""
        limited_elsewhere = bool(self._obstacle and self._maker.settings.limit.is_limit)
        plan = self._memory.on_device(self._lookup.main.plan, is_planned_only=limited_elsewhere)
        if self._measured is None or self._measured[0] is not self._lookup.main:
            return dataclasses.replace(plan, measured_peak_bytes=None, measured_pinned_bytes=None)
        measured = self._measured[1]
        return dataclasses.replace(plan, measured_peak_bytes=measured.peak_bytes, measured_pinned_bytes=measured.pinned_bytes)

    @property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """What memory buys: `peak_bytes` and `time_us` of all plans that the search found best at something, leanest first.

        Empty where no limit was asked for.
        """
        report = self.plan.cost_report
        return () if report is None else report.frontier

    @property
    def ranges(self) -> list[str]:
        """What a step for a range of shapes promises at the ends of each part that is captured so far; empty for other steps."""
        ranged = self._others.range
        return [] if ranged is None else ranged.lines

    def at(self, memory: MemoryLimits = None, *, latency: float | None = None, effort: str | None = None) -> Step:
        """A step of the same program under another limit, or under none; this one stays as it is. Limits are those of `optimize`.

        If this step has a limit, too, its search answers at once; another `effort` looks further. A smaller limit never gives a higher
        peak, a larger one never a slower program, nor does one of the host's memory. Both steps work on the same model and optimizer: call
        either. Raises BudgetError if nothing fits.
        """
        sweeps = () if effort is None else sweeps_of(effort, None)
        limit, machine = Limit.of(memory, latency), self._maker.machine
        varies = self._others.range is not None
        check_memories(limit, self._maker.capturing.device, machine.simulated, swap=machine.swap, varies=varies)
        maker, family = self._maker.at(limit, self._lookup.families[0], sweeps)
        others, lookup = self._others, self._lookup
        return Step(maker, lookup.batch, family, self._obstacle, self._new_memory, others.policy, others.seen, lookup.check_policy)

    def plan_for(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for batches of this one's shape, which is captured now where it is new: what it promises is known before it runs.

        A limit in bytes holds for it as well; a share is of eager's peak for the batch given to `optimize`. Raises as a call does.
        """
        try:
            self._lookup.batch.leaves_of(args, kwargs, self._maker.capturing.device)
        except NewShapeError as error:
            return self._made_for(error, args, kwargs).plan
        return self.plan

    @property
    def source(self) -> str:
        return self._lookup.main.program.source

    @property
    def arena(self) -> ArenaReport | None:
        """What the step's arena does; None where none was asked for."""
        return None if self._memory.step_arena is None else self._memory.step_arena.report()

    @property
    def graph(self) -> GraphReport | None:
        """What became of calls where the step may be a CUDA graph (`Run(graph=...)`); None where it was not asked for."""
        return self._memory.graph_report(self._lookup.main)

    def empty_arena(self) -> None:
        """Give the memory of the arena and of CUDA graphs back until the next call, as torch.cuda.empty_cache does.

        Numbers and tensors in use do not change; graphs are captured again. Nothing happens if there is neither, or while a call is under
        way in another thread.
        """
        self._memory.empty()

    def frozen(self, *args: Any, **kwargs: Any) -> Frozen:
        """A function for batches like this one, with the model's weights as they are now. It holds nothing of the model.

        For inference by generated kernels; a call looks nothing up. Runs once on the batch. Raises StepError for another step.
        """
        return self._for_good(freeze, args, kwargs)

    def save_frozen(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write that function to a file, which `lowtide.load_frozen` reads without the model. Raises as `frozen`, and OSError."""
        self._for_good(partial(save, path), args, kwargs)

    def _for_good(self, make: Callable[[Variant, BatchSpec, Sequence[Any]], T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        prepared = self._prepare(args, kwargs)
        if isinstance(prepared, NewShapeError):
            return self._made_for(prepared, args, kwargs)._for_good(make, args, kwargs)
        self._again = None
        self._caller.end_step(self._run(prepared, self._memory.graphs)[1])
        return make(prepared.variant, self._lookup.batch, prepared.inputs)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write what runs, for people and for other tools, as the path ends.

        .html: a page that asks no network: memory over the step beside eager PyTorch's, what lives at each step, what a limit buys.
        .png, .svg, .pdf: a picture of memory over the step. .json: a trace for Chrome and Perfetto. .pickle: a snapshot for PyTorch's
        memory_viz. .py: the generated program.

        Raises FormatError for another suffix, ImportError where a picture is wanted and matplotlib is not installed, and OSError.
        """
        if Path(path).suffix == ".py":
            write_whole(path, self.source)
        else:
            save_report(self.plan, path)

    def fetch_state(self) -> None:
        """With `state="host"`: put the optimizer's state on the device, as its own `step()` needs it, if there is room.

        The next call sends it back to the host. `optimizer.state_dict()` and `load_state_dict` need no such call. For any other step, and
        before the first, nothing changes.
        """
        if self._between_steps and self._caller.optimizer is not None:
            fetch(self._caller.optimizer)

    def gathered(self) -> AbstractContextManager[None]:
        """With `shard="parameters"`: the model's parameters are whole inside. All ranks must enter it together.

        Use it to evaluate or save the model, or to write into it; afterwards each rank keeps its part of what is there then. Between
        steps without it, a parameter is this rank's part, flat. For any other step nothing changes.
        """
        peers = self._peers
        if not isinstance(peers, Peers):
            return nullcontext()
        peers.meet("step.gathered()")
        return gathered(self._caller.model, peers.main)

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write model and optimizer into a folder, as torch.distributed.checkpoint does; of several processes all must call it.

        Each rank writes its own shards. Another number of ranks, or one process alone, may load them.
        """
        with self.gathered():
            self._trained().save(path)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Read such a folder into model and optimizer. Raises FormatError where it is of others."""
        with self.gathered():
            self._trained().load(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was planned, for `optimize(..., plan=path)`: the plan; of a step for a range all that was planned for it so far.

        Raises FormatError for a program that text cannot hold, and OSError.
        """
        if self._others.range is None:
            self.plan.save(path)
        else:
            self._others.range.save(path)

    @undisturbed
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once on a batch like the one given to `optimize`; one of another shape goes the way that `on_new_shape` says.

        Raises BatchError for a batch unlike it in another way, StepError where the model or optimizer no longer is what was captured;
        CaptureError where it has to be captured anew and cannot be; BudgetError where nothing within the limit is found for that shape;
        what the program itself raises where it checks its data and finds them wrong: all is done then that comes before, as in eager.
        Under a limit, and with several processes, no counts and lists are filled in such a call, and none of it is done where the batch
        alone decides. Threads that train by one step take turns.
        """
        if self._turns is None:
            return self._called(args, kwargs)
        with self._turns:
            return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        again = self._again  # which another thread may set
        if again is not None and not self._lookup.check.comes:
            began = time.perf_counter()
            if (outcome := again(args, kwargs)) is not UNLIKE:
                self._lookup.check.ran(time.perf_counter() - began)
                return outcome
        self._again = None  # whatever becomes of this call, networks may have other constants behind it
        known = self._others.known(lambda: shape_of(args, kwargs))
        if known is not None:
            return known(*args, **kwargs)
        match self._lookup.prepared(args, kwargs, always=self._others.limited):
            case None:
                result = self._run_eagerly(args, kwargs, begun=True)
                self._lookup.tell()
                return result
            case Prepared() as prepared:
                began = time.perf_counter()
                undo = None if self._others.limited else prepared.variant.undoing(prepared.inputs)
                try:
                    result, stepped = self._run(prepared, self._memory.graphs)
                except BaseException as error:
                    if undo is None or not hasattr(error, CHECK):
                        raise
                else:
                    self._lookup.check.ran(time.perf_counter() - began)
                    self._caller.end_step(stepped)
                    self._again = self._like_this(prepared)
                    return result
                undo()
                return self._run_eagerly(args, kwargs, begun=True)
            case reshaped:
                if self._obstacle:
                    raise StepError(self._obstacle)
                other = self._others.find(reshaped, self._lookup.families[0], args, kwargs)
                return self._run_eagerly(args, kwargs) if other is None else other(*args, **kwargs)

    def measure(self, *args: Any, **kwargs: Any) -> MeasuredStep:
        """Run once under the profiler: the peak in bytes as the allocator counts them, with what is resident, as the plan promises it.

        `step.plan` then shows it beside the promise. This is a step like any other: a training step trains, and a UserWarning says so.
        Raises StepError for an optimizer's first step, and as a call does.
        """
        prepared = self._prepare(args, kwargs)
        if isinstance(prepared, NewShapeError):
            return self._made_for(prepared, args, kwargs).measure(*args, **kwargs)
        variant = prepared.variant
        if variant is not self._lookup.main:
            raise StepError("the first step of this optimizer makes its state, unlike the later ones: call the step once, then measure")
        device = max((value.storage.device for value in variant.captured.graph.inputs), default="cpu")
        done: list[tuple[Any, bool]] = []  # holds the result, as a caller would
        if variant.program.gradients:
            warn(_TRAINS)
        self.empty_arena()  # it is a part of what the run takes
        taken = measure_memory(lambda: done.append(self._run(prepared, graphs=None)), device)
        resident_bytes = variant.plan.resident_bytes
        pinned_bytes = 0 if variant.program.host is None else variant.program.host.taken_bytes
        measured = MeasuredStep(resident_bytes + taken.above_bytes, resident_bytes, taken.end_bytes, pinned_bytes)
        self._measured = variant, measured
        self._caller.end_step(done[-1][1])
        return measured

    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        """How far this step's results and gradients are from eager's on a batch, beside how far eager's are from float64's.

        Nothing of the caller's changes. All runs on copies, which takes more than eager's memory, and draws the random numbers that a
        call would draw. Raises as a call does. Raises StepError if the step would have to be captured again first, as at an optimizer's
        first step after its state was replaced.
        """
        if self._peers.several:
            raise StepError("verify: a step of several processes has no eager run in one of them to be compared with")
        try:
            leaves = self._lookup.batch.leaves_of(args, kwargs)
        except NewShapeError as error:
            return self._made_for(error, args, kwargs).verify(*args, **kwargs)
        if self._obstacle:
            raise StepError(self._obstacle)
        chosen = self._lookup.find(self._caller.view(leaves))
        if not isinstance(chosen, tuple):
            raise StepError(f"verify: the step is to be captured anew first, as its next call does: {chosen or 'for data of another kind'}")
        return verified(*chosen)

    def __repr__(self) -> str:
        what = "training" if self._lookup.main.program.gradients else "inference"
        return f"Step({what}, {one_line(self.plan)})"

    def _repr_html_(self) -> str:
        """What notebooks show: a picture of memory over the step, and the plan's summary."""
        return svg(self.plan) + self.plan._repr_html_()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """A step is bound to the objects that it works on. Raises StepError, also for `copy.copy` and `copy.deepcopy`."""
        raise StepError(
            "a step cannot be pickled or copied: it works on the very model and optimizer that it was made for. Save its plan with "
            "step.plan.save(path), and call lowtide.optimize(model, batch, ..., plan=path) where the copy or the other process has its own"
        )

    def _trained(self) -> Trained:
        from lowtide.api.checkpoint import Trained  # importing torch.distributed.checkpoint takes a second

        program = self._maker.capturing.program
        in_shards = program is not None and program.ranks is not None and bool(program.ranks.shard)
        return Trained(self._caller.model, self._caller.optimizer, self._peers, in_shards)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, begun: bool = False) -> Any:
        """The caller's own loop, which has its memory and state to itself."""
        self.empty_arena()
        self.fetch_state()
        return run_eagerly(self._caller.model, self._maker.capturing.program, args, kwargs, begun=begun)

    def _run(self, prepared: Prepared, graphs: StepGraphs | None) -> tuple[Any, bool]:
        with self._peers.in_step():
            return prepared.variant.run(prepared.inputs, prepared.now, self._memory.arena, graphs)

    def _like_this(self, prepared: Prepared) -> RepeatedCalls | None:
        """How calls like this one run; None where each has to look everything up."""
        variant, specs, caller = prepared.variant, self._lookup.batch.specs, self._caller
        own = self._memory.arena is not None or self._memory.has_graphs
        if specs is None or own or self._peers.several or caller.optimizer is not None or caller.counters:
            return None
        return None if variant.inference is None else RepeatedCalls(variant.inference, variant.premises, specs, prepared.inputs)

    def _made_for(self, error: NewShapeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """The step for a batch of another shape, whatever the policy says."""
        return self._others.step_for(error, self._lookup.families[0], args, kwargs)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared | NewShapeError:
        """What runs for a call, captured now where there is none."""
        prepared = self._lookup.prepared(args, kwargs, always=True)
        assert prepared is not None, "it is captured in any case"
        return prepared


def _on_same(obstacle: str, memory: StepMemory, check: str, maker: StepMaker | RangeMaker, spec: BatchSpec, family: Family) -> Step:
    """A step for another shape, on the same objects and in the same memory. It knows no other step, so that none is kept by another."""
    return Step(maker, spec, family, obstacle, lambda *_: memory, "error", check=check)
