"""Swapping: sending a storage to the host's memory and fetching it back before it is needed (MAGIS, section 5.2).

`store` begins to copy a whole storage to the host, `drop` is the last use of it on the device, `load` makes a new storage and begins to
fill it. What moves is the storage: the copy on the host stands for the one value that the maker gave on it, and whoever wants a view takes
it of the present copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lowtide.cost.memory import counted_storages
from lowtide.ir.graph import Graph, Kind, Node, Source, Storage, Value
from lowtide.ir.operators.nodes import begins_collective, homes_of, is_transfer, is_view
from lowtide.ir.operators.row import DROP, LOAD, STORE


class Base(NamedTuple):
    """The value that stands for a storage: the one that its maker gave, or the input."""

    value: Value
    source: Source | None = None


def movable_storages(graph: Graph) -> tuple[Storage, ...]:
    """The storages that entries of a sequence can name, in the order of their numbers: the counted ones, then those to be offloaded."""
    return (*counted_storages(graph), *offloadable_storages(graph))


def offloadable_storages(graph: Graph) -> tuple[Storage, ...]:
    """The inputs that can be offloaded: parameters and optimizer state of one value that the graph does not return.

    This is state that the caller lends. It is there again when the program is over. What has been written is not offloaded after that.
    """
    device, values = _device(graph), Counter(value.storage for value in graph.inputs)
    returned = {value.storage for value in graph.outputs}
    offloaded = (storage for storage, count in values.items() if storage.kind in _OFFLOADABLE and count == 1 and storage not in returned)
    return tuple(storage for storage in offloaded if _moves(storage, device))


def storable(graph: Graph, *, swap_state: bool = False) -> tuple[bool, ...]:
    """By movable storage: whether it can be stored, dropped and loaded; what could be offloaded only with `swap_state`."""
    moved, counted = bases(graph), len(counted_storages(graph))
    return tuple(storage in moved and (swap_state or position < counted) for position, storage in enumerate(movable_storages(graph)))


def bases(graph: Graph) -> dict[Storage, Base]:
    """The storages that can be stored, and what stands for each.

    A storage that the graph returns has to be there in the end, a donated one is the caller's to free, one without bytes or off the
    device gains nothing, what a collective has begun is not whole, and what lies on the host between steps is copied as the graph says.
    And where a storage has other values than the maker's one and views of it, nobody could take those anew.
    """
    device = _device(graph)
    makers: dict[Storage, Base] = {}
    copied = (value for _, node in between_steps(graph) for value in (*node.inputs, *node.results))
    fixed = {value.storage for value in (*graph.inputs, *graph.outputs, *copied)}
    for node in graph.nodes:
        for value in () if is_view(node) else node.outputs:
            if value is None:
                continue
            if value.storage in makers or begins_collective(node):
                fixed.add(value.storage)
            makers[value.storage] = Base(value, node.source)
    offloadable = set(offloadable_storages(graph))
    own = {value.storage: Base(value) for value in graph.inputs if value.storage in offloadable}
    return own | {storage: base for storage, base in makers.items() if storage not in fixed and _moves(storage, device)}


def store(value: Value, name: str, source: Source | None) -> Node:
    """Begin to copy the storage of `value` to the host: the result, of that name, looks like it and lies there."""
    there = Storage(name, value.storage.nbytes, "cpu", Kind.HOST)
    return Node(STORE, (value,), (replace(value, name=name, storage=there),), source=source)


def drop(value: Value, there: Value, source: Source | None) -> Node:
    """Free `value` on the device, once what is `there` on the host is whole."""
    return Node(DROP, (value, there), (), source=source)


def drop_offloaded(value: Value, there: Value, name: str) -> Node:
    """The same of what the caller owns, who holds on to it: so it is emptied, which is a write, and every reader comes before."""
    gone = replace(value, name=name, version=value.version + 1)
    return Node(DROP, (value, there), (), writes=((value, gone),))


def load(there: Value, like: Value, name: str, source: Source | None, after: tuple[Node, ...] = ()) -> Node:
    """Begin to fetch what is `there` on the host into a new storage like that of `like`, or into the caller's own, `after` its drop."""
    here = replace(like.storage, name=name)
    return Node(LOAD, (there,), (replace(like, name=name, storage=here, version=0),), after=after, source=source)


_OFFLOADABLE = (Kind.PARAMETER, Kind.STATE)


def _device(graph: Graph) -> str:
    return max((value.storage.device for value in _tensors(graph)), default="cpu")


def between_steps(graph: Graph) -> Iterator[tuple[int, Node]]:
    """The nodes that copy what lies on the host between steps, and their indices."""
    homes = homes_of(graph)
    for index, node in enumerate(graph.nodes) if homes else ():
        if is_transfer(node) and any(value.storage in homes for value in (*node.inputs, *node.results)):
            yield index, node


def _moves(storage: Storage, device: str) -> bool:
    """Whether moving a storage frees bytes of that device."""
    if storage.kind in (Kind.HOST, Kind.SCALAR) or storage.device != device:
        return False
    return not isinstance(storage.nbytes, int) or storage.nbytes > 0


def _tensors(graph: Graph) -> Iterator[Value]:
    values = (*graph.inputs, *(value for node in graph.nodes for value in node.outputs if value is not None))
    return (value for value in values if value.storage.kind not in (Kind.HOST, Kind.SCALAR))
