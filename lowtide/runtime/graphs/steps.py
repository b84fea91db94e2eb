"""A step's programs as graphs: which call is captured, which is replayed, and what goes in and out around it.

The first call of a program runs as without a graph, and has libraries set up what they keep. The next one is captured if it finds the same:
parameters, buffers and state at the same addresses, the same numbers, the same stream and arena. It is then replayed for as long as that
holds, and captured anew where two calls in succession find something else alike. So a number that is changed once costs two calls, one that
changes at each step is never frozen: such steps run from Python, and the report says what changes.

A batch whose tensors lie where they lay is read there; from the first one that lies elsewhere on, it is copied to where the graph reads.
What a step returns is copied out of the graph's memory before anybody sees it. Copies of both kinds lie in one block that all graphs share.
As it grows, and as a program needs more than all before it, earlier graphs go and are captured again when their turn comes: what is
reserved is what the largest needs, not the sum.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowtide.base.messages import bytes_text
from lowtide.errors import StepError
from lowtide.ir.sizes import reach
from lowtide.runtime.arena.arena import Arena
from lowtide.runtime.copies import TensorLayout
from lowtide.runtime.graphs.capturable import NUMBER_BYTES, Capturable, rounded
from lowtide.runtime.graphs.device import CudaGraphs
from lowtide.runtime.program import Program

_ALWAYS = 'Run(graph="always")'
_ALL = 2**64
_STREAM, _ARENA, _BEFORE = 0, 1, 2  # of what a graph takes for granted: the first two, and where those of inputs begin
_GROWN = "the step's arena has other memory than at the call before"
_UNKNOWN = "it is not known yet how results lie"
_TENSOR = (
    "give it as a tensor on the device (`lr=torch.tensor(1e-3, device=...)`), which graphs read anew; fused and capturable optimizers do"
)


@dataclass(frozen=True)
class GraphReport:
    """What became of a step's calls where it may be a CUDA graph."""

    captured: int  # graphs that are there now
    captures: int  # so far
    replays: int
    calls_without: Mapping[str, int]  # by why: each ran from Python
    copies_bytes: int  # of the block for copies of batches and of results; 0 before the first capture
    most_beside_bytes: int  # what is promised beside the plan's peak: that block, and results that the caller is given
    absent: str = ""  # why there can be none at all

    def __str__(self) -> str:
        if self.absent:
            return f"no CUDA graph: {self.absent}"
        pieces = [
            f"{self.captured} CUDA graphs of {self.captures} captures, {self.replays} replays, {bytes_text(self.copies_bytes)} of copies",
            *(f"{count} calls from Python: {why}" for why, count in self.calls_without.items()),
        ]
        return "; ".join(pieces)


@dataclass(frozen=True, eq=False)
class NumberCopies:
    """A program that reads numbers from tensors, which are written before it is replayed."""

    program: Program  # with tensors of no dimensions behind its inputs
    arithmetic: Program  # what they hold, of numbers among the inputs
    numbers: tuple[int, ...]  # those inputs
    dtypes: tuple[torch.dtype, ...]  # by tensor
    free: frozenset[int]  # inputs that may be other numbers at each call

    def now(self, inputs: Sequence[Any]) -> list[Any]:
        return self.arithmetic([inputs[at] for at in self.numbers])


@dataclass(frozen=True)
class GraphedCall:
    key: Hashable  # of the program
    program: Program
    prepare: Callable[[], tuple[Capturable, NumberCopies | None]]  # what is known of the program, asked once
    inputs: Sequence[Any]
    run: Callable[[Callable[[], list[Any]]], list[Any]]  # has a call of the program take its memory where it should
    arena: Arena | None
    makes_bytes: Callable[[], int]  # what the program takes beside the caller's
    place: Callable[[BaseException], str]  # the operator and the line of the caller's at which an error came; "" for no operator

    def plain(self) -> list[Any]:
        """As without a graph."""
        return self.run(lambda: self.program(self.inputs))

    @property
    def generation(self) -> int:
        """Of the arena's memory."""
        return 0 if self.arena is None else self.arena.generation


