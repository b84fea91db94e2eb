"""Capturing a whole program: a training step, or an inference call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.capture import openings as openings  # what torch's registry can open is opened from here on
from lowtide.capture.batches import micro_batches, objects_in, refuse_batch_leaf, refuse_changed_batch
from lowtide.capture.care.conversions import conversions_in_place
from lowtide.capture.care.failures import no_tracebacks_logged, raised_in
from lowtide.capture.care.generators import untouched_randomness
from lowtide.capture.care.hooks import watched_hooks
from lowtide.capture.care.leaks import Watch
from lowtide.capture.care.memos import of_call
from lowtide.capture.care.reads import AttributeReads, following_reads
from lowtide.capture.care.surroundings import put_back_on_failure
from lowtide.capture.data import host
from lowtide.capture.data.facts import Reading
from lowtide.capture.data.reader import Reader
from lowtide.capture.draft import Draft
from lowtide.capture.fakes import FakeModel, ModuleTensors, fake_batch_leaf, fake_model, swapped
from lowtide.capture.formulas import as_eager
from lowtide.capture.losses import checked_loss, joined, share_of, with_loss
from lowtide.capture.optimizers.optimizer import Shadow, Update, refuse_idle, same_program
from lowtide.capture.optimizers.scalars import Fact, UndecidedError
from lowtide.capture.optimizers.scaler import ScalerTrace, scalers_refused, stop_if
from lowtide.capture.ranks.exchange import average_gradients, broadcast_buffers
from lowtide.capture.ranks.in_parts import in_parts
from lowtide.capture.ranks.ranks import Ranks
from lowtide.capture.ranks.shards import Shards, gather, own_shards, refuse_mixing, refuse_whole_state
from lowtide.capture.ranks.wrapped import passing_on
from lowtide.capture.recorder import Recorder
from lowtide.capture.returned import Number, NumbersLater, beside, is_result
from lowtide.capture.sizes.symbols import Symbols, nothing_twice
from lowtide.capture.sources import Sources
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.ir.graph import Graph, Kind, Value
from lowtide.ir.shapes.conditions import Condition
from lowtide.ir.slots import Slot
from lowtide.ir.varying import FIXED, Varying


@dataclass(frozen=True)
class Captured:
    """A program as a graph, and how it is tied to the caller's objects.

    graph.outputs are the tensors of the result, then what is assigned to slots.
    """

    graph: Graph
    slots: tuple[Slot, ...]  # of graph.inputs
    assigned: tuple[Slot, ...]  # of the last graph.outputs
    constants_assigned: tuple[tuple[int, Slot, Any], ...]  # flags and texts that the optimizer sets, and how many of `assigned` come before
    guards: tuple[Fact, ...]  # what must hold of the caller's numbers
    readings: tuple[Reading, ...]  # what must come out of the caller's data, in the program's order
    constants: tuple[torch.Tensor, ...]  # what "constant" slots refer to
    gradients: tuple[Value, ...]  # what eager PyTorch would leave in the parameters' `.grad`
    state_entries: int  # of the optimizer, all parameters together, that the program starts from
    read: frozenset[tuple[str, str]]  # the attributes of modules that the program has read: (path, name)
    result: Callable[[Sequence[Any]], Any]  # the tensors of the result -> what the program returns
    trained: tuple[str, ...] = ()  # the parameters that those gradients are of
    conditions: tuple[Condition, ...] = ()  # on the graph's dimensions, under which this is the program

    def to_assign(self, made: Sequence[Any]) -> tuple[list[Slot], list[Any]]:
        """Slots and what goes into them, given what the program made for `assigned`, in the order that eager's `state_dict` shows."""
        slots, items = list(self.assigned), list(made)
        for at, slot, item in reversed(self.constants_assigned):
            slots.insert(at, slot)
            items.insert(at, item)
        return slots, items

    def made_before(self, made: Sequence[Any]) -> tuple[list[Slot], list[Any]]:
        """The same of a program that ended before the optimizer stepped: what the model's own places get."""
        pairs = [(slot, item) for slot, item in zip(self.assigned, made, strict=True) if slot.table in ("buffer", "attribute")]
        return [slot for slot, _ in pairs], [item for _, item in pairs]


