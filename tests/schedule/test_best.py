import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from lowtide.errors import CheckError
from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import Best, ProgramOrder, ReadyList, ReversePostOrder, Schedule, lower_bound_bytes, schedule
from lowtide.schedule.base import scheduled
from tests.problems import Case, cases, slow_peak, topological_orders, unhurried

DATA = Path(__file__).parents[1] / "data" / "order"
ROWS = list(csv.DictReader((DATA / "expected.csv").read_text().splitlines()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_known_networks(row: dict[str, str]) -> None:
    problem = load_problem(DATA / f"{row['name']}.json")
    peak_bytes = {
        "as_written_bytes": schedule(problem, ProgramOrder()).peak_bytes,
        "rpo_bytes": schedule(problem, ReversePostOrder("inputs")).peak_bytes,
        "rpo_from_outputs_bytes": schedule(problem, ReversePostOrder("outputs")).peak_bytes,
        "list_greedy_bytes": schedule(problem, ReadyList("waiting")).peak_bytes,
    }
    assert peak_bytes == {column: int(row[column]) for column in peak_bytes}
    best = schedule(problem, Best())
    least_kib = float(row["optimum_kib"])  # rounded to a tenth
    assert best.peak_bytes <= min(peak_bytes.values())
    assert best.lower_bound_bytes / 1024 - 0.05 <= least_kib <= best.peak_bytes / 1024 + 0.05


@unhurried
@given(cases(max_nodes=6))
def test_bound_and_status_against_every_order(case: Case) -> None:
    least = min(slow_peak(case, order) for order in topological_orders(case))
    found = schedule(case.problem, Best())
    assert found.lower_bound_bytes == lower_bound_bytes(case.problem) <= least <= found.peak_bytes
    assert (found.status is Status.OPTIMAL) == (found.peak_bytes == found.lower_bound_bytes)


def test_the_bound_counts_both_ends_and_what_takes_over() -> None:
    start = [Task("a", makes=(2,), reads=(0,)), Task("b", makes=(3,), reads=(1,))]
    assert lower_bound_bytes(OrderProblem.of([10, 10, 3, 4], start)) == 23  # both inputs wait while either runs
    assert lower_bound_bytes(OrderProblem.of([1, 1, 30, 40], start, kept=[2, 3], resident_bytes=5)) == 5 + 70 + 1
    relu = [Task("relu", makes=(1,), reads=(0,), takes=((0, 0),), workspace_bytes=1)]
    assert lower_bound_bytes(OrderProblem.of([8, 8], relu)) == 9
    assert lower_bound_bytes(OrderProblem.of([8, 8], relu, kept=[0])) == 17


def test_of_equal_peaks_the_earliest_solver_wins() -> None:
    fan = [Task("x", makes=(0,)), *(Task("y", makes=(node,), reads=(0,)) for node in (1, 2)), Task("z", reads=(1, 2))]
    problem = OrderProblem.of([1, 1, 1], fan)
    assert schedule(problem, Best((ReversePostOrder("inputs"), ProgramOrder()))).solver == "ReversePostOrder()"
    assert schedule(problem, Best((ProgramOrder(), ReversePostOrder("inputs")))).solver == "ProgramOrder()"


def test_best_keeps_the_best_bound_and_stops_at_a_proof() -> None:
    problem = OrderProblem.of([2, 2, 9], [Task("a", (0,)), Task("b", (1,)), Task("c", (), (0, 1)), Task("d", (2,))], kept=[2])
    loose, proven = Claimed((0, 3, 1, 2), 0), Claimed((0, 1, 2, 3), 9)
    answer = schedule(problem, Best((loose, proven, Unreachable())))
    assert (answer.order, answer.peak_bytes, answer.lower_bound_bytes, answer.status) == ((0, 1, 2, 3), 9, 9, Status.OPTIMAL)


def test_a_solver_cannot_answer_with_an_order_that_is_not_one() -> None:
    with pytest.raises(CheckError, match="step 1"):
        schedule(OrderProblem.of([], [Task("a"), Task("b")]), Claimed((0, 0), 0))


def test_no_nodes_and_no_solvers() -> None:
    empty = schedule(OrderProblem.of([5, 6], [], kept=[0], resident_bytes=1))
    assert (empty.order, empty.peak_bytes, empty.status) == ((), 6, Status.OPTIMAL)
    with pytest.raises(ValueError, match="at least one"):
        Best(())


class Claimed:
    """A solver that answers with what it was given."""

    def __init__(self, order: tuple[int, ...], bound_bytes: int) -> None:
        self.order, self.bound_bytes = order, bound_bytes

    def solve(self, problem: OrderProblem) -> Schedule:
        return scheduled(problem, np.array(self.order), self, bound_bytes=self.bound_bytes)


class Unreachable:
    """A solver that must not be asked."""

    def solve(self, problem: OrderProblem) -> Schedule:
        raise AssertionError("asked although the answer was proven")
