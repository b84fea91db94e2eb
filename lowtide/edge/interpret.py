"""A plan for a small device, run: in arenas of exactly its bytes, each tensor written to and read from its address.

What a plan can get wrong shows here, by other means than it was made with. Around each arena lie guard bytes, looked at after each step.
Bytes of a block that starts or ends are spoilt. Each byte knows whose it is, and each tensor what was written: a read of anything else is
an error. No output may lie on bytes that its operator still reads, but where the graph says so. Moves copy bytes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.edge.cuts import CutBody, cut_body
from lowtide.edge.graph import EdgeGraph, EdgeNode, from_bytes, numpy_dtype, to_bytes, view_starts
from lowtide.edge.models import Array, Engine, Function, engine_at_hand, kernel_of
from lowtide.edge.plan import EdgePlan
from lowtide.edge.run_cut import CutRun, Lying, SliceKernels
from lowtide.edge.windows import is_weight
from lowtide.errors import BatchError, CheckError

_GUARD_BYTES = 64
_GUARD, _SPOILT = 0xA5, 0x5A
_NOBODY = -1


def interpret(
    plan: EdgePlan,
    inputs: Mapping[str, Any] | Sequence[Any],
    *,
    functions: Mapping[str, Function] | None = None,
    engine: Engine | None = None,
) -> dict[str, Array]:
    """What a plan's network gives for these inputs, by name, computed in arenas of exactly the plan's bytes.

    inputs: arrays by name, or in the order of `plan.graph.inputs`, of its dtypes and shapes.
    functions: what computes operators that no engine knows, by kind: f(attributes, *inputs) gives one array or several.
    engine: "onnxruntime", or "reference" for onnx's own; by default the first that is installed.

    Raises CheckError, which names step, node, tensor and block, where the plan does not keep what it promises. Raises BatchError for
    inputs that are not the graph's, StepError for an operator that nobody computes.
    """
    graph = plan.graph
    given = _inputs(graph, inputs)
    machine, known = engine or engine_at_hand(), functions or {}
    bodies = [cut_body(node) for node in graph.nodes]
    kernels = [
        kernel_of(graph, node, known, machine) if body is None else SliceKernels(body.graph, known, machine)
        for node, body in zip(graph.nodes, bodies, strict=True)
    ]
    device = _Device(plan, given)
    _check_order(plan)
    for step, at in enumerate(plan.order):
        device.begin(step, given)
        node = graph.nodes[at]
        device.check_overlap(step, node)
        arrays = [device.read(step, tensor, node.name) if tensor >= 0 else None for tensor in node.inputs]
        kernel, body = kernels[at], bodies[at]
        if isinstance(kernel, SliceKernels):
            if body is not None:
                device.run_cut(step, node, body, kernel)
        else:
            for tensor, array in zip(node.outputs, kernel(arrays), strict=True):
                if graph.tensors[tensor].dtype:
                    device.write(step, tensor, array, node)
        device.check_guards(step, node.name)
    last = len(plan.order)
    device.begin(last, given)
    return {graph.tensors[at].name: device.read(last, at, "the caller") for at in graph.outputs}


def _inputs(graph: EdgeGraph, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[int, Array]:
    """The caller's arrays by tensor. Raises BatchError where they are not what the graph asks for."""
    names = [graph.tensors[at].name for at in graph.inputs]
    by_name = dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=False))
    if len(inputs) != len(names) or by_name.keys() != set(names):
        raise BatchError(f"inputs: expected {', '.join(names) or 'none'}, got {', '.join(map(str, by_name)) or 'none'} ({len(inputs)})")
    arrays = {}
    for at in graph.inputs:
        tensor, array = graph.tensors[at], np.asarray(by_name[graph.tensors[at].name])
        if array.shape != tensor.shape or array.dtype != numpy_dtype(tensor.dtype):
            raise BatchError(f"input `{tensor.name}`: expected {tensor.dtype} {tensor.shape}, got {array.dtype} {array.shape}")
        arrays[at] = array
    return arrays


def _check_order(plan: EdgePlan) -> None:
    if sorted(plan.order) != list(range(len(plan.graph.nodes))):
        raise CheckError(f"order: expected each of {len(plan.graph.nodes)} nodes once, got {len(plan.order)} entries: {plan.order}")


