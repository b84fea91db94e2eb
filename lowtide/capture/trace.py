"""One capture under way: what it is given, what it records into, and the graph that it ends in.

`module.to(...)` while a capture lasts: torch would swap the fakes in the module's places, which it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.base.places import NOTHING, Beside, Position
from lowtide.base.skeleton import built
from lowtide.capture.batches import refuse_batch_leaf, refuse_changed_batch
from lowtide.capture.care.failures import no_tracebacks_logged, raised_in
from lowtide.capture.care.follower import containers_beside, containers_of, put_beside
from lowtide.capture.care.generators import untouched_randomness
from lowtide.capture.care.hooks import hooks_on_fakes, no_gradients_taken, refuse_gradients_of, warn_of_gradients_of
from lowtide.capture.care.leaks import LeakWatch
from lowtide.capture.care.reads import AttributeReads, following_reads
from lowtide.capture.care.snapshots import ModuleSnapshot, of_call
from lowtide.capture.care.turns import module_views, replaced, unasked
from lowtide.capture.care.writes import outside_unchanged
from lowtide.capture.control import compiling_nothing
from lowtide.capture.data import host
from lowtide.capture.data.facts import Reader, Reading
from lowtide.capture.draft import Draft
from lowtide.capture.effects.actions import NOTHING_LEFT, StepOutputs
from lowtide.capture.effects.calls import NumberOperands
from lowtide.capture.effects.data import Data, following_data
from lowtide.capture.effects.flags import FlagRecorder
from lowtide.capture.effects.outputs import OutputRecorder
from lowtide.capture.effects.stand_ins import is_stand_in, original
from lowtide.capture.effects.sums import Term, recipe, results_in
from lowtide.capture.fakes import OwnParameters, fake_batch_leaf, fake_model, swapped
from lowtide.capture.formulas import as_eager
from lowtide.capture.lists import fakes_in_lists
from lowtide.capture.optimizers.optimizer import Early, Update
from lowtide.capture.optimizers.scalars import Fact
from lowtide.capture.optimizers.wrappers import ScalerTrace, scalers_refused
from lowtide.capture.ranks.data_parallel import Ranks
from lowtide.capture.ranks.shards import Shards, in_parts
from lowtide.capture.recorder import Recorder
from lowtide.capture.results import Number, is_result
from lowtide.capture.sizes.numbers import called_with_sizes
from lowtide.capture.sizes.symbols import Symbols, is_size, nothing_twice
from lowtide.capture.sources import Sources, users_line
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.ir.graph import NOTHING_HELD, Graph, HeldStorages, Kind, Slot, Value
from lowtide.ir.shapes.conditions import Condition
from lowtide.ir.shapes.dimension import FIXED, Varying


def _apply(module: Any, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Conversions that change nothing (`.to(self.dtype)` in a forward) do nothing; others raise CaptureError."""
    for child in module.children() if recurse else ():
        child._apply(convert)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        with torch.no_grad():
            changes = tensor is not None and convert(tensor) is not tensor
        if changes:
            raise CaptureError(
                f"{name} of a {type(module).__name__} is converted while the program runs, at {users_line()}: a captured step leaves "
                "dtype and device of parameters as they are; convert the model before it is optimized"
            )
    return module


