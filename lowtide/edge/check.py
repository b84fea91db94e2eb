"""A plan gone over step by step, as a device would run it. Shares no code with what made the plan."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import NoReturn

from lowtide.edge.check_cuts import check_cut
from lowtide.edge.graph import EdgeNode, view_starts
from lowtide.edge.plan import PS_PER_S, EdgeBlock, EdgePlan, Move
from lowtide.errors import CheckError
from lowtide.problems import Status


def check(plan: EdgePlan) -> None:
    """Raises CheckError, naming step, tensor or block, unless the plan can be run and takes what it promises.

    - every operator runs once, after those whose results it reads
    - a block lies in its space, aligned, and alone on its bytes while it is alive
    - a tensor is in its block, alive and not written over, wherever it is read; views and in-place results are as the operators allow
    - a move copies what is there to another space, beneath a step that does not write it; at most one moves beneath a step
    - a cut goes through `check_cut`
    - the time is that of the model, and a plan that is called optimal meets its bound
    """
    _check_order(plan)
    _check_blocks(plan)
    _check_overlaps(plan)
    for node in plan.graph.nodes:
        if "cut" in node.attributes:
            check_cut(plan.graph, node)
    _PlanRun(plan).check()
    _check_promises(plan)


def _refuse(text: str) -> NoReturn:
    raise CheckError(text)


def _check_order(plan: EdgePlan) -> None:
    graph, n = plan.graph, len(plan.graph.nodes)
    if sorted(plan.order) != list(range(n)):
        _refuse(f"order: expected each of {n} nodes once, got {len(plan.order)} entries")
    maker = {tensor: index for index, node in enumerate(graph.nodes) for tensor in node.outputs if tensor >= 0}
    ready, step_of = set(graph.inputs), {index: step for step, index in enumerate(plan.order)}
    for step, index in enumerate(plan.order):
        for other in graph.nodes[index].after:
            if step_of[other] > step:
                _refuse(f"step {step} ({graph.nodes[index].name}): runs before {graph.nodes[other].name}, for which it waits")
        for tensor in graph.nodes[index].inputs:
            if tensor >= 0 and tensor in maker and tensor not in ready:
                name, late = graph.tensors[tensor].name, graph.nodes[maker[tensor]].name
                _refuse(f"step {step} ({graph.nodes[index].name}): reads {name} before {late} made it")
        ready.update(graph.nodes[index].outputs)


def _check_blocks(plan: EdgePlan) -> None:
    graph, n = plan.graph, len(plan.order)
    for index, block in enumerate(plan.blocks):
        where = f"block {index}"
        if not 0 <= block.space < len(plan.spaces):
            _refuse(f"{where}: expected a space from 0 to {len(plan.spaces) - 1}, got {block.space}")
        memory = plan.spaces[block.space]
        if block.offset_bytes < 0 or block.size_bytes < 0:
            _refuse(f"{where}: expected an offset and a size of 0 or more, got {block.offset_bytes} and {block.size_bytes}")
        if block.offset_bytes % memory.align_bytes:
            _refuse(f"{where}: expected an offset that is a multiple of {memory.align_bytes} in {memory.name}, got {block.offset_bytes}")
        end_bytes = block.offset_bytes + block.size_bytes
        if memory.capacity_bytes is not None and end_bytes > memory.capacity_bytes:
            _refuse(f"{where}: expected to end within the {memory.capacity_bytes} bytes of {memory.name}, got {end_bytes}")
        if not 0 <= block.start < block.end <= n:
            _refuse(f"{where}: expected steps within 0 to {n}, got [{block.start}, {block.end})")
        if len(set(block.tensors)) < len(block.tensors) or (block.starts and len(block.starts) != len(block.tensors)):
            _refuse(f"{where}: expected each tensor once, with its start, got {block.tensors} and {block.starts}")
        for tensor in block.tensors:
            if not 0 <= tensor < len(graph.tensors):
                _refuse(f"{where}: expected tensors from 0 to {len(graph.tensors) - 1}, got {tensor}")
            start = block.start_of(tensor)
            if start < 0 or start + graph.tensors[tensor].size_bytes > block.size_bytes:
                _refuse(f"{where}: {graph.tensors[tensor].name} does not lie within its {block.size_bytes} bytes")


def _check_overlaps(plan: EdgePlan) -> None:
    alive: list[int] = []
    for index in sorted(range(len(plan.blocks)), key=lambda each: plan.blocks[each].start):
        block = plan.blocks[index]
        alive = [other for other in alive if plan.blocks[other].end > block.start]
        for other, its in ((other, plan.blocks[other]) for other in alive):
            ends = block.offset_bytes + block.size_bytes, its.offset_bytes + its.size_bytes
            if its.space == block.space and max(block.offset_bytes, its.offset_bytes) < min(ends):
                _refuse(f"blocks {other} and {index} overlap in {plan.spaces[block.space].name} at step {block.start}")
        alive.append(index)


class _PlanRun:
    """The plan as a device runs it: which block holds each tensor, and which tensors of a block have not been written over."""

    def __init__(self, plan: EdgePlan) -> None:
        self.plan, self.graph = plan, plan.graph
        self.targets = {move.to for move in plan.moves}
        self.block_of: dict[int, int] = {}  # by tensor
        self.contents: list[set[int]] = [set() for _ in plan.blocks]
        placed = {tensor for block in plan.blocks for tensor in block.tensors}
        self.fixed = {
            index for index, tensor in enumerate(plan.graph.tensors) if tensor.constant and index not in placed
        }  # and their views
        self.used: set[int] = set()  # tensors that are read or given back
        for node in plan.graph.nodes:
            self.used.update(node.inputs)
        self.used.update(plan.graph.outputs)
        self.time_ps: int | None = 0

    def check(self) -> None:
        weights = [at for at, tensor in enumerate(self.graph.tensors) if tensor.constant and at not in self.graph.inputs]
        for tensor in (*self.graph.inputs, *weights):
            if tensor in self.used and tensor not in self.fixed:
                self._begin(tensor, 0, "what the caller gives")
        beneath: dict[int, Move] = {}
        for each in self.plan.moves:
            if each.before - 1 in beneath:
                _refuse(f"expected at most one move before step {each.before}, got two")
            beneath[each.before - 1] = each
            if not 1 <= each.before < len(self.plan.order):
                _refuse(f"move of block {each.block}: expected before a step from 1 to {len(self.plan.order) - 1}, got {each.before}")
        for step, index in enumerate(self.plan.order):
            node, move = self.graph.nodes[index], beneath.get(step)
            step_ps = self._step_ps(step, node)
            written = self._run(step, node)
            self._workspace(step, node)
            if move is not None:
                self._move(move, step, node, written, step_ps)
        last = len(self.plan.order)
        for tensor in self.graph.outputs:
            if tensor not in self.fixed and self._holding(tensor, last - 1, "the end").end != last:
                _refuse(f"{self.graph.tensors[tensor].name}: expected to be there at the end, as the caller gets it")
        if self.plan.time_ps is not None and self.plan.time_ps != self.time_ps:
            _refuse(f"time: expected {self.time_ps} ps by the model, got {self.plan.time_ps}")

    def _holding(self, tensor: int, step: int, where: str) -> EdgeBlock:
        name, index = self.graph.tensors[tensor].name, self.block_of.get(tensor)
        if index is None:
            _refuse(f"{where}: {name} is in no block")
        block = self.plan.blocks[index]
        if not block.start <= step < block.end:
            _refuse(f"{where}: {name} is in block {index}, which is alive over [{block.start}, {block.end}) only")
        if tensor not in self.contents[index]:
            _refuse(f"{where}: {name} was written over in block {index}")
        return block

    def _begin(self, tensor: int, step: int, where: str) -> int:
        """A tensor that comes into being in a block of its own, or in its part of one, where nothing else lies."""
        fitting = [
            index
            for index, block in enumerate(self.plan.blocks)
            if tensor in block.tensors and index not in self.targets and _may_begin(block, step)
            and not any(self._share(block, tensor, other) for other in self.contents[index])
        ]  # fmt: skip
        if len(fitting) != 1:
            _refuse(f"{where}: expected one block of {self.graph.tensors[tensor].name} that starts at step {step}, got {len(fitting)}")
        self.block_of[tensor] = fitting[0]
        self.contents[fitting[0]].add(tensor)
        return fitting[0]

    def _share(self, block: EdgeBlock, one: int, other: int) -> bool:
        """Whether two tensors of a block have bytes in common; without starts they have."""
        low, high = max(block.start_of(one), block.start_of(other)), 2**62
        for each in (one, other):
            high = min(high, block.start_of(each) + self.graph.tensors[each].size_bytes)
        return not block.starts or low < high

    def _run(self, step: int, node: EdgeNode) -> set[int]:
        where = f"step {step} ({node.name})"
        views: dict[int, list[tuple[int, int]]] = {}
        for output, source, start in view_starts(self.graph, node):
            views.setdefault(output, []).append((source, start))
        for tensor in node.inputs:
            if tensor >= 0 and tensor not in self.fixed:
                self._holding(tensor, step, where)
        written: set[int] = set()
        for tensor in node.outputs:
            if tensor < 0:
                continue
            if tensor not in views:
                written.add(self._write(tensor, step, node, where))
            elif views[tensor][0][0] in self.fixed:
                self.fixed.add(tensor)
            for source, start in views.get(tensor, ()):
                if source not in self.fixed:
                    self._look(tensor, source, start, where)
        return written

    def _look(self, tensor: int, source: int, start: int, where: str) -> None:
        index = self.block_of[source]
        block = self.plan.blocks[index]
        if tensor not in block.tensors or block.start_of(tensor) != block.start_of(source) + start:
            _refuse(f"{where}: expected {self.graph.tensors[tensor].name} where {self.graph.tensors[source].name} is, as its view")
        self.contents[index].add(tensor)
        self.block_of[tensor] = index

    def _write(self, tensor: int, step: int, node: EdgeNode, where: str) -> int:
        for output, source_at in node.in_place:
            source = node.inputs[source_at]
            if node.outputs[output] == tensor and source in self.block_of:
                index = self.block_of[source]
                block = self.plan.blocks[index]
                if tensor in block.tensors and block.start_of(tensor) == block.start_of(source):
                    here = [each for each in node.inputs if each >= 0 and each != source and self.block_of.get(each) == index]
                    others = [each for each in here if self._share(block, tensor, each)]
                    if others or self.graph.tensors[tensor].size_bytes > self.graph.tensors[source].size_bytes:
                        _refuse(f"{where}: {self.graph.tensors[tensor].name} cannot be written over {self.graph.tensors[source].name}")
                    self.contents[index] = {each for each in self.contents[index] if not self._share(block, tensor, each)} | {tensor}
                    self.block_of[tensor] = index
                    return index
        return self._begin(tensor, step, where)

    def _workspace(self, step: int, node: EdgeNode) -> None:
        if node.workspace_bytes and not self._workspaces(step, node):
            _refuse(f"step {step} ({node.name}): expected a workspace of {node.workspace_bytes} bytes, got none")

    def _workspaces(self, step: int, node: EdgeNode) -> list[EdgeBlock]:
        """The blocks that are large enough for a step's workspace."""
        alive = [block for block in self.plan.blocks if not block.tensors and block.start <= step < block.end]
        return [block for block in alive if block.size_bytes >= node.workspace_bytes]

    def _move(self, move: Move, step: int, node: EdgeNode, written: set[int], step_ps: int | None) -> None:
        where = f"move before step {move.before}"
        count = len(self.plan.blocks)
        if not (0 <= move.block < count and 0 <= move.to < count) or move.block == move.to:
            _refuse(f"{where}: expected two blocks of {count}, got {move.block} and {move.to}")
        source, target = self.plan.blocks[move.block], self.plan.blocks[move.to]
        if source.space == target.space or target.start != step or not source.start <= step < source.end:
            _refuse(f"{where}: expected blocks {move.block} and {move.to} in two spaces and both alive from step {step}")
        if move.block in written or len({output for output, _ in node.views}) == sum(each >= 0 for each in node.outputs):
            _refuse(f"{where}: step {step} ({node.name}) writes block {move.block}, or takes no time to move beneath")
        moved = self.contents[move.block] & set(target.tensors)
        if not moved or self.contents[move.to]:
            _refuse(f"{where}: expected block {move.to} to be empty and to take what is in block {move.block}")
        if any(target.start_of(tensor) != source.start_of(tensor) for tensor in moved) or source.size_bytes > target.size_bytes:
            _refuse(f"{where}: expected block {move.to} to be as large as block {move.block}, each tensor where it was")
        self.contents[move.to] = moved
        self.block_of.update(dict.fromkeys(moved, move.to))
        reads, writes = self.plan.spaces[source.space].read_bytes_per_s, self.plan.spaces[target.space].write_bytes_per_s
        if self.time_ps is not None and step_ps is not None and reads is not None and writes is not None:
            move_ps = _ps(source.size_bytes, min(reads, writes))
            self.time_ps += max(0, move_ps - step_ps) if self.plan.dma else move_ps
        else:
            self.time_ps = None

    def _step_ps(self, step: int, node: EdgeNode) -> int | None:
        """How long a step takes; also adds it up. What a cut reads and writes has gone through `check_cut`."""
        traffic = node.attributes.get("traffic")
        read_bytes = {} if traffic is None else dict(zip(node.inputs, traffic.read_bytes, strict=True))
        looked_at = {node.inputs[source] for _, source in node.views}
        views = {node.outputs[output] for output, _ in node.views}
        total: int | None = 0
        for tensor in {each for each in node.inputs if each >= 0} - looked_at:
            nbytes = read_bytes.get(tensor, self.graph.tensors[tensor].size_bytes)
            if tensor in self.fixed:
                rate = self.plan.constants_bytes_per_s
                total = None if total is None else total + (0 if rate is None else _ps(nbytes, rate))
            elif tensor in self.block_of:
                total = _plus(total, nbytes, self.plan.spaces[self.plan.blocks[self.block_of[tensor]].space].read_bytes_per_s)
        for tensor in {each for each in node.outputs if each >= 0} - views:
            index = self._future_block(tensor, step, node)
            rate = None if index is None else self.plan.spaces[self.plan.blocks[index].space].write_bytes_per_s
            total = _plus(total, self.graph.tensors[tensor].size_bytes, rate)
        if traffic is not None and (traffic.ring_written_bytes or traffic.ring_read_bytes):
            rings = next(iter(self._workspaces(step, node)), None)
            memory = None if rings is None else self.plan.spaces[rings.space]
            total = _plus(total, traffic.ring_written_bytes, None if memory is None else memory.write_bytes_per_s)
            total = _plus(total, traffic.ring_read_bytes, None if memory is None else memory.read_bytes_per_s)
        if total is not None and self.plan.macs_per_s is not None:
            total = max(total, _ps(node.macs, self.plan.macs_per_s))
        self.time_ps = None if total is None or self.time_ps is None else self.time_ps + total
        return total

    def _future_block(self, tensor: int, step: int, node: EdgeNode) -> int | None:
        """Where a step is about to write a tensor; None where that is not clear, which running the step will refuse."""
        sources = {node.inputs[source] for output, source in node.in_place if node.outputs[output] == tensor}
        known = [self.block_of[each] for each in sources if each in self.block_of]
        over = [index for index in known if tensor in self.plan.blocks[index].tensors]
        fresh = [
            index
            for index, block in enumerate(self.plan.blocks)
            if tensor in block.tensors and index not in self.targets and _may_begin(block, step)
        ]  # fmt: skip
        return next(iter(over + fresh), None)


def _may_begin(block: EdgeBlock, step: int) -> bool:
    """Whether a tensor may come into being: where a block starts, or in one of parts."""
    return block.start == step or (bool(block.starts) and block.start < step < block.end)


def _plus(total: int | None, nbytes: int, rate: float | None) -> int | None:
    return None if total is None or rate is None else total + _ps(nbytes, rate)


def _ps(amount: int, rate: float) -> int:
    return ceil(Fraction(amount * PS_PER_S) / Fraction(rate))


def _check_promises(plan: EdgePlan) -> None:
    if plan.least is not None and not 0 <= plan.least < len(plan.spaces):
        _refuse(f"least: expected a space from 0 to {len(plan.spaces) - 1}, got {plan.least}")
    if plan.bound > plan.value:
        _refuse(f"bound: expected at most the plan's own {plan.value}, got {plan.bound}")
    if (plan.status is Status.OPTIMAL) != (plan.bound == plan.value) and plan.status is not Status.UNKNOWN:
        _refuse(f"status: expected optimal where the bound {plan.bound} is the plan's own {plan.value}, got {plan.status.name.lower()}")
    if plan.status is Status.INFEASIBLE:
        _refuse("status: expected a plan that is feasible or optimal, got infeasible")
