"""An optimizer's step for parameters that look alike, made of a recording for a few of them.

An optimizer of torch's own does the same to all parameters that look alike, and layers repeat themselves. So it is recorded for the
first and the last parameter of each look. For those between, the nodes of the first are made again with other values in their places.
A call over lists, by which a device updates small parameters, is made again over longer ones.

What comes out is what a recording of all gives: the same nodes in the same order, the same names, the same ends of what eager holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, islice
from typing import Any, TypeAlias

import torch

from lowtide.capture.draft import Draft
from lowtide.capture.optimizers.scalars import Fact, Guard
from lowtide.errors import LowtideError
from lowtide.ir.graph import Node, Slot, Storage, Value, values_of, with_values

LEAST_COPIES = 8  # that are worth it
_OVER_LISTS = ("aten._foreach_", "aten._fused_")
_COUNT = re.compile(r"_\d+$")

Values: TypeAlias = "dict[Value, Value]"  # of a copy, by those of what was recorded
_Owner: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"  # a parameter, or by position those in the lists of a call
_Pass: TypeAlias = "dict[_Owner, list[Node]]"  # a loop over parameters: what is done to each, in their order; or one call over lists


class NotAlikeError(LowtideError):
    """A step that cannot be made of a recording of a few parameters: one that reads several together, say."""


@dataclass(frozen=True)
class Few:
    """By parameter, in the optimizer's order, the one whose recording tells what is done to it: itself for those that are recorded."""

    first: Mapping[torch.Tensor, torch.Tensor]
    group: Mapping[torch.Tensor, int]

    @classmethod
    def of(cls, keys: Mapping[torch.Tensor, tuple[int, Any]]) -> Few | None:
        """The first and the last of each look, whose key begins with the parameter's group; None where most would be recorded."""
        first, last = dict[Any, torch.Tensor](), dict[Any, torch.Tensor]()
        for parameter, key in keys.items():
            first.setdefault(key, parameter)
            last[key] = parameter
        few = cls(
            {each: each if each is last[key] else first[key] for each, key in keys.items()},
            {each: group for each, (group, _) in keys.items()},
        )
        return few if len(keys) - len(few.recorded) >= LEAST_COPIES else None

    @cached_property
    def recorded(self) -> frozenset[torch.Tensor]:
        return frozenset(self.first.values())

    def facts(self, facts: Iterable[Fact], names: Mapping[torch.Tensor, str]) -> tuple[Fact, ...]:
        """What must hold of all parameters where this must of those that were recorded."""
        alike: dict[Any, list[str]] = {}
        for each, first in self.first.items():
            alike.setdefault(names[first], []).append(names[each])

        def of_all(slots: tuple[Slot, ...]) -> Iterable[tuple[Slot, ...]]:
            owners = {slot.path[0] for slot in slots if slot.table == "state"}
            if len(owners) > 1:
                raise NotAlikeError
            for name in alike[owners.pop()] if owners else [""]:
                yield tuple(replace(slot, path=(name, *slot.path[1:])) if slot.table == "state" else slot for slot in slots)

        every: dict[Fact, None] = {}
        for fact in facts:
            if isinstance(fact, Guard):
                every.update((replace(fact, slot=slot), None) for (slot,) in of_all((fact.slot,)))
            else:
                every[replace(fact, applied=tuple(dict.fromkeys(slots for each in fact.applied for slots in of_all(each))))] = None
        return tuple(every)


