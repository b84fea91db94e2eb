"""The grammar of solvers as text: names, braces and lists, with no idea of what they stand for. See `spec`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, Union

from lowtide.errors import FormatError

_TOKEN = re.compile(r"[{}\[\],=]|[^{}\[\],=]+")
_MARKS = frozenset("{}[],=")
_MAX_DEPTH = 20  # of solvers within solvers: far above any use, far below Python's recursion limit


@dataclass(frozen=True, slots=True)
class Spec:
    """A name and its settings in the order given; a plain word is a name without any."""

    name: str
    settings: tuple[tuple[str, Text], ...] = ()

    def __str__(self) -> str:
        inside = ",".join(f"{field}={_shown(value)}" for field, value in self.settings)
        return f"{self.name}{{{inside}}}" if inside else self.name


Text: TypeAlias = Union[Spec, "tuple[Text, ...]"]


def read_spec(text: str, example: str) -> Spec:
    """The name and settings in `text`. Raises FormatError saying where it ends being one, and how one is written, by an example."""
    reader = _SpecReader(text, example)
    spec = reader.spec(0)
    return spec if reader.peek() == "" else reader.refuse("the end")


def _shown(value: Text) -> str:
    return str(value) if isinstance(value, Spec) else f"[{','.join(map(_shown, value))}]"


class _SpecReader:
    """Words and marks, one after another."""

    def __init__(self, text: str, example: str) -> None:
        self.example = example
        self.tokens = [token.strip() for token in _TOKEN.findall(text) if token.strip()]
        self.at = 0

    def peek(self) -> str:
        """The next word or mark, "" at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, mark: str) -> bool:
        """Whether `mark` comes next; if so, it is passed."""
        found = self.peek() == mark
        self.at += found
        return found

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            self.refuse(repr(mark))

    def word(self, what: str) -> str:
        word = self.peek()
        if not word or word in _MARKS:
            self.refuse(what)
        self.at += 1
        return word

    def spec(self, depth: int) -> Spec:
        name = self.word("a name")
        if not self.take("{"):
            return Spec(name)
        settings: list[tuple[str, Text]] = []
        while not self.take("}"):
            if settings:
                self.expect(",")
            field = self.word("a setting")
            self.expect("=")
            settings.append((field, self.value(depth + 1)))
        return Spec(name, tuple(settings))

    def value(self, depth: int) -> Text:
        if depth > _MAX_DEPTH:
            raise FormatError(f"solver: expected at most {_MAX_DEPTH} solvers and lists within one another, got more")
        if not self.take("["):
            return self.spec(depth)
        items: list[Text] = []
        while not self.take("]"):
            if items:
                self.expect(",")
            items.append(self.value(depth + 1))
        return tuple(items)

    def refuse(self, expected: str) -> NoReturn:
        before, found = "".join(self.tokens[: self.at]), repr(self.peek()) if self.peek() else "the end"
        after = f" after {before!r}" if before else ""
        raise FormatError(f"solver: expected {expected}{after}, got {found}: write it like {self.example}")
