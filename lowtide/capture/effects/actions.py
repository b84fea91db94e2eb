"""What a step puts into places of the caller's, done again after each one: without anything of the capture in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeAlias

from lowtide.base.places import Position, Sum
from lowtide.capture.care.contents import is_plain
from lowtide.capture.effects.containers import Container
from lowtide.capture.effects.draws import HostDraws
from lowtide.capture.effects.identity import MadeAnew, UnlikeError, is_sure, resolved
from lowtide.capture.effects.stand_ins import SHOWS_A_TENSOR, LeavingError
from lowtide.capture.effects.sums import NumberExpression, Recipe, Term, recipe, results_in
from lowtide.capture.results import holds_fakes, is_result
from lowtide.errors import CaptureError
from lowtide.ir import tree

Act: TypeAlias = "tuple[Any, Callable[[Any], object], str, bool]"  # what, how, in words; whether it is not seen where it lies already


@dataclass(frozen=True)
class Action:
    """One thing that a step puts somewhere, and how."""

    act: Callable[[Any], object]
    plain: tuple[Any, ...]  # its leaves; None for those that the step computes
    recipes: dict[int, Recipe]  # of the others, by position
    rebuild: Any
    words: str  # where, in words
    count: int = 0  # how many results of the program it takes

    @property
    def unsure(self) -> Iterator[int]:
        """The leaves that each step may make anew."""
        return (at for at, item in enumerate(self.plain) if at not in self.recipes and not is_sure(item))

    def resolved(self, before: Action) -> tuple[Action, str]:
        """The same, with objects that each step makes anew for what another capture has made, too; and these in words."""
        plain, words = list(self.plain), []
        for at in self.unsure:
            try:
                plain[at], text = resolved(before.plain[at] if before.words == self.words else None, plain[at])
            except UnlikeError as error:
                raise CaptureError(
                    f"the program puts something else into {self.words} each time, which no step could do again: {error}; make it once, "
                    "before the step, and put that there, or do it behind the step"
                ) from None
            words.append(text)
        return replace(self, plain=tuple(plain)), " ".join(words)

    def put(self, results: Sequence[Any], before: Sequence[Any], known: dict[int, Any], containers: dict[int, Any]) -> None:
        """Do it again; `known` as `MadeAnew` has it."""
        left = iter(results)
        filled = [item.instance(known) if isinstance(item, MadeAnew) else item for item in self.plain]
        for index, item_recipe in self.recipes.items():
            filled[index] = item_recipe(left, before)
        self.act(tree.unflatten(self.rebuild, filled, containers))


@dataclass(frozen=True)
class StepOutputs:
    """What a step puts into the caller's places."""

    actions: tuple[Action, ...] = ()  # of the results that leave, in the program's order, and of `sums`
    relied_on: tuple[Container, ...] = ()
    words: tuple[str, ...] = ()  # the same for steps that do the same
    sums: tuple[Sum, ...] = ()  # places that are computed with
    conditions: tuple[Recipe, ...] = ()  # of these numbers, which must be true
    draws: HostDraws = field(default_factory=HostDraws)

    def holds(self) -> bool:
        """Whether the places are there, and hold what the program relies on."""
        self.draws.ahead()
        if not (all(container.holds() for container in self.relied_on) and all(each.holds() for each in self.sums)):
            return False
        before = self.before() if self.conditions else []
        return all(condition(iter(()), before) for condition in self.conditions)

    def before(self) -> list[Any]:
        """What lies in the places that are computed with."""
        return [each.now for each in self.sums]

    def put(self, results: Sequence[Any], before: list[Any], containers: dict[int, Any]) -> None:
        """Do it again. `results` end with those that leave; `before` lay there when the step began.

        `containers`: those of what the step returns, by number, which may lie there as well.
        """
        at, known = len(results) - sum(each.count for each in self.actions), dict[int, Any]()
        for action in self.actions:
            action.put(results[at : at + action.count], before, known, containers)
            at += action.count

    def with_places(self, puts: Iterable[tuple[Position, Any]]) -> StepOutputs:
        """Attributes and variables, too, in which the same lies after each step, or something like it."""
        puts = list(puts)
        added = tuple(Action(place.put, (now,), {}, next, place.text) for place, now in puts)
        words = (f"{place.text} {repr(now) if is_plain(now) else type(now).__name__}" for place, now in puts)
        return replace(self, actions=(*self.actions, *added), words=(*self.words, *words))

    @property
    def are_unsure(self) -> bool:
        """Whether only another capture tells what of it each step makes anew."""
        return any(True for each in self.actions for _ in each.unsure)

    def resolved(self, before: StepOutputs) -> StepOutputs:
        """The same where another capture of the program has put `before`. Raises CaptureError where it puts something else each time."""
        pairs = [each.resolved(old or each) for each, old in zip_longest(self.actions, before.actions[: len(self.actions)])]
        return replace(self, actions=tuple(each for each, _ in pairs), words=(*self.words, *(text for _, text in pairs)))


NOTHING_LEFT = StepOutputs()


def outputs_of(
    acts: Iterable[Act], sharing: tree.Sharing, relied_on: tuple[Container, ...], sums: tuple[Sum, ...], conditions: tuple[Recipe, ...]
) -> tuple[StepOutputs, tuple[str, ...], bool]:
    """How to do all of it again; in words; and whether there are numbers and texts among it that are those of the capture."""
    actions: list[Action] = []
    words, lasting, plainly = [], list[bool](), False
    for value, act, text, stays in acts:
        leaves, rebuild = tree.flatten(value, sharing)
        at = [index for index, leaf in enumerate(leaves) if is_result(leaf.value)]
        if any(holds_fakes(leaf.value) for leaf in leaves if not is_result(leaf.value)):
            raise CaptureError("a number that the program computes lies in an object that cannot be made again")
        plainly |= any(type(leaf.value) in (int, float, str, bytes, complex, NumberExpression) for leaf in leaves)
        plain = tuple(None if index in at else leaf.value for index, leaf in enumerate(leaves))
        recipes = {index: recipe(leaves[index].value) for index in at}
        actions.append(Action(act, plain, recipes, rebuild, text, sum(len(results_in(leaves[index].value)) for index in at)))
        words.append(f"{text} {[_text(leaf) for leaf in leaves]}")
        if "FakeTensor(" in words[-1]:  # a library has made a text of it
            raise LeavingError(SHOWS_A_TENSOR, converts=True)
        lasting.append(bool(at) or not stays)
    outputs = StepOutputs(tuple(actions), relied_on, tuple(itertools.compress(words, lasting)), sums, conditions)
    return outputs, tuple(words), plainly


def _text(leaf: tree.Leaf) -> str:
    if isinstance(leaf.value, Term):
        return f"{leaf.where} {leaf.value.text()}"
    if is_result(leaf.value):
        return leaf.where
    return repr(leaf.value) if is_sure(leaf.value) else type(leaf.value).__name__
