"""What an ordering problem is built from, one `Task` a node, and the checks that it must pass. Shares no code with any solver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from lowtide.errors import FormatError

LIMIT_BYTES = 2**62  # of all sizes together: sums of them then never overflow an int64
_SHOWN = 8  # of a list in a message


@dataclass(frozen=True, slots=True)
class Task:
    """One node of an ordering problem: tensors and other nodes by index."""

    name: str
    makes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()  # distinct, none that the node makes
    after: tuple[int, ...] = ()  # nodes that come before this one for other reasons than the tensors it reads
    workspace_bytes: int = 0
    takes: tuple[tuple[int, int], ...] = ()  # (tensor, the caller's index for it): makes[0] may take over its memory, the preferred first


def checked_producers(tensor_bytes: Sequence[int], tasks: Sequence[Task], kept: Sequence[int], resident_bytes: int) -> list[int]:
    """[m] the node that makes each tensor, -1 where none does; raises FormatError where tensors or sizes are wrong."""
    _check_sizes(tensor_bytes, tasks, resident_bytes)
    _check_known("the list of kept tensors", "tensor", kept, len(tensor_bytes))
    producer = [-1] * len(tensor_bytes)
    for index, task in enumerate(tasks):
        where = _where(index, tasks)
        _check_known(f"{where}: makes", "tensor", task.makes, len(tensor_bytes))
        _check_known(f"{where}: reads", "tensor", task.reads, len(tensor_bytes))
        for tensor in task.makes:
            if producer[tensor] >= 0:
                other = _where(producer[tensor], tasks)
                raise FormatError(f"{where}: expected to make tensors that no other node makes, got tensor {tensor} of {other}")
            producer[tensor] = index
        if task.takes:
            _check_takes(where, task, tensor_bytes)
    return producer


def checked_predecessors(producer: Sequence[int], tasks: Sequence[Task]) -> list[list[int]]:
    """[n] the distinct nodes before each node, ascending; raises FormatError where they form a cycle."""
    preds = []
    for index, task in enumerate(tasks):
        if task.after:
            _check_known(f"{_where(index, tasks)}: after", "node", task.after, len(tasks))
        before = {producer[tensor] for tensor in task.reads}
        before.update(task.after)
        before.discard(-1)
        preds.append(sorted(before))
    # Most problems are written in an order that is right already, which proves that there is no cycle.
    if any(before and before[-1] >= index for index, before in enumerate(preds)):
        _check_acyclic(preds, tasks)
    return preds


def _check_sizes(tensor_bytes: Sequence[int], tasks: Sequence[Task], resident_bytes: int) -> None:
    """Every size lies in [0, LIMIT_BYTES], and so does the sum of all."""
    for tensor, nbytes in enumerate(tensor_bytes):
        if not 0 <= nbytes <= LIMIT_BYTES:
            _refuse_bytes(f"tensor {tensor}: bytes", nbytes, _made_by(tensor, tasks))
    for index, task in enumerate(tasks):
        if task.workspace_bytes:
            _check_bytes(f"{_where(index, tasks)}: workspace_bytes", task.workspace_bytes)
    _check_bytes("resident_bytes", resident_bytes)
    workspace_bytes = max((task.workspace_bytes for task in tasks), default=0)
    _check_bytes("the sum of all tensors, resident_bytes and the largest workspace", sum(tensor_bytes) + resident_bytes + workspace_bytes)


def _check_bytes(what: str, nbytes: int) -> None:
    if not 0 <= nbytes <= LIMIT_BYTES:
        _refuse_bytes(what, nbytes)


def _refuse_bytes(what: str, nbytes: int, remark: str = "") -> NoReturn:
    shown = str(nbytes) if abs(nbytes) < 10**30 else "a number of more than 30 digits"
    raise FormatError(f"{what}: expected 0 to 2**62 bytes, got {shown}{remark}")


def _made_by(tensor: int, tasks: Sequence[Task]) -> str:
    """Which node makes a tensor, for people who know nodes by name and tensors not at all."""
    return next((f", made by {_where(index, tasks)}" for index, task in enumerate(tasks) if tensor in task.makes), "")


def _check_known(where: str, noun: str, ids: Sequence[int], count: int) -> None:
    """`ids` are distinct numbers of the `count` that there are."""
    for id_ in ids:
        if not 0 <= id_ < count:
            raise FormatError(f"{where}: expected a {noun} from 0 to {count - 1}, got {id_}")
    if len(set(ids)) < len(ids):
        twice = next(id_ for id_, count in Counter(ids).items() if count > 1)
        raise FormatError(f"{where}: expected each {noun} once, got {noun} {twice} twice")


def _check_takes(where: str, task: Task, tensor_bytes: Sequence[int]) -> None:
    """What may be taken over is read by the node and as large as its first output, which exists."""
    if not task.makes:
        raise FormatError(f"{where} may take over memory but makes no tensor: expected at least one in `makes`")
    candidates = [tensor for tensor, _ in task.takes]
    unread = set(candidates) - set(task.reads)
    if unread or len(set(candidates)) < len(candidates):
        reads = f"{list(task.reads[:_SHOWN])}{' and more' * (len(task.reads) > _SHOWN)}"
        raise FormatError(f"{where}: expected reuses of distinct tensors that it reads {reads}, got {candidates[:_SHOWN]}")
    for tensor, slot in task.takes:
        if tensor_bytes[tensor] != tensor_bytes[task.makes[0]]:
            expected = f"{tensor_bytes[task.makes[0]]} bytes as its first output (tensor {task.makes[0]}) has"
            raise FormatError(f"{where}: expected a reuse of {expected}, got tensor {tensor} of {tensor_bytes[tensor]} bytes")
        if not 0 <= slot < 2**31:
            raise FormatError(f"{where}: expected the index of a reuse from 0 to 2**31 - 1, got {slot}")


def _check_acyclic(preds: Sequence[Sequence[int]], tasks: Sequence[Task]) -> None:
    """Runs nodes as their predecessors are done: whatever is left over holds a cycle."""
    waiting = [len(before) for before in preds]
    succs: list[list[int]] = [[] for _ in preds]
    for node, before in enumerate(preds):
        for pred in before:
            succs[pred].append(node)
    ready = [node for node, count in enumerate(waiting) if count == 0]
    while ready:
        for node in succs[ready.pop()]:
            waiting[node] -= 1
            if waiting[node] == 0:
                ready.append(node)
    if any(waiting):
        cycle = _cycle(preds, waiting)
        raise FormatError(f"nodes wait for one another in a cycle: {' after '.join(_where(node, tasks) for node in cycle)}")


def _cycle(preds: Sequence[Sequence[int]], waiting: Sequence[int]) -> list[int]:
    """Nodes of one cycle, each after the next, first and last the same; the first few where it is longer."""
    node = next(node for node, count in enumerate(waiting) if count)
    path: dict[int, None] = {}
    while node not in path:  # each waiting node has a waiting predecessor, so this walk comes back to its own path
        path[node] = None
        node = next(pred for pred in preds[node] if waiting[pred])
    trail = list(path)
    return [*trail[trail.index(node) :], node][:_SHOWN]


def _where(index: int, tasks: Sequence[Task]) -> str:
    return f"node {index} ({tasks[index].name})"
