"""The inverse of rematerialisation and swapping: a sequence without some of its repetitions and copies, and still right.

A tensor that is not made again is the one that was there before, kept for longer; one that is not dropped stays, and need not be loaded.
So taking an entry out asks for others to go with it: a drop before which the tensor comes back goes with that return, a load goes with the
drop that it made good, and all of them with the store. `rematerialise` of what is left has fewer copies, down to the graph itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Storage
from lowtide.remat.entries import Codes, Deed
from lowtide.remat.offload import movable_storages, offloadable_storages


def extras(graph: Graph, sequence: Sequence[int]) -> tuple[int, ...]:
    """The places of a sequence that can be taken out: runs that repeat a node, stores, drops and loads."""
    codes, seen, found = Codes(len(graph.nodes), len(movable_storages(graph))), set(), []
    for place, entry in enumerate(sequence):
        deed, _ = codes.read(entry)
        if deed is not Deed.RUN or entry in seen:
            found.append(place)
        seen.add(entry)
    return tuple(found)


def without(graph: Graph, sequence: Sequence[int], places: Iterable[int]) -> tuple[int, ...]:
    """A right sequence without the entries at `places`, and without those others that make no sense without them.

    Raises CheckError for a place that is not one of `extras`: every node has to run once.
    """
    may_go, gone = set(extras(graph, sequence)), set(places)
    if gone - may_go:
        raise CheckError(f"places: expected some of a run that repeats a node, a store, a drop or a load; got {min(gone - may_go)}")
    events = _events(graph, sequence, may_go)
    while True:
        more = {place for own in events for place in _senseless(own, gone)}
        if not more:
            return tuple(entry for place, entry in enumerate(sequence) if place not in gone)
        gone |= more


class _Event(NamedTuple):
    """What an entry does with one storage."""

    place: int
    deed: Deed  # RUN: makes it
    reads: bool  # it has to be there
    may_go: bool
    needless: bool  # a load of what is there all the same


def _events(graph: Graph, sequence: Sequence[int], may_go: set[int]) -> list[list[_Event]]:
    """By storage that is ever stored: what is done with it, in the sequence's order; what is offloaded is there before and after."""
    movable = movable_storages(graph)
    codes = Codes(len(graph.nodes), len(movable))
    found: dict[Storage, list[_Event]] = {movable[index]: [] for deed, index in map(codes.read, sequence) if deed is Deed.STORE}
    offloaded = found.keys() & set(offloadable_storages(graph))
    here: set[Storage] = set(offloaded)
    for storage in offloaded:
        found[storage] = [_Event(-1, Deed.RUN, False, False, False), _Event(len(sequence), Deed.RUN, True, False, False)]
    for place, entry in enumerate(sequence):
        deed, index = codes.read(entry)
        if deed is Deed.RUN:
            node = graph.nodes[index]
            read = {value.storage for value in (*node.inputs, *(before for before, _ in node.writes))}
            made = {value.storage for value in node.outputs if value is not None} - {value.storage for value in node.inputs}
            for storage in read & found.keys():
                found[storage].append(_Event(place, deed, True, False, False))
            for storage in made & found.keys():
                found[storage].append(_Event(place, deed, False, place in may_go, False))
                here.add(storage)
            continue
        storage = movable[index]
        if storage in found:
            found[storage].append(_Event(place, deed, deed is not Deed.LOAD, True, storage in here))
        (here.discard if deed is Deed.DROP else here.add)(storage)
    return [sorted(own) for own in found.values()]


def _senseless(events: Sequence[_Event], gone: set[int]) -> set[int]:
    """Of what is left to be done with one storage: entries that make no sense any more, at least one if there are any."""
    left = [event for event in events if event.place not in gone]
    store = next((event.place for event in left if event.deed is Deed.STORE), -1)
    copies = {event.place for event in left if event.deed in (Deed.DROP, Deed.LOAD)}
    if store < 0:
        return copies
    here, pending, last_drop = False, False, -1
    for event in left:
        if event.reads and not here:
            return {last_drop}  # it would be wanted before it is back
        comes = not event.reads
        if comes and event.may_go and (pending or (here and event.deed is Deed.LOAD and not event.needless)):
            return {event.place}  # it is there all the while
        if event.deed is Deed.DROP:
            here, pending, last_drop = False, False, event.place
        elif event.deed is Deed.STORE:
            pending = True
        elif comes:
            here = True
    return {store} if pending else set()
