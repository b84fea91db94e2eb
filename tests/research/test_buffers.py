import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost.memory import simulate
from lowtide.errors import CheckError
from lowtide.problems.order import OrderProblem, Task
from research.buffers import order_buffers, place_problem
from tests.problems import Case, cases, unhurried


@st.composite
def ordered_cases(draw: st.DrawFn) -> tuple[Case, tuple[int, ...]]:
    case = draw(cases(max_nodes=10))
    order: list[int] = []
    while len(order) < len(case.tasks):
        ready = [node for node in range(len(case.tasks)) if node not in order and case.preds(node) <= set(order)]
        order.append(draw(st.sampled_from(ready)))
    return case, tuple(order)


@unhurried
@given(ordered_cases())
def test_buffers_alive_add_up_to_the_footprint(drawn: tuple[Case, tuple[int, ...]]) -> None:
    case, order = drawn
    problem = case.problem
    buffers = place_problem(problem, order)
    for step, footprint_bytes in enumerate(simulate(problem, order).footprint_bytes.tolist()):
        alive = (buffers.start <= step) & (step < buffers.end)
        assert buffers.size_bytes[alive].sum() + problem.resident_bytes == footprint_bytes


@unhurried
@given(ordered_cases())
def test_a_tensor_lives_in_its_buffer_and_where_it_takes_over_in_that_of_the_taken(drawn: tuple[Case, tuple[int, ...]]) -> None:
    case, order = drawn
    problem = case.problem
    found, footprint = order_buffers(problem, order), simulate(problem, order)
    buffers = found.problem
    assert np.array_equal(buffers.size_bytes[found.of_tensor], problem.tensor_bytes)
    assert (buffers.start[found.of_tensor] <= footprint.lifetimes.start).all()
    assert (buffers.end[found.of_tensor] >= footprint.lifetimes.end).all()
    taken = {
        problem.take_output[node]: tensor
        for node, task in enumerate(case.tasks)
        for tensor, slot in task.takes
        if slot == footprint.reuses[node]
    }
    assert all(found.of_tensor[taker] == found.of_tensor[tensor] for taker, tensor in taken.items())
    needs_workspace = problem.workspace_bytes > 0
    assert (found.of_workspace >= 0).tolist() == needs_workspace.tolist()
    assert buffers.buffer_count == problem.tensor_count - len(taken) + np.count_nonzero(needs_workspace)


def test_a_chain_of_reuses_is_one_buffer() -> None:
    tasks = [
        Task(name="make", makes=(0,), reads=()),
        Task(name="relu", makes=(1,), reads=(0,), takes=((0, 0),), workspace_bytes=3),
        Task(name="relu", makes=(2,), reads=(1,), takes=((1, 0),)),
    ]
    problem = OrderProblem.of([8, 8, 8], tasks, kept=[2])
    found = order_buffers(problem, [0, 1, 2], align_bytes=4)
    assert found.of_tensor.tolist() == [0, 0, 0]
    assert found.of_workspace.tolist() == [-1, 1, -1]
    buffers = found.problem
    assert buffers.names == ("tensor0", "workspace1")
    assert (buffers.size_bytes.tolist(), buffers.start.tolist(), buffers.end.tolist()) == ([8, 3], [0, 1], [3, 2])
    assert buffers.align_bytes.tolist() == [4, 4]


def test_an_order_must_be_topological() -> None:
    problem = OrderProblem.of([8], [Task(name="make", makes=(0,), reads=()), Task(name="use", makes=(), reads=(0,))])
    with pytest.raises(CheckError, match="expected at step 0"):
        place_problem(problem, [1, 0])
