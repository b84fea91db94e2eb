"""Equal parts are solved once: a stack of identical blocks costs as much as one of them.

Parts are equal where one is the other with its nodes and tensors renumbered. Numbers are taken from what surrounds a node, refined round by
round (Weisfeiler and Leman 1968), so that equal parts get equal arrays; as whole arrays are compared, unequal parts never pass for equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.problems.order import OrderProblem, Rows
from lowtide.schedule.base import Schedule, Solver

_ROUNDS = 4  # of refinement: what is further away seldom tells nodes apart that were alike until then
Words = NDArray[np.uint64]


class Form(NamedTuple):
    """What a problem is when its numbering is left aside."""

    key: bytes  # equal for two problems only where they are equal, hash collisions of 256 bits aside
    nodes: NDArray[np.intp]  # [n] the problem's nodes in the order of the form


def solve_once(pieces: Iterable[OrderProblem], inner: Solver) -> list[Schedule]:
    """The answers of `inner` to all parts, those to equal parts carried over from the first of them."""
    known: dict[bytes, tuple[OrderProblem, Form, Schedule]] = {}
    answers = []
    for piece in pieces:
        form = form_of(piece)
        if form.key not in known:
            known[form.key] = (piece, form, inner.solve(piece))
        answers.append(_carried(piece, form, *known[form.key]))
    return answers


def form_of(problem: OrderProblem) -> Form:
    """The form of a problem, names and what is resident left aside."""
    node_words, tensor_words = _refined(problem)
    nodes = np.argsort(node_words, kind="stable")
    tensors = np.argsort(tensor_words, kind="stable")
    node_place, tensor_place = np.argsort(nodes), np.argsort(tensors)
    pieces = [
        problem.tensor_bytes[tensors], problem.kept[tensors], np.append(node_place, -1)[problem.producer][tensors],
        problem.workspace_bytes[nodes], np.append(tensor_place, -1)[problem.take_output][nodes],
        *(_placed(rows, nodes, position) for rows, position in
          ((problem.reads, tensor_place), (problem.preds, node_place), (problem.takes, tensor_place))),
    ]  # fmt: skip
    digest = hashlib.sha256(f"{problem.node_count} {problem.tensor_count}".encode())
    for piece in pieces:
        digest.update(np.ascontiguousarray(piece, np.int64).tobytes())
        digest.update(b"/")
    return Form(digest.digest(), nodes)


def _carried(piece: OrderProblem, form: Form, first: OrderProblem, first_form: Form, schedule: Schedule) -> Schedule:
    """The answer to `first` as one to `part`, which has the same form."""
    if piece is first:
        return schedule
    node_of = np.empty(piece.node_count, np.intp)
    node_of[first_form.nodes] = form.nodes
    more_bytes = piece.resident_bytes - first.resident_bytes
    return replace(
        schedule,
        order=tuple(node_of[list(schedule.order)].tolist()),
        peak_bytes=schedule.peak_bytes + more_bytes,
        lower_bound_bytes=schedule.lower_bound_bytes + more_bytes,
    )


def _refined(problem: OrderProblem) -> tuple[Words, Words]:
    """A word for each node and tensor that does not depend on the numbering."""
    nodes = _mixed(problem.workspace_bytes.astype(np.uint64), np.diff(problem.pred_ptr).astype(np.uint64))
    tensors = _mixed(problem.tensor_bytes.astype(np.uint64), problem.kept.astype(np.uint64))
    for _ in range(_ROUNDS):
        made_by = np.append(nodes, np.uint64(7))[problem.producer]
        tensors = _mixed(tensors, made_by, _sums(problem.readers, nodes))
        around = [_sums(rows, nodes) for rows in (problem.preds, problem.succs)]
        nodes = _mixed(nodes, _sums(problem.reads, tensors), _sums(problem.outputs_of, tensors), *around)
    return nodes, tensors


def _sums(rows: Rows, words: Words) -> Words:
    """By row: the sum of its entries' words, whatever their order; it wraps around."""
    running: Words = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(words)[rows.ids], dtype=np.uint64)])
    return running[rows.ptr[1:]] - running[rows.ptr[:-1]]


def _mixed(*columns: Words) -> Words:
    """Columns of words made one, so that each bit counts for all (splitmix64's finisher)."""
    word = np.zeros_like(columns[0])
    for column in columns:
        word = (word ^ column) + np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
    return word


def _placed(rows: Rows, nodes: NDArray[np.intp], position: NDArray[np.intp]) -> NDArray[np.int64]:
    """[rows + entries] the lengths of the rows of `nodes`, then the rows themselves, renumbered, each ascending."""
    row_place = np.argsort(nodes)
    row_of = np.repeat(row_place, np.diff(rows.ptr))
    order = np.lexsort((position[rows.ids], row_of))
    return np.concatenate([np.diff(rows.ptr)[nodes], position[rows.ids[order]]]).astype(np.int64)