@dataclass(frozen=True)
class CapturedStep:
    """A program as a graph, and how it is tied to the caller's objects.

    graph.outputs are the tensors of the result, then what is assigned to slots.
    """

    graph: Graph
    slots: tuple[Slot, ...]  # of graph.inputs
    assigned: tuple[Slot, ...]  # of the last graph.outputs
    constants_assigned: tuple[tuple[int, Slot, Any], ...]  # flags, texts and skeletons; and how many of `assigned` come before
    guards: tuple[Fact, ...]  # what must hold of the caller's numbers
    readings: tuple[Reading, ...]  # what must come out of the caller's data, in the program's order
    constants: tuple[Any, ...]  # what "constant" slots refer to: tensors, generators, or where each step puts another tensor
    gradients: tuple[Value, ...]  # what eager PyTorch would leave in the parameters' `.grad`
    state_entries: int  # of the optimizer, all parameters together, that the program starts from
    read: frozenset[tuple[str, str]]  # the attributes of modules that the program has read: (path, name)
    result: Callable[..., Any]  # the tensors of the result, `outputs.before`, containers by number -> what the program returns
    computed: tuple[str, ...] = ()  # the arithmetic on numbers in it
    detached: tuple[int, ...] = ()  # outputs that are other tensors on memory of the caller's than the caller has
    alone: tuple[Slot, ...] = ()  # tensors whose memory the step writes where eager PyTorch takes other memory
    trained: tuple[str, ...] = ()  # the parameters that those gradients are of
    eager: HeldStorages = NOTHING_HELD  # but for those gradients
    conditions: tuple[Condition, ...] = ()  # on the graph's dimensions, under which this is the program
    beside: Beside = NOTHING  # what the program has read beside the model
    outputs: StepOutputs = NOTHING_LEFT  # what each step puts into places of the caller's; what leaves are the last tensors of the result
    flags: FlagRecorder = field(default_factory=FlagRecorder)  # what it puts in the place of numbers and texts that it has read, once
    counted: str = ""  # what it has put into containers, which a captured step would not; "" where that is nothing
    numbers: tuple[Position, ...] = ()  # places of numbers that it could have as inputs
    early: tuple[Early, ...] | None = None  # what is assigned where the optimizer ends its step early; None where it does not

    @property
    def held_storages(self) -> HeldStorages:
        """What eager holds for longer than the graph needs it."""
        return replace(self.eager, values=self.gradients)

    def with_flags(self, flags: FlagRecorder, model: nn.Module) -> CapturedStep:
        """The program after a first step, which runs it as well: what that puts somewhere is no reason to capture anew."""
        holders = {(id(memo.place.holder), memo.place.name) for memo in flags.memos}
        read = frozenset((path, name) for path, name in self.read if (id(model.get_submodule(path)), name) not in holders)
        places = tuple(place for place in self.beside.places if (id(place.holder), place.name) not in holders)
        return replace(self, flags=flags, read=read, beside=replace(self.beside, places=places))

    def to_assign(self, results: Sequence[Any]) -> tuple[list[Slot], list[Any]]:
        """Slots and what goes into them, given what the program made for `assigned`, in the order that eager's `state_dict` shows."""
        slots, items = list(self.assigned), list(results)
        for at, slot, item in reversed(self.constants_assigned):
            slots.insert(at, slot)
            items.insert(at, item)
        if not self.constants_assigned:
            return slots, items
        left = iter(zip(slots, items, strict=True))
        whole = [(slot, built(chain([item], (each for _, each in left)))) for slot, item in left]
        return [slot for slot, _ in whole], [item for _, item in whole]

    def made_before(self, results: Sequence[Any]) -> tuple[list[Slot], list[Any]]:
        """The same of a program that ended before the optimizer stepped, or early in its step: what the model's own places get by then."""
        pairs = zip(*self.to_assign(results), strict=True)
        kept = [(slot, item) for slot, item in pairs if slot.table in ("buffer", "attribute", "data", "requires_grad")]
        left = ((slot, item if at is None else results[at]) for slot, at, item in self.early or ())
        kept += [(slot, built(chain([item], (each for _, each in left)))) for slot, item in left]
        return [slot for slot, _ in kept], [item for _, item in kept]


@dataclass(frozen=True)
class Given:
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