def _bits(item: Any) -> Any:
    """What is equal where a number is the same to the last bit; of anything else, as a generator, that it is the same object."""
    if isinstance(item, float):
        return "float", item.hex()
    return (type(item), item) if isinstance(item, (bool, int, str, type(None))) else (type(item), id(item))


@dataclass(frozen=True)
class _Fresh:
    """A result on memory that the program made: where its storage is copied to, and how it lies on that."""

    begin: int  # bytes, in the block
    layout: TensorLayout


@dataclass(frozen=True)
class _Given:
    """A result that is an input, or lies on the memory of one."""

    at: int  # of the inputs
    itself: bool
    layout: TensorLayout
    shift: int  # elements from the input's own offset


@dataclass(frozen=True)
class _Layout:
    """Where a call's copies lie in the block: bytes by input, and what becomes of each output."""

    results: tuple[Any, ...]  # _Fresh, _Given, or what is no tensor
    nbytes: int
    copies: Mapping[int, int] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()  # where those lie that are tensors

    @classmethod
    def of(cls, inputs: Sequence[Any], outputs: Sequence[Any], owners: Sequence[tuple[int, ...]]) -> _Layout:
        """From a run of the program, before anything of the batch is copied; `owners` are inputs on the storage of each output."""
        nbytes, begins, results = 0, dict[int, int](), list[Any]()
        for item, given in zip(outputs, owners, strict=True):
            if not isinstance(item, torch.Tensor):
                results.append(item)
                continue
            storage, layout = item.untyped_storage(), TensorLayout.of(item)
            if given:
                same = next((at for at in given if inputs[at] is item), None)
                source = inputs[given[0]]
                shift = (item.storage_offset() * item.itemsize - source.storage_offset() * source.itemsize) // item.itemsize
                results.append(_Given(given[0] if same is None else same, same is not None, layout, shift))
                continue
            if storage.data_ptr() not in begins:
                begins[storage.data_ptr()], nbytes = nbytes, nbytes + rounded(storage.nbytes())
            results.append(_Fresh(begins[storage.data_ptr()], layout))
        return cls(tuple(results), nbytes)

    def with_copies(self, inputs: Sequence[Any], copied: Sequence[int], align_bytes: int, numbers: int) -> _Layout:
        """The same with room for these inputs, each aligned as it is now, up to so many bytes, and for numbers."""
        places, nbytes = dict[int, int](), self.nbytes
        for at in copied:
            shift = inputs[at].data_ptr() % align_bytes
            places[at], nbytes = nbytes + shift, nbytes + rounded(shift + _span_bytes(inputs[at]))
        begins = tuple(nbytes + at * NUMBER_BYTES for at in range(numbers))
        return _Layout(self.results, nbytes + rounded(numbers * NUMBER_BYTES), places, begins)


@dataclass(frozen=True, eq=False)
class _Captured:
    handle: torch.cuda.CUDAGraph
    seen: tuple[Any, ...]
    layout: _Layout
    block: torch.Tensor
    copies: tuple[tuple[int, torch.Tensor], ...]  # by input of the batch where it is copied to
    numbers: tuple[torch.Tensor, ...]
    latest: list[Any]  # what these hold; None before they are first written
    keeps: tuple[Any, ...]  # generators, which it refers to


