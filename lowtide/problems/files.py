"""Bare problems as files: orders as JSON, placements as CSV.

Orders come in two forms, and both are read; `bench.order_files` writes them.

The simple form: item i creates tensor i, so that an edge is a number and nothing else needs a name.

    {"nodes": [
    {"op": "Input", "inputs": [], "bytes": 4096, "inplace": false},
    {"op": "Relu", "inputs": [0], "bytes": 4096, "inplace": true}
    ]}

An item of op "Input" is no node: its tensor is there from the start and lives to its last use. Every other item is a node, named after
its operator and its position here ("Relu_1"). A tensor without readers lives to the end. With "inplace" a node may take over its first
input of its own size, if that dies there.

The general form holds all that an `OrderProblem` does. Fields after the first of each item may be left out, and are
then false, empty or 0.

    {"format": "lowtide.order", "version": 1, "resident_bytes": 0,
    "tensors": [
    {"bytes": 4096, "kept": false}
    ],
    "nodes": [
    {"name": "relu_1", "makes": [1], "reads": [0], "after": [7], "workspace_bytes": 512, "takes": [[0, 0]]}
    ]}

A tensor in no "makes" is there from the start. "after" lists nodes that come before this one for other reasons than tensors. "takes" lists
[tensor, the caller's index for it], the preferred first: the first tensor in "makes" may take over its memory, if that tensor dies there.

Placement problems and offsets: one row a buffer, columns by the names in the first row, in any order.

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
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, SupportsIndex

from lowtide.base import fields
from lowtide.base.files import read_bytes, read_utf8, write_whole
from lowtide.errors import FormatError
from lowtide.problems.order import OrderProblem, Task
from lowtide.problems.placement import FREE, PlaceProblem, check_buffer

FORMAT, VERSION = "lowtide.order", 1


class Loaded(NamedTuple):
    """A problem, and where its nodes stand in the text that it was read from."""

    problem: OrderProblem
    positions: Sequence[int]  # [n] of each node in the list "nodes": in the simple form, items of op "Input" stand there too


def load_problem(path: str | os.PathLike[str]) -> OrderProblem:
    """The problem in a file, of either form. Raises FormatError naming the file and the node, OSError where the file cannot be read."""
    return load_with_positions(path).problem


def load_with_positions(path: str | os.PathLike[str]) -> Loaded:
    """The same, with the position of each node in the file's list."""
    text = read_utf8(path)
    try:
        return _loaded(text)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def problem_from_json(text: str) -> OrderProblem:
    """The problem in a text of either form. Raises FormatError naming the node."""
    return _loaded(text).problem


def _loaded(text: str) -> Loaded:
    try:
        data = json.loads(text, object_pairs_hook=fields.marking_repeats, parse_int=_integer)
    except (ValueError, RecursionError) as error:  # truncated, not JSON, or nested beyond reason
        raise FormatError(f"expected a whole JSON text: {error}") from error
    if isinstance(data, fields.Repeating):
        raise FormatError(f"the top level: {data.complaint}")
    if not isinstance(data, dict) or not isinstance(data.get("nodes"), list):
        raise FormatError('expected a JSON object with a list of "nodes"')
    if "tensors" in data or "format" in data:
        return Loaded(_general(data), range(len(data["nodes"])))
    return Loaded(_simple(data), [position for position, item in enumerate(data["nodes"]) if item["op"] != "Input"])


def _integer(digits: str) -> int:
    """A number, cut short where Python would refuse to read it: it is out of every range then, and whoever looks at it can say where."""
    return int(digits[:40])


def _general(data: dict[str, Any]) -> OrderProblem:
    fields.check_fields("the top level", data, {"format", "version", "resident_bytes", "tensors", "nodes"})
    if data.get("format") != FORMAT or data.get("version") != VERSION or isinstance(data.get("version"), bool):
        version = f"{data.get('format')!r} version {data.get('version')!r}"
        raise FormatError(f'expected "format" {FORMAT!r} and "version" {VERSION}, got {version}: write it again with this release')
    if not isinstance(data.get("tensors"), list):
        fields.refuse("the top level", "tensors", "a list", data.get("tensors"))
    tensor_bytes, kept = [], []
    for index, item in enumerate(data["tensors"]):
        where = f"tensor {index}"
        fields.check_fields(where, item, {"bytes", "kept"})
        tensor_bytes.append(fields.integer(where, item, "bytes"))
        if fields.boolean(where, item, "kept"):
            kept.append(index)
    tasks = [_task(f"node {index}", item) for index, item in enumerate(data["nodes"])]
    return OrderProblem.of(tensor_bytes, tasks, kept=kept, resident_bytes=fields.integer("the top level", data, "resident_bytes", 0))


