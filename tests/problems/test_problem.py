from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from lowtide.errors import FormatError
from lowtide.problems.order import OrderProblem, Rows, Task
from tests.problems import Case, cases


def rows(of: Rows) -> list[list[int]]:
    return [of.ids[start:end].tolist() for start, end in zip(of.ptr[:-1], of.ptr[1:], strict=True)]


@given(cases())
def test_arrays_say_what_the_tasks_say(case: Case) -> None:
    problem, nodes = case.problem, range(len(case.tasks))
    assert (problem.node_count, problem.tensor_count) == (len(case.tasks), len(case.tensor_bytes))
    assert rows(problem.reads) == [list(task.reads) for task in case.tasks]
    assert rows(problem.outputs_of) == [list(task.makes) for task in case.tasks]
    assert rows(problem.preds) == [sorted(case.preds(node)) for node in nodes]
    assert rows(problem.succs) == [[other for other in nodes if node in case.preds(other)] for node in nodes]
    assert rows(problem.readers) == [sorted(case.readers(tensor)) for tensor in range(problem.tensor_count)]
    assert rows(problem.takes) == [[tensor for tensor, _ in task.takes] for task in case.tasks]
    assert rows(Rows(problem.take_ptr, problem.take_slots)) == [[slot for _, slot in task.takes] for task in case.tasks]
    assert problem.made_bytes.tolist() == [sum(case.tensor_bytes[tensor] for tensor in task.makes) for task in case.tasks]
    assert np.flatnonzero(problem.kept).tolist() == sorted(case.kept)


def test_arrays_cannot_be_changed() -> None:
    problem = OrderProblem.of([4], [Task("a", makes=(0,))])
    for array in (problem.tensor_bytes, problem.producer, problem.kept, problem.read_ptr, problem.succs.ids, problem.uses):
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 0


@pytest.mark.parametrize(
    ("sizes", "tasks", "message"),
    [
        ([1], [Task("a", reads=(1,))], r"node 0 \(a\): reads: expected a tensor from 0 to 0, got 1"),
        ([1], [Task("a", reads=(0, 0))], r"node 0 \(a\): reads: expected each tensor once, got tensor 0 twice"),
        ([1], [Task("a", makes=(-1,))], r"node 0 \(a\): makes: expected a tensor from 0 to 0, got -1"),
        ([1], [Task("a", makes=(0,)), Task("b", makes=(0,))], r"node 1 \(b\): .* no other node makes, got tensor 0 of node 0 \(a\)"),
        ([1], [Task("a", after=(1,))], r"node 0 \(a\): after: expected a node from 0 to 0, got 1"),
        ([-1], [], r"tensor 0: bytes: expected 0 to 2\*\*62 bytes, got -1"),
        ([2**62 + 1], [], r"tensor 0: bytes: expected 0 to 2\*\*62"),
        ([10**5000], [], "more than 30 digits"),
        ([2**61, 2**61, 1], [], "the sum of all"),
        ([], [Task("a", workspace_bytes=-5)], r"node 0 \(a\): workspace_bytes: expected 0 to .* got -5"),
        ([1], [Task("a", makes=(0,), reads=(0,))], r"node 0 \(a\) after node 0 \(a\)"),
        ([], [Task("a", after=(2,)), Task("b", after=(0,)), Task("c", after=(1,))], r"0 \(a\) after node 2 \(c\) after node 1 \(b\)"),
        ([1], [Task("a", reads=(0,), takes=((0, 0),))], r"node 0 \(a\) may take over memory but makes no tensor"),
        ([1, 1], [Task("a", makes=(0,), takes=((1, 0),))], r"node 0 \(a\): expected reuses of distinct tensors .* \[\], got \[1\]"),
        ([1, 2], [Task("a", makes=(0,), reads=(1,), takes=((1, 0),))], r"node 0 \(a\): expected a reuse of 1 bytes .* tensor 1 of 2"),
        ([1, 1], [Task("a", makes=(0,), reads=(1,), takes=((1, -1),))], r"node 0 \(a\): expected the index of a reuse from 0"),
    ],
)  # fmt: skip
def test_refuses(sizes: list[int], tasks: list[Task], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        OrderProblem.of(sizes, tasks)


def test_refuses_unknown_kept_tensors_and_negative_residents() -> None:
    with pytest.raises(FormatError, match="kept tensors: expected a tensor from 0 to -1, got 0"):
        OrderProblem.of([], [], kept=[0])
    with pytest.raises(FormatError, match="resident_bytes: expected 0"):
        OrderProblem.of([], [], resident_bytes=-1)


def test_a_cycle_is_found_behind_a_long_tail() -> None:
    tail = [Task(f"t{node}", after=(node + 1,)) for node in range(50_000)]
    with pytest.raises(FormatError, match=r"node 50000 \(x\) after node 50001 \(y\) after node 50000 \(x\)$"):
        OrderProblem.of([], [*tail, Task("x", after=(50_001,)), Task("y", after=(50_000,))])


def test_a_hundred_thousand_nodes() -> None:
    n = 100_000
    tasks = [Task("op", makes=(node,), reads=tuple(range(max(0, node - 3), node))) for node in range(n)]
    problem = OrderProblem.of([64] * n, tasks, kept=[n - 1])
    assert (problem.succs.ptr[-1], problem.readers.ptr[-1], problem.start_bytes) == (3 * n - 6, 3 * n - 6, 0)


def test_a_long_list_with_a_repetition_is_refused_in_linear_time() -> None:
    tensors = range(20_000)
    seen = _Counting()
    reads = tuple(_Number(tensor, seen) for tensor in (*tensors, tensors[-1]))
    with pytest.raises(FormatError, match="expected each tensor once, got tensor 19999 twice"):
        OrderProblem.of([1] * len(tensors), [Task("long", reads=reads)])
    assert seen.comparisons < 10 * len(tensors)


class _Counting:
    comparisons = 0


class _Number(int):
    def __new__(cls, value: int, seen: _Counting) -> _Number:
        number = super().__new__(cls, value)
        number.seen = seen
        return number

    def __eq__(self, other: object) -> bool:
        self.seen.comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__
