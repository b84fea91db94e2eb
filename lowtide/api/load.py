"""Makes an inference function of a file. Nothing in it is executed: a graph is read, checked, and compiled for this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowtide.api import archive
from lowtide.api.archive import Result, result_of
from lowtide.api.frozen import Frozen, Inference, stored_bytes
from lowtide.api.saved_check import check
from lowtide.base import fields
from lowtide.base.messages import bytes_text
from lowtide.cpu.executable import LoadedNetwork, loaded_region, network_bytes, placing_as
from lowtide.cpu.network import Placing
from lowtide.errors import BudgetError, CheckError, FormatError, StepError
from lowtide.ir.bodies import Region, is_region
from lowtide.ir.graph import Graph, Slot, Value
from lowtide.ir.text.graph_text import parse
from lowtide.lower.interpreter import looked_at, watched
from lowtide.lower.python import without_constants
from lowtide.plan.contents import Decision
from lowtide.plan.promises import peak_bytes
from lowtide.runtime.batch import BatchSpec
from lowtide.runtime.libraries import NativeError
from lowtide.runtime.program import Program

T = TypeVar("T")
_MOST_BYTES = 2**40  # of an arena
_FIELDS = {"versions", "batch", "result", "inputs", "order", "offsets", "graph", "blocks", "tensors"}


def load_frozen(path: str | os.PathLike[str], memory: int | str | None = None) -> Frozen:
    """An inference function from a file that `step.save_frozen` has written, without the model, on this machine.

    Kernels are compiled by the system's C++ compiler, once, or come from the cache. The file is not needed afterwards. `memory` is the
    most that it may take, in bytes or as "32MiB": what `frozen_needs` says is compared with that before a weight is read.
    Raises BudgetError where it takes more, FormatError for a file that is of another kind or damaged. Raises StepError if no kernels
    can be compiled, and OSError.
    """
    limit_bytes = None if memory is None else _bytes_of(memory)
    with _on_this_machine(path):
        if limit_bytes is not None and (needs := _needs_of(path)).peak_bytes > limit_bytes:
            expected = f"expected a function that takes at most {bytes_text(limit_bytes)}, got one that {needs}: raise `memory`"
            raise BudgetError(f"{os.fspath(path)}: {expected}", needs.peak_bytes, searched=False)
        return _loaded(_Read.of(*archive.read(path)))


def frozen_needs(path: str | os.PathLike[str]) -> FrozenNeeds:
    """What a function in a file takes on this machine; none of its weights is read, and no kernel made. Raises as `load_frozen`."""
    with _on_this_machine(path):
        return _needs_of(path)


@dataclass(frozen=True)
class FrozenNeeds:
    """What a loaded function takes of memory, above what a process has that has imported torch and lowtide."""

    held_bytes: int  # from call to call: weights as kernels read them, their arenas, and weights that torch's operators read
    call_bytes: int  # more in a call: the batch, the result, and what torch's operators make
    file_bytes: int  # whose pages may lie in memory as well while it is loaded; they are the system's to drop

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + self.call_bytes

    def __str__(self) -> str:
        return f"holds {bytes_text(self.held_bytes)} once loaded, and takes {bytes_text(self.call_bytes)} more in a call"


def _bytes_of(memory: int | str) -> int:
    from lowtide.planning.request import Limit  # of a room that loading does without

    limit = Limit.of(memory)
    if limit.memory_bytes is None or limit.host_bytes is not None or limit.device not in ("", "cpu"):
        why = "a loaded function has no peak to take a share of, and no memory but that of the CPU"
        raise ValueError(f'memory: expected bytes, such as "32MiB", as {why}; got {memory!r}')
    return limit.memory_bytes


@contextmanager
def _on_this_machine(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever the caller has set (tensors take longer to make where a device is said); errors name the file, or what is lacking here."""
    try:
        with torch.inference_mode(False), nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            yield
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)}: {error}") from error
    except NativeError as error:
        raise StepError(f"load_frozen: expected a machine that generated kernels can be made for: {error}") from error
    except (MemoryError, OverflowError, RuntimeError) as error:
        raise StepError(f"load_frozen: expected a function that this machine has the memory for: {error}") from error


@dataclass(frozen=True)
class _Read:
    """What a file says, checked."""

    decision: Decision
    slots: tuple[Slot, ...]
    batch: BatchSpec
    result: Result
    inputs: list[Any]  # stored tensors; of the batch, made-up ones
    offsets: list[list[int]]  # by region, of its buffers

    @classmethod
    def of(cls, contents: dict[str, Any], tensors: Sequence[Tensor]) -> _Read:
        """Raises FormatError."""
        fields.check_fields("frozen function", contents, _FIELDS)
        graph = parse("\n".join(fields.lines("frozen function", contents, "graph")))
        order = fields.integers("frozen function", contents, "order")
        batch = BatchSpec.from_rows(contents.get("batch"))
        slots = _slots(contents.get("inputs"), graph, batch, len(tensors))
        check(graph, order, [value for value, slot in zip(graph.inputs, slots, strict=True) if slot.table != "batch"])
        for value, slot in zip(graph.inputs, slots, strict=True):
            if slot.table == "batch" and not batch.is_tensor_like(int(slot.path[0]), value.dtype, value.shape, value.stride):
                raise FormatError(f"{value.name}: expected a batch as the graph says, got {batch.leaves[int(slot.path[0])][1]}")
        leaves = batch.made_up()
        inputs = [(leaves if slot.table == "batch" else tensors)[int(slot.path[0])] for slot in slots]
        for value, tensor in zip(graph.inputs, inputs, strict=True):
            looked_at(value, tensor)
        decision = Decision.in_order(graph, order)
        result = result_of(contents.get("result"), len(graph.outputs))
        return cls(decision, slots, batch, result, inputs, _offsets(contents.get("offsets"), sum(map(is_region, graph.nodes))))


