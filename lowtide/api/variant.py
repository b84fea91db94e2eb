"""One program of a step, made ready to run on what the caller holds.

It also tells the caller what a step that failed has changed. Until the loss exists a step changes only what eager PyTorch would have
changed by then, so a failure there is passed on as it is. After that, gradients are used as soon as they exist: when a later operator
fails, some parameters have been updated and others have not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from lowtide.api.frozen import Inference, Network
from lowtide.capture.data.facts import Facts
from lowtide.capture.trace import CapturedStep
from lowtide.cost.memory import home_bytes
from lowtide.cpu.executable import NetworkCalls
from lowtide.cpu.networks import runners
from lowtide.cuda.forecast import expected
from lowtide.errors import StepError
from lowtide.ir.graph import Kind, Node, Slot, Storage
from lowtide.ir.operators.nodes import is_collective, is_transfer
from lowtide.kernels.data_shapes import CHECK
from lowtide.lower.numbers import NumberTensors
from lowtide.lower.python import lower, positions
from lowtide.lower.statements import swaps
from lowtide.plan.contents import Decision
from lowtide.plan.plan import Plan
from lowtide.regions.compilation import compiled_runners
from lowtide.runtime.arena.arena import Arena
from lowtide.runtime.caller import InputCheck, View
from lowtide.runtime.copies import host_memory
from lowtide.runtime.graphs.capturable import Capturable, not_replayed, text_of
from lowtide.runtime.graphs.steps import GraphedCall, NumberCopies, StepGraphs
from lowtide.runtime.premises import Premises, SettingsCheck
from lowtide.runtime.program import Program
from lowtide.runtime.ranks import UNANSWERED

_MOST_COPIED_BYTES = 2**20  # in each call, for a check that may never fail


@dataclass(frozen=True)
class Harm:
    """What a step has written of what it trains, before the node that failed or was interrupted."""

    updated: int  # parameters
    at_most: int  # with those of the node itself: an interrupt comes before it has run, or after
    trained: int  # parameters that a whole step updates
    touched: bool  # whether any parameter or optimizer state may have been written
    node: Node

    @classmethod
    def of(cls, plan: Decision, position: int, *, interrupted: bool) -> Harm:
        """Of a step whose node at `position` of the order has failed, or was `interrupted`."""
        nodes = [plan.graph.nodes[index] for index in plan.order]
        done, begun = _written(nodes[:position]), _written(nodes[: position + interrupted])
        whole = {storage for storage in _written(nodes) if storage.kind is Kind.PARAMETER}
        return cls(len(whole & done), len(whole & begun), len(whole), bool(begun), nodes[position])

    def __str__(self) -> str:
        source = self.node.source
        where = f" ({source.file}:{source.line})" if source is not None else ""
        count = f"{self.updated} or {self.at_most}" if self.at_most > self.updated else self.updated
        return (
            f"the step ended in {self.node.op}{where}, after its loss: {count} of {self.trained} parameters were updated, and the "
            "optimizer's state of some; go on from a checkpoint"
        )


def tell_harm(error: BaseException, plan: Decision, program: Program) -> None:
    """Raise StepError from `error` where the run that it ended has begun to update; an interrupt is told by a note instead.

    Returns where nothing was updated: then the error tells all.
    """
    line = program.line_of(error)
    position = positions(plan)[line - 1] if line else -1
    if not 0 <= position < len(plan.order):
        return
    harm = Harm.of(plan, position, interrupted=not isinstance(error, Exception))
    if not harm.touched:
        if is_collective(harm.node) and isinstance(error, RuntimeError):
            raise StepError(f"{UNANSWERED}. No parameter was updated in this step. What failed: {error}") from error
        return
    if isinstance(error, Exception):
        raise StepError(f"{harm}. What failed: {type(error).__name__}: {error}") from error
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(str(harm))


def _written(nodes: list[Node]) -> set[Storage]:
    """The parameters and optimizer state that these nodes write; a copy to the host and back is no change."""
    writes = (before.storage for node in nodes if not is_transfer(node) for before, _ in node.writes)
    return {storage for storage in writes if storage.kind in (Kind.PARAMETER, Kind.STATE)}


@dataclass(frozen=True)
class Variant:
    """One program for one state of the caller's: optimizers make their state in the first step and update it in later ones."""

    captured: CapturedStep
    decision: Decision  # that the program follows from
    planned: Callable[[], Plan]  # made when it is asked for: a shape's own takes longer than to run the step
    program: Program
    premises: Premises  # the same for all that were captured together
    check: InputCheck
    settings: SettingsCheck
    shape: tuple[int, ...] | None = None  # of its batches, where the program is one for several
    networks: Mapping[str, NetworkCalls] = field(default_factory=dict, compare=False)  # that run its regions, by first result

    @classmethod
    def of(
        cls,
        captured: CapturedStep,
        decision: Decision,
        premises: Premises,
        gradients: bool,
        planned: Callable[[], Plan],
        host_bytes: int | None = None,
    ) -> Variant:
        """The program that does what was decided, as `planned` tells it, with so many pinned bytes of the host at most."""
        inputs = captured.graph.inputs
        devices = tuple(sorted({torch.device(value.storage.device).type for value in inputs}))
        host = host_memory(max((value.storage.device for value in inputs), default="cpu")) if swaps(decision) else None
        if host_bytes is not None:
            host_bytes -= home_bytes(captured.graph)  # which is there whatever else is
        check = InputCheck.of(captured.graph, captured.slots)
        networks = runners(decision.graph)
        regions: dict[str, Callable[..., Sequence[Any]]] = {**networks, **compiled_runners(decision.graph)}
        program = Program(lower(decision), gradients, devices, host, regions, host_bytes, partial(positions, decision))
        settings = SettingsCheck.of(captured.graph, captured.slots)
        return cls(captured, decision, planned, program, premises, check, settings, networks=networks)

    @cached_property
    def plan(self) -> Plan:
        return self.planned()

    @property
    def leaves_only_its_result(self) -> bool:
        """Whether nothing but tensors decides what it does, and it changes nothing of the caller's."""
        captured, program = self.captured, self.program
        bound = (
            captured.assigned
            or captured.constants_assigned
            or captured.detached
            or captured.alone
            or captured.guards
            or captured.readings
            or captured.outputs.actions
            or captured.outputs.sums
            or captured.flags.memos
        )
        if bound or self.shape is not None or program.gradients or program.host:
            return False
        return not any(node.writes for node in self.decision.graph.nodes)

    @cached_property
    def not_replayed(self) -> str:
        """What replays of a caller's CUDA graph of the program would leave out, or do to memory of others; "" where nothing."""
        return not_replayed(self.decision.graph)

    @cached_property
    def capturable(self) -> Capturable:
        """Whether it can be a CUDA graph by itself, on the device where most of what it reads lies."""
        capturable = Capturable.of(self.decision.graph, self.captured.slots, self._device)
        if capturable.refusal or self.program.host is None or self.program.host_bytes is None:
            return capturable
        return replace(
            capturable, refusal='it keeps to a limit of the host\'s memory, of which a graph would pin its part again: leave "host" out'
        )

    @property
    def _device(self) -> str:
        return max((value.storage.device for value in self.decision.graph.inputs), default="cpu")

    @cached_property
    def _number_tensors(self) -> NumberTensors | None:
        return NumberTensors.of(self.decision, self._device)

    @cached_property
    def number_copies(self) -> NumberCopies | None:
        """The program that reads numbers from tensors where these keep their bits; None where no number is as well a tensor."""
        tensors = self._number_tensors
        if tensors is None:
            return None
        program = replace(self.program, source=lower(tensors.decision), positions=partial(positions, tensors.decision))
        arithmetic = Program(lower(tensors.arithmetic), False, ())
        return NumberCopies(program, arithmetic, tensors.numbers, tuple(getattr(torch, each) for each in tensors.dtypes), tensors.free)

    @property
    def is_generated(self) -> bool:
        """Whether generated kernels run its regions, all of them."""
        return bool(self.networks) and len(self.networks) == len(self.program.regions)

    @cached_property
    def written_before_checks(self) -> tuple[int, ...] | None:
        """Which inputs a run writes before the last check of the program's own; None where it checks nothing."""
        graph = self.captured.graph
        last = max((at for at, node in enumerate(graph.nodes) if node.op == CHECK), default=None)
        written = {before.storage for node in graph.nodes[:last] for before, _ in node.writes}
        return None if last is None else tuple(at for at, value in enumerate(graph.inputs) if value.storage in written)

    @cached_property
    def inference(self) -> Inference | None:
        """How it is called again where only the batch is another; None where it leaves more than its result."""
        if self.written_before_checks is not None or not self.leaves_only_its_result:
            return None
        return self.inference_by({name: network.again for name, network in self.networks.items()} if self.is_generated else {})

    def inference_by(self, networks: Mapping[str, Network]) -> Inference:
        """How it is called where only the batch is another, its regions run by these networks."""
        return Inference.of(self.decision, self.program, self.captured.slots, self.captured.result, networks)

    def fits(self, now: View, facts: Facts) -> bool:
        """Whether this is the program for what the caller holds now. `facts` are of the same moment."""
        return self.premises.holds() and self.fits_settings(now) and facts.hold((*self.captured.flags.to_read, *self.captured.readings))

    def fits_settings(self, now: View) -> bool:
        """Whether this is the program for the caller's settings, whatever the data are; `premises` tells of the rest."""
        if self.captured.state_entries != now.caller.state_entries or not self.captured.outputs.holds() or not self.captured.flags.holds():
            return False

        def read(slot: Slot) -> Any:
            return now.read(slot, self.captured.constants)

        try:
            if not self.settings.hold(read):
                return False
            return all(guard.holds(read) for guard in self.captured.guards)
        except StepError:
            return False

    def inputs(self, now: View) -> list[Any]:
        """What the program reads. Raises ChangedError for what looks otherwise now, BatchError for a batch that shares memory with it."""
        inputs = [now.read(slot, self.captured.constants) for slot in self.captured.slots]
        self.check(inputs)
        return inputs

    def undoing(self, inputs: Sequence[Any]) -> Callable[[], None] | None:
        """What puts back all that a run changes until a check of the program's own fails, so that the caller's own loop can run instead.

        None for a program that checks nothing, or writes much. The optimizer has written nothing by then (`capture/care/harm.py`).
        """
        tensors = [inputs[at] for at in self.written_before_checks or ()]
        if self.written_before_checks is None or sum(each.nbytes for each in tensors) > _MOST_COPIED_BYTES:
            return None
        generators = [item for item in self.captured.constants if isinstance(item, torch.Generator)]
        generators += [torch.default_generator, *(torch.cuda.default_generators if "cuda" in self._device else ())]
        before = [(each.copy_, each.clone()) for each in tensors] + [(each.set_state, each.get_state()) for each in generators]

        def undo() -> None:
            with torch.no_grad():
                for put, old in before:
                    put(old)
            self.captured.outputs.draws.go_back()

        return undo

    def run(self, inputs: Sequence[Any], now: View, arena: Arena | None = None, graphs: StepGraphs | None = None) -> tuple[Any, bool]:
        """Run once on what the caller holds; the result as the captured program returns it, and whether the optimizer has stepped."""
        if "cuda" in self.program.autocast_devices and torch.cuda.is_current_stream_capturing() and self.not_replayed:
            raise StepError(f"a CUDA graph is captured, and its replays would not do what the step does: {self.not_replayed}")
        self.captured.outputs.draws.begin()
        now.set_apart(self.captured.alone, self.captured.constants)
        try:
            if graphs is not None:
                outputs = graphs.run(self._call(inputs, arena))
            else:
                outputs = self.program(inputs) if arena is None else self._served(arena, lambda: self.program(inputs))
        except BaseException as error:  # an interrupt, too, leaves parameters updated by half: it goes on with a note of that
            if not hasattr(error, CHECK):  # which comes before all of the optimizer's
                tell_harm(error, self.decision, self.program)
            raise
        stepped = isinstance(outputs, list)  # a program that ends before the optimizer returns a tuple
        results = len(outputs) - len(self.captured.assigned)
        if self.captured.detached:
            outputs = list(outputs)
        for at in self.captured.detached:
            outputs[at] = outputs[at].detach()
        slots, items = self.captured.to_assign(outputs[results:]) if stepped else self.captured.made_before(outputs[results:])
        now.assign(slots, items, self.captured.constants)
        before = self.captured.outputs.before()
        containers = dict[int, Any]()
        result = self.captured.result(outputs[:results], before, containers)
        self.captured.outputs.put(outputs[:results], before, containers)
        self.captured.flags.put()
        self.premises.note_put()
        return result, stepped or self.captured.early is not None

    def _served(self, arena: Arena, run: Callable[[], list[Any]]) -> list[Any]:
        return arena.run(self.program, run, self.shape, lambda: expected(self.plan))

    def _call(self, inputs: Sequence[Any], arena: Arena | None) -> GraphedCall:
        run = (lambda call: call()) if arena is None else partial(self._served, arena)
        return GraphedCall((self.program, self.shape), self.program, self._prepared, inputs, run, arena, self._makes_bytes, self._place)

    def _prepared(self) -> tuple[Capturable, NumberCopies | None]:
        return self.capturable, None if self.capturable.refusal else self.number_copies

    def _makes_bytes(self) -> int:
        return self.plan.peak_bytes - self.plan.resident_bytes

    def _place(self, error: BaseException) -> str:
        """The operator of a failed capture, and where it stands in the caller's program; "" for none."""
        programs: list[tuple[Program, Decision]] = [(self.program, self.decision)]
        if self._number_tensors is not None and self.number_copies is not None:
            programs.append((self.number_copies.program, self._number_tensors.decision))
        for program, decision in programs:
            line = program.line_of(error)
            at = positions(decision)[line - 1] if line else -1
            if 0 <= at < len(decision.order):
                return text_of(decision.graph.nodes[decision.order[at]])
        return ""
