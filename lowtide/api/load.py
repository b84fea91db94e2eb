"""Makes an inference function of a file. Nothing in it is executed: a graph is read, checked, and compiled for this machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.api import archive
from lowtide.api.archive import Result, result_of
from lowtide.api.frozen import Frozen, Inference
from lowtide.api.saved_check import check
from lowtide.base import fields
from lowtide.cpu.executable import LoadedNetwork, loaded_region, placing_as
from lowtide.cpu.network import Placing
from lowtide.errors import CheckError, FormatError, StepError
from lowtide.ir.bodies import Region, is_region
from lowtide.ir.graph import Graph, Slot, Value
from lowtide.ir.text.graph_text import parse
from lowtide.lower.interpreter import looked_at, watched
from lowtide.lower.python import without_constants
from lowtide.plan.contents import Decision
from lowtide.runtime.batch import BatchSpec
from lowtide.runtime.libraries import NativeError
from lowtide.runtime.program import Program

_MOST_BYTES = 2**40  # of an arena
_FIELDS = {"versions", "batch", "result", "inputs", "order", "offsets", "graph", "blocks", "tensors"}


def load_frozen(path: str | os.PathLike[str]) -> Frozen:
    """An inference function from a file that `step.save_frozen` has written, without the model, on this machine.

    Kernels are compiled by the system's C++ compiler, once, or come from the cache. The file is not needed afterwards. Raises
    FormatError for a file that is of another kind or damaged, StepError if no kernels can be compiled, and OSError.
    """
    try:
        with torch.inference_mode(False), _on_cpu():  # whatever the caller has set
            return _loaded(_Read.of(*archive.read(path)))
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)}: {error}") from error
    except NativeError as error:
        raise StepError(f"load_frozen: expected a machine that generated kernels can be made for: {error}") from error
    except (MemoryError, OverflowError, RuntimeError) as error:
        raise StepError(f"load_frozen: expected a function that this machine has the memory for: {error}") from error


def _on_cpu() -> AbstractContextManager[Any]:
    """Where tensors are made; each takes longer to make where that is said."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


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


def _held(region: Region, given: dict[Value, Any], placing: Placing) -> LoadedNetwork:
    """Raises FormatError for what kernels cannot be generated for after all."""
    try:
        fixed = [given[value] for value in (region.node.args[at] for at in region.fixed) if isinstance(value, Value)]
        return loaded_region(region, fixed, placing)
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
