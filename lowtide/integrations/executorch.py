"""ExecuTorch's programs in lowtide's order, at lowtide's addresses.

    planning = MemoryPlanningPass([Space("sram", 256 * 1024, 8e9, 8e9), Space("psram", 8 * 2**20, 1e8, 1e8)])
    program = to_edge(exported).to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
    print(planning.plans[0])

ExecuTorch keeps the order of the export and places tensors by size (`greedy`). Here both are searched as for any network (`lowtide.edge`):
in one memory for the least bytes, in several for the least time by reads and writes. Each method and each branch of a program has a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from executorch.exir import memory
from executorch.exir.memory_planning import (
    MemoryAlgoResult,
    MemoryPlanningAlgorithmSuite,
    SpecAllocResult,
    get_node_tensor_specs,
    update_all_tensors_lifetime,
)
from executorch.exir.passes import MemoryPlanningPass as ExirPass
from torch.fx import GraphModule, Node

from lowtide.api.edge import plan_edge
from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
from lowtide.edge.plan import EdgePlan, Space, rounded_up
from lowtide.edge.solve import EdgeEffort
from lowtide.errors import FormatError

Specs = Sequence[Any]  # executorch's TensorSpec


class MemoryPlanningPass(ExirPass):
    """What `ExecutorchBackendConfig(memory_planning_pass=...)` takes. `plans` has what was decided, one plan a method or branch.

    memories: the arenas of the runtime from `mem_id` 1 up. Several need rates, and sizes within which the time is made least.
    reorder: whether operators may run in another order. Programs that write to their buffers keep theirs.
    effort: how far to search.
    settings: those of ExecuTorch's pass: `alignment`, `alloc_graph_input`, `alloc_graph_output`, `alloc_mutable_buffers` ...

    Raises BudgetError, with what would do, where a method does not fit. Raises FormatError for memories that make no sense, for tensors
    that a pass has put into an arena before, and for those of other devices than the CPU.
    """

    def __init__(
        self, memories: Sequence[Space] = (Space("memory"),), *, reorder: bool = True, effort: EdgeEffort | None = None, **settings: Any
    ) -> None:
        for each in memories:
            if not isinstance(each, Space):
                raise FormatError(f"memories: expected values like Space('sram', 524288, 2e9, 2e9), got {each!r}")
        if not isinstance(reorder, bool):
            raise FormatError(f"reorder: expected True or False, got {reorder!r}")
        if settings.get("share_mutable_buffers") and len(memories) > 1:
            raise FormatError("share_mutable_buffers: expected one memory, as ExecuTorch keeps shared buffers in the second arena")
        self.plans: list[EdgePlan] = []
        planner = _Planner(tuple(memories), reorder, replace(effort or EdgeEffort(), moves=False), self.plans)
        super().__init__(memory_planning_algo=MemoryPlanningAlgorithmSuite([planner]), **settings)


@dataclass(frozen=True)
class _Planner:
    """An algorithm for ExecuTorch's suite."""

    memories: tuple[Space, ...]
    reorder: bool
    effort: EdgeEffort
    plans: list[EdgePlan]

    __name__ = "lowtide"  # the suite tells algorithms apart by it

    def __call__(self, alignment: int, specs: Specs, module: GraphModule, signature: Any = None, extra_padding: int = 0) -> Any:
        for spec in specs:
            spec.realign(alignment)
        _check(specs)
        method = _Method.of(module, signature, specs, self.reorder)
        taken = self._taken_bytes(module, alignment)  # before all else
        room = [_left(space, alignment, nbytes + extra_padding) for space, nbytes in zip(self.memories, taken, strict=True)]
        plan = plan_edge(method.graph, room, effort=self.effort)
        self.plans.append(plan)
        method.run_in(plan.order)
        for spec in {id(each): each for node in module.graph.nodes for each in _tensors(node)}.values():
            spec.lifetime = [None, None]
        update_all_tensors_lifetime(module, signature)
        at = {space.name: index for index, space in enumerate(self.memories)}
        result = MemoryAlgoResult({}, [0, *taken])
        for block in plan.blocks:
            arena = at[plan.spaces[block.space].name]
            for tensor in block.tensors:
                spec = method.specs.get(tensor)
                if spec is not None:
                    result.spec_dict[spec] = SpecAllocResult(arena + 1, 0, taken[arena] + block.offset_bytes + block.start_of(tensor))
        for space, needed in zip(plan.spaces, plan.arena_bytes, strict=True):
            result.bufsizes[at[space.name] + 1] += needed + (extra_padding if needed else 0)
        for spec in specs:
            root, start = _root(spec)
            where = result.spec_dict.get(root) or SpecAllocResult(1, 0, 0)  # of no bytes
            result.spec_dict[spec] = replace(where, mem_offset=where.mem_offset + start)
        return result

    def _taken_bytes(self, module: GraphModule, alignment: int) -> list[int]:
        """What branches need of each memory. Those of one `cond` share it, and no others.

        The runtime leaves a result in the memory of the branch that made it. ExecuTorch has all branches of a method share theirs, so that
        one may write over another's result before it is read. Raises FormatError for loops, which hand such results on to themselves.
        """
        aligns, taken, known = [math.lcm(each.align_bytes, alignment) for each in self.memories], [0] * len(self.memories), set[int]()
        for node in module.graph.nodes:
            branches = [getattr(module, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
            branches = [each for each in branches if isinstance(each, GraphModule)]
            if branches and (node.target is not torch.ops.higher_order.cond or not known.isdisjoint(map(id, branches))):
                raise FormatError(
                    f"{node.name}: expected torch.cond with branches of its own, got {node.target}: use ExecuTorch's own pass"
                )
            begin = [rounded_up(each, align) for each, align in zip(taken, aligns, strict=True)]
            for branch in branches:
                _shift(branch, begin)
                taken = [max(both) for both in zip(taken, branch.meta["non_const_buffer_sizes"][1:], strict=True)]
            known.update(map(id, branches))
        return [rounded_up(each, align) for each, align in zip(taken, aligns, strict=True)]


def _shift(module: GraphModule, by_bytes: Sequence[int]) -> None:
    """Have all that a branch places, and branches within it, begin later."""
    within = [each for each in module.modules() if isinstance(each, GraphModule)]
    for spec in {id(each): each for inner in within for node in inner.graph.nodes for each in _tensors(node)}.values():
        if spec.mem_offset is not None and spec.mem_id is not None:
            spec.mem_offset += by_bytes[spec.mem_id - 1]
    for inner in within:
        sizes = inner.meta["non_const_buffer_sizes"]
        inner.meta["non_const_buffer_sizes"] = [0, *(each + more for each, more in zip(sizes[1:], by_bytes, strict=True))]


def _check(specs: Specs) -> None:
    for spec in specs:
        if spec.mem_id is not None:
            raise FormatError(f"{list(spec.shape)}: expected no mem_id before planning, got {spec.mem_id}: leave out the pass that sets it")
        if spec.device.name != "CPU":
            raise FormatError(f"{list(spec.shape)}: expected a tensor of the CPU, got one of {spec.device.name}")


def _left(space: Space, alignment: int, taken_bytes: int) -> Space:
    room = None if space.capacity_bytes is None else space.capacity_bytes - taken_bytes
    if room is not None and room < 1:
        raise FormatError(f"memory {space.name}: expected more than the {taken_bytes} bytes of branches, got {space.capacity_bytes}")
    return replace(space, capacity_bytes=room, align_bytes=math.lcm(space.align_bytes, alignment))


@dataclass(frozen=True)
class _Method:
    """A method's graph of torch.fx, and the same as a network: operators by position, in the order of the graph."""

    module: GraphModule
    nodes: tuple[Node, ...]
    graph: EdgeGraph
    specs: dict[int, Any]  # by tensor of the network

    @classmethod
    def of(cls, module: GraphModule, signature: Any, specs: Specs, reorder: bool) -> _Method:
        nodes = tuple(node for node in module.graph.nodes if node.op == "call_function" and node.target is not memory.alloc)
        network = _MethodNetwork({id(spec) for spec in specs})
        for node in module.graph.nodes:
            if node.op == "placeholder":
                network.give(node, stays=_is_mutable_buffer(node, signature))
        kept = not reorder or any(map(_writes, nodes))
        for node in nodes:
            network.add(node, waits=kept, in_turn=_in_turn(node))
        return cls(module, nodes, network.graph(_output(module)), network.specs)

    def run_in(self, order: Sequence[int]) -> None:
        """Puts the nodes into this order, each behind the tensors that are made for it."""
        output = _output(self.module)
        for index in order:
            if index < len(self.nodes):
                node = self.nodes[index]
                for each in (*(each for each in node.all_input_nodes if each.target is memory.alloc), node):
                    output.prepend(each)
        self.module.graph.lint()
        self.module.recompile()


class _MethodNetwork:
    """A network that grows by one operator at a time: of tensors that are to be placed, all else by who waits for whom."""

    def __init__(self, planned: set[int]) -> None:
        self._planned = planned
        self.specs: dict[int, Any] = {}
        self._tensors: list[EdgeTensor] = []
        self._nodes: list[EdgeNode] = []
        self._inputs: list[int] = []
        self._kept: list[int] = []
        self._tensor_of: dict[int, int] = {}  # by the id of its spec
        self._index: dict[Node, int] = {}
        self._in_turn: list[int] = []  # the last operator that keeps its turn

    def give(self, node: Node, *, stays: bool) -> None:
        new = self._make(node)
        self._inputs += new
        self._kept += new if stays else []

    def add(self, node: Node, *, waits: bool, in_turn: bool) -> None:
        index = len(self._nodes)
        after = {self._index[each] for each in node.all_input_nodes if each in self._index}
        after |= {index - 1} if waits and index else set()
        after |= {*self._in_turn} if in_turn else set()
        reads = dict.fromkeys(tensor for each in node.all_input_nodes for tensor in self._there(each))
        self._nodes.append(EdgeNode(node.name, str(node.target), "", tuple(reads), self._make(node), after=tuple(sorted(after))))
        self._index[node] = index
        self._in_turn = [index] if in_turn else self._in_turn

    def graph(self, output: Node) -> EdgeGraph:
        """A buffer that is written has a tensor of its own at the end, which no operator makes."""
        new = self._make(output)
        if new or not self._nodes:
            self._nodes.append(EdgeNode("output", "output", "", (), new, after=tuple(range(len(self._nodes)))))
        kept = tuple(dict.fromkeys([*self._there(output), *self._kept]))
        return EdgeGraph("method", tuple(self._tensors), tuple(self._nodes), tuple(self._inputs), kept)

    def _there(self, node: Node) -> list[int]:
        roots = [id(_root(spec)[0]) for spec in _tensors(node)]
        return [self._tensor_of[each] for each in roots if each in self._tensor_of]

    def _make(self, node: Node) -> tuple[int, ...]:
        new = []
        for spec in _tensors(node):
            root, _ = _root(spec)
            if id(root) in self._planned and id(root) not in self._tensor_of:
                index = self._tensor_of[id(root)] = len(self._tensors)
                self._tensors.append(EdgeTensor(node.name, tuple(root.shape), str(root.dtype), root.allocated_memory))
                self.specs[index] = root
                new.append(index)
        return tuple(new)


def _output(module: GraphModule) -> Node:
    return module.graph.output_node()


def _tensors(node: Node) -> Iterator[Any]:
    return (spec for spec in get_node_tensor_specs(node) if spec is not None)


def _root(spec: Any) -> tuple[Any, int]:
    """The tensor in whose bytes this one lies, and where: mostly itself."""
    start = 0
    while spec.storage_base is not None:
        spec, start = spec.storage_base, start + spec.storage_base_offset
    return spec, start


def _is_mutable_buffer(node: Node, signature: Any) -> bool:
    name = None if signature is None else signature.inputs_to_buffers.get(node.target)
    return name is not None and name in signature.buffers_to_mutate.values()


def _writes(node: Node) -> bool:
    """Whether a node writes over what others read: a buffer, or a part of another tensor."""
    if any(spec.storage_base is not None for spec in _tensors(node)):
        return True
    schema = getattr(node.target, "_schema", None)  # ExecuTorch's wrapped operators have it, too
    written = () if schema is None else [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return any(not each.is_out for each in written)


def _in_turn(node: Node) -> bool:
    """Whether a node does something beside its result: it keeps its place among others of the kind."""
    tags = getattr(node.target, "tags", None)
    if tags is None:  # no operator: a delegate, say
        return getattr(node.target, "__name__", "") not in ("getitem", "view")
    return not node.users or torch.Tag.nondeterministic_seeded in tags
