"""Are copies to the host and back, and collectives, begun and ended well? A check that shares no code with what writes them.

A store reads a storage that a node made and makes one of kind "host" that looks like it; a drop names both; a load makes such a storage
anew; nothing else touches what is on the host. State that is there between steps is loaded once, and saved as it is in the end. While a
store or save is under way, what it copies must stay: each is followed by a drop of the very storage that it reads.

Offloaded state is an input that the caller lends, a parameter or optimizer state, and the caller's own block all along: its drop empties
it, which is a write, so that every reader comes before; the load after that fills it, and comes after that drop. In the end it is there.

Collectives begin in one order on all processes of a group, and nobody touches what one of them still fills.
"""

from __future__ import annotations

from lowtide.ir.check.verdict import NodeLocation, Verdict, refuse
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import begins_collective, row_of
from lowtide.ir.operators.own import GATHER, READING
from lowtide.ir.operators.row import DROP, LOAD, SAVE, STORE, Collective

_LENDABLE = (Kind.PARAMETER, Kind.STATE)
_ARGUMENTS = {STORE: 1, SAVE: 2, DROP: 2, LOAD: 1}


def check_host_copies(graph: Graph, within: str = "") -> None:
    """Whether all that a graph copies, which is right otherwise, is copied well. Raises CheckError: verdict, node, operator, source."""
    fixed = {value.storage for value in (*graph.inputs, *graph.outputs) if value.storage.kind is not Kind.HOST}
    lendable = {value.storage for value in graph.inputs if value.storage.kind in _LENDABLE} - {value.storage for value in graph.outputs}
    offloaded, homes = _Offloaded(lendable), _Homes({value.storage for value in graph.inputs if value.storage.kind is Kind.HOST})
    awaited: dict[tuple[Storage, Storage], NodeLocation] = {}  # stores and saves by what they copy and where to
    for index, node in enumerate(graph.nodes):
        where = NodeLocation(index, node, within)
        if node.op not in _ARGUMENTS:
            _check_other(node, where)
            homes.note(node)
            continue
        _check_form(node, where)
        here, there = _ends(node)
        if there.storage.kind is not Kind.HOST or here.storage.kind in (Kind.HOST, Kind.SCALAR):
            refuse(Verdict.HOST_ENDS, f"{where}: {here.name} is {here.storage.kind.value}, {there.name} is {there.storage.kind.value}")
        if here.storage in fixed - lendable:
            refuse(Verdict.HOST_FIXED, f"{where}: {here.name}")
        if _look(here) != _look(there):
            refuse(Verdict.HOST_UNLIKE, f"{where}: {here.name} and {there.name}")
        if not homes.check(node, here, there, where):
            offloaded.check(node, here, there, where)
        if node.op in (STORE, SAVE):
            awaited[here.storage, there.storage] = where
        elif node.op == DROP:
            awaited.pop((here.storage, there.storage), None)
    for where in awaited.values():
        refuse(Verdict.HOST_NOT_DROPPED, where)
    for where in offloaded.gone.values():
        refuse(Verdict.OFFLOADED_NOT_RESTORED, where)
    homes.check_end(graph, within)


class _Homes:
    """State that lies on the host between steps: what is loaded of it, and which writes of that are saved."""

    def __init__(self, homes: set[Storage]) -> None:
        self.homes = homes
        self.loaded: dict[Storage, Storage] = {}  # by what a load makes: its home
        self.version: dict[Storage, int] = {}  # of what was loaded, now
        self.saved: dict[Storage, int] = {}  # by home: the version that was saved of what was loaded

    def note(self, node: Node) -> None:
        self.version.update((after.storage, after.version) for _, after in node.writes if after.storage in self.loaded)

    def check(self, node: Node, here: Value, there: Value, where: NodeLocation) -> bool:
        """Whether a load, save or drop is of such state; it is right then."""
        if (node.op == SAVE) != (bool(node.writes) and there.storage in self.homes):
            refuse(Verdict.HOME_ENDS, where)
        if there.storage not in self.homes:
            return False
        if node.op == LOAD:
            if here.storage.kind is not Kind.STATE or there.storage in self.loaded.values():  # a second one would be of before
                refuse(Verdict.HOME_ENDS, where)
            self.loaded[here.storage], self.version[here.storage] = there.storage, 0
        elif self.loaded.get(here.storage) is not there.storage:
            refuse(Verdict.HOME_ENDS, where)
        elif node.op == SAVE:
            if [before for before, _ in node.writes] != [there]:
                refuse(Verdict.HOME_ENDS, where)
            self.saved[there.storage] = here.version
        return True

    def check_end(self, graph: Graph, within: str) -> None:
        for here, home in self.loaded.items():
            if self.saved.get(home, 0) != self.version[here]:
                refuse(Verdict.HOME_LEFT, f"{here.name}{within}")
        if any(value.storage in self.loaded for value in graph.outputs):
            refuse(Verdict.HOST_FIXED, f"the graph returns what it has loaded of state{within}")