@dataclass
class _Entry:
    capturable: Capturable
    numbers: NumberCopies | None
    graph: _Captured | None = None
    latest: tuple[Any, ...] | None = None  # what the latest call found
    changed: bool = False  # whether the one before found something else
    copies: bool = False  # whether batches are copied
    layout: _Layout | None = None

    def __post_init__(self) -> None:
        parts, free = self.capturable, frozenset[int]() if self.numbers is None else self.numbers.free
        self.refusal = parts.refusal
        self._numbers = [at for at in parts.numbers if at not in free]
        others = {*parts.batch, *parts.numbers}
        self._fixed = [at for at in range(len(parts.names)) if at not in others]
        self.order = [*parts.batch, *self._numbers, *self._fixed]  # of the inputs in what is seen of them

    def seen(self, stream: int, call: GraphedCall, align_bytes: int) -> tuple[Any, ...]:
        """What a graph takes for granted: stream, arena, how a batch lies, numbers, addresses of all else."""
        inputs, modulus = call.inputs, align_bytes if self.copies else _ALL
        batch = [
            (each.shape, each.stride(), each.dtype, each.data_ptr() % modulus) for each in map(inputs.__getitem__, self.capturable.batch)
        ]
        numbers = [_bits(inputs[at]) for at in self._numbers]
        return (stream, call.generation, *batch, *numbers, *[inputs[at].data_ptr() for at in self._fixed])


