"""Writes ordering problems as the JSON that `lowtide.problems.files` reads: the simple form where it says everything."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np

from lowtide.problems.files import FORMAT, VERSION
from lowtide.problems.order import OrderProblem, Rows


def problem_to_json(problem: OrderProblem) -> str:
    """One line a tensor and a node: the simple form where it says everything, else the general one."""
    lists = _Lists(problem)
    items = _simple_items(problem, lists)
    if items is not None:
        return f'{{"nodes": [\n{_lines(items)}\n]}}\n'
    head = json.dumps({"format": FORMAT, "version": VERSION, "resident_bytes": problem.resident_bytes})[:-1]
    tensors = [{"bytes": nbytes} | ({"kept": True} if kept else {}) for nbytes, kept in zip(lists.tensor_bytes, lists.kept, strict=True)]
    nodes = [_node_item(problem, lists, node) for node in range(problem.node_count)]
    return f'{head},\n"tensors": [\n{_lines(tensors)}\n],\n"nodes": [\n{_lines(nodes)}\n]}}\n'


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
