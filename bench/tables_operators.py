"""The section of the results page on programs that nobody here wrote: PyTorch's operators and modules, networks of libraries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from bench.tables_parts import Row, rows_of, section

_COUNTED = ("right", "refused", "different", "raised", "dead")
_DATABASES = (
    ("operators", "op_db_first_2"),
    ("operators under autocast", "op_db_autocast_first_2"),
    ("modules", "module_db"),
    ("modules under autocast", "module_db_autocast_first_3"),
)

_NETWORKS = (
    ("networks of libraries", "coverage"),
    ("transformers 5.17, torch 2.11", "coverage_torch_2_11"),
    ("transformers 5.24, torch 2.15", "coverage_torch_2_15"),
)


def of_others() -> tuple[str, ...]:
    """What became of them, by capture."""
    lines = [line for what, name in _DATABASES for line in _lines(what, rows_of(name))]
    lines += [
        _line(f"{what}, {mode}", rows, Counter(row[mode] for row in rows))
        for what, rows in ((what, rows_of(name)) for what, name in _NETWORKS)
        for mode in ("training", "inference")
    ]
    return (
        section(
            "Operators and networks of others",
            "op_db_autocast_first_2",
            "python -m bench.op_db --dtype autocast --samples 2",
            "Eager beside lowtide, to the last bit, on float32, and under autocast to bfloat16. Of each operator of PyTorch's own test\n"
            "database two samples are called and trained through. So are calls made up for each operator that is composite or known to\n"
            "autocast, by overload. Counts are of samples; those that eager does not run, or does not repeat, are in none.\n"
            "Refused are sparse layouts, `resize_`, and samples of which no parameter has a gradient. Networks take three steps.",
            ("", "subjects", *_COUNTED),
            lines,
            after="Other files: `op_db_first_2.json`, `module_db.json`, `module_db_autocast_first_3.json`, `coverage.json`,\n"
            "`coverage_torch_2_11.json`, `coverage_torch_2_15.json`.",
        ),
    )


def _lines(what: str, rows: Sequence[Row]) -> Iterable[list[str]]:
    modes = dict.fromkeys(row.get("mode") for row in rows)
    for mode in modes:
        of = [row for row in rows if row.get("mode") == mode]
        yield _line(what if mode is None else f"{what}, {mode}", of, {each: sum(row.get(each) or 0 for row in of) for each in _COUNTED})


def _line(what: str, rows: Sequence[Row], counts: dict[str, int]) -> list[str]:
    return [what, f"{len(rows):,}", *(f"{counts.get(each, 0):,}" for each in _COUNTED)]
