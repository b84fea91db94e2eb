"""Words that were retired stay so: each thing has one name, the field's where it has one (docs/glossary.md)."""

import re
from pathlib import Path

import pytest

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


def _lines(path: Path, word: re.Pattern[str]) -> list[int]:
    """The numbers of the lines that say the word; what the glossary says under "elsewhere called" is others' own."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.name == "glossary.md":
        lines = [line.rpartition("|")[0].rpartition("|")[0] for line in lines]
    return [number for number, line in enumerate(lines, 1) if word.search(line)]
