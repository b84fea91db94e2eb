"""A network as a bare problem: storages in place of tensors, tasks in place of operators, times in place of rates.

Views are of their input's storage. Where the parts of one are made one by one, a task of its own, behind the operators, makes the storage
before the first part is written, and those that make parts read it.

A result that may be written over an input of as many bytes may take that storage's place, where the
input dies: which one does is decided with the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter

from lowtide.edge.cuts import CutTraffic
from lowtide.edge.graph import EdgeGraph, EdgeNode, SharedBytes, shared_bytes, view_starts
from lowtide.edge.plan import PS_PER_S, Space, check_rate, rounded_up
from lowtide.errors import FormatError
from lowtide.problems.order import OrderProblem, Task


@dataclass(frozen=True, slots=True)
class EdgeTask:
    """One operator: storages by index."""

    name: str
    makes: tuple[int, ...]
    reads: tuple[int, ...]  # distinct, none that it makes; those that it only views too
    takes: tuple[int, ...]  # of these, the storages that makes[0] may be written over
    before: tuple[int, ...]  # tasks that run before it
    read_traffic: tuple[tuple[int, int], ...]  # (storage, bytes) of each tensor
    write_traffic: tuple[tuple[int, int], ...]
    macs_ps: int
    constants_ps: int
    workspace_bytes: int
    only_views: bool
    ring_bytes: tuple[int, int] = (0, 0)  # that a cut writes to its workspace, and reads from it


@dataclass(frozen=True)
class EdgeProblem:
    """n tasks over m storages, to be put into an order, and the storages into spaces. Raises FormatError as `of` says."""

    tasks: tuple[EdgeTask, ...]
    size_bytes: tuple[int, ...]  # [m]
    tensors: tuple[tuple[int, ...], ...]  # [m] of the graph
    starts: tuple[tuple[int, ...], ...]  # [m] of each tensor in its storage
    operators: int  # of the tasks: those behind them make storages of parts
    given: frozenset[int]  # storages that the caller gives
    kept: frozenset[int]  # storages that live to the end
    spaces: tuple[Space, ...]
    dma: bool
    constants: frozenset[int] = frozenset()  # storages of weights, which lie where they are put throughout
    flash: int = -1  # the space in which nothing else may lie; -1: there is none, and weights are no storages

    @classmethod
    def of(
        cls,
        graph: EdgeGraph,
        spaces: Sequence[Space],
        *,
        macs_per_s: float | None = None,
        constants_bytes_per_s: float | None = None,
        dma: bool = False,
        constants: Space | None = None,
        weights: Sequence[tuple[int, ...]] | None = None,
    ) -> EdgeProblem:
        """The problem of a graph in these spaces, and with `constants` in one more, for weights that lie in no other.

        weights: which tensors are one storage of weights; left out, those that the same operators read.

        Raises FormatError, which says what was expected: no spaces, two of one name, several of which one has no rates, no operators,
        a tensor that nobody makes or two make, a negative size, operators in a cycle.
        """
        _check_spaces(spaces, constants)
        check_rate("macs_per_s", macs_per_s)
        check_rate("constants_bytes_per_s", constants_bytes_per_s)
        _check_graph(graph)
        align_bytes = 0 if constants is None else max(memory.align_bytes for memory in (*spaces, constants))
        storages = _Storages(graph, align_bytes, weights)
        return storages.problem((*spaces, *(() if constants is None else (constants,))), macs_per_s, constants_bytes_per_s, dma)

    def sizes_in(self, space: int) -> list[int]:
        """[m] the bytes that each storage takes up there, in whole multiples of the alignment."""
        return [rounded_up(size, self.spaces[space].align_bytes) for size in self.size_bytes]

    def order_problem(self, space: int) -> OrderProblem:
        """The order of least bytes, where all lies in one space."""
        tasks = [
            Task(
                task.name,
                makes=task.makes,
                reads=task.reads,
                after=task.before,
                workspace_bytes=rounded_up(task.workspace_bytes, self.spaces[space].align_bytes),
                takes=tuple((storage, slot) for slot, storage in enumerate(task.takes)),
            )
            for task in self.tasks
        ]
        return OrderProblem.of(self.sizes_in(space), tasks, kept=sorted(self.kept))

    def beside_bytes(self, task: EdgeTask, first: int, end: int) -> int:
        """Bytes that are alive, whatever the order, when tasks [first, end) run as this one, beside what they read and make."""
        mask = 0
        for index in range(first, end):
            mask |= self.beside[index]
        for storage in self.constants:
            mask &= ~(1 << storage)
        for storage in (*task.reads, *task.makes, *(each for index in range(first, end) for each in self.tasks[index].makes)):
            mask &= ~(1 << storage)
        finest, total = min(memory.align_bytes for memory in self.spaces), 0
        while mask:
            storage = (mask & -mask).bit_length() - 1
            total += rounded_up(self.size_bytes[storage], finest)
            mask &= mask - 1
        return total

    @cached_property
    def beside(self) -> tuple[int, ...]:
        """[n] as bits the storages that are alive when a task runs, whatever the order, beside its own."""
        n = len(self.tasks)
        before, after, others = [0] * n, [0] * n, [0] * n
        order = list(TopologicalSorter({at: task.before for at, task in enumerate(self.tasks)}).static_order())
        for index in order:
            for earlier in self.tasks[index].before:
                before[index] |= before[earlier] | 1 << earlier
        for index in reversed(order):
            for earlier in self.tasks[index].before:
                after[earlier] |= after[index] | 1 << index
        for storage in range(len(self.size_bytes)):
            makers = [at for at, task in enumerate(self.tasks) if storage in task.makes]
            users = {at for at, task in enumerate(self.tasks) if storage in (*task.reads, *task.makes)}
            mask = sum(1 << user for user in users)
            for index in range(n):
                there = not makers or before[index] >> makers[0] & 1
                if there and index not in users and (storage in self.kept or mask & after[index]):
                    others[index] |= 1 << storage
        return tuple(others)

    def move_ps(self, storage: int, source: int, target: int) -> int:
        """How long it takes to copy a storage from one space to another."""
        return ps(self.size_bytes[storage], min(_rate(self.spaces[source].read_bytes_per_s), _rate(self.spaces[target].write_bytes_per_s)))


def ps(amount: int, rate: float) -> int:
    """Picoseconds for so much at a rate per second, rounded up."""
    over, under = rate.as_integer_ratio()
    return -(-amount * PS_PER_S * under // over)


def _rate(rate: float | None) -> float:
    return 1e18 if rate is None else rate  # unknown, in a single space: nobody asks for the time then


def traffic_ps(problem: EdgeProblem, space: int, nbytes: int, *, writes: bool) -> int:
    """How long a tensor of so many bytes is read or written in a space."""
    memory = problem.spaces[space]
    return ps(nbytes, _rate(memory.write_bytes_per_s if writes else memory.read_bytes_per_s))


def task_ps(problem: EdgeProblem, task: EdgeTask, space_of: Mapping[int, int], workspace: int = 0) -> int:
    """How long a task takes where its storages, and the rings of a cut, lie in these spaces."""
    reads = sum(traffic_ps(problem, space_of[storage], nbytes, writes=False) for storage, nbytes in task.read_traffic)
    writes = sum(traffic_ps(problem, space_of[storage], nbytes, writes=True) for storage, nbytes in task.write_traffic)
    return max(task.macs_ps, task.constants_ps + reads + writes + ring_ps(problem, task, workspace))


def ring_ps(problem: EdgeProblem, task: EdgeTask, space: int) -> int:
    """How long a cut writes to its rings and reads from them, in a space."""
    written, read = task.ring_bytes
    return traffic_ps(problem, space, written, writes=True) + traffic_ps(problem, space, read, writes=False)


def _check_spaces(spaces: Sequence[Space], constants: Space | None) -> None:
    if constants is not None and (not isinstance(constants, Space) or constants.read_bytes_per_s is None):
        raise FormatError(f"constants: expected a memory with a rate to read, like Space('flash', None, 5e7), got {constants!r}")
    if not spaces:
        raise FormatError("expected at least one memory, got none: name one, such as sram=512KiB@2GB/s")
    others = () if constants is None else (constants,)
    for index, memory in enumerate((*spaces, *others)):
        if not isinstance(memory, Space):
            raise FormatError(f"memories: expected values like Space('sram', 524288, 2e9, 2e9), got {memory!r}")
        if memory.name in [other.name for other in (*spaces, *others)[:index]]:
            raise FormatError(f"memories: expected names of their own, got {memory.name} twice")
    slow = next((memory for memory in spaces if memory.read_bytes_per_s is None or memory.write_bytes_per_s is None), None)
    if len(spaces) + len(others) > 1 and slow is not None:
        raise FormatError(f"memory {slow.name}: expected its rates, as in {slow.name}=512KiB@2GB/s: among several memories time decides")
    for memory in spaces:
        if memory.room_bytes == 0:
            raise FormatError(
                f"memory {memory.name}: expected at least its alignment of {memory.align_bytes} bytes, got {memory.capacity_bytes}"
            )


def _check_graph(graph: EdgeGraph) -> None:
    if not graph.nodes:
        raise FormatError(f"{graph.name}: expected at least one operator, got none")
    count = len(graph.tensors)
    for tensor in graph.tensors:
        if not 0 <= tensor.size_bytes < 2**62:
            raise FormatError(f"tensor {tensor.name}: expected 0 bytes or more, got {tensor.size_bytes}")
    there = {index for index, tensor in enumerate(graph.tensors) if tensor.constant} | set(graph.inputs)
    makers: dict[int, EdgeNode] = {}
    for node in graph.nodes:
        for tensor_id in (*node.inputs, *node.outputs):
            if not -1 <= tensor_id < count:
                raise FormatError(f"operator {node.name}: expected tensors from 0 to {count - 1}, got {tensor_id}")
        if node.macs < 0 or node.workspace_bytes < 0:
            raise FormatError(
                f"operator {node.name}: expected macs and a workspace of 0 or more, got {node.macs} and {node.workspace_bytes}"
            )
        if any(not 0 <= index < len(graph.nodes) for index in node.after):
            raise FormatError(f"operator {node.name}: expected to run after operators from 0 to {len(graph.nodes) - 1}, got {node.after}")
        for output, source in (*node.views, *node.in_place):
            if not (0 <= output < len(node.outputs) and 0 <= source < len(node.inputs)) or node.inputs[source] < 0:
                raise FormatError(f"operator {node.name}: expected views and in_place as (output, input), got {(output, source)}")
        if len({output for output, _ in node.in_place}) > 1:  # then a bound would not be one
            raise FormatError(f"operator {node.name}: expected in_place for one of its outputs, got {node.in_place}: leave out the others")
        for output_id, source_id, start in view_starts(graph, node):
            view, viewed = sorted((graph.tensors[output_id], graph.tensors[source_id]), key=lambda each: each.size_bytes)
            if abs(start) + view.size_bytes > viewed.size_bytes or (len(node.views) == 1 and view.size_bytes < viewed.size_bytes):
                raise FormatError(
                    f"operator {node.name}: expected views of as many bytes, or of parts that lie one behind the other, got"
                    f" {graph.tensors[output_id].name} in {graph.tensors[source_id].name}: read it without"
                )
        for output_id in node.outputs:
            if output_id >= 0 and (output_id in makers or output_id in there):
                raise FormatError(f"operator {node.name}: expected to make tensors of its own, got {graph.tensors[output_id].name} again")
            makers[output_id] = node
    for node in graph.nodes:
        for read in node.inputs:
            if read >= 0 and read not in makers and read not in there:
                raise FormatError(f"operator {node.name}: reads {graph.tensors[read].name}, which nobody makes or gives")
    for output in graph.outputs:
        if not 0 <= output < count or (output not in makers and output not in there):
            raise FormatError(f"{graph.name}: expected outputs that an operator makes, got tensor {output}")


class _Storages:
    """The storages of a graph: who shares whose bytes by views; weights, too, where they have an alignment."""

    def __init__(self, graph: EdgeGraph, weights_align_bytes: int, weights: Sequence[tuple[int, ...]] | None) -> None:
        self.graph, shared = graph, shared_bytes(graph)
        self.maker = {tensor: index for index, node in enumerate(graph.nodes) for tensor in node.outputs if tensor >= 0}
        read = {tensor for node in graph.nodes for tensor in node.inputs} | set(graph.outputs)
        self.roots: list[int] = []
        self.members: list[tuple[int, ...]] = []
        for group in shared.members:
            roots = sorted(at for at in group if at in shared.made_apart and not graph.tensors[at].constant)
            if roots and (roots[0] in self.maker or any(at in read for at in group)):
                self.roots.append(roots[0])
                self.members.append(tuple(sorted(at for at in group if roots[0] in self.maker or at in read or roots[0] in read)))
        order = sorted(range(len(self.roots)), key=lambda at: min(self.members[at]))
        self.roots, self.members = [self.roots[at] for at in order], [self.members[at] for at in order]
        self.storage_of = {tensor: storage for storage, each in enumerate(self.members) for tensor in each}
        low = [min(shared.start[at] for at in each) for each in self.members]
        self.starts = [tuple(shared.start[at] - low[storage] for at in each) for storage, each in enumerate(self.members)]
        self.sizes = [
            max(start + graph.tensors[at].size_bytes for at, start in zip(each, starts, strict=True))
            for each, starts in zip(self.members, self.starts, strict=True)
        ]
        for tensors in (_weights(graph, shared) if weights is None else weights) if weights_align_bytes else ():
            starts, nbytes = _starts_in_a_row(graph, shared, tensors, weights_align_bytes)
            self.storage_of |= dict.fromkeys(tensors, len(self.members))
            self.roots.append(tensors[0])
            self.members.append(tensors)
            self.starts.append(starts)
            self.sizes.append(nbytes)
        self.has_flash = weights_align_bytes > 0
        self.weights = range(len(order), len(self.members))
        whole = [graph.tensors[root].size_bytes == size for root, size in zip(self.roots, self.sizes, strict=True)]
        self.in_parts = [storage for storage in range(len(order)) if shared.is_in_parts(self.roots[storage]) or not whole[storage]]

    def problem(self, spaces: tuple[Space, ...], macs_per_s: float | None, constants_bytes_per_s: float | None, dma: bool) -> EdgeProblem:
        problem = EdgeProblem(
            tasks=(
                *(self._task(node, macs_per_s, constants_bytes_per_s) for node in self.graph.nodes),
                *(self._parts_task(storage) for storage in self.in_parts),
            ),
            size_bytes=tuple(self.sizes),
            tensors=tuple(self.members),
            starts=tuple(self.starts),
            operators=len(self.graph.nodes),
            given=frozenset(storage for storage, root in enumerate(self.roots) if root not in self.maker),
            kept=frozenset(self.storage_of[tensor] for tensor in self.graph.outputs if tensor in self.storage_of) | {*self.weights},
            spaces=spaces,
            dma=dma,
            constants=frozenset(self.weights),
            flash=len(spaces) - 1 if self.has_flash else -1,
        )
        problem.order_problem(0)  # finds cycles
        return problem

    def _parts_task(self, storage: int) -> EdgeTask:
        """What makes a storage whose parts others write."""
        name = f"parts of {self.graph.tensors[self.roots[storage]].name}"
        return EdgeTask(name, (storage,), (), (), (), (), (), 0, 0, 0, only_views=False)

    def _task(self, node: EdgeNode, macs_per_s: float | None, constants_bytes_per_s: float | None) -> EdgeTask:
        graph, viewed = self.graph, {node.inputs[source] for _, source in node.views}
        views = {node.outputs[output] for output, _ in node.views}
        outputs = [tensor for tensor in node.outputs if tensor >= 0 and tensor not in views]
        inputs = [tensor for tensor in dict.fromkeys(node.inputs) if tensor >= 0]
        parts = [tensor for tensor in outputs if self.storage_of[tensor] in self.in_parts]
        first, takes = self._takes(node, [tensor for tensor in outputs if tensor not in parts])
        makes = [self.storage_of[tensor] for tensor in sorted(outputs, key=lambda tensor: tensor != first) if tensor not in parts]
        cut: CutTraffic | None = node.attributes.get("traffic")
        read_bytes = dict(zip(node.inputs, cut.read_bytes, strict=True)) if cut is not None else {}
        reads = [(tensor, read_bytes.get(tensor, graph.tensors[tensor].size_bytes)) for tensor in inputs if tensor not in viewed]
        constants = [nbytes for tensor, nbytes in reads if tensor not in self.storage_of]
        waits = {len(graph.nodes) + self.in_parts.index(self.storage_of[tensor]) for tensor in parts}
        return EdgeTask(
            name=node.name,
            makes=tuple(makes),
            reads=tuple(dict.fromkeys(self.storage_of[tensor] for tensor in (*inputs, *parts) if tensor in self.storage_of)),
            takes=takes,
            before=tuple(sorted({self.maker[tensor] for tensor in inputs if tensor in self.maker} | {*node.after} | waits)),
            read_traffic=tuple((self.storage_of[each], nbytes) for each, nbytes in reads if each in self.storage_of),
            write_traffic=tuple((self.storage_of[each], graph.tensors[each].size_bytes) for each in outputs),
            macs_ps=0 if macs_per_s is None else ps(node.macs, macs_per_s),
            constants_ps=0 if constants_bytes_per_s is None else sum(ps(nbytes, constants_bytes_per_s) for nbytes in constants),
            workspace_bytes=node.workspace_bytes,
            only_views=not outputs,
            ring_bytes=(0, 0) if cut is None else (cut.ring_written_bytes, cut.ring_read_bytes),
        )

    def _takes(self, node: EdgeNode, outputs: list[int]) -> tuple[int, tuple[int, ...]]:
        """The output that may take a storage's place, and the storages; the first output that may."""
        for tensor in outputs:
            sources = [node.inputs[source] for output, source in node.in_place if node.outputs[output] == tensor]
            takes = dict.fromkeys(self.storage_of[source] for source in sources if self._may_take(node, tensor, source))
            if takes:
                return tensor, tuple(takes)
        return -1, ()

    def _may_take(self, node: EdgeNode, tensor: int, source: int) -> bool:
        if source not in self.storage_of or self.graph.tensors[tensor].size_bytes > self.graph.tensors[source].size_bytes:
            return False
        storage = self.storage_of[source]
        if self.sizes[self.storage_of[tensor]] != self.sizes[storage] or set(self.members[storage]) & set(self.graph.outputs):
            return False
        return all(each == source or self.storage_of.get(each) != storage for each in node.inputs)


def _weights(graph: EdgeGraph, shared: SharedBytes) -> list[tuple[int, ...]]:
    """Weights, with their views, that the same operators read."""
    by_readers: dict[frozenset[int], list[int]] = {}
    for group in shared.members:
        if any(graph.tensors[at].constant for at in group) and not any(at in graph.inputs for at in group):
            readers = frozenset(index for index, node in enumerate(graph.nodes) if not {*group}.isdisjoint(node.inputs))
            by_readers.setdefault(readers, []).extend(group)
    return [tuple(tensors) for readers, tensors in by_readers.items() if readers]


def _starts_in_a_row(graph: EdgeGraph, shared: SharedBytes, tensors: Sequence[int], align_bytes: int) -> tuple[tuple[int, ...], int]:
    """Where each begins, one behind the other but for views, and the bytes of all."""
    begin: dict[int, int] = {}
    end = 0
    for at in tensors:
        if shared.group[at] not in begin:
            begin[shared.group[at]] = end
            end += rounded_up(max(graph.tensors[each].size_bytes for each in shared.members[shared.group[at]]), align_bytes)
    return tuple(begin[shared.group[at]] for at in tensors), end