class Trace:
    scaler: ScalerTrace | None = None
    sharded: tuple[Shards, Ranks] | None = None  # what of the parameters this rank updates, where it is not all

    def __init__(
        self, watch: LeakWatch, model: nn.Module, given: Given, training: bool, ranks: Ranks | None, leaving: OutputRecorder | None
    ) -> None:
        self.leaving = leaving
        self.model, self.device, self.varying = model, given.device, given.varying
        self.symbols = given.symbols()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.symbols.env, static_shapes=True)
        self.sources = Sources()
        self.real: dict[Slot, torch.Tensor] = {}  # what the caller holds, where it can be read before the step
        trusted = self.real  # not by way of this trace: in a circle, its fakes would wait for the collector
        frozen = lambda slot: slot.table == "parameter" and not (training and trusted[slot].requires_grad)  # noqa: E731
        reader = Reader(trusted.__getitem__, frozen, self.symbols.number)
        self.recorder = Recorder(Draft(self.mode, self.sources, self.symbols, training), reader)
        self.watch = watch
        self.fakes = fake_model(model, self.mode, given.device)
        self.own = OwnParameters(self.fakes)
        self.modules: list[ModuleSnapshot] = []  # as the program finds them
        self._containers = containers_of(model)
        self.reads = AttributeReads()
        slots: dict[torch.Tensor, Slot] = {}
        for table, fakes in (("parameter", self.fakes.parameters), ("buffer", self.fakes.buffers), ("attribute", self.fakes.attributes)):
            kind = Kind.PARAMETER if table == "parameter" else Kind.BUFFER
            for real, fake in fakes.items():
                name = self.fakes.names[real]
                slots[real] = Slot(table, (name,))
                self.real[slots[real]] = real
                self.recorder.draft.add_input(self.fakes.parts.get(real, fake), slots[real], kind, name)
        for real, (fake, slot) in self.fakes.within.items():
            slots[real], self.real[slot] = slot, real
            kind = Kind.PARAMETER if slot.table == "parameter" else Kind.BUFFER
            self.recorder.draft.add_input(fake, slot, kind, self.fakes.names[real])
        if leaving is not None:
            leaving.own = frozenset(map(id, model.modules()))
            self.recorder.numbers = leaving.numbers
        self.data = self.recorder.data = Data(self.recorder.draft, self.fakes.all, slots)
        with self.own.are_the_same():  # they are found by what they are then
            self.in_parts = in_parts(self.fakes, ranks)
        self.recorder.wholes = None if self.in_parts is None else self.in_parts.wholes

    @contextmanager
    def recording(self, recorder: Recorder | None = None) -> Iterator[None]:
        recorder = recorder or self.recorder
        recorder.draft.ends.nodes = recorder.draft.nodes
        with compiling_nothing(), self.mode, recorder, as_eager(), host.reading(recorder), following_data(recorder.data), unasked(self.own):
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
                self.data.declare(fake, leaf.value, Slot("batch", (index,)))
                fakes.append(fake)
            else:
                fakes.append(leaf.value)
        built: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, fakes)
        self.batch = built, tree.flatten(built)[0]
        return built

    def forget_example(self) -> None:
        self.real.clear()
        self.recorder.reader.close()
        self.data.forget()
        if self.in_parts is not None:
            self.in_parts.forget()

    def handed_on(self) -> tree.Own:
        """Which containers are the caller's."""
        containers = self._containers | containers_beside()

        def own_of(item: Any) -> Callable[[], Any] | None:
            if is_stand_in(item):
                return None if item.kept.is_new else partial(getattr, item.kept, "now")
            return (lambda: item) if id(item) in containers else None

        return own_of

    def values_of(self, result: Any) -> list[Value]:
        """The values that a call returns or puts into modules."""
        sharing = tree.Sharing(self.handed_on())
        items = [item for leaf in tree.flatten(result, sharing)[0] for item in results_in(leaf.value)]
        rebound = (tensor for _, tensor in self.rebound())
        return [_value_of(item, self.recorder.draft) for item in (*items, *self._leaving(sharing), *rebound)]

    def leaving_followed(self) -> AbstractContextManager[None]:
        """What the program does inside to containers of the caller's is noted, if that is asked for."""
        leaving, recorder = self.leaving, self.recorder
        return nullcontext() if leaving is None else leaving.followed(lambda: NumberOperands(recorder, leaving.numbers))

    def close_leaving(self, result: Any) -> None:
        """The program has run; this is what it returns."""
        if self.leaving is not None:
            self.leaving.close(result)

    def _leaving(self, sharing: tree.Sharing) -> list[Any]:
        return [] if self.leaving is None else self.leaving.values(sharing)

    def rebound(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Where the program has put another tensor, or other data into one, and that."""
        for each in self.modules:
            yield from each.rebound()
        yield from self.data.bound()

    def _detached(self, items: Sequence[Any], draft: Draft) -> tuple[int, ...]:
        """Which of what leaves lies on memory of the caller's and is no tensor of the caller's: `weight.detach()`, a part of a buffer."""
        own = {id(fake) for fake in (*self.fakes.all.values(), *(leaf.value for leaf in self.batch[1]))}
        fakes = ((at, item) for at, item in enumerate(items) if isinstance(item, FakeTensor) and id(item) not in own)
        return tuple(at for at, item in fakes if draft.owns(item))

    def _flags(self) -> list[tuple[Slot, bool]]:
        """The parameters that the program freezes or thaws, which each step does. Raises CaptureError where others would get gradients."""
        if self.recorder.draft.trains:
            given = ((f"batch{leaf.where}", leaf.value, False) for leaf in self.batch[1] if isinstance(leaf.value, torch.Tensor))
            looked_at, others = frozenset(self.own.looked_at), {**self.fakes.buffers, **self.fakes.attributes}.items()
            kept = [(self.fakes.names[real], fake, real.requires_grad) for real, fake in others]
            refuse_gradients_of(each for each in kept if each[2] or id(each[1]) in looked_at)
            warn_of_gradients_of((*given, *kept))
        parameters = self.fakes.parameters.items()
        changed = [(self.fakes.names[real], fake) for real, fake in parameters if fake.requires_grad != real.requires_grad]
        return [(Slot("requires_grad", ("parameter", name)), fake.requires_grad) for name, fake in changed]

    def _outputs(self, puts: Iterable[tuple[Position, Any]], sharing: tree.Sharing) -> StepOutputs:
        """What each step puts into places: what it has computed, and all else."""
        if self.leaving is None:
            return NOTHING_LEFT.with_places(puts)
        followed = self.leaving.followed_places
        others = ((place, now) for place, now in puts if (id(place.holder), place.name) not in followed)
        return self.leaving.left(sharing).with_places((place, original(now)) for place, now in others)

    def finish(self, recorder: Recorder, result: Any, update: Update) -> CapturedStep:
        leaves, rebuild = tree.flatten(result, sharing := tree.Sharing(self.handed_on()))
        at = [index for index, leaf in enumerate(leaves) if is_result(leaf.value)]
        results = [item for index in at for item in results_in(leaves[index].value)]
        results, moved = [*results, *self._leaving(sharing.copy())], list(self.rebound())
        recipes = [recipe(leaves[index].value) for index in at]
        computed = tuple(leaves[index].value.text() for index in at if isinstance(leaves[index].value, Term))
        with self.recording(recorder):
            outputs = [_value_of(item, recorder.draft) for item in results]
            gradients = tuple(recorder.draft.value(fake.grad) for fake in self.fakes.parameters.values() if fake.grad is not None)
            rebound = [(slot, recorder.draft.value(tensor)) for slot, tensor in moved]
            detached = self._detached([*results, *(tensor for _, tensor in moved)], recorder.draft)
        flags = self._flags()
        assigned = (*rebound, *update.assigned)
        early = update.early
        if early is not None and recorder.stop is not None:
            recorder.end_early(recorder.stop, [*outputs, *(value for _, value in rebound)])
            early = tuple((slot, at if at is None else at + len(rebound), item) for slot, at, item in early)
        graph, slots = recorder.graph([*outputs, *(value for _, value in assigned)])
        graph = replace(graph, dimensions=self.symbols.dimensions)

        def put(tensors: Sequence[Any], before: Sequence[Any] = (), containers: dict[int, Any] | None = None) -> Any:
            filled: list[Any] = [leaf.value for leaf in leaves]
            left = iter(tensors)  # behind them are those that leave
            for index, fill in zip(at, recipes, strict=True):
                filled[index] = fill(left, before)
            return tree.unflatten(rebuild, filled, {} if containers is None else containers)

        for index in at:
            leaves[index] = tree.Leaf(leaves[index].where, None)  # no fake tensor outlives the capture
        alone = rebuild is next and isinstance(result, torch.Tensor)  # as most programs return one
        refuse_changed_batch(*self.batch)
        reads = self.reads.pairs(self.model)
        self.watch.note(recorder.draft)
        return CapturedStep(
            graph,
            slots,
            tuple(slot for slot, _ in assigned),
            (*((0, slot, flag) for slot, flag in flags), *((len(rebound) + at, slot, item) for at, slot, item in update.constants)),
            (*update.guards, *(self.scaler.guards() if self.scaler is not None else ())),
            tuple(recorder.reader.readings.values()),
            tuple(recorder.draft.constants),
            gradients,
            update.state_entries,
            reads if self.leaving is None else self.leaving.without(reads, self.model),
            (lambda tensors, *_: tensors[0]) if alone else put,
            computed,
            detached,
            self.data.alone,
            tuple(self.fakes.names[real] for real, fake in self.fakes.parameters.items() if fake.grad is not None),
            recorder.held_storages(graph),
            self.symbols.conditions(),
            outputs=self._outputs([*self.reads.puts(self.model), *put_beside()], sharing),
            flags=FlagRecorder(tuple(self.reads.memos(self.model))),
            early=early,
        )


@contextmanager
def tracing(
    watch: LeakWatch, model: nn.Module, given: Given, training: bool, ranks: Ranks | None = None, leaving: OutputRecorder | None = None
) -> Iterator[Trace]:
    """A capture: inside, this thread finds fakes for the tensors of the model.

    Modes of torch's dispatch that the caller has entered (a `FlopCounterMode`) do not see it: what they see is the program as it runs.
    """
    with (
        raised_in("the capture"),
        no_tracebacks_logged(),
        untouched_randomness(watch.states),
        outside_unchanged(),
        no_gradients_taken(),
        _disable_current_modes(),
    ):
        trace = Trace(watch, model, given, training, ranks, leaving)
        following = None if training or trace.symbols.env is not None else partial(of_call, trace.recorder.draft)
        try:
            with (
                nothing_twice() if trace.symbols.env is not None else nullcontext(),
                called_with_sizes() if trace.symbols.env is not None else nullcontext(),
                scalers_refused(),
                fakes_in_lists(),
                module_views() as views,
                following_reads() as trace.reads,
                swapped(model, trace.fakes, views, trace.reads, following) as trace.modules,
                hooks_on_fakes(trace.fakes),
                trace.sources.following(model),  # around the hooks of modules
                replaced(nn.Module, "_apply", lambda _: _apply),
                trace.own.are_the_same(),
            ):
                yield trace
        finally:
            trace.forget_example()
            trace.recorder.refusals.clear()  # whose tracebacks hold the recorder


def _value_of(item: Any, draft: Draft) -> Value:
    if is_size(item):
        return draft.number(item)
    return item.value if isinstance(item, Number) and item.value is not None else draft.value(item)