def _task(where: str, item: Any) -> Task:
    fields.check_fields(where, item, {"name", "makes", "reads", "after", "workspace_bytes", "takes"})
    name = fields.string(where, item, "name")
    where = f"{where} ({name})"
    return Task(
        name=name,
        makes=fields.integers(where, item, "makes"),
        reads=fields.integers(where, item, "reads"),
        after=fields.integers(where, item, "after"),
        workspace_bytes=fields.integer(where, item, "workspace_bytes", 0),
        takes=fields.pairs(where, item, "takes"),
    )


def _simple(data: dict[str, Any]) -> OrderProblem:
    fields.check_fields("the top level", data, {"name", "nodes"})
    parsed = [_simple_item(f"node {index}", item) for index, item in enumerate(data["nodes"])]
    tensor_bytes = [nbytes for _, _, nbytes, _ in parsed]
    tasks: list[Task] = []
    for index, (op, inputs, nbytes, inplace) in enumerate(parsed):
        if op == "Input" and (inputs or inplace):
            raise FormatError(f'node {index} (Input): expected neither "inputs" nor "inplace", got {list(inputs)}, {inplace}')
        unknown = [tensor for tensor in inputs if not 0 <= tensor < len(parsed)]
        if unknown:  # told here, where items and nodes are still numbered alike
            raise FormatError(f"node {index} ({op}): expected inputs from 0 to {len(parsed) - 1}, got {unknown[0]}")
        if op != "Input":
            alike = next(((tensor, 0) for tensor in inputs if tensor_bytes[tensor] == nbytes), None)
            tasks.append(Task(f"{op}_{index}", makes=(index,), reads=inputs, takes=(alike,) if inplace and alike else ()))
    read = {tensor for _, inputs, _, _ in parsed for tensor in inputs}
    return OrderProblem.of(tensor_bytes, tasks, kept=[tensor for tensor in range(len(parsed)) if tensor not in read])


def _simple_item(where: str, item: Any) -> tuple[str, tuple[int, ...], int, bool]:
    """Operator, distinct inputs, bytes and whether it may write in place."""
    fields.check_fields(where, item, {"op", "inputs", "bytes", "inplace"})
    op = fields.string(where, item, "op")
    where = f"{where} ({op})"
    inputs = tuple(dict.fromkeys(fields.integers(where, item, "inputs")))  # x + x reads one tensor
    return op, inputs, fields.integer(where, item, "bytes"), fields.boolean(where, item, "inplace")


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
    for line, given in lines:
        if len(given) != len(header):
            _refuse(line, f"{len(header)} fields, as in the first row", f"{len(given)}")
        yield _row(line, {name: given[place] for name, place in columns.items()}, align_bytes)


def _fields(text: str) -> Iterator[tuple[int, list[str]]]:
    """The fields of each row that has any, and the line on which it starts."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            given = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            _refuse(line, "fields between commas", f"{error}")
        if given:
            yield line, given


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


def _row(line: int, given: dict[str, str], align_bytes: int) -> _Row:
    name = given["id"]
    if not _is_id(name):
        _refuse(line, "an id of characters that can be printed", repr(name) if name else "none")
    lower, upper, size = (_number(line, column, given[column]) for column in _NEEDED[1:])
    align = _number(line, "alignment", given["alignment"]) if given.get("alignment") else align_bytes
    fixed = _number(line, "fixed", given["fixed"]) if given.get("fixed") else FREE
    if given.get("fixed") and fixed < 0:  # FREE is a word of ours
        _refuse(line, "a fixed offset of 0 or more", str(fixed))
    try:
        check_buffer(name, size, lower, upper, align, fixed)
    except FormatError as error:
        raise FormatError(f"line {line}: {error}") from error
    return _Row(line, name, lower, upper, size, align, fixed)


def _number(line: int, column: str, text: str) -> int:
    digits = text.strip()
    if not _INTEGER.fullmatch(digits):
        _refuse(line, f"{column} to be an integer", repr(text) if text else "nothing")
    if len(digits) > _MAX_DIGITS:
        _refuse(line, f"{column} to be below 2**62", f"a number of {len(digits)} digits")
    return int(digits)


def _refuse(line: int, expected: str, got: str) -> NoReturn:
    raise FormatError(f"line {line}: expected {expected}, got {got}")
