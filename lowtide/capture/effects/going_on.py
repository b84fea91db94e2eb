"""Tensors that each step reads where they lie, and puts others in the places of: what the next step goes on with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.places import Position, Sum
from lowtide.capture.care.contents import differ, is_plain
from lowtide.capture.care.follower import Follower
from lowtide.capture.care.turns import seen
from lowtide.capture.data.facts import Reading, SlotLeaf
from lowtide.capture.effects.containers import Container
from lowtide.capture.effects.draws import WRITES
from lowtide.capture.effects.stand_ins import StaleError, own_of
from lowtide.ir import tree
from lowtide.ir.graph import Graph, Slot


class GoingOn:
    """Those of one program, which has run."""

    def __init__(
        self, follower: Follower, constants: Sequence[Any], tables: Sequence[tuple[Any, Any]], containers: Sequence[Container]
    ) -> None:
        """`constants`: what of the caller's it has computed with. `tables`: objects, and attributes or variables of theirs."""
        self.places: dict[int, Position | Sum] = {}  # where they lie, by id; those of drawn arrays, too
        self._follower, self._constants, self._tables, self._containers = follower, constants, tables, containers

    def uses(self, item: Any) -> bool:
        """Whether the program has computed with a tensor in what it has found."""
        return any(isinstance(each, torch.Tensor) and self._is_used(each) for each in tree.pieces(item))

    def follow(self, item: Any, name: str, text: str, was: Any, now: Any) -> None:
        """Raise StaleError where later steps would not find, what the program has read and put another in the place of, as it was."""
        if not self._goes_on(was, now, Position.of(item, name, text, "its making")):
            raise StaleError(
                f"it reads {text}, which an earlier step has put there; a buffer that it writes with copy_ goes on from step to step"
            )

    def follow_within(self, container: Container) -> None:
        """Of a container that the program changes each step reads the tensors that lie there then."""
        for key, (was, line) in container.tensors.items():
            place = Position(key, f"entry {key!r} of a {container.kind.__name__}", line, lambda: container.now)
            now = container.lying_at(key)
            if not self._is_used(was):
                continue
            if self._lies_twice(was, container.original) or not now or not (now[0] is was or _may_follow(was, now[0])):
                raise StaleError(
                    f"at {line} it reads what other steps leave in {place.text} that it changes, and leaves a tensor of another shape "
                    "there, or has that one in another place, too: write into it with copy_"
                )
            self.places[id(was)] = place

    def _is_used(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self._constants)

    def _goes_on(self, was: Any, now: Any, place: Position, within: Any = None) -> bool:
        """Whether each step may read what lies in a place then, tensors alone or in containers, and has put its like there."""
        was = own_of(was)
        if type(was) in (tuple, list, dict) and type(was) is type(now) and len(was) == len(now):
            keys = list(was) if isinstance(was, dict) else range(len(was))
            if isinstance(was, dict) and keys != list(now):
                return False
            pieces = (Position(key, f"{place.text}[{key!r}]", place.line, place.now) for key in keys)
            return all(self._goes_on(was[each.name], now[each.name], each, was) for each in pieces)
        if not isinstance(was, torch.Tensor):
            return is_plain(was) and is_plain(now) and not differ(was, now)
        if not self._is_used(was):
            return False
        self.places[id(was)] = place
        return not self._lies_twice(was, within) and (now is was or _may_follow(was, now))

    def _lies_twice(self, was: torch.Tensor, within: Any) -> bool:
        """Whether a tensor that the program has found lies in another place, too; `within` a container that has it."""
        tables = any(now is was for item, table in self._tables for now in seen(item, table).values())
        counts = (each.holds_before(was) - (each.original is within) for each in self._containers)
        return tables or any(count > 0 for count in counts) or self._follower.leads_to(was, but=within)

    def refuse_uses(self, readings: Iterable[Reading], graph: Graph, slots: Sequence[Slot]) -> None:
        """Raise StaleError for a decision that follows from such a tensor, and for a write into an array that the program draws.

        Another tensor lies there in each step; and in eager a tensor that is made of an array lies in the array's own memory.
        """
        for reading in readings:
            for step in reading.question.steps:
                if isinstance(step, SlotLeaf) and (place := self.places.get(id(step.constant))) is not None:
                    what = f"{place.text}, which another step has put there" if isinstance(place, Position) else "an array that it draws"
                    raise StaleError(f"at {reading.question.line} it decides on {what}")
        written = {before.storage for node in graph.nodes for before, _ in node.writes}
        for value, slot in zip(graph.inputs, slots, strict=True):
            constant = self._constants[int(slot.path[0])] if slot.table == "constant" else None
            if value.storage in written and isinstance(self.places.get(id(constant)), Sum):
                raise StaleError(f"it {WRITES}; or write into a copy (`torch.tensor(x)`)")

    def found_in(self, constants: Sequence[Any]) -> tuple[Any, ...]:
        """The constants, with the places of tensors that go on in the places of these."""
        return tuple(self.places.get(id(each), each) for each in constants)


def _may_follow(was: Any, now: Any) -> bool:
    """Whether the next step reads a tensor as this one has read the one before."""
    plain = type(was) is torch.Tensor and type(now) is FakeTensor and not isinstance(now, nn.Parameter)
    if not plain or was.requires_grad or now.requires_grad:
        return False
    return (was.shape, was.stride(), was.dtype, was.device) == (now.shape, now.stride(), now.dtype, now.device)
