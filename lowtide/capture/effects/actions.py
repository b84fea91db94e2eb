"""What a step puts into places of the caller's, done again after each one: without anything of the capture in it."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lowtide.base.places import Sum
from lowtide.capture.effects.containers import Container, LeavingError, StaleError
from lowtide.capture.effects.sums import NumberExpression, Recipe, Term, recipe, results_in
from lowtide.capture.results import holds_fakes, is_result
from lowtide.errors import CaptureError
from lowtide.ir import tree

Act: TypeAlias = "tuple[Any, Callable[[Any], object], str, bool]"  # what, how, in words; whether it is not seen where it lies already


@dataclass(frozen=True)
class StepOutputs:
    """What a step puts into the caller's places."""

    actions: tuple[Callable[[list[Any], list[Any]], None], ...] = ()  # of the results that leave, in the program's order, and of `sums`
    counts: tuple[int, ...] = ()  # how many of them each takes
    relied_on: tuple[Container, ...] = ()
    words: tuple[str, ...] = ()  # the same for steps that do the same
    sums: tuple[Sum, ...] = ()  # places that are computed with
    divisors: tuple[Recipe, ...] = ()  # of these numbers, none of which may be zero

    def holds(self) -> bool:
        """Whether the places are there, and hold what the program relies on."""
        if not (all(container.holds() for container in self.relied_on) and all(each.holds() for each in self.sums)):
            return False
        before = self.before() if self.divisors else []
        return all(divisor(iter(()), before) for divisor in self.divisors)

    def before(self) -> list[Any]:
        """What lies in the places that are computed with."""
        return [each.now for each in self.sums]

    def put(self, results: Sequence[Any], before: list[Any]) -> None:
        """Do it again. `results` end with those that leave; `before` lay there when the step began."""
        at = len(results) - sum(self.counts)
        for action, count in zip(self.actions, self.counts, strict=True):
            action(list(results[at : at + count]), before)
            at += count

    def with_plain(self, puts: Iterable[tuple[Any, str, Any]]) -> StepOutputs:
        """Numbers and texts in attributes of objects, too, the same after each step."""
        actions, words = list(self.actions), list(self.words)
        for item, name, now in puts:
            actions.append(functools.partial(_set, item, name, now))
            words.append(f"{type(item).__name__}.{name} {now!r}")
        return replace(self, actions=tuple(actions), counts=(*self.counts, *([0] * (len(actions) - len(self.counts)))), words=tuple(words))


NOTHING_LEFT = StepOutputs()


def outputs_of(
    acts: Iterable[Act], relied_on: tuple[Container, ...], sums: tuple[Sum, ...], divisors: tuple[Recipe, ...]
) -> tuple[StepOutputs, tuple[str, ...], bool]:
    """How to do all of it again; in words; and whether there are numbers and texts among it that are those of the capture."""
    actions: list[Callable[[list[Any], list[Any]], None]] = []
    counts, words, lasting, known, plainly = [], [], list[bool](), dict[int, int](), False
    for number, (value, act, text, stays) in enumerate(acts):
        if any(known.setdefault(id(piece), number) != number for piece in _made(value)):
            raise StaleError("it puts one list, dictionary or object into two places, and each step would put another into each")
        leaves, rebuild = tree.flatten(value)
        at = [index for index, leaf in enumerate(leaves) if is_result(leaf.value)]
        if any(holds_fakes(leaf.value) for leaf in leaves if not is_result(leaf.value)):
            raise CaptureError("a number that the program computes lies in an object that cannot be made again")
        if any(type(leaf.value) is str and "FakeTensor(" in leaf.value for leaf in leaves):
            shows = "a text shows a tensor that the program computes, which a captured step would not: keep the tensor itself"
            raise LeavingError(shows, converts=True)
        plainly |= any(type(leaf.value) in (int, float, str, bytes, complex, NumberExpression) for leaf in leaves)
        plain = [None if index in at else leaf.value for index, leaf in enumerate(leaves)]
        actions.append(functools.partial(_act, act, plain, {index: recipe(leaves[index].value) for index in at}, rebuild))
        counts.append(sum(len(results_in(leaves[index].value)) for index in at))
        words.append(f"{text} {[_text(leaf) for leaf in leaves]}")
        lasting.append(bool(at) or not stays)
    outputs = StepOutputs(tuple(actions), tuple(counts), relied_on, tuple(itertools.compress(words, lasting)), sums, divisors)
    return outputs, tuple(words), plainly


def _act(
    act: Callable[[Any], object], plain: list[Any], recipes: dict[int, Recipe], rebuild: Any, results: list[Any], before: list[Any]
) -> None:
    filled, left = list(plain), iter(results)
    for index, item_recipe in recipes.items():
        filled[index] = item_recipe(left, before)
    act(tree.unflatten(rebuild, filled))


def _set(item: Any, name: str, value: Any, results: list[Any], before: list[Any]) -> None:
    object.__setattr__(item, name, copy.deepcopy(value))  # a list of its own, as eager makes one


def _text(leaf: tree.Leaf) -> str:
    if isinstance(leaf.value, Term):
        return f"{leaf.where} {leaf.value.text()}"
    return leaf.where if is_result(leaf.value) else repr(leaf.value)


def _made(value: Any) -> list[Any]:
    """The containers and objects in what is put somewhere that hold what the program has computed."""
    holders, waiting = dict[int, Any](), [value]
    while waiting:
        piece = waiting.pop()
        if id(piece) not in holders and not is_result(piece) and holds_fakes(piece):
            holders[id(piece)] = piece
            waiting.extend(tree.pieces(piece))
    return list(holders.values())[1:]