@dataclass(frozen=True)
class SampleGraph:
    """What was recorded for a few parameters."""

    few: Few
    draft: Draft
    since: int  # the first of its nodes
    bound: Mapping[torch.Tensor, Sequence[Value]]  # by parameter: it, its gradient and its state, before the step
    kept: Mapping[Value, torch.Tensor]  # new state, and the parameter that it is of

    @property
    def owners(self) -> dict[Node, _Owner | None]:
        """What each node is for; None where that is nothing alone. Raises NotAlikeError."""
        return self._owners[0]

    @property
    def owner_of(self) -> dict[Value, torch.Tensor]:
        """The parameter that each value is of."""
        return self._owners[1]

    @cached_property
    def _owners(self) -> tuple[dict[Node, _Owner | None], dict[Value, torch.Tensor]]:
        nodes = self.draft.nodes[self.since :]
        owners, _ = self._read_by(nodes, {})
        users: dict[Value, dict[int, torch.Tensor]] = {value: {id(parameter): parameter} for value, parameter in self.kept.items()}
        for node in reversed(nodes):
            with suppress(NotAlikeError):  # counts in lists, that begin at zero
                if owners[node] is None and len(places := _places(node)) > 1:
                    owners[node] = self._together([dict(chain(*(users.get(each, {}).items() for each in new))) for _, new in places])
            if isinstance(owner := owners[node], tuple):
                for value, which in _read_in_lists(node, owner):
                    users.setdefault(value, {}).update({id(each): each for each in which})
                continue
            if owner is not None:
                who = {id(owner): owner}
            else:
                who = {key: each for value in node.results for key, each in users.get(value, {}).items()}
            if len(who) == 1:  # a count that begins at zero reads nothing of the parameter
                (owners[node],) = who.values()
            for value in node.inputs:
                users.setdefault(value, {}).update(who)
        return self._read_by(nodes, owners)

    def _read_by(
        self, nodes: Sequence[Node], known: Mapping[Node, _Owner | None]
    ) -> tuple[dict[Node, _Owner | None], dict[Value, torch.Tensor]]:
        """What each node reads something of, or is known to be for; and whose each value is."""
        owner_of = {value: parameter for parameter, values in self.bound.items() for value in values}
        owners: dict[Node, _Owner | None] = {}
        for node in nodes:
            who = {id(owner_of[value]): owner_of[value] for value in node.inputs if value in owner_of}
            if (owner := known.get(node)) is not None and not isinstance(owner, tuple):
                who[id(owner)] = owner
            if node.after or node.body is not None:
                raise NotAlikeError
            if len(who) > 1:
                places = _places(node)
                together = self._together([{id(owner_of[each]): owner_of[each] for each in read if each in owner_of} for read, _ in places])
                owner_of.update((each, owner) for owner, (_, results) in zip(together, places, strict=True) for each in results)
                owners[node] = together
                continue
            owners[node] = one = next(iter(who.values()), None)
            if one is not None:
                owner_of.update(dict.fromkeys(node.results, one))
        return owners, owner_of

    def _together(self, whose: Sequence[Mapping[int, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        """By position in the lists of a call, whose the tensors there are. Raises NotAlikeError unless they are one each, in order."""
        together = tuple(owner for each in whose for owner in each.values())
        turns = {id(parameter): number for number, parameter in enumerate(self.few.first)}
        numbers = [turns[id(each)] for each in together]
        in_order = numbers == sorted({*numbers}) and len({self.few.group[each] for each in together}) == 1
        if not in_order or any(len(each) != 1 for each in whose):
            raise NotAlikeError
        return together

    @cached_property
    def passes(self) -> list[_Pass]:
        """The nodes as they were recorded: loops over parameters, one after the other. What is for several comes where it is first used."""
        turns = {parameter: number for number, parameter in enumerate(self.few.first)}
        passes: list[_Pass] = []
        last: _Owner | None = None
        shared = list[Node]()
        for node, owner in self.owners.items():
            if owner is None:
                shared.append(node)
                continue
            if (
                last is None
                or isinstance(last, tuple)
                or isinstance(owner, tuple)
                or turns[owner] < turns[last]
                or self.few.group[owner] != self.few.group[last]
            ):
                passes.append({})
            passes[-1].setdefault(owner, []).extend((*shared, node))
            last, shared = owner, []
        if shared:
            raise NotAlikeError
        return passes


def _places(node: Node) -> list[tuple[list[Value], list[Value]]]:
    """By position in the lists of a call, what is read there and what is made. Raises NotAlikeError for any other call."""
    lists = [item for item in node.args if isinstance(item, tuple) and item]
    if not node.op.startswith(_OVER_LISTS) or not lists or len({*map(len, lists)}) > 1 or node.inplace:
        raise NotAlikeError
    read, results = [values_of(entries) for entries in zip(*lists, strict=True)], list[list[Value]]()
    for at in range(len(read)):
        written = node.writes[at :: len(read)]
        results.append([*(after for _, after in written), *filter(None, node.outputs[at : at + 1])])
        if not all(before in read[at] for before, _ in written):
            raise NotAlikeError
    if (node.outputs and len(node.outputs) != len(read)) or sum(map(len, results)) != len(node.results):
        raise NotAlikeError
    return [*zip(read, results, strict=True)]


def _read_in_lists(node: Node, owners: tuple[torch.Tensor, ...]) -> Iterator[tuple[Value, tuple[torch.Tensor, ...]]]:
    """What a call over lists reads, and for whom: for all, where it is in no list."""
    for item in (*node.args, *(item for _, item in node.kwargs)):
        if isinstance(item, tuple) and item:
            yield from ((value, (owner,)) for entry, owner in zip(item, owners, strict=True) for value in values_of(entry))
        else:
            yield from ((value, owners) for value in values_of(item))


class NodeCopies:
    """Makes the nodes of all parameters in a draft that has none of them yet. Raises NotAlikeError.

    `bound`: as in the recording, of all parameters. `settings`: values in the draft, by those of the recording.
    """

    def __init__(self, recording: SampleGraph, draft: Draft, bound: Mapping[torch.Tensor, Sequence[Value]], settings: Values) -> None:
        self._recording, self._draft, self._first = recording, draft, recording.few.first
        self._shared = dict(settings)
        self._values: dict[torch.Tensor, Values] = {
            each: dict(zip(recording.bound[first], bound[each], strict=True)) for each, first in self._first.items()
        }
        if any(
            len({*zip(recording.bound[first], bound[each], strict=True)}) > len(self._values[each]) for each, first in self._first.items()
        ):
            raise NotAlikeError  # what is one value of the one is two of the other
        self._storages = {each: {old.storage: new.storage for old, new in values.items()} for each, values in self._values.items()}
        self._shared_storages = {old.storage: new.storage for old, new in settings.items()}
        self._made: list[_Pass] = []  # as in the recording, less what is for several
        self._of_several: dict[Node, Node] = {}
        for segments in recording.passes:
            self._made.append({})
            together = [(each, each) for each in segments if isinstance(each, tuple)]
            for each, first in together or self._first.items():
                if first in segments:
                    copies = [self._copied(node, each) for node in segments[first]]
                    self._made[-1][each] = [
                        copy for node, copy in zip(segments[first], copies, strict=True) if recording.owners[node] is not None
                    ]
        self._note_ends()

    def of(self, parameter: torch.Tensor) -> Values:
        """The values of a parameter's copy, and those of several, by what was recorded."""
        return {**self._shared, **self._values[parameter]}

    def _copied(self, node: Node, owner: _Owner) -> Node:
        if node in self._of_several:
            return self._of_several[node]
        values, storages = self._shared, self._shared_storages
        if not (several := self._recording.owners[node] is None):
            if isinstance(owner, tuple):
                return self._copied_over_lists(node, owner)
            values, storages = self._values[owner], self._storages[owner]
        new = partial(self._new, values)
        for value in node.inputs:
            if new(value) is value:
                storages.setdefault(value.storage, value.storage)
        args, kwargs = with_values(node.args, new), tuple((key, with_values(item, new)) for key, item in node.kwargs)
        inplace = tuple((new(value), name) for value, name in node.inplace)
        writes = tuple((new(before), self._written(before, after, values)) for before, after in node.writes)
        outputs = tuple(None if value is None else self._made_anew(value, values, storages) for value in node.outputs)
        copy = Node(node.op, args, outputs, kwargs, writes, inplace=inplace, source=node.source)
        self._draft.nodes.append(copy)
        if several:
            self._of_several[node] = copy
        return copy

    def _copied_over_lists(self, node: Node, owners: tuple[torch.Tensor, ...]) -> Node:
        at = {id(owner): position for position, owner in enumerate(owners)}
        every = [(self._values[each], self._storages[each], at[id(first)]) for each, first in self._first.items() if id(first) in at]

        def of_all(item: Any) -> Any:
            if isinstance(item, tuple) and item:
                return tuple(with_values(item[position], partial(self._new, values)) for values, _, position in every)
            return with_values(item, partial(self._new, self._shared))

        args, kwargs = tuple(map(of_all, node.args)), tuple((key, of_all(item)) for key, item in node.kwargs)
        writes = [
            (self._new(values, pair[0]), self._written(*pair, values))
            for begin in range(0, len(node.writes), len(owners))
            for values, _, position in every
            for pair in (node.writes[begin + position],)
        ]
        results = [value for value in node.outputs if value is not None]
        outputs = [self._made_anew(results[position], values, storages) for values, storages, position in every if results]
        copy = Node(node.op, args, tuple(outputs), kwargs, tuple(writes), source=node.source)
        self._draft.nodes.append(copy)
        return copy

    def _new(self, values: Values, value: Value) -> Value:
        return values.get(value) or self._shared.get(value, value)

    def _written(self, before: Value, after: Value, values: Values) -> Value:
        """The next version of what a node writes."""
        if values is self._shared or (written := values.get(before)) is None:
            raise NotAlikeError
        name = self._draft.unused_name(f"{written.storage.name}_v{written.version + 1}")
        values[after] = replace(after, name=name, storage=written.storage, version=written.version + 1)
        return values[after]

    def _made_anew(self, value: Value, values: Values, storages: dict[Storage, Storage]) -> Value:
        name = self._draft.unused_name(_COUNT.sub("", value.name))
        if value.storage not in storages:
            storages[value.storage] = replace(value.storage, name=name)
        elif value.version:
            raise NotAlikeError  # a view of what was written
        values[value] = replace(value, name=name, storage=storages[value.storage])
        return values[value]

    def _note_ends(self) -> None:
        """Where eager lets go of what the step makes: at the node at which it does in the recording."""
        at: dict[Node, tuple[int, _Owner, int]] = {}  # pass, whose turn, and how many of the parameter's own nodes come before
        for number, segments in enumerate(self._recording.passes):
            for owner, nodes in segments.items():
                own = accumulate((self._recording.owners[node] is not None for node in nodes), initial=-1)
                at.update({node: (number, owner, position) for node, position in zip(nodes, islice(own, 1, None), strict=True)})
        makers = {value.storage: node for node in at for value in node.results}
        turns = [([*segments], [*copies]) for segments, copies in zip(self._recording.passes, self._made, strict=True)]
        positions = [tuple({id(each): number for number, each in enumerate(those)} for those in pair) for pair in turns]

        def end_of(parameter: _Owner, began: int, owner: _Owner, ended: int, then: _Owner, position: int) -> Node:
            """The node that is at that position of the turn for a parameter as `then`'s is for the recorded `owner`."""
            (recorded, every), (position_of, position_of_all) = turns[ended], positions[ended]
            if then is owner or isinstance(then, tuple):
                turn = parameter if then is owner else then
            elif ended == began and position_of[id(then)] == position_of[id(owner)] + 1:
                turn = every[position_of_all[id(parameter)] + 1]
            elif then is recorded[-1] or then is recorded[0]:
                turn = every[-1 if then is recorded[-1] else 0]
            else:
                raise NotAlikeError
            if position < 0:
                raise NotAlikeError
            nodes = self._made[ended][turn]
            return nodes[min(position, len(nodes) - 1)]

        owner_of = {value.storage: owner for value, owner in self._recording.owner_of.items()}
        for storage, last in self._recording.draft.last_nodes().items():
            if storage not in makers or last not in at:
                continue
            began, turn, _ = at[makers[storage]]
            owner = owner_of.get(storage, turn)
            if isinstance(owner, tuple):  # a number for all in the lists
                self._draft.ends.note(self._shared_storages[storage], end_of(owner, began, owner, *at[last]))
                continue
            for each, first in self._first.items():
                if first is owner:
                    copy = self._storages[each].get(storage) or self._shared_storages[storage]
                    self._draft.ends.note(copy, end_of(each, began, owner, *at[last]))
