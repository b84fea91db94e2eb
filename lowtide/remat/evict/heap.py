"""A heap of candidates: the one of least score is at its head, of equals the one that came first."""

from __future__ import annotations

from typing import Any

from lowtide.base.kernels import kernel


@kernel(borrows=True)
def heapify(heap: Any, count: Any, scores: Any) -> None:
    for position in range(count):
        heap[position] = position
    for at in range(count // 2 - 1, -1, -1):
        sift_down(heap, at, count, scores)


@kernel(borrows=True)
def sift_down(heap: Any, at: Any, count: Any, scores: Any) -> None:
    """Put one back to where it belongs whose score has grown."""
    moved = heap[at]
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _before(heap[child + 1], heap[child], scores):
            child += 1
        if not _before(heap[child], moved, scores):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moved


@kernel(borrows=True)
def _before(one: Any, other: Any, scores: Any) -> bool:
    return bool(scores[one] < scores[other] or (scores[one] == scores[other] and one < other))