class _Offloaded:
    """State that the caller lends: which block each copy on the host is of, and the drops that no load has made good yet."""

    def __init__(self, lendable: set[Storage]) -> None:
        self.block = {storage: storage for storage in lendable}  # by storage: the caller's own, which its values lie on
        self.copy_of: dict[Storage, Storage] = {}  # by storage on the host: the caller's block
        self.gone: dict[Storage, NodeLocation] = {}
        self.drops: dict[Storage, Node] = {}  # the latest of each block

    def check(self, node: Node, here: Value, there: Value, where: NodeLocation) -> None:
        """One store, drop or load, if it is of offloaded state."""
        if node.op == STORE and here.storage in self.block:
            self.copy_of[there.storage] = self.block[here.storage]
        block = self.copy_of.get(there.storage)
        emptied = node.op == DROP and block is not None
        if ([before for before, _ in node.writes] != [here]) if emptied else node.writes:
            refuse(Verdict.OFFLOADED_WRITE, where)
        if block is None:
            return
        if here.version != 0:
            refuse(Verdict.OFFLOADED_WRITTEN, f"{where}: {here.name}, version {here.version}")
        if node.op == DROP:
            self.gone[block], self.drops[block] = where, node
        elif node.op == LOAD:
            if self.gone.pop(block, None) is None or self.drops[block] not in node.after:
                refuse(Verdict.OFFLOADED_STILL_THERE, where)
            self.block[here.storage] = block


def _check_other(node: Node, where: NodeLocation) -> None:
    """A node of another kind knows nothing of the host."""
    for value in (*node.inputs, *node.results):
        if value.storage.kind is Kind.HOST:
            refuse(Verdict.HOST_TOUCHED, f"{where}: {value.name}")


def _check_form(node: Node, where: NodeLocation) -> None:
    """One value for each argument, one result but for a drop, nothing else."""
    values = [arg for arg in node.args if isinstance(arg, Value)]
    results = [value for value in node.outputs if value is not None]
    expected = _ARGUMENTS[node.op], 0 if node.op in (SAVE, DROP) else 1
    new_storages = {value.storage for value in results} - {value.storage for value in values}
    plain = not (node.kwargs or node.inplace or node.body)
    if (
        (len(node.args), len(node.outputs)) != expected
        or (len(values), len(results)) != expected
        or len(new_storages) != expected[1]
        or not plain
    ):
        refuse(Verdict.HOST_FORM, where)


def _ends(node: Node) -> tuple[Value, Value]:
    if node.op == STORE:
        return node.inputs[0], node.results[0]
    return (node.results[0], node.inputs[0]) if node.op == LOAD else (node.inputs[0], node.inputs[-1])


def _look(value: Value) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride, value.offset, value.storage.nbytes


def check_collectives(graph: Graph, within: str) -> None:
    """Raises CheckError for a collective whose place among the others is free, and for one whose result is used before it is whole."""
    last: Node | None = None
    filled: dict[Storage, NodeLocation] = {}  # storages that a collective fills, and where it began
    read_by: dict[Value, tuple[Value, ...]] = {}  # by what a collective makes apart: what it reads meanwhile
    for index, node in enumerate(graph.nodes):
        where, part = NodeLocation(index, node, within), row_of(node.op).collective
        for value in (*node.inputs, *(before for before, _ in node.writes)):
            if value.storage in filled and part is not Collective.ENDS:
                refuse(Verdict.COLLECTIVE_TOUCHED, f"{where} uses {value.name}, which {filled[value.storage]} makes")
        if part is Collective.ENDS and not all(given in node.inputs for value in node.inputs for given in read_by.get(value, ())):
            refuse(Verdict.COLLECTIVE_TOUCHED, f"{where} does not hold what the collective reads until then")
        if part is not Collective.BEGINS:
            continue
        if node.op in READING:
            read_by |= dict.fromkeys(node.results, node.inputs)
        if not (node.op == GATHER and not any(begins_collective(before) for before in node.after)):  # a load's place is the plan's
            if last is not None and last not in node.after:
                refuse(Verdict.COLLECTIVE_FREE, f"{where} does not come after {last.op}")
            last = node
        filled.update((value.storage, where) for value in node.outputs if value is not None)
    for value in graph.outputs:
        if value.storage in filled:
            refuse(Verdict.COLLECTIVE_TOUCHED, f"the graph returns {value.name}{within}")