@dataclass
class StepGraphs:
    """Those of one step and of its steps for other shapes, which share memory.

    Of two threads that call at once, the second runs from Python. A call on another stream comes after what the one before was given.
    """

    device: CudaGraphs | None
    word: str = "auto"  # as `Run` has it
    absent: str = ""
    captures: int = 0
    replays: int = 0
    calls_without: Counter[str] = field(default_factory=Counter)
    _entries: dict[Hashable, _Entry] = field(default_factory=dict)
    _block: torch.Tensor | None = None
    _made_bytes: int = 0  # the most that a captured program takes
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, most_beside_bytes: int) -> GraphReport:
        captured = sum(entry.graph is not None for entry in self._entries.values())
        copies_bytes = 0 if self._block is None else self._block.nbytes
        return GraphReport(captured, self.captures, self.replays, dict(self.calls_without), copies_bytes, most_beside_bytes, self.absent)

    def run(self, call: GraphedCall) -> list[Any]:
        """The program's outputs. Raises StepError where there has to be a graph and can be none, before anything has changed."""
        if self.device is None:
            return call.plain()
        if self.device.capturing():
            return self._without("a CUDA graph of the caller's was captured", call)
        if not self._lock.acquire(blocking=False):
            return self._without("the same step was running", call)
        try:
            return self._run(self.device, self.device.follow(self._block), call)
        finally:
            self._lock.release()

    def let_go(self) -> None:
        """Give the memory of all graphs back; they are captured again. While a run is under way nothing happens."""
        if self.device is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._drop(self.device)
        finally:
            self._lock.release()

    def _without(self, why: str, call: GraphedCall) -> list[Any]:
        self.calls_without[why] += 1
        return call.plain()

    def _drop(self, device: CudaGraphs) -> None:
        had = self._block is not None
        for entry in self._entries.values():
            entry.graph = None
        self._block, self._made_bytes = None, 0
        if had:
            device.release()

    def _run(self, device: CudaGraphs, stream: int, call: GraphedCall) -> list[Any]:
        entry = self._entries.get(call.key)
        if entry is None:
            entry = self._entries[call.key] = _Entry(*call.prepare())
        graph, seen, before = entry.graph, entry.seen(stream, call, device.align_bytes), entry.latest
        entry.latest = seen
        if graph is not None and seen == graph.seen and graph.block is self._block:
            entry.changed = False
            return self._replayed(graph, entry, call)
        if before is None:  # the first step of many optimizers runs but once
            return self._looked_at(entry, call, "the first call of a program sets up what libraries keep")
        if entry.refusal:
            if self.word == "always":
                raise StepError(f"{_ALWAYS}: no CUDA graph can do what the step does: {entry.refusal}")
            return self._without(entry.refusal, call)
        other = [at for at, (old, new) in enumerate(zip(before, seen, strict=True)) if old != new]
        of_batch = range(_BEFORE, _BEFORE + len(entry.capturable.batch))
        if not entry.copies and any(at in of_batch for at in other):
            entry.copies = True
            entry.latest = entry.seen(stream, call, device.align_bytes)
            other = [at for at in other if at not in of_batch]
        if other or entry.layout is None:
            why = _changed(entry, other[0]) if other else _UNKNOWN
            changed, entry.changed = entry.changed, bool(other) and other[0] != _ARENA
            if changed and entry.changed and self.word == "always":
                raise StepError(f"{_ALWAYS}: {why}")
            return self._looked_at(entry, call, why)
        entry.changed = False
        return self._captured(device, entry, entry.layout, call)

    def _looked_at(self, entry: _Entry, call: GraphedCall, why: str) -> list[Any]:
        """A run from Python, which tells how results lie."""
        outputs = self._without(why, call)
        if not entry.refusal:
            entry.layout = _Layout.of(call.inputs, outputs, entry.capturable.owners)
        return outputs

    def _captured(self, device: CudaGraphs, entry: _Entry, layout: _Layout, call: GraphedCall) -> list[Any]:
        copied, dtypes = entry.capturable.batch if entry.copies else (), () if entry.numbers is None else entry.numbers.dtypes
        layout = layout.with_copies(call.inputs, copied, device.align_bytes, len(dtypes))
        block, seen, given = self._block_for(device, layout, call), entry.latest, [*call.inputs]
        assert seen is not None, "a call came before"
        for at, begin in layout.copies.items():
            given[at] = _static(block, begin, call.inputs[at])
        numbers = tuple(_number(block, begin, dtype) for begin, dtype in zip(layout.numbers, dtypes, strict=True))
        body = _Body(call.program if entry.numbers is None else entry.numbers.program, [*given, *numbers], layout, block)
        generators = tuple(item for item in call.inputs if isinstance(item, torch.Generator))
        try:
            handle = device.capture(body, generators, call.run)
        except Exception as error:
            self._refuse(entry, call, error)
            return self._without(entry.refusal, call)
        except BaseException as interrupt:  # as long as it is captured nothing happens: no operator was cut short
            raise interrupt.with_traceback(None) from None
        if call.generation != seen[_ARENA]:
            return self._without(_GROWN, call)
        copies = tuple((at, _span(given[at])) for at in layout.copies)
        entry.graph = _Captured(handle, seen, layout, block, copies, numbers, [None] * len(numbers), generators)
        self.captures += 1
        return self._replayed(entry.graph, entry, call)

    def _refuse(self, entry: _Entry, call: GraphedCall, error: Exception) -> None:
        """Remember why a program cannot be captured; nothing of it has happened. Raises StepError where it has to be."""
        where, text = call.place(error), str(error).partition("\n")[0]
        entry.refusal = f"{f'{where} cannot be captured' if where else 'it cannot be captured'}: {text}"
        if self.word == "always":
            raise StepError(f"{_ALWAYS}: {entry.refusal}. Nothing has been changed in this step") from error

    def _block_for(self, device: CudaGraphs, layout: _Layout, call: GraphedCall) -> torch.Tensor:
        """Memory for a call's copies. Where there is not enough of it, or of what graphs take, for this one, all others go."""
        made_bytes = call.makes_bytes() if call.arena is None else 0
        block = self._block
        if block is None or block.nbytes < layout.nbytes or made_bytes > self._made_bytes:
            nbytes = max(layout.nbytes, 1, 0 if block is None else block.nbytes)
            made_bytes = max(made_bytes, self._made_bytes)
            del block
            self._drop(device)
            on = next(item.device for item in call.inputs if isinstance(item, torch.Tensor))
            with torch.inference_mode(False):
                block = self._block = torch.empty(nbytes, dtype=torch.uint8, device=on)
            self._made_bytes = made_bytes
        return block

    def _replayed(self, graph: _Captured, entry: _Entry, call: GraphedCall) -> list[Any]:
        self.replays += 1
        for at, number in enumerate(() if entry.numbers is None else entry.numbers.now(call.inputs)):
            if (bits := _bits(number)) != graph.latest[at]:
                graph.latest[at] = None  # an interrupt may come between
                call.program.beneath(graph.numbers[at].fill_, as_kernels_round(number, graph.numbers[at].dtype))
                graph.latest[at] = bits
        return call.program.beneath(lambda inputs: _run_of(graph, inputs), call.inputs)


