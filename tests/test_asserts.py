"""No check of input is an assertion: `python -O` leaves those out. What they may say is what mypy cannot see, and only of lowtide's own."""

import ast
from pathlib import Path

import pytest

from tests.imports import PACKAGE, parsed

pytestmark = pytest.mark.xdist_group("source")  # one process parses all files, once

# Rooms and files that read what came from a file: there even a kind is looked at by `errors.py`.
OF_FILES = ("cpu/", "ir/", "lower/", "plan/", "problems/", "api/archive.py", "api/load.py", "api/save.py", "api/saved_check.py")
KINDS = {"assert x is not None": "is there", "assert isinstance(x, int)": "of a kind", "assert x > 0": "anything else"}


def kind(condition: ast.expr) -> str:
    """What an assertion says of something."""
    match condition:
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return "is there"
        case ast.Call(func=ast.Name(id="isinstance")):
            return "of a kind"
    return "anything else"


def assertions(source: str) -> list[tuple[int, str]]:
    """Lines and kinds."""
    return [(node.lineno, kind(node.test)) for node in ast.walk(parsed(source)) if isinstance(node, ast.Assert)]


def sources(word: str) -> list[tuple[Path, str]]:
    """Files of the package in which a word stands, and what is in them."""
    read = ((path, path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    return [(path, source) for path, source in read if word in source]


def test_assertions_only_narrow_what_lowtide_itself_has_made():
    found = [(path.relative_to(PACKAGE).as_posix(), *each) for path, source in sources("assert ") for each in assertions(source)]
    wrong = [f"{path}:{line}" for path, line, what in found if what == "anything else" or path.startswith(OF_FILES)]
    assert wrong == []


def test_nobody_counts_on_an_assertion_that_fails():
    handlers = [(path, node) for path, source in sources("AssertionError") for node in ast.walk(parsed(source))]
    caught = [str(path) for path, node in handlers if isinstance(node, ast.ExceptHandler) and "AssertionError" in ast.dump(node)]
    assert caught == []


@pytest.mark.parametrize(("source", "expected"), KINDS.items())
def test_the_search_tells_kinds_apart(source: str, expected: str):
    assert assertions(source) == [(1, expected)]
    assert all((PACKAGE / place).exists() for place in OF_FILES)
