"""The way to the host: stores, drops and loads as a lowered program calls them, and the copies, which run beside the operators.

with memory.transfers() as host:
    x_host = host.store(x)      begins to copy the whole storage of x to the host
    host.drop(x, x_host)        waits until that is done: x may be let go from here on
    x_back = host.load(x_host)  makes a tensor like x and begins to fill it
    host.arrived(x_back)        waits until that is done: x_back may be read, or let go, from here on

What the caller lends is the caller's block all along, and there again when the run is over, also where it fails:

    host.empty(p, p_host)       drop, and the caller's storage has no memory from here on
    p = host.refill(p, p_host)  gives it memory again, and begins to fill it: the same tensor

State that lies on the host between steps is the caller's tensor there, which can be read once the run is over:

    x = host.fetch(home, device)  makes a tensor like home on the device, and begins to fill it
    host.save(x, home)            begins to copy it back
    home = host.send(x)           the same into a new tensor, pinned
    host.saved(x)                 waits until either is done: x may be let go from here on

In the end, however the run went, the host itself waits: `finally: host.last_waits[0]()`, and so the other one. An interrupt comes before
such a call of C or after it: what the caller may read or let go is whole.
On CUDA, copies run on streams of their own: "waits" means that the stream that computes waits, or one that copies, and the program itself
runs on. On a device without streams they are done at once, and there is nothing to wait for.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from lowtide.ir.sizes import pinned_block_bytes

Wait: TypeAlias = Callable[[], object]
NOTHING: Wait = bool


@dataclass(frozen=True)
class CudaStreams:
    """What copies want of a CUDA device: streams, moments to wait for, and memory of the host that it reaches by itself."""

    device: torch.device

    def computing(self) -> torch.cuda.Stream:
        """The stream that the program's operators run on now."""
        return torch.cuda.current_stream(self.device)

    def copying(self) -> torch.cuda.Stream:
        """A stream that waits for nobody unless told to."""
        return torch.cuda.Stream(self.device)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give a stream the work of copying bytes; returns at once, as one end is pinned."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory; the first request for it makes the device wait, so it is kept."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def wait(self, stream: torch.cuda.Stream) -> Wait:
        """What has the host itself wait for all work given to a stream by then. A function of C; nothing where a graph is captured."""
        return NOTHING if self.capturing() else super(torch.cuda.Stream, stream).synchronize  # its own is Python's

    def capturing(self) -> bool:
        """Whether what is given to the computing stream now becomes a CUDA graph, which is run later."""
        return torch.cuda.is_current_stream_capturing()

    def let_go(self) -> None:
        """PyTorch's allocator keeps such memory, until copies that still read it are done and it is told to let it go."""
        torch.cuda.synchronize(self.device)
        torch.accelerator.empty_host_cache()


@dataclass(frozen=True)
class TensorLayout:
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements
    nbytes: int  # of the storage
    device: torch.device
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        offset, nbytes = int(tensor.storage_offset()), tensor.untyped_storage().nbytes()
        dtype, device, conjugate, negative = tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()
        return cls(dtype, tensor.size(), tensor.stride(), offset, nbytes, device, conjugate, negative)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor


@dataclass(eq=False)
class _Buffer:
    """Pinned memory, and the moment from which on nothing reads it."""

    memory: torch.Tensor
    idle: Any = None