def _run_of(graph: _Captured, inputs: Sequence[Any]) -> list[Any]:
    for at, copy in graph.copies:
        copy.copy_(_span(inputs[at]))
    graph.handle.replay()
    copies = dict[int, torch.UntypedStorage]()
    return [_taken(each, graph.block, inputs, copies) for each in graph.layout.results]


def _taken(result: Any, block: torch.Tensor, inputs: Sequence[Any], copies: dict[int, torch.UntypedStorage]) -> Any:
    """A result as the caller gets it: on memory of its own, or of what the caller has given."""
    if isinstance(result, _Given):
        source, layout = inputs[result.at], result.layout
        if result.itself:
            return source
        there = source.storage_offset() * source.itemsize // layout.dtype.itemsize + result.shift
        return replace(layout, offset=there).on(source.untyped_storage())
    if not isinstance(result, _Fresh):
        return result
    if result.begin not in copies:
        copies[result.begin] = block[result.begin : result.begin + result.layout.nbytes].clone().untyped_storage()
    return result.layout.on(copies[result.begin])


@dataclass(frozen=True, eq=False)
class _Body:
    """What is captured: the program on what it is given, and its results copied to where replays leave them."""

    program: Program
    given: Sequence[Any]
    layout: _Layout
    block: torch.Tensor

    def __call__(self) -> None:
        outputs = self.program([*self.given])
        with torch.no_grad():
            done = set[int]()
            for item, result in zip(outputs, self.layout.results, strict=True):
                if not isinstance(result, _Fresh) or result.begin in done:
                    continue
                storage = item.untyped_storage()
                if TensorLayout.of(item) != result.layout:
                    raise StepError("its results lie otherwise than those of the call before")
                source = torch.empty(0, dtype=torch.uint8, device=item.device).set_(storage)
                self.block[result.begin : result.begin + storage.nbytes()].copy_(source)
                done.add(result.begin)


def _static(block: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor in the block that lies as another does in its own memory."""
    elements = block[begin : begin + _span_bytes(like)].view(like.dtype)
    return elements.as_strided(like.size(), like.stride(), elements.storage_offset())


def as_kernels_round(number: float, dtype: torch.dtype) -> float:
    """What a kernel of a dtype makes of a number; one that is too large is infinite, which `fill_` would refuse."""
    return float(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item())


def _number(block: torch.Tensor, begin: int, dtype: torch.dtype) -> torch.Tensor:
    return block[begin : begin + dtype.itemsize].view(dtype)[0]


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """All elements from a tensor's first to its last, those between its own among them."""
    return tensor.as_strided((reach(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset())


def _span_bytes(tensor: torch.Tensor) -> int:
    return reach(tensor.shape, tensor.stride()) * tensor.itemsize


def _changed(entry: _Entry, at: int) -> str:
    """What a call found otherwise than the one before, and what to do about it."""
    if at == _STREAM:
        return "it is called on another stream than before, where a CUDA graph would not wait for what uses its memory"
    if at == _ARENA:
        return _GROWN
    which = entry.order[at - _BEFORE]
    name = entry.capturable.names[which]
    if which in entry.capturable.batch:
        return f"{name} has other strides than at the call before, or is aligned otherwise: give a copy of it (clone)"
    if which not in entry.capturable.numbers:
        return f"{name} lies elsewhere than at the call before, and a CUDA graph reads where it lay: write into it (copy_)"
    return f"{name} is another number than at the call before, and a CUDA graph holds it as it was: {_TENSOR}"
