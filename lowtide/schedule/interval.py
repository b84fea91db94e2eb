"""Part of an order as a problem of its own: the nodes that run after one downset and before everything else."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtide.ir.problem import Bytes, Ints, OrderProblem, Rows

Item = TypeVar("Item", bound=np.generic)


def interval(problem: OrderProblem, nodes: Ints, done: NDArray[np.bool_]) -> OrderProblem:
    """The problem of `nodes` alone, where those of the mask `done` [n] have run and all others wait; node i of it is `nodes[i]`.

    Every order of `nodes` has the footprints that it has as that part of an order of `problem`: what lives throughout is resident, what
    others read later is kept, what nobody else reads any more is there from the start. `done` is closed under predecessors, and so
    is it with `nodes`.
    """
    n, m = problem.node_count, problem.tensor_count
    inside = np.zeros(n, np.bool_)
    inside[nodes] = True
    reads, outputs = row_entries(problem.reads, nodes), row_entries(problem.outputs_of, nodes)
    is_here, was_made = np.zeros(m, np.bool_), np.append(done, True)[problem.producer]  # -1: there from the start
    is_here[outputs.ids] = True
    touched = is_here.copy()
    touched[reads.ids] = True
    waiting = ~done[problem.readers.ids]
    left = _count(problem.readers, waiting)
    lasting = problem.kept | (left > _count(problem.readers, waiting & inside[problem.readers.ids]))
    is_local = is_here | (touched & was_made & ~lasting)
    throughout = was_made & ~is_local & (problem.kept | (left > 0))
    local, place = np.flatnonzero(is_local), renumbered(is_local)
    node_place = np.full(n, -1, np.int32)
    node_place[nodes] = np.arange(len(nodes), dtype=np.int32)
    takes = row_entries(problem.takes, nodes)
    may_take = is_local[takes.ids] & ~lasting[takes.ids]
    taken = _only(takes, place, may_take)
    makers = problem.producer[local]
    return OrderProblem(
        names=tuple(problem.names[node] for node in nodes),
        tensor_bytes=frozen(problem.tensor_bytes[local]),
        producer=frozen(np.where(is_here[local], node_place[makers], -1).astype(np.int32)),
        kept=frozen((lasting & is_here)[local]),
        **_named("read", _only(reads, place, is_local[reads.ids])),
        **_named("pred", sorted_rows(_only(before := row_entries(problem.preds, nodes), node_place, inside[before.ids]))),
        workspace_bytes=frozen(problem.workspace_bytes[nodes]),
        **_named("take", taken),
        take_slots=frozen(row_entries(Rows(problem.take_ptr, problem.take_slots), nodes).ids[may_take]),
        take_output=frozen(np.where(np.diff(taken.ptr) > 0, np.append(place, -1)[problem.take_output[nodes]], -1).astype(np.int32)),
        resident_bytes=problem.resident_bytes + int(problem.tensor_bytes[throughout].sum()),
    )


def row_entries(rows: Rows, chosen: Ints) -> Rows:
    """The rows of numbers `chosen`, in that order."""
    lengths = (rows.ptr[1:] - rows.ptr[:-1])[chosen]
    ptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    places = np.arange(ptr[-1], dtype=np.int32) + np.repeat(rows.ptr[:-1][chosen] - ptr[:-1], lengths)
    return Rows(ptr, rows.ids[places])


def renumbered(mask: NDArray[np.bool_]) -> Ints:
    """By number: its place among those in `mask`, -1 where it is not in it."""
    return np.where(mask, np.cumsum(mask) - 1, -1).astype(np.int32)


def sorted_rows(rows: Rows) -> Rows:
    """The same rows, each ascending."""
    row_of = np.repeat(np.arange(len(rows.ptr) - 1), np.diff(rows.ptr))
    return Rows(rows.ptr, frozen(rows.ids[np.lexsort((rows.ids, row_of))]))


def frozen(array: NDArray[Item]) -> NDArray[Item]:
    """`array` itself, from now on read-only."""
    array.setflags(write=False)
    return array


def _only(rows: Rows, place: Ints, keep: NDArray[np.bool_]) -> Rows:
    """The entries that `keep` marks, renumbered."""
    return Rows(frozen(np.concatenate([[0], np.cumsum(keep)]).astype(np.int32)[rows.ptr]), frozen(place[rows.ids[keep]]))


def _count(rows: Rows, mask: NDArray[np.bool_]) -> Bytes:
    """By row: how many of its entries are marked."""
    running: Bytes = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    return running[rows.ptr[1:]] - running[rows.ptr[:-1]]


def _named(name: str, rows: Rows) -> dict[str, Ints]:
    return {f"{name}_ptr": rows.ptr, f"{name}_ids": rows.ids}