class StreamedMemory:
    """Copies on two streams, one each way, over pinned buffers that are kept from step to step.

    Why no memory is read or written too early, without `record_stream`: all of the device's memory is asked for and let go on the
    computing stream, so its allocator gives a block away again only to work that comes later on that stream.

    - A store's source was made by work given to the computing stream before: the copy waits for that moment.
    - The source lives until its drop. There the computing stream waits for the copy, so whoever gets that memory next comes after it.
    - A load's target may lie where work still queued on the computing stream reads or writes: the copy waits for the moment of the load.
    - A loaded tensor's readers, and whoever gets its memory after it, come after `arrived`, where the computing stream waits for the copy.
    - A load reads what a store has written: it waits for the moment at which that is done.
    - What the caller lends lies in memory of the same allocator: emptied after its drop, it is given memory as a load's target is.
    - State on the host is saved after what was computed of it, so after it was loaded. The host waits for all saves where a run ends.
    - A buffer is used again once nobody refers to the copy in it. The store that does so waits until the last load of that copy is done;
      an earlier store into the buffer is on the same stream.

    After a run, whichever way it ended, the computing stream waits for those that were given work: what a failed run leaves may be let go
    like everything else. Only then is what such a run has borrowed given back.

    A run that becomes a CUDA graph has streams and buffers of its own, as it may wait for nothing that was begun before, and is run again
    whenever its owner wants. PyTorch keeps pinned memory that is asked for meanwhile as long as the graph.
    """

    def __init__(self, streams: CudaStreams) -> None:
        self.streams = streams
        self._way: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to the host and back; made by the first run
        self._idle: dict[int, list[_Buffer]] = {}  # by size; `append` and `pop` are safe among threads
        self._made, self._used, self._most = Counter[int](), Counter[int](), Counter[int]()  # buffers by size: all, in use, in use at once
        self._most_bytes: int | None = None
        self._homes_bytes = 0  # what of the caller's the latest run has found or left on the host

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """As PyTorch pins memory, of its own: it is the caller's."""
        memory = self.streams.pinned(tensor.untyped_storage().nbytes()).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(memory, 0, tensor.size(), tensor.stride())

    def transfers(self, most_bytes: int | None = None) -> StreamedTransfers:
        """For one run, in which all runs together pin no more than so many bytes, as far as that run's own need leaves it so."""
        memory = StreamedMemory(self.streams) if self.streams.capturing() else self
        memory._most_bytes, memory._most, memory._homes_bytes = most_bytes, Counter(memory._used), 0
        if memory._way is None:
            memory._way = self.streams.copying(), self.streams.copying()
        return StreamedTransfers(memory, *memory._way)

    @property
    def pinned_bytes(self) -> int:
        return sum(size * count for size, count in self._made.items())

    @property
    def taken_bytes(self) -> int:
        return sum(size * count for size, count in self._most.items()) + self._homes_bytes

    def take(self, nbytes: int) -> _Buffer:
        """A buffer of at least so many bytes. Sizes are powers of two, as PyTorch's allocator of pinned memory makes them anyway."""
        size = pinned_block_bytes(nbytes)
        try:
            buffer = self._idle.setdefault(size, []).pop()
        except IndexError:
            self._make_room(size)
            buffer = _Buffer(self.streams.pinned(size))
            self._made[size] += 1
        self._used[size] += 1
        self._most[size] = max(self._most[size], self._used[size])
        return buffer

    def _make_room(self, size: int) -> None:
        """Let go of what other programs have left of other sizes, the largest first, until one more buffer is within the limit."""
        let_go = False
        for other in sorted(self._idle, reverse=True):
            while self._most_bytes is not None and self.pinned_bytes + size > self._most_bytes and self._idle[other]:
                del self._idle[other][-1]
                self._made[other] -= 1
                let_go = True
        if let_go:
            self.streams.let_go()

    def give_back(self, buffer: _Buffer) -> None:
        size = buffer.memory.numel()
        self._used[size] -= 1
        self._idle[size].append(buffer)


class _StreamedCopy:
    """What a store hands out. Its buffer goes back when nobody refers to it any more, also where a step fails in its midst."""

    def __init__(self, memory: StreamedMemory, layout: TensorLayout) -> None:
        self.layout = layout
        self.stored: Any = None  # the moment from which on the copy is whole
        self._memory, self.buffer = memory, memory.take(layout.nbytes)

    @property
    def bytes(self) -> torch.Tensor:
        """The part of the buffer that the copy fills."""
        return self.buffer.memory[: self.layout.nbytes]

    def __del__(self) -> None:
        if hasattr(self, "buffer"):  # not where there was no memory for one
            self._memory.give_back(self.buffer)


