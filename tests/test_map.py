"""The map of the house says what is there: each file in its own first sentence, and paths through functions that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.imports import PACKAGE

DOCS = Path(__file__).parents[1] / "docs"
FILES = DOCS / "files.md"
STEP = re.compile(r"`([\w/]+\.py)` `(\w+)`")
HEAD = """# Each file in a sentence

This page is written from the first lines of the files of `lowtide`, by `pytest tests/test_map.py --update-golden`.
[Architecture](architecture.md) says how the rooms belong together.
"""


def first_sentence(path: Path) -> str:
    """Of what a file says of itself: the text that it begins with."""
    begins = re.match(r'"""(.*?)(?:\n\n|""")', path.read_text(encoding="utf-8"), re.DOTALL)
    text = " ".join(begins[1].split()) if begins else ""
    return re.split(r"(?<=[.?!])\s", text)[0]


def page() -> Iterator[str]:
    yield HEAD
    for room in sorted(path for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()):
        yield f"## {room.name}\n"
        yield first_sentence(room / "__init__.py") + "\n"
        files = (path for path in sorted(room.rglob("*.py")) if path != room / "__init__.py")
        told = [(path.relative_to(room), first_sentence(path)) for path in files]
        yield "\n".join(f"- `{path}`: {sentence}" for path, sentence in told if sentence) + "\n"


def test_every_file_says_what_it_is_for(request: pytest.FixtureRequest):
    text = "\n".join(page())
    if request.config.getoption("--update-golden"):
        FILES.write_text(text, encoding="utf-8")
    assert FILES.read_text(encoding="utf-8") == text, "pytest tests/test_map.py --update-golden"


def test_paths_lead_through_functions_that_exist():
    steps = STEP.findall((DOCS / "architecture.md").read_text(encoding="utf-8"))
    assert len(steps) > 20
    missing = [
        f"{file} {name}"
        for file, name in steps
        if not re.search(rf"^\s*(def|class) {name}\b", (PACKAGE / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []
