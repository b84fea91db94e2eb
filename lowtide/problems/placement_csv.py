"""Placement problems and offsets as CSV: one row a buffer, columns by the names in the first row, in any order.

    id,lower,upper,size
    weights,0,12,4096
    hidden,3,7,1024

The buffer lives over the steps `[lower, upper)` and takes `size` bytes. Ids are all different, and can be printed. Three more columns
may be there, and a field of theirs may be empty:

    alignment   the offset is a multiple of this many bytes; where empty, of what the caller says
    fixed       the offset that the buffer must have; where empty, it may lie anywhere
    offset      where somebody has placed the buffer: an answer, and no part of the problem

Files with an offset are minimalloc's answers, and ours: `id,lower,upper,size,offset`. A file that is read as a problem may have that
column, and nothing in it is looked at. To hold a buffer where it is, call the column `fixed`.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn, SupportsIndex

from lowtide.base.files import read_bytes, write_whole
from lowtide.errors import FormatError
from lowtide.problems.placement import FREE, PlaceProblem, check_buffer

_NEEDED = ("id", "lower", "upper", "size")
_KNOWN = (*_NEEDED, "alignment", "fixed", "offset")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_MAX_DIGITS = 30  # far more than any number in range has


class _Row(NamedTuple):
    line: int  # its first one in the file
    name: str
    lower: int
    upper: int
    size: int
    align: int
    fixed: int


def load_buffers(path: str | os.PathLike[str], *, align_bytes: int = 1) -> PlaceProblem:
    """The problem in a file; `align_bytes` is the alignment of buffers that have none of their own.

    Raises FormatError naming the file and the line, OSError where the file cannot be read.
    """
    try:
        return buffers_from_csv(read_bytes(path).decode("utf-8"), align_bytes=align_bytes)
    except UnicodeDecodeError as error:
        raise FormatError(f"{os.fspath(path)}: expected text in UTF-8: {error}") from error
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)}: {error}") from error


def save_offsets(problem: PlaceProblem, offsets: Iterable[SupportsIndex], path: str | os.PathLike[str]) -> None:
    """Writes `id,lower,upper,size,offset` so that the file is either whole or as it was before. Raises OSError."""
    write_whole(path, offsets_to_csv(problem, offsets))


def buffers_from_csv(text: str, *, align_bytes: int = 1) -> PlaceProblem:
    """The problem in a text. Raises FormatError naming the line."""
    return _problem(list(_rows(text, align_bytes)))


def offsets_to_csv(problem: PlaceProblem, offsets: Iterable[SupportsIndex]) -> str:
    """One row a buffer: `id,lower,upper,size,offset`, and no other column."""
    columns = (ids(problem), problem.start.tolist(), problem.end.tolist(), problem.size_bytes.tolist(), map(int, offsets))
    return _text((*_NEEDED, "offset"), zip(*columns, strict=True))


def ids(problem: PlaceProblem) -> Sequence[str]:
    """What buffers are called in files: their names, or their numbers where two have one name, or one has none that fits on a line."""
    are_ids = len(set(problem.names)) == problem.buffer_count and all(map(_is_id, problem.names))
    return problem.names if are_ids else [str(buffer) for buffer in range(problem.buffer_count)]


def _is_id(name: str) -> bool:
    return name.isprintable() and name != ""


def _text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _problem(rows: Sequence[_Row]) -> PlaceProblem:
    first_line: dict[str, int] = {}
    for row in rows:
        if first_line.setdefault(row.name, row.line) != row.line:
            _refuse(row.line, "an id of its own", f"{row.name!r}, which is that of line {first_line[row.name]} too")
    return PlaceProblem.of(
        [row.size for row in rows],
        [row.lower for row in rows],
        [row.upper for row in rows],
        names=[row.name for row in rows],
        align_bytes=[row.align for row in rows],
        fixed_bytes=[row.fixed for row in rows],
    )


def _rows(text: str, align_bytes: int) -> Iterator[_Row]:
    """Checked rows, one a buffer; empty lines are passed over."""
    lines = _fields(text.removeprefix("\ufeff"))  # some spreadsheets start a file with that mark
    line, header = next(lines, (1, []))
    columns = _columns(line, header)
    for line, fields in lines:
        if len(fields) != len(header):
            _refuse(line, f"{len(header)} fields, as in the first row", f"{len(fields)}")
        yield _row(line, {name: fields[place] for name, place in columns.items()}, align_bytes)


def _fields(text: str) -> Iterator[tuple[int, list[str]]]:
    """The fields of each row that has any, and the line on which it starts."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            _refuse(line, "fields between commas", f"{error}")
        if fields:
            yield line, fields


def _columns(line: int, header: Sequence[str]) -> dict[str, int]:
    names = [name.strip() for name in header]
    for name in names:
        if name not in _KNOWN:
            _refuse(line, f"columns among {','.join(_KNOWN)}", repr(name))
    places = {name: place for place, name in enumerate(names)}
    if len(places) != len(names):
        _refuse(line, "each column once", ",".join(names))
    for name in _NEEDED:
        if name not in places:
            _refuse(line, f"the columns {','.join(_NEEDED)}", f"none named {name!r}")
    return places


def _row(line: int, fields: dict[str, str], align_bytes: int) -> _Row:
    name = fields["id"]
    if not _is_id(name):
        _refuse(line, "an id of characters that can be printed", repr(name) if name else "none")
    lower, upper, size = (_integer(line, column, fields[column]) for column in _NEEDED[1:])
    align = _integer(line, "alignment", fields["alignment"]) if fields.get("alignment") else align_bytes
    fixed = _integer(line, "fixed", fields["fixed"]) if fields.get("fixed") else FREE
    if fields.get("fixed") and fixed < 0:  # FREE is a word of ours
        _refuse(line, "a fixed offset of 0 or more", str(fixed))
    try:
        check_buffer(name, size, lower, upper, align, fixed)
    except FormatError as error:
        raise FormatError(f"line {line}: {error}") from error
    return _Row(line, name, lower, upper, size, align, fixed)


def _integer(line: int, column: str, text: str) -> int:
    digits = text.strip()
    if not _INTEGER.fullmatch(digits):
        _refuse(line, f"{column} to be an integer", repr(text) if text else "nothing")
    if len(digits) > _MAX_DIGITS:
        _refuse(line, f"{column} to be below 2**62", f"a number of {len(digits)} digits")
    return int(digits)


def _refuse(line: int, expected: str, got: str) -> NoReturn:
    raise FormatError(f"line {line}: expected {expected}, got {got}")
