"""What the house must stay: within its budget of lines, classes and test files told apart by name. See `docs/architecture.md`."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.imports import PACKAGE

TESTS = Path(__file__).parent
BUDGET_LINES = 75_932

A_SCREEN = 25  # files that are seen at one look


@cache
def lines_of(pattern: str) -> list[str]:
    """What a pattern finds at the beginnings of lines, in all files of the package."""
    return [each for path in PACKAGE.rglob("*.py") for each in re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)]


def classes() -> list[str]:
    return lines_of(r"^ *class (\w+)[(:\[]")


def test_the_package_stays_within_its_budget_of_lines():
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py"))
    assert lines <= BUDGET_LINES


def test_classes_have_names_of_their_own():
    """But for solvers and what they answer with: `order` and `place` ask alike, and users name them alike."""
    assert {name for name, count in Counter(classes()).items() if count > 1} == {"Anytime", "Auto", "Exact"}


def test_aliases_of_types_have_names_that_no_class_has():
    aliases = set(lines_of(r"^(\w+): .*TypeAlias"))
    assert len(aliases) > 50
    assert sorted(aliases.intersection(classes())) == []


def test_files_are_named_by_nouns():
    """No participle and no adverb, but for those that the field uses as nouns."""
    nouns = {"family", "fitting", "lightning", "pruning", "rounding", "staging"}
    stems = {path.stem for path in PACKAGE.rglob("*.py")}
    assert (
        sorted(
            stem for stem in stems - nouns if stem.endswith(("ed", "ing", "ly")) or stem in ("beside", "within", "found", "made", "held")
        )
        == []
    )


def test_a_room_that_fits_on_a_screen_has_no_folders():
    """But for the arena of `runtime`, which lies beside its source in C++."""
    with_folders = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/*/__init__.py")}
    assert {room for room in with_folders if len(list((PACKAGE / room).rglob("*.py"))) <= A_SCREEN} == {"runtime"}


def test_test_files_have_names_of_their_own():
    """pytest imports them by name: of two that are called alike it collects one."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize("listed", ["long.txt", "slow.txt"])
def test_listed_tests_exist(listed):
    for line in (TESTS / listed).read_text(encoding="utf-8").splitlines()[1:]:
        path, _, name = line.partition("::")
        source = (TESTS.parent / path).read_text(encoding="utf-8")
        assert not name or f"def {name.partition('[')[0]}(" in source, line