class _Device:
    """Arenas between guards, whose each byte is, and what was last written as each tensor."""

    def __init__(self, plan: EdgePlan, given: Mapping[int, Array]) -> None:
        self.plan, self.graph = plan, plan.graph
        self.outside = {at: array for at, array in given.items() if plan.graph.tensors[at].constant}
        sizes = [0] * len(plan.spaces)
        for index, block in enumerate(plan.blocks):
            _check_block(plan, index)
            sizes[block.space] = max(sizes[block.space], block.offset_bytes + block.size_bytes)
        for space, size in zip(plan.spaces, sizes, strict=True):
            if space.capacity_bytes is not None and size > space.capacity_bytes:
                raise CheckError(f"space {space.name}: expected at most {space.capacity_bytes} bytes, its blocks reach {size}")
        self.guarded = [np.full(size + 2 * _GUARD_BYTES, _GUARD, np.uint8) for size in sizes]
        self.arenas = [memory[_GUARD_BYTES : _GUARD_BYTES + size] for memory, size in zip(self.guarded, sizes, strict=True)]
        for arena in self.arenas:
            arena[:] = _SPOILT
        self.owners = [np.full(size, _NOBODY, np.int64) for size in sizes]
        self.alike = _alike(self.graph)
        self.arrivals = {move.to: move.before for move in plan.moves}
        self.written: dict[int, NDArray[np.uint8]] = {}

    def begin(self, step: int, given: Mapping[int, Array]) -> None:
        """What happens before a step: blocks end, moves copy, blocks start, the caller's inputs and constants are put into theirs."""
        moves = [move for move in self.plan.moves if move.before == step]
        moved, filled = {move.block for move in moves}, {move.to for move in moves}
        ended = [index for index, block in enumerate(self.plan.blocks) if block.end == step < len(self.plan.order)]
        for index in ended:
            if index not in moved:
                self._spoil(index)
        for move in moves:
            self._move(move.block, move.to, step)
            if move.block in ended:
                self._spoil(move.block)
        for index, block in enumerate(self.plan.blocks):
            if block.start == step and index not in filled:
                self._spoil(index)
                self._fill(index, step, given)

    def _fill(self, index: int, step: int, given: Mapping[int, Array]) -> None:
        for tensor in self.plan.blocks[index].tensors:
            if index in self.arrivals:
                continue  # its bytes come by a move
            is_first = not any(tensor in block.tensors and block.start < step for block in self.plan.blocks)
            if tensor in given and is_first:
                self._put(index, tensor, given[tensor], step, "the caller")
            elif tensor in self.graph.constants:
                self._put(index, tensor, self.graph.constants[tensor], step, "the constants")

    def _move(self, source: int, target: int, step: int) -> None:
        """The bytes of a block to another, with whose they are."""
        first, second = self.plan.blocks[source], self.plan.blocks[target]
        where = f"step {step}: the move of block {source} to block {target}"
        shared = set(first.tensors).intersection(second.tensors)
        if not shared or first.size_bytes > second.size_bytes or any(first.start_of(at) != second.start_of(at) for at in shared):
            raise CheckError(f"{where}: expected a block that holds its tensors where they were, got {first} and {second}")
        if not (first.start < step <= first.end and second.start <= step < second.end + (step == len(self.plan.order))):
            raise CheckError(f"{where}: expected blocks that are both there, got {first} and {second}")
        begin, other, size = first.offset_bytes, second.offset_bytes, first.size_bytes
        self.arenas[second.space][other : other + size] = self.arenas[first.space][begin : begin + size].copy()
        self.owners[second.space][other : other + size] = self.owners[first.space][begin : begin + size].copy()

    def read(self, step: int, tensor: int, reader: str) -> Array:
        """A tensor, as it lies in its block; constants that lie in none come from where the weights are."""
        noun = self.graph.tensors[tensor]
        where = f"step {step}: {reader} reads `{noun.name}`"
        index = self._home(tensor, step)
        if index is None and tensor in self.graph.constants:
            return np.asarray(self.graph.constants[tensor], numpy_dtype(noun.dtype))
        if index is None and tensor in self.outside:
            return self.outside[tensor]
        if index is None:
            raise CheckError(f"{where}: expected it in a block that is there at this step, it is in none")
        space, begin, end = self._range(index, tensor)
        raw, owners = self.arenas[space][begin:end], self.owners[space][begin:end]
        if tensor not in self.written:
            raise CheckError(f"{where} in block {index}: nobody has written it")
        strange = np.flatnonzero((owners != self.alike[tensor]) | (raw != self.written[tensor]))
        if len(strange):
            owner = owners[strange[0]]
            whose = "and nobody's" if owner == _NOBODY else f"written as `{self.graph.tensors[int(owner)].name}`"
            raise CheckError(
                f"{where} in block {index}: {len(strange)} of its {end - begin} bytes are no longer its own, the first at"
                f" {self.plan.spaces[space].name}+{begin + int(strange[0])}, {whose}"
            )
        array = from_bytes(raw, noun.stored_dtype or noun.dtype, noun.shape)
        return array.astype(numpy_dtype(noun.dtype)) if noun.stored_dtype else array

    def write(self, step: int, tensor: int, array: Array, node: EdgeNode) -> None:
        """A result to its address. What a device does nothing for has to be there already."""
        index, where = self._home(tensor, step), f"step {step}: {node.name} writes `{self.graph.tensors[tensor].name}`"
        there = self._there(step, tensor, index, node)
        if there is None:
            if index is None:
                raise CheckError(f"{where}: expected it in a block that is there at this step, it is in none")
            return self._put(index, tensor, array, step, node.name)
        self.written[tensor] = self._raw(tensor, array, where)
        if not np.array_equal(there, self.written[tensor]):
            place = "outside" if index is None else f"in block {index}"
            raise CheckError(f"{where}: expected it {place} already, got other bytes")
        if index is None:
            self.outside[tensor] = array
        return None

    def _there(self, step: int, tensor: int, index: int | None, node: EdgeNode) -> NDArray[np.uint8] | None:
        """The bytes of a part, of what has parts, and of a view of what lies outside; None for another result."""
        if index is not None:
            space, begin, end = self._range(index, tensor)
            return self.arenas[space][begin:end] if len(node.views) > 1 else None
        for output, source, start in view_starts(self.graph, node):
            if output == tensor and self._home(source, step) is None and (source in self.outside or source in self.graph.constants):
                raw = self._raw(source, self.read(step, source, node.name), node.name)
                return raw[start : start + self.graph.tensors[tensor].size_bytes]
        return None

    def _raw(self, tensor: int, array: Array, where: str) -> NDArray[np.uint8]:
        stored = self.graph.tensors[tensor].stored_dtype or self.graph.tensors[tensor].dtype
        return to_bytes(_as_stored(array, stored, where), stored)

    def _put(self, index: int, tensor: int, array: Array, step: int, writer: str) -> None:
        noun, where = self.graph.tensors[tensor], f"step {step}: {writer} writes `{self.graph.tensors[tensor].name}`"
        if array.shape != noun.shape or array.dtype != numpy_dtype(noun.dtype):
            raise CheckError(f"{where}: expected {noun.dtype} {noun.shape}, got {array.dtype} {array.shape}")
        space, begin, end = self._range(index, tensor)
        self.written[tensor] = self._raw(tensor, array, where)
        self.arenas[space][begin:end] = self.written[tensor]
        self.owners[space][begin:end] = self.alike[tensor]

    def run_cut(self, step: int, node: EdgeNode, body: CutBody, kernels: SliceKernels) -> None:
        """A cut, in the bytes of its tensors and of its workspace."""
        where, result = f"step {step}: {node.name}", node.outputs[0]
        outer = [at for at in node.inputs if at >= 0 and not is_weight(self.graph, at)]
        place = self._lying(result, step)
        if place is None:
            raise CheckError(f"{where} makes `{self.graph.tensors[result].name}`: expected it in a block that is there, it is in none")
        space, begin, end = place
        rings = next((block for block in self.plan.blocks if not block.tensors and block.start == step), None)
        if rings is None or rings.size_bytes < node.workspace_bytes:
            if node.workspace_bytes:
                raise CheckError(f"{where}: expected a workspace of {node.workspace_bytes} bytes, got {rings}")
            workspace = Lying(np.zeros(0, np.uint8), np.zeros(0, np.int64), _NOBODY)
        else:
            workspace = self._bytes(rings.space, rings.offset_bytes, rings.offset_bytes + node.workspace_bytes, _NOBODY)
        ins: dict[int, Lying | Array] = {inner: self._bytes_of(at, step) for inner, at in zip(body.graph.inputs, outer, strict=True)}
        CutRun(body, kernels, ins, self._bytes(space, begin, end, self.alike[result]), workspace, where).run()
        self.written[result] = self.arenas[space][begin:end].copy()
        if rings is not None:
            self._spoil(self.plan.blocks.index(rings))

    def _bytes_of(self, tensor: int, step: int) -> Lying | Array:
        place = self._lying(tensor, step)
        return self.outside[tensor] if place is None else self._bytes(*place, self.alike[tensor])

    def _bytes(self, space: int, begin: int, end: int, owner: int) -> Lying:
        return Lying(self.arenas[space][begin:end], self.owners[space][begin:end], owner)

    def check_overlap(self, step: int, node: EdgeNode) -> None:
        """Raises CheckError where an output lies on an input that its operator does not allow it to be written over."""
        for position, output in enumerate(node.outputs):
            mine = self._lying(output, step)
            for other, one in enumerate(node.inputs):
                theirs = self._lying(one, step)
                if mine is None or theirs is None or mine[0] != theirs[0] or mine[2] <= theirs[1] or theirs[2] <= mine[1]:
                    continue
                if (position, other) not in node.views and ((position, other) not in node.in_place or mine != theirs):
                    names = [self.graph.tensors[at].name for at in (output, one)]
                    raise CheckError(f"step {step}: node `{node.name}` ({node.kind}) writes `{names[0]}` over `{names[1]}`, which it reads")

    def check_guards(self, step: int, writer: str) -> None:
        """Raises CheckError where a byte outside of an arena was written."""
        for space, memory in zip(self.plan.spaces, self.guarded, strict=True):
            if (memory[:_GUARD_BYTES] != _GUARD).any() or (memory[-_GUARD_BYTES:] != _GUARD).any():
                raise CheckError(f"step {step}: {writer} wrote outside of {space.name}: its guard bytes have changed")

    def _spoil(self, index: int) -> None:
        block = self.plan.blocks[index]
        begin, end = block.offset_bytes, block.offset_bytes + block.size_bytes
        self.arenas[block.space][begin:end] = _SPOILT
        self.owners[block.space][begin:end] = _NOBODY

    def _home(self, tensor: int, step: int) -> int | None:
        """The block in which a tensor is at a step, of several the one where it arrived last: results are there after the last step."""
        last = len(self.plan.order)
        there = [
            (arrival, index)
            for index, block in enumerate(self.plan.blocks)
            if tensor in block.tensors
            and (arrival := self.arrivals.get(index, block.start)) <= step
            and (step < block.end or step == last == block.end)
        ]
        return max(there)[1] if there else None

    def _lying(self, tensor: int, step: int) -> tuple[int, int, int] | None:
        index = self._home(tensor, step)
        return None if index is None else self._range(index, tensor)

    def _range(self, index: int, tensor: int) -> tuple[int, int, int]:
        """Space, first byte and end of a tensor in a block."""
        block = self.plan.blocks[index]
        begin = block.offset_bytes + block.start_of(tensor)
        return block.space, begin, begin + self.graph.tensors[tensor].size_bytes


