"""Ordering problems as JSON, in two forms that both are read; `bench.order_files` writes them.

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
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from lowtide.base import fields
from lowtide.base.files import read_utf8
from lowtide.errors import FormatError
from lowtide.problems.order import OrderProblem, Task

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
