"""What two recordings of one program do otherwise: an operator, a number, what is written, what is returned.

They are compared by what they compute, not by how results lie, which operators that were tried say better than others: inputs by their
slots, values by the nodes that make them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch

from lowtide.base.places import Position, Sum
from lowtide.capture.care.generators import which
from lowtide.capture.draft import Draft
from lowtide.capture.trace import CapturedStep
from lowtide.ir import tree
from lowtide.ir.graph import Node, Slot, Value


def difference(before: CapturedStep, now: CapturedStep) -> str:
    """The first difference, in words; "" where there is none."""
    return next(_differences(before, now), "")


def is_same(one: Draft, two: Draft) -> bool:
    """Whether two recordings compute the same. Of an optimizer's step: they differ in nothing but numbers that stand for others."""
    return not any(_computed(*(_NamedProgram(each.inputs, each.slots, each.nodes, each.constants) for each in (one, two))))


def _differences(before: CapturedStep, now: CapturedStep) -> Iterator[str]:
    one, two = (_NamedProgram(each.graph.inputs, each.slots, each.graph.nodes, each.constants) for each in (before, now))
    yield from _computed(one, two)
    both = frozenset(before.assigned).intersection(now.assigned)
    (slots, values), (new_slots, new_values) = _kept(before, both), _kept(now, both)
    if slots != new_slots or [*map(one.text, values), *before.computed] != [*map(two.text, new_values), *now.computed]:
        yield "which of its values the program returns or keeps has changed"
    if before.outputs.words != now.outputs.words:
        yield "what the program puts into lists, dictionaries and attributes has changed"
    yield from _returned(before, now)


def _kept(step: CapturedStep, both: Collection[Slot]) -> tuple[list[Slot], list[Value]]:
    """The model's places that get something, and what the program returns and puts there. A tensor of the caller's that is put into an
    attribute (`self.last = self.buffer`) lies there from then on, so that only the first capture sees it change."""
    own, at = {value.storage for value in step.graph.inputs}, len(step.graph.outputs) - len(step.assigned)
    pairs = zip(step.assigned, step.graph.outputs[at:], strict=True)
    left = [(slot, value) for slot, value in pairs if slot in both or slot.table != "attribute" or value.storage not in own]
    return [slot for slot, _ in left], [*step.graph.outputs[:at], *(value for _, value in left)]


def _computed(one: _NamedProgram, two: _NamedProgram) -> Iterator[str]:
    """What differs in the nodes; where nothing does, in constants."""
    for old, new in zip_longest(one.nodes, two.nodes):
        words = _between(old, new, one, two)
        if words:
            yield words
            return
        one.number(old)
        two.number(new)
    for pair in zip(one.constants, two.constants, strict=False):
        first, second = (each.now() if isinstance(each, Position) else each for each in pair)
        if isinstance(first, torch.Generator) and isinstance(second, torch.Generator):
            if which(first) != which(second):
                yield "the generator that the program draws from is another one"
        elif first is not second and not isinstance(first, Sum) and not _equal(first, second):
            yield f"the numbers of a tensor of shape {list(first.shape)}, which the program finds or makes beside the model, have changed"


def _between(old: Node | None, new: Node | None, one: _NamedProgram, two: _NamedProgram) -> str:
    """What differs between two nodes in one place; "" where nothing does."""
    if old is new:
        return ""
    if old is None or new is None:
        node = old or new
        assert node is not None, "one of them is there"
        return f"{node.op} at {_line(node)} {'is not there any more' if new is None else 'was not there'}"
    if old.op != new.op:
        return f"the operator at {_line(old)} was {old.op} and is {new.op}"
    for first, second in zip_longest((*old.args, *old.kwargs), (*new.args, *new.kwargs)):
        was, now = one.text(first), two.text(second)
        if was != now:
            return f"an argument of {old.op} at {_line(old)} was {was} and is {now}"
    if [one.text(value) for value, _ in old.writes] != [two.text(value) for value, _ in new.writes]:
        return f"what {old.op} at {_line(old)} writes has changed"
    if [value.dtype for value in old.results] != [value.dtype for value in new.results]:
        return f"the dtypes of what {old.op} at {_line(old)} makes have changed"
    return ""


def _returned(before: CapturedStep, now: CapturedStep) -> Iterator[str]:
    old, new = (_leaves(each) for each in (before, now))
    for first, second in zip_longest(old, new):
        if first != second:
            shown = ["not there" if each is None else f"{each.value!r} (result{each.where})" for each in (first, second)]
            yield f"what the program returns beside tensors was {shown[0]} and is {shown[1]}"
            return


def _leaves(captured: CapturedStep) -> list[tree.Leaf]:
    count = len(captured.graph.outputs) - len(captured.assigned)
    try:
        leaves = tree.flatten(captured.result([_MADE] * count, [_MADE] * len(captured.outputs.sums)))[0]
    except ValueError:  # of a text of whole numbers
        return []
    return [leaf for leaf in leaves if type(leaf.value) in (bool, int, float, str, type(None)) and leaf.value == leaf.value]


_MADE = float("nan")  # in place of what the program computes: all arithmetic on it can be done


class _NamedProgram:
    """One recording, with names for its values by what makes them."""

    def __init__(self, inputs: Sequence[Value], slots: Sequence[Slot], nodes: Sequence[Node], constants: Sequence[Any]) -> None:
        self.nodes, self.constants = nodes, constants
        self._names = {value: str(slot) for value, slot in zip(inputs, slots, strict=True)}
        self._made = 0

    def number(self, node: Node) -> None:
        for value in node.results:
            self._names[value] = f"%{self._made}"
            self._made += 1

    def text(self, arg: Any) -> str:
        """An argument, the same in both recordings where it is the same; repr tells 0.0 from -0.0, and nan equals itself."""
        if isinstance(arg, Value):
            return self._names[arg]
        return f"({', '.join(map(self.text, arg))})" if isinstance(arg, tuple) else repr(arg)


def _line(node: Node) -> str:
    return "an unknown line" if node.source is None else f"{node.source.file}:{node.source.line}"


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, to the last bit: nan is like itself."""
    if (one.shape, one.dtype, one.device, one.layout) != (two.shape, two.dtype, two.device, two.layout):
        return False
    with torch.no_grad():
        return torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (one, two)))