class StreamedTransfers:
    """One run's copies. The computing stream is looked up anew each time: it is the one that operators go to."""

    def __init__(self, memory: StreamedMemory, to_host: torch.cuda.Stream, from_host: torch.cuda.Stream) -> None:
        self._memory, self._streams = memory, memory.streams
        self._to_host, self._from_host = to_host, from_host
        self._begun: dict[int, torch.cuda.Stream] = {}  # by identity: those that were given work
        self._arriving: dict[int, Any] = {}  # by address: the moment at which a loaded storage is filled
        self._empty: dict[int, tuple[torch.Tensor, _StreamedCopy]] = {}  # by identity: what the caller is owed
        self._saving: dict[int, Any] = {}  # by address: the moment at which a storage is copied to where it lies between steps
        self.last_waits = [NOTHING, NOTHING]

    def __enter__(self) -> StreamedTransfers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._settle()
        if self._empty and error is not None:
            traceback.clear_frames(error.__traceback__)  # in memory that its variables hold
            for tensor, copy in list(self._empty.values()):
                self.refill(tensor, copy)
            self._settle()
        # The device waits for all else.
        self.last_waits = [self.last_waits[0] if self._saving else NOTHING, NOTHING]

    def store(self, tensor: torch.Tensor) -> _StreamedCopy:
        """Begin to copy the tensor's storage, once it is made and the buffer is free."""
        copy = _StreamedCopy(self._memory, TensorLayout.of(tensor))
        self._after_computing(self._to_host)
        if copy.buffer.idle is not None:
            self._to_host.wait_event(copy.buffer.idle)
        self._streams.copy(self._to_host, copy.bytes, _bytes_of(tensor))
        copy.stored = self._to_host.record_event()
        return copy

    def _after_computing(self, stream: torch.cuda.Stream) -> None:
        """What it is given from here on comes after what is computed so far."""
        if id(stream) not in self._begun:
            self.last_waits[stream is self._from_host] = self._streams.wait(stream)
            self._begun[id(stream)] = stream
        stream.wait_event(self._streams.computing().record_event())

    def drop(self, tensor: torch.Tensor, copy: _StreamedCopy) -> None:
        """What is computed from here on comes after the copy."""
        self._streams.computing().wait_event(copy.stored)

    def load(self, copy: _StreamedCopy) -> torch.Tensor:
        """Memory as the computing stream has it to give, filled once that stream is done with it and the copy is whole."""
        layout = copy.layout
        return self._filled(layout.on(torch.empty(layout.nbytes, dtype=torch.uint8, device=layout.device).untyped_storage()), copy)

    def _filled(self, tensor: torch.Tensor, copy: _StreamedCopy) -> torch.Tensor:
        """The tensor, whose memory the computing stream has just been given."""
        self._after_computing(self._from_host)
        self._from_host.wait_event(copy.stored)
        self._streams.copy(self._from_host, _bytes_of(tensor), copy.bytes)
        copy.buffer.idle = self._arriving[_address(tensor)] = self._from_host.record_event()
        return tensor

    def arrived(self, tensor: torch.Tensor) -> None:
        """What is computed from here on comes after the copy."""
        self._streams.computing().wait_event(self._arriving.pop(_address(tensor)))

    def empty(self, tensor: torch.Tensor, copy: _StreamedCopy) -> None:
        """A drop, after which the memory may be given to what is computed from here on."""
        self.drop(tensor, copy)
        self._empty[id(tensor)] = tensor, copy  # first, or an interrupt behind it would leave the caller without a value
        tensor.untyped_storage().resize_(0)

    def refill(self, tensor: torch.Tensor, copy: _StreamedCopy) -> torch.Tensor:
        tensor.untyped_storage().resize_(copy.layout.nbytes)
        self._filled(tensor, copy)
        del self._empty[id(tensor)]  # last: after an interrupt it is filled once more, with the same bytes
        return tensor

    def fetch(self, home: torch.Tensor, device: torch.device) -> torch.Tensor:
        tensor = _like(home, device)
        self._after_computing(self._from_host)
        self._streams.copy(self._from_host, _bytes_of(tensor), _bytes_of(home))
        self._arriving[_address(tensor)] = self._from_host.record_event()
        self._memory._homes_bytes += pinned_block_bytes(tensor.untyped_storage().nbytes())
        return tensor

    def save(self, tensor: torch.Tensor, home: torch.Tensor) -> None:
        self._after_computing(self._to_host)
        self._streams.copy(self._to_host, _bytes_of(home), _bytes_of(tensor))
        self._saving[_address(tensor)] = self._to_host.record_event()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        home = self._memory.home(tensor)
        self.save(tensor, home)
        self._memory._homes_bytes += pinned_block_bytes(tensor.untyped_storage().nbytes())
        return home

    def saved(self, tensor: torch.Tensor) -> None:
        """What is computed from here on comes after the copy."""
        self._streams.computing().wait_event(self._saving[_address(tensor)])

    def _settle(self) -> None:
        """What is computed from here on comes after all copies so far."""
        for stream in self._begun.values():
            self._streams.computing().wait_event(stream.record_event())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _like(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


_known: WeakValueDictionary[str, StreamedMemory] = WeakValueDictionary()


def host_memory(device: str) -> HostMemory:
    """The host's memory for programs on a device. On CUDA they share it, and it is let go of with the last of them."""
    if torch.device(device).type != "cuda":
        return DirectMemory()
    known = _known.get(device)
    if known is None:
        known = _known[device] = StreamedMemory(CudaStreams(torch.device(device)))
    return known


@dataclass(frozen=True)
class _DirectCopy:
    layout: TensorLayout
    storage: torch.UntypedStorage


class DirectMemory:
    """For a device without streams: the host's memory is its own, and copies are done when they are asked for. Nothing is pinned."""

    taken_bytes = 0

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        return _like(tensor)

    def transfers(self, most_bytes: int | None = None) -> DirectTransfers:
        return DirectTransfers()


class DirectTransfers:
    def __init__(self) -> None:
        self._empty: dict[int, tuple[torch.Tensor, _DirectCopy]] = {}  # by identity: what the caller is owed
        self.last_waits = [NOTHING, NOTHING]

    def __enter__(self) -> DirectTransfers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for tensor, copy in list(self._empty.values()):
            self.refill(tensor, copy)

    def store(self, tensor: torch.Tensor) -> _DirectCopy:
        return _DirectCopy(TensorLayout.of(tensor), tensor.untyped_storage().clone())

    def drop(self, tensor: torch.Tensor, copy: _DirectCopy) -> None:
        """Nothing: the copy is whole."""

    def load(self, copy: _DirectCopy) -> torch.Tensor:
        """A tensor on a copy of the copy, which may be wanted again."""
        return copy.layout.on(copy.storage.clone())

    def arrived(self, tensor: torch.Tensor) -> None:
        """Nothing: it is filled."""

    def empty(self, tensor: torch.Tensor, copy: _DirectCopy) -> None:
        """Let its memory go."""
        tensor.untyped_storage().resize_(0)
        self._empty[id(tensor)] = tensor, copy

    def refill(self, tensor: torch.Tensor, copy: _DirectCopy) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storage.resize_(copy.layout.nbytes)
        storage.copy_(copy.storage)
        del self._empty[id(tensor)]
        return tensor

    def fetch(self, home: torch.Tensor, device: torch.device) -> torch.Tensor:
        return _like(home, device).copy_(home)

    def save(self, tensor: torch.Tensor, home: torch.Tensor) -> None:
        home.copy_(tensor)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return _like(tensor).copy_(tensor)

    def saved(self, tensor: torch.Tensor) -> None:
        """Nothing: the copy is whole."""


HostMemory: TypeAlias = StreamedMemory | DirectMemory  # where a program's copies go, kept between its runs
