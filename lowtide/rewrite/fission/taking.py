"""In which of its arguments a loop may leave its first result: a part of it goes where the part lay that it was made of.

    y = fission.loop(x, w, along=(0, None), into=(0,), ...)  inplace(x, fission.loop)
        def body(x, w, y): each part reads x[start:end] for the last time, then writes y[start:end], which may be the same memory

An argument may be taken where it is cut as the result is, lies just as that does, and no node of the body reads a part of it once the
result is written there; the node that writes may read it if that works element by element. Whether it dies at the loop, others decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.loops import Loop
from lowtide.ir.operators.names import LOOP


def takes(node: Node) -> tuple[tuple[Value, str], ...]:
    """What a loop may leave its first result in, as `Node.inplace` has it. Depends on the order of the body."""
    loop = Loop.of(node)
    result, place, into = next(loop.made, (None, None, None))
    if result is None or place is None or not isinstance(into, int):
        return ()
    return tuple(
        (value, LOOP)
        for value, part, dim in loop.cut
        if dim == into and alike(value, result) and _is_alone(value, node) and _is_read_before(loop.body, part, place)
    )


def takers_first(results: Sequence[Value], arguments: Sequence[Value], dims: Mapping[Value, int]) -> list[Value]:
    """Results in an order: first the largest that may lie where an argument lies, as far as both are cut alike; of those the last."""
    given = [value for value in arguments if value in dims]
    able = [each for each in results if any(dims[value] == dims.get(each) and alike(value, each) for value in given)]
    first = max(reversed(able), key=lambda each: each.storage.nbytes if isinstance(each.storage.nbytes, int) else 0, default=None)
    return list(results) if first is None else [first, *(each for each in results if each is not first)]


def alike(value: Value, result: Value) -> bool:
    """Whether a value lies as a result does, on a storage of the program's own that holds nothing else."""
    here, there = value.storage, result.storage
    same = (value.dtype, value.shape, value.stride, value.offset) == (result.dtype, result.shape, result.stride, result.offset)
    return same and (here.nbytes, here.device) == (there.nbytes, there.device) and not here.kind.caller_owned


def _is_alone(value: Value, node: Node) -> bool:
    """Whether the loop is given nothing else on that storage."""
    return sum(other.storage is value.storage for other in node.inputs) == 1


def _is_read_before(body: Graph, part: Value, place: Value) -> bool:
    """Whether what is read of a part of an argument is so before the result is written, or by what may write it there."""
    written = False
    for node in body.nodes:
        writes = any(before.storage is place.storage for before, _ in node.writes)
        read = [value for value in node.inputs if value.storage is part.storage]
        if read and (written or (writes and not _works_in(node, read))):
            return False
        written = written or writes
    return written


def _works_in(node: Node, read: Sequence[Value]) -> bool:
    """Whether a node may write where all of this lies that it reads."""
    return all(any(value is taken for taken, _ in node.inplace) for value in read)