def _loaded(read: _Read) -> Frozen:
    graph = read.decision.graph
    given = dict(zip(graph.inputs, read.inputs, strict=True))
    regions = [Region.of(node) for node in graph.nodes if is_region(node)]
    placings = [placing_as(offsets) for offsets in read.offsets]
    networks = {each.node.results[0].name: _held(each, given, placing) for each, placing in zip(regions, placings, strict=True)}
    short, wanted = without_constants(read.decision)
    inputs = _own(read.inputs, wanted)
    if any(not is_region(node) for node in graph.nodes):  # what torch makes is looked at once
        watched(short.graph, [inputs[at] for at in wanted], read.decision.order, networks)
    settings = Program("step = None", gradients=False)  # whose source is another's
    return Frozen(Inference.of(read.decision, settings, read.slots, read.result, networks), read.batch, inputs, networks)


def _needs_of(path: str | os.PathLike[str]) -> FrozenNeeds:
    read = _Read.of(*archive.read(path, numbers=False))
    graph = read.decision.graph
    regions = [Region.of(node) for node in graph.nodes if is_region(node)]
    networks = [_of_region(region, network_bytes, placing_as(offsets)) for region, offsets in zip(regions, read.offsets, strict=True)]
    short, wanted = without_constants(read.decision)
    stored = [read.inputs[at] for at in wanted if read.slots[at].table != "batch"]
    batch = {value.storage for value, slot in zip(graph.inputs, read.slots, strict=True) if slot.table == "batch"}
    in_order = replace(short.graph, nodes=tuple(short.graph.nodes[index] for index in read.decision.order))
    call_bytes = sum(int(storage.nbytes) for storage in batch) + peak_bytes(in_order, 1)
    return FrozenNeeds(sum(networks) + stored_bytes(stored), call_bytes, os.path.getsize(path))


def _held(region: Region, given: dict[Value, Any], placing: Placing) -> LoadedNetwork:
    fixed = [given[value] for value in (region.node.args[at] for at in region.fixed) if isinstance(value, Value)]
    return _of_region(region, partial(loaded_region, constants=fixed), placing)


def _of_region(region: Region, call: Callable[[Region, Placing], T], placing: Placing) -> T:
    """Raises FormatError for what kernels cannot be generated for after all."""
    try:
        return call(region, placing)
    except (NativeError, FormatError):
        raise
    except (ValueError, TypeError, KeyError, IndexError, CheckError, ArithmeticError, RuntimeError) as error:
        raise FormatError(f"{region.name}: expected a region that kernels can be generated for: {error}") from error


def _own(inputs: Sequence[Any], wanted: Collection[int]) -> list[Any]:
    """The inputs that are `wanted`, in memory of their own: what is one in the file stays one. None in the place of others."""
    copies: dict[int, Tensor] = {}
    constants: list[Any] = [None] * len(inputs)
    for at in wanted:
        tensor = inputs[at]
        flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        block = copies.setdefault(flat.data_ptr(), flat.clone())
        constants[at] = torch.as_strided(block.view(tensor.dtype), tensor.shape, tensor.stride())
    return constants


def _offsets(entries: Any, regions: int) -> list[list[int]]:
    right = isinstance(entries, list) and len(entries) == regions and all(isinstance(each, list) for each in entries)
    if not right or any(type(offset) is not int or not 0 <= offset < _MOST_BYTES for each in entries for offset in each):
        raise FormatError(f"expected offsets as a list of {regions} lists of bytes, one for each region")
    return [list(each) for each in entries]


def _slots(entries: Any, graph: Graph, batch: BatchSpec, stored: int) -> tuple[Slot, ...]:
    """By input of the graph, what it is: a leaf of the batch, or a stored tensor."""
    limits = {"batch": len(batch.leaves), "tensor": stored}
    if not isinstance(entries, list) or len(entries) != len(graph.inputs):
        raise FormatError(f"expected inputs as a list of {len(graph.inputs)}, one for each of the graph's")
    for entry in entries:
        match entry:
            case [("batch" | "tensor") as table, int(at)] if type(at) is int and 0 <= at < limits[table]:
                continue
        raise FormatError(f"expected an input as ['batch', leaf] or ['tensor', number], got {str(entry)[:80]}")
    return tuple(Slot(table, (at,)) for table, at in entries)
