"""Work that goes on beside the order: begun as soon as can be, waited for as late as the peak lets it.

    takes   an order, which of its nodes begin such work, and which wait for it
    leaves  another one of no higher peak

A begin goes up to right behind the last node that it depends on. A wait, and all that follows from it, goes down the order, the last wait
first, and the others before it, as work ends in the order in which it was begun: as far as the peak stays, by halves of what is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

import numpy as np

from lowtide.cost.memory import simulate
from lowtide.problems.order import OrderProblem


def beside(problem: OrderProblem, order: Sequence[int], begins: AbstractSet[int], waits: AbstractSet[int]) -> list[int]:
    """The order with `begins` early and `waits` late."""
    most_bytes, found = simulate(problem, order).peak_bytes, list(order)
    before = [problem.preds.ids[start:end].tolist() for start, end in zip(problem.preds.ptr, problem.preds.ptr[1:], strict=False)]
    begun = [each for each in order if each in begins]
    for earlier, later in pairwise(begun):  # links work in the order in which their work is wanted
        before[later].append(earlier)
    for node in begun:
        found = _lean(problem, [_raised(found, node, before)], most_bytes) or found
    end = len(found)
    for node in [each for each in reversed(found) if each in waits]:
        found = _lean(problem, _sunk(found[:end], node, before, found[end:]), most_bytes) or found
        end = found.index(node)
    return found


def holding(problem: OrderProblem, waits: Mapping[int, int]) -> OrderProblem:
    """The problem in which the workspace of these waits is held from its begin on, `waits[wait]`: a tensor between the two."""
    if not waits:
        return problem
    workspace_bytes, first = problem.workspace_bytes.copy(), problem.tensor_count
    held = np.array([workspace_bytes[wait] for wait in waits], np.int64)
    workspace_bytes[[*waits, *waits.values()]] = 0
    row_of = {wait: first + row for row, wait in enumerate(waits)}
    reads = [problem.read_ids[start:end].tolist() for start, end in zip(problem.read_ptr, problem.read_ptr[1:], strict=False)]
    rows = [[*row, row_of[node]] if node in row_of else row for node, row in enumerate(reads)]
    return dataclasses.replace(
        problem,
        tensor_bytes=np.concatenate([problem.tensor_bytes, held]),
        producer=np.concatenate([problem.producer, np.array(list(waits.values()), np.int32)]),
        kept=np.concatenate([problem.kept, np.zeros(len(held), bool)]),
        read_ptr=np.cumsum([0, *map(len, rows)], dtype=np.int32),
        read_ids=np.array([each for row in rows for each in row], np.int32),
        workspace_bytes=workspace_bytes,
    )


def _raised(order: Sequence[int], node: int, before: Sequence[Sequence[int]]) -> list[int]:
    """The order with a node right behind the last that it depends on."""
    needed, at = set(before[node]), order.index(node)
    up = next((position + 1 for position in range(at - 1, -1, -1) if order[position] in needed), 0)
    return [*order[:up], node, *order[up:at], *order[at + 1 :]]


def _sunk(order: Sequence[int], node: int, before: Sequence[Sequence[int]], behind: Sequence[int]) -> Iterable[list[int]]:
    """Orders with a node and all that follows from it further down, the furthest first; `behind` stays behind all."""
    at = order.index(node)
    follows = {node}
    for each in order[at + 1 :]:
        if not follows.isdisjoint(before[each]):
            follows.add(each)
    span = len(order) - at
    while span > 1:
        piece = order[at : at + span]
        moved = [*(each for each in piece if each not in follows), *(each for each in piece if each in follows)]
        if moved != list(piece):
            yield [*order[:at], *moved, *order[at + span :], *behind]
        span //= 2


def _lean(problem: OrderProblem, orders: Iterable[list[int]], most_bytes: int) -> list[int] | None:
    """The first that peaks no higher; None where all do."""
    return next((order for order in orders if simulate(problem, order).peak_bytes <= most_bytes), None)
