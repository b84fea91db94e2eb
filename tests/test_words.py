"""Words that were retired stay so, each thing has one name (docs/glossary.md), and what users read has short sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowtide
from tests.imports import parsed

pytestmark = pytest.mark.xdist_group("source")  # one process parses all files, once

ROOT = Path(__file__).parents[1]
RETIRED = {  # what is no longer said, and what is said instead
    r"take-?overs?": "in-place reuse",
    r"Moment|peak_moment|moment_lines?": "snapshot",
    r"deals?|Deals?|deal_lines|deals_of": "eviction",
    r"trade|Trade|trade_from|kept_us|kept_peak_bytes": "cost report; order_us, order_peak_bytes",
    r"rehears(e|es|ed|al|als|e_\w+)": "warm-up",
    r"told_as|_told": "a name for what it is",
    r"place_text": "source_text",
    r"RunProblem|evict_room|evict_state|run_cost|hills?": "remat problem, victims, segment",
    r"_?TOLD\w*|told(?= ?=[^=])|told[.\[]": "a name for what it is",
    r"kept_bytes|warn_(if_)?not_kept|can_be_kept": "checkpoint bytes, cached; a kept tensor lives to the end",
    r"among\(|among[:,)]|\w+\.among": "a name for what is selected",
    r"place_of|peak_place|load_with_places|into_places|slot\.place|class _?Places?": "position, location; to place is to give an address",
    r"had back|letting go": "evicted and restored, eviction",
    r"place\.parts|_next_part|part: NDArray": "component, subproblem, role",
}
SOURCES = (*(ROOT / "lowtide").rglob("*.py"), *(ROOT / "research").rglob("*.py"))
PAGES = sorted(path for path in (*SOURCES, *(ROOT / "docs").glob("*.*"), ROOT / "README.md") if path.suffix in (".py", ".md"))


@pytest.mark.parametrize("retired", RETIRED)
def test_a_retired_word_is_said_nowhere(retired: str):
    word = re.compile(rf"\b(?:{retired})\b")
    found = [f"{path.relative_to(ROOT)}:{number}" for path in PAGES for number in _lines(path, word)]
    assert found == [], f"say {RETIRED[retired]}"


@pytest.mark.parametrize(
    "text",
    [
        "a takeover", "peak_moment(graph)", "for deal in deals", "plan.trade", "a rehearsal", "_told(hook)", "hills", "told = 1",
        "option.kept_bytes", "point.among(3)", "slot.place", "part: NDArray", "had back",
    ],
)  # fmt: skip
def test_a_retired_word_is_found(text: str):
    assert sum(bool(re.search(rf"\b(?:{retired})\b", text)) for retired in RETIRED) == 1


NO_NOUNS = frozenset({"told", "said", "asked", "held", "found", "made", "way", "look", "looks", "Lay"})


def test_names_say_what_they_stand_for():
    """By a noun of the field: not for how one came by it."""
    found = [f"{path.relative_to(ROOT)}:{line}: {name}" for path in SOURCES for line, name in _bound(path.read_text(encoding="utf-8"))]
    assert [entry for entry in found if entry.rpartition(" ")[2] in NO_NOUNS] == []


@pytest.mark.parametrize(
    "source",
    [
        "found = 1", "for way in ways: pass", "def f(*, held=None): pass", "class Lay: pass", "x = [look for look in y]", "lambda made: 0",
        "def held(): pass", "async def found(): pass", "class Arena:\n    held: int", "self.asked = 1", "from x import specs as made",
    ],
)  # fmt: skip
def test_a_name_that_stands_for_nothing_is_found(source: str):
    assert [name for _, name in _bound(source) if name in NO_NOUNS]


def _bound(source: str) -> Iterator[tuple[int, str]]:
    """What a source gives a name: variables, parameters, attributes, functions, classes and what it imports, by line."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.alias):
            yield node.lineno, node.asname or node.name
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def _lines(path: Path, word: re.Pattern[str]) -> list[int]:
    """The numbers of the lines that say the word; what the glossary says under "elsewhere called" is others' own."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.name == "glossary.md":
        lines = [line.rpartition("|")[0].rpartition("|")[0] for line in lines]
    return [number for number, line in enumerate(lines, 1) if word.search(line)]


READ = ("README.md", *(f"docs/{name}.md" for name in ("guide", "recipes", "faq", "engines", "glossary")))
MOST_WORDS, MOST_LETTERS = 25, 600  # of a sentence, of a paragraph
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_START = re.compile(r"[-|#<]|\d+\. |$")


@pytest.mark.parametrize("page", READ)
def test_sentences_and_paragraphs_are_short(page: str):
    long = []
    for number, paragraph in _paragraphs((ROOT / page).read_text(encoding="utf-8")):
        long += [f"{page}:{number}: {len(paragraph)} letters"] if len(paragraph) > MOST_LETTERS else []
        long += [f"{page}:{number}: {sentence}" for sentence in _long_sentences(paragraph)]
    assert long == []


def test_sentences_of_public_docstrings_are_short():
    long = [
        f"{name}: {sentence}" for name, text in _public_docstrings() for _, part in _paragraphs(text) for sentence in _long_sentences(part)
    ]
    assert long == []


def test_a_long_sentence_is_found():
    words = " ".join(["word"] * MOST_WORDS)
    text = (
        f"# {words}\n\n{words}.\n{words}.\n\n```\n{words} {words}\n```\n\n| a | {words} more |\n|---|---|\n\n- {words}\n- {words} `a b c`\n"
    )
    assert [number for number, paragraph in _paragraphs(text) for _ in _long_sentences(paragraph)] == [10, 14]


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items of lists and cells of tables with the number of their first line; code is left out."""
    lines: list[str] = []
    for number, line in enumerate([*_FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text).splitlines(), ""], 1):
        stripped = line.strip()
        if lines and _START.match(stripped):
            yield number - len(lines), " ".join(lines)
            lines = []
        if stripped.startswith("|"):
            yield from ((number, cell.strip()) for cell in stripped.strip("|").split("|"))
        elif stripped and not stripped.startswith("<"):
            lines.append(stripped.lstrip("-# "))


def _long_sentences(paragraph: str) -> list[str]:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", paragraph)).replace("*", "")
    sentences = re.split(r"(?<=[.!?])[\")]*\s+", plain)
    return [each for each in sentences if sum(bool(re.search(r"\w", word)) for word in each.split()) > MOST_WORDS]


def _public_docstrings() -> Iterator[tuple[str, str]]:
    """Of what `lowtide` exports, and of the public methods of its classes; one paragraph for each argument that is explained."""
    for name in {*lowtide.__all__} - {*lowtide._FOLDERS}:
        path = ROOT / lowtide._MODULES.get(name, "lowtide.errors").replace(".", "/")  # not imported, as torch takes seconds
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = parsed(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                for each in (node, *(inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name[0] != "_")):
                    text = ast.get_docstring(each) or ""
                    yield f"{name}.{each.name}", re.sub(r"^(?=\w+: )", "\n", text, flags=re.MULTILINE)