@dataclass(frozen=True)
class TrainingProgram:
    """What the user wrote: `loss(model, *batch)`, a backward pass, perhaps a hook on the gradients, the optimizer's step."""

    model: nn.Module
    loss: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    after_backward: Callable[[nn.Module], Any] | None = None
    accumulate: int | str = 1  # micro-batches into which the batch is cut; BATCHES where it consists of them
    scaler: torch.amp.GradScaler | None = None
    ranks: Ranks | None = None  # where several processes train it together
    wrapper: nn.Module | None = None  # around the model, where there is one: what the user's functions are given

    @property
    def given(self) -> nn.Module:
        """What the user's functions are given."""
        return self.wrapper or self.model

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, and gradients are looked at to unscale them."""
        return self.scaler is not None and self.scaler.is_enabled()


@dataclass(frozen=True)
class Given:
    """What a program is captured with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device  # on which what lies on the meta device is taken to be
    varying: Varying = FIXED  # which extents of the batch are dimensions

    def symbols(self) -> Symbols:
        """Those dimensions, with the example's numbers. Raises ShapeError where the example breaks a tie or is out of range."""
        if not self.varying:
            return Symbols()
        leaves = [leaf.value for leaf in tree.flatten((self.args, self.kwargs))[0]]
        shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        return Symbols(self.varying.dimensions, self.varying.point(shapes))


def capture_inference(model: nn.Module, given: Given) -> Captured:
    """Capture `model(*args, **kwargs)` without gradients. Raises CaptureError; the model is as before, whatever happens."""
    watch = Watch()
    with put_back_on_failure((), objects_in(given.args, given.kwargs)):
        captured = _captured_inference(watch, model, given)
        watch.refuse_survivors()
        return captured


def _captured_inference(watch: Watch, model: nn.Module, given: Given) -> Captured:
    with _tracing(watch, model, given, False) as trace, passing_on(None), torch.no_grad():
        fake_args, fake_kwargs = trace.declare_batch(given.args, given.kwargs)
        with trace.recording(), raised_in(f"{type(model).__name__}()"):
            result = model(*fake_args, **fake_kwargs)
        return trace.finish(trace.recorder, result, Update())


def capture_training(program: TrainingProgram, given: Given) -> tuple[Captured, ...]:
    """Capture a training step as the optimizer's state is now, and as it is from the next step on if that differs.

    The first steps of most optimizers make their state, the later ones update it: two programs, which share forward and backward.
    Raises CaptureError; model, optimizer and generators are as before, whatever happens.
    """
    watch = Watch()
    with put_back_on_failure((program.loss, program.after_backward), objects_in(given.args, given.kwargs)):
        captured = _captured_training(watch, program, given)
        watch.refuse_survivors()
        return captured


def _captured_training(watch: Watch, program: TrainingProgram, given: Given) -> tuple[Captured, ...]:
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise CaptureError("torch's anomaly detection is on, which looks at the values of all gradients: switch it off for the capture")
    with _tracing(watch, program.model, given, True, program.ranks) as trace, passing_on(program.wrapper), torch.enable_grad():
        fake_args, fake_kwargs = trace.declare_batch(given.args, given.kwargs)
        shadow = Shadow.of(program.optimizer, trace.fakes.names, trace.fakes.parameters, trace.recorder.draft)
        if program.scaler is not None and program.scales:
            trace.scaler = ScalerTrace.of(program.scaler, trace.recorder.draft, trace.mode, given.device)
        result = _forward_and_backward(trace, program, fake_args, fake_kwargs)
        if program.ranks is not None and program.ranks.shard:
            shadow = _sharded(trace, shadow, program.ranks)
        first, following = _optimizer_step(trace, shadow, result)
        if not any(slot.table in ("state", "group") for slot in (*first.assigned, *(slot for _, slot, _ in first.constants_assigned))):
            captured: tuple[Captured, ...] = (first,)
        else:
            later = _later_step(trace, following, result)
            if later is None:
                return (first,)
            captured = first, later
        refuse_idle(program.optimizer, [each.graph for each in captured])
        return captured


def _later_step(trace: _Trace, following: Shadow, result: Any) -> Captured | None:
    """The program of the steps after this one; None where it can be known only then, as the optimizer decides on the state it has made."""
    try:
        return _optimizer_step(trace, following, result)[0]
    except UndecidedError:
        return None


def _forward_and_backward(trace: _Trace, program: TrainingProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record everything up to the optimizer; gradients are left on the fake parameters, as eager would."""
    results, recorder = [], trace.recorder
    with trace.recording(), torch.autograd.set_multithreading_enabled(False):
        if program.ranks is not None and program.ranks.broadcasts_buffers:
            with torch.no_grad():
                broadcast_buffers(trace.fakes.buffers.values(), program.ranks)
        parts = list(micro_batches(args, kwargs, program.accumulate))
        for number, (micro_args, micro_kwargs) in enumerate(parts, 1):
            recorder.draft.kind = Kind.ACTIVATION
            with raised_in("loss(model, ...)"):
                result = program.loss(program.given, *micro_args, **micro_kwargs)
            loss = checked_loss(result)
            scaled = share_of(loss, program.accumulate)
            recorder.note_loss()
            if trace.in_parts is not None:
                trace.in_parts.begin_backward(completes=number == len(parts) and not program.scales)
            recorder.draft.kind = Kind.GRADIENT
            with raised_in("the backward pass"):
                (scaled if trace.scaler is None else trace.scaler.scaled(scaled)).backward()
            results.append(with_loss(result, scaled))
            if trace.in_parts is not None:
                trace.in_parts.end_backward()
        _refuse_sparse(trace.fakes)
        if program.ranks is not None:
            with torch.no_grad():
                _exchange(trace, program, program.ranks)
        found = None if trace.scaler is None else trace.scaler.unscale(_trained(program.optimizer, trace.fakes))
        returned = None
        if program.after_backward is not None:
            with torch.no_grad(), raised_in("after_backward(model)"), NumbersLater(recorder.draft):
                returned = program.after_backward(program.given)
                if trace.in_parts is not None:
                    trace.in_parts.wholes.read([leaf.value for leaf in tree.flatten(returned)[0]], recorder.draft, nullcontext())
        result = beside(joined(results, program.accumulate), returned)
        if trace.scaler is not None and found is not None:
            trace.scaler.update(found)
            recorder.stop = stop_if(found, trace.values_of(result), recorder.draft)
        return result


def _exchange(trace: _Trace, program: TrainingProgram, ranks: Ranks) -> None:
    """What happens to gradients before anybody looks at them: a scaler and all that is not in parts has whole means."""
    parameters = list(trace.fakes.parameters.values())
    if trace.in_parts is None or program.scales:
        average_gradients(parameters, ranks, trace.recorder.draft.age())
        return
    trace.in_parts.send_rest(parameters)
    if program.after_backward is not None:
        trace.in_parts.show(trace.recorder.draft)


def _optimizer_step(trace: _Trace, shadow: Shadow, result: Any) -> tuple[Captured, Shadow]:
    """Record the optimizer's step on a continuation of the recording; twice, to see that no number escapes."""
    tails = []
    for seed in (1, 2):
        tail = trace.recorder.fork()
        tail.draft.kind = Kind.TEMPORARY
        with trace.recording(tail), raised_in(f"{type(shadow.optimizer).__name__}.step()"):
            before = len(tail.draft.nodes)
            tails.append((tail, *shadow.step(tail.draft, seed)))
            if trace.sharded is not None:
                refuse_mixing(shadow.optimizer, tail.draft.nodes[before:])
                if trace.sharded[1].shard != "parameters":
                    with torch.no_grad():
                        gather(*trace.sharded)
    (tail, update, following), (other, _, _) = tails
    if not same_program(tail.draft, other.draft):
        name = type(shadow.optimizer).__name__
        raise CaptureError(
            f"{name} turns a hyper-parameter into a constant (through `math`, `torch.tensor` or the like), so later changes "
            "of it would go unseen: it cannot be captured"
        )
    return trace.finish(tail, result, update), following


def _sharded(trace: _Trace, shadow: Shadow, ranks: Ranks) -> Shadow:
    """The shadow of an optimizer that updates this rank's part of each parameter."""
    refuse_whole_state(shadow, ranks)
    fakes = list(shadow.fakes.values())
    with trace.recording(), torch.no_grad():
        shards = own_shards(fakes, ranks) if trace.in_parts is None else trace.in_parts.shards(fakes)
    trace.sharded = shards, ranks
    return replace(shadow, fakes={real: shards.get(fake, fake) for real, fake in shadow.fakes.items()})


def _trained(optimizer: torch.optim.Optimizer, fakes: FakeModel) -> Iterator[torch.Tensor]:
    """The fakes of the optimizer's parameters, in its order."""
    for group in optimizer.param_groups:
        yield from (fakes.parameters[parameter] for parameter in group["params"])


class _Trace:
    """One capture under way."""

    scaler: ScalerTrace | None = None
    sharded: tuple[Shards, Ranks] | None = None  # what of the parameters this rank updates, where it is not all

    def __init__(self, watch: Watch, model: nn.Module, given: Given, training: bool, ranks: Ranks | None = None) -> None:
        self.model, self.device, self.varying = model, given.device, given.varying
        self.symbols = given.symbols()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.symbols.env, static_shapes=True)
        self.sources = Sources()
        self.real: dict[Slot, torch.Tensor] = {}  # what the caller holds, where it can be read before the step
        held = self.real  # not by way of this trace: in a circle, its fakes would wait for the collector
        frozen = lambda slot: slot.table == "parameter" and not (training and held[slot].requires_grad)  # noqa: E731
        reader = Reader(held.__getitem__, frozen, self.symbols.number)
        self.recorder = Recorder(Draft(self.mode, self.sources, self.symbols, training), reader)
        self.watch = watch
        self.fakes = fake_model(model, self.mode, given.device)
        self.module_tensors = ModuleTensors(())  # of the model's tensors, once fakes are in them
        self.reads = AttributeReads()
        for table, kind, fakes in (
            ("parameter", Kind.PARAMETER, self.fakes.parameters),
            ("buffer", Kind.BUFFER, self.fakes.buffers),
            ("attribute", Kind.BUFFER, self.fakes.attributes),
        ):
            for real, fake in fakes.items():
                name = self.fakes.names[real]
                self.real[Slot(table, (name,))] = real
                self.recorder.draft.add_input(self.fakes.parts.get(real, fake), Slot(table, (name,)), kind, name)
        self.in_parts = in_parts(self.fakes, ranks)
        self.recorder.wholes = None if self.in_parts is None else self.in_parts.wholes

    @contextmanager
    def recording(self, recorder: Recorder | None = None) -> Iterator[None]:
        """What runs inside is recorded."""
        recorder = recorder or self.recorder
        with self.mode, recorder, as_eager(), host.reading(recorder):
            yield

    def declare_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch with fakes for its tensors; other leaves are taken as they are."""
        leaves, rebuild = tree.flatten((args, kwargs))
        fakes = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf.value, torch.Tensor):
                refuse_batch_leaf(leaf)
                extents = {dim: self.symbols.extent(name) for dim, name in self.varying.of_leaf(index).items()}
                fake = fake_batch_leaf(leaf, self.mode, self.device, extents)
                self.real[Slot("batch", (index,))] = leaf.value
                self.recorder.draft.add_input(fake, Slot("batch", (index,)), Kind.INPUT, f"batch_{index}")
                fakes.append(fake)
            else:
                fakes.append(leaf.value)
        built: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, fakes)
        self.batch = built, tree.flatten(built)[0]
        return built

    def forget_example(self) -> None:
        """Hold on to nothing of the caller's."""
        self.real.clear()
        self.recorder.reader.close()
        if self.in_parts is not None:
            self.in_parts.forget()

    def values_of(self, result: Any) -> list[Value]:
        """The values that a call returns or puts into modules."""
        items = [leaf.value for leaf in tree.flatten(result)[0] if is_result(leaf.value)]
        return [_value_of(item, self.recorder.draft) for item in (*items, *(tensor for _, tensor in self.module_tensors.rebound()))]

    def finish(self, recorder: Recorder, result: Any, update: Update) -> Captured:
        """The graph of what was recorded."""
        leaves, rebuild = tree.flatten(result)
        at = [index for index, leaf in enumerate(leaves) if is_result(leaf.value)]
        with self.recording(recorder):
            outputs = [_value_of(leaves[index].value, recorder.draft) for index in at]
            gradients = tuple(recorder.draft.value(fake.grad) for fake in self.fakes.parameters.values() if fake.grad is not None)
            rebound = [(slot, recorder.draft.value(tensor)) for slot, tensor in self.module_tensors.rebound()]
        assigned = (*rebound, *update.assigned)
        graph, slots = recorder.graph([*outputs, *(value for _, value in assigned)])
        graph = replace(graph, dimensions=self.symbols.dimensions)

        def put(tensors: Sequence[Any]) -> Any:
            filled: list[Any] = [leaf.value for leaf in leaves]
            for index, tensor in zip(at, tensors, strict=True):
                filled[index] = tensor
            return tree.unflatten(rebuild, filled)

        for index in at:
            leaves[index] = tree.Leaf(leaves[index].where, None)  # no fake tensor outlives the capture
        refuse_changed_batch(*self.batch)
        self.watch.note(recorder.draft)
        return Captured(
            graph,
            slots,
            tuple(slot for slot, _ in assigned),
            tuple((len(rebound) + at, slot, item) for at, slot, item in update.constants),
            (*update.guards, *(self.scaler.guards() if self.scaler is not None else ())),
            tuple(recorder.reader.readings.values()),
            tuple(recorder.draft.constants),
            gradients,
            update.state_entries,
            self.reads.pairs(self.model),
            put,
            tuple(self.fakes.names[real] for real, fake in self.fakes.parameters.items() if fake.grad is not None),
            self.symbols.conditions(),
        )


def _value_of(item: Any, draft: Draft) -> Value:
    return item.value if isinstance(item, Number) else draft.value(item)


@contextmanager
def _tracing(watch: Watch, model: nn.Module, given: Given, training: bool, ranks: Ranks | None = None) -> Iterator[_Trace]:
    with raised_in("the capture"), no_tracebacks_logged(), untouched_randomness(), scalers_refused():
        trace = _Trace(watch, model, given, training, ranks)
        following = None if training or trace.symbols.env is not None else partial(of_call, trace.recorder.draft)
        try:
            with (
                nothing_twice() if trace.symbols.env is not None else nullcontext(),
                following_reads() as trace.reads,
                swapped(model, trace.fakes, trace.reads, following) as trace.module_tensors,
                trace.sources.following(model),
                conversions_in_place(),
                watched_hooks(model, trace.fakes, trace.recorder.draft, trace.module_tensors),
            ):
                yield trace
        finally:
            trace.forget_example()


def _refuse_sparse(fakes: FakeModel) -> None:
    for real, fake in fakes.parameters.items():
        if fake.grad is not None and fake.grad.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {fakes.names[real]} is sparse ({fake.grad.layout}), which cannot be captured: use sparse=False"
            )
