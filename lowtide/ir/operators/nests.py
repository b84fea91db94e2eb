"""The loops around an operator, and which of them index what it reads: what weights and the analysis of repeated work are made of.

A convolution is seven loops, a product of matrices three; what is known by its shapes alone has a loop for each dimension of the largest
tensor that it reads or makes, parameters aside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.shapes import ints

Index: TypeAlias = "tuple[tuple[str, int], ...]"  # loops and steps, which are added up: (("h", 2), ("r", 1)) is 2 h + r


@dataclass(frozen=True, slots=True)
class NestLoop:
    """One loop of a nest."""

    name: str  # unique in the nest
    extent: int
    reduces: bool = False  # what it computes is added up: the result has no such dimension


@dataclass(frozen=True, slots=True)
class Access:
    """How one tensor is indexed: for each of its dimensions the loops that run over it."""

    value: Value
    dims: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Nest:
    """The loops of an operator, and what they read. No accesses: which loop reads what is not known."""

    loops: tuple[NestLoop, ...]
    accesses: tuple[Access, ...] = ()

    def access(self, value: Value) -> Access | None:
        """How a tensor is read; None where that is not known."""
        return next((each for each in self.accesses if each.value is value), None)

    def loop(self, name: str) -> NestLoop:
        return next(each for each in self.loops if each.name == name)

    @property
    def steps(self) -> int:
        """How often the innermost statement runs."""
        return prod(each.extent for each in self.loops)


NestRule: TypeAlias = Callable[[Node], "Nest | None"]  # None where a rule does not know a form of its operator


def by_letters(text: str) -> NestRule:
    """A product by its letters, "mk,kn->mn"; an argument in brackets is added, and has no loop of its own."""
    given, _, made = text.partition("->")
    terms = given.split(",")

    def rule(node: Node) -> Nest | None:
        found = [(node.args[at], term) for at, term in enumerate(terms) if not term.startswith("[")]
        extents: dict[str, int] = {}
        accesses = []
        for value, term in found:
            if not isinstance(value, Value) or len(value.shape) != len(term):
                return None
            extents |= dict(zip(term, ints(node, value), strict=True))
            accesses.append(Access(value, tuple(((letter, 1),) for letter in term)))
        return Nest(tuple(NestLoop(name, extent, name not in made) for name, extent in extents.items()), tuple(accesses))

    return rule