def _check_block(plan: EdgePlan, index: int) -> None:
    """Raises CheckError for a block that cannot be."""
    block, where = plan.blocks[index], f"block {index}"
    if not 0 <= block.space < len(plan.spaces):
        raise CheckError(f"{where}: expected one of {len(plan.spaces)} spaces, got {block.space}")
    if block.offset_bytes < 0 or block.offset_bytes % plan.spaces[block.space].align_bytes:
        raise CheckError(f"{where}: expected a multiple of {plan.spaces[block.space].align_bytes} bytes from 0, got {block.offset_bytes}")
    if block.starts and len(block.starts) != len(block.tensors):
        raise CheckError(f"{where}: expected a start for each of {len(block.tensors)} tensors, got {len(block.starts)}")
    for tensor, start in zip(block.tensors, block.starts or (0,) * len(block.tensors), strict=True):
        noun = plan.graph.tensors[tensor]
        if start < 0 or start + noun.size_bytes > block.size_bytes:
            raise CheckError(f"{where}: `{noun.name}` takes {noun.size_bytes} bytes from {start}, the block has {block.size_bytes}")


def _alike(graph: EdgeGraph) -> list[int]:
    """By tensor the first of those whose bytes are the same, as one is a view of the other."""
    first = list(range(len(graph.tensors)))
    for node in graph.nodes:
        for output, one in node.views:
            low, high = sorted((first[node.outputs[output]], first[node.inputs[one]]))
            first = [low if each == high else each for each in first]
    return first


def _as_stored(array: Array, stored: str, where: str) -> Array:
    """Numbers in the dtype that a memory holds. Raises CheckError where one of them is none of that dtype's."""
    if array.dtype == numpy_dtype(stored):
        return array
    with np.errstate(invalid="ignore"):
        converted = array.astype(numpy_dtype(stored))
    if not np.array_equal(converted.astype(array.dtype), array):
        raise CheckError(f"{where}: expected numbers that {stored} holds, got some from {array.min()} to {array.max()}")
    return converted
