"""Ordering problems as JSON, in two forms; both are read, and the simple one is written where it says everything.

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
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from lowtide.base import fields
from lowtide.base.files import read_utf8
from lowtide.errors import FormatError
from lowtide.problems.order import OrderProblem, Rows, Task

_FORMAT, _VERSION = "lowtide.order", 1


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


def problem_to_json(problem: OrderProblem) -> str:
    """One line a tensor and a node: the simple form where it says everything, else the general one."""
    lists = _Lists(problem)
    items = _simple_items(problem, lists)
    if items is not None:
        return f'{{"nodes": [\n{_lines(items)}\n]}}\n'
    head = json.dumps({"format": _FORMAT, "version": _VERSION, "resident_bytes": problem.resident_bytes})[:-1]
    tensors = [{"bytes": nbytes} | ({"kept": True} if kept else {}) for nbytes, kept in zip(lists.tensor_bytes, lists.kept, strict=True)]
    nodes = [_node_item(problem, lists, node) for node in range(problem.node_count)]
    return f'{head},\n"tensors": [\n{_lines(tensors)}\n],\n"nodes": [\n{_lines(nodes)}\n]}}\n'


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
    if data.get("format") != _FORMAT or data.get("version") != _VERSION or isinstance(data.get("version"), bool):
        version = f"{data.get('format')!r} version {data.get('version')!r}"
        raise FormatError(f'expected "format" {_FORMAT!r} and "version" {_VERSION}, got {version}: write it again with this release')
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


class _Lists:
    """The arrays of a problem as lists: walking those is many times faster than indexing arrays one by one."""

    def __init__(self, problem: OrderProblem) -> None:
        self.tensor_bytes: list[int] = problem.tensor_bytes.tolist()
        self.kept: list[bool] = problem.kept.tolist()
        self.producer: list[int] = problem.producer.tolist()
        self.readers: list[int] = np.diff(problem.readers.ptr).tolist()
        self.reads = _split(problem.reads)
        self.makes = _split(problem.outputs_of)
        self.preds = _split(problem.preds)
        self.takes = _split(problem.takes)
        self.slots = _split(Rows(problem.take_ptr, problem.take_slots))

    def after(self, node: int) -> list[int]:
        """The predecessors of a node that the tensors it reads do not imply."""
        implied = {self.producer[tensor] for tensor in self.reads[node]}
        return [pred for pred in self.preds[node] if pred not in implied]


def _node_item(problem: OrderProblem, lists: _Lists, node: int) -> dict[str, Any]:
    makes, first = lists.makes[node], int(problem.take_output[node])
    if first >= 0:
        makes = [first, *(tensor for tensor in makes if tensor != first)]
    item: dict[str, Any] = {
        "makes": makes,
        "reads": lists.reads[node],
        "after": lists.after(node),
        "workspace_bytes": int(problem.workspace_bytes[node]),
        "takes": [list(pair) for pair in zip(lists.takes[node], lists.slots[node], strict=True)],
    }
    return {"name": problem.names[node]} | {field: value for field, value in item.items() if value}


def _simple_items(problem: OrderProblem, lists: _Lists) -> list[dict[str, Any]] | None:
    """The items of the simple form, or None where it would lose something."""
    makers = [node for node in lists.producer if node >= 0]
    one_each = makers == list(range(problem.node_count))  # in the order of their tensors
    kept_if_unread = all(kept == (readers == 0) for kept, readers in zip(lists.kept, lists.readers, strict=True))
    if not one_each or not kept_if_unread or problem.resident_bytes or np.any(problem.workspace_bytes):
        return None
    items: list[dict[str, Any]] = []
    for tensor, node in enumerate(lists.producer):
        if node < 0:
            items.append({"op": "Input", "inputs": [], "bytes": lists.tensor_bytes[tensor], "inplace": False})
            continue
        takes, reads = lists.takes[node], lists.reads[node]
        alike = [read for read in reads if lists.tensor_bytes[read] == lists.tensor_bytes[tensor]][:1]
        op, _, position = problem.names[node].rpartition("_")
        if takes not in ([], alike) or any(lists.slots[node]) or lists.after(node) or op == "Input" or position != str(tensor):
            return None
        items.append({"op": op, "inputs": reads, "bytes": lists.tensor_bytes[tensor], "inplace": bool(takes)})
    return items


def _split(rows: Rows) -> list[list[int]]:
    ids, ptr = rows.ids.tolist(), rows.ptr.tolist()
    return [ids[start:end] for start, end in pairwise(ptr)]


def _lines(items: list[dict[str, Any]]) -> str:
    return ",\n".join(map(json.dumps, items))
