from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import ReadyList, ReversePostOrder, Schedule
from lowtide.schedule.beam import Beam
from lowtide.schedule.repair import OrderLine
from research.orders.partition import AtWaists, Partitioned, waists
from research.orders.repeat import form_of, solve_once
from tests.problems import Case, cases, slow_peak, topological_orders, unhurried

DATA = Path(__file__).parents[1] / "data" / "order"
EXACT = Beam(width=256)


@unhurried
@given(cases(max_nodes=7))
def test_waists_are_the_nodes_comparable_with_all_others(case: Case) -> None:
    orders = list(topological_orders(case))
    fixed = [
        node for node in range(len(case.tasks)) if all(set(o[: o.index(node)]) == set(orders[0][: orders[0].index(node)]) for o in orders)
    ]
    line = OrderLine.of(case.problem, ReadyList().solve(case.problem).order)
    assert sorted(line.order[waists(case.problem, line)].tolist()) == sorted(fixed)


@unhurried
@given(cases(max_nodes=7))
def test_parts_between_waists_are_as_good_as_the_whole(case: Case) -> None:
    least = min(slow_peak(case, order) for order in topological_orders(case))
    found = AtWaists(EXACT).solve(case.problem)
    assert (found.peak_bytes, found.lower_bound_bytes, found.status) == (least, least, Status.OPTIMAL)


@unhurried
@given(cases(max_nodes=7), st.integers(1, 4), st.booleans())
def test_parts_cost_no_more_than_post_orders_where_cuts_follow_them(case: Case, parts: int, naive: bool) -> None:
    orders = {order: slow_peak(case, order) for order in topological_orders(case)}
    found = Partitioned(parts, EXACT, naive).solve(case.problem)
    assert found.peak_bytes == orders[found.order]
    assert found.lower_bound_bytes <= min(orders.values())
    if naive:
        assert found.peak_bytes <= min(ReversePostOrder(root).solve(case.problem).peak_bytes for root in ("inputs", "outputs"))
    if parts == 1:
        assert (found.peak_bytes, found.status) == (min(orders.values()), Status.OPTIMAL)


def test_cuts_at_little_memory_beat_cuts_at_equal_numbers() -> None:
    problem = load_problem(DATA / "hrnet_w18_small-256.json")
    aware, naive = (Partitioned(4, naive=is_naive).solve(problem) for is_naive in (False, True))
    assert aware.peak_bytes == 6368 * 1024 < naive.peak_bytes
    assert (aware.stats["parts"], naive.stats["parts"]) == (4, 4)


def test_repeated_blocks_are_solved_once() -> None:
    # A stack of equal diamonds, each written in another order of its branches.
    tasks, sizes = [Task("x", (0,))], [8]
    for block in range(3_000):
        at, root = len(sizes), len(sizes) - 1
        branches = [Task("a", (at,), (root,)), Task("b", (at + 1,), (at,)), Task("c", (at + 2,), (root,))]
        tasks += branches if block % 2 else [branches[2], *branches[:2]]
        tasks.append(Task("join", (at + 3,), (at + 1, at + 2)))
        sizes += [9, 1, 2, 8]
    counting = Counting()
    found = AtWaists(counting).solve(OrderProblem.of(sizes, tasks))
    assert (found.peak_bytes, found.status) == (8 + 9 + 1, Status.OPTIMAL)
    assert found.stats == {"parts": 3_000}
    assert len(counting.asked) <= 4  # the first and the last may differ: who reads what comes in, who keeps what goes out


@unhurried
@given(cases(max_nodes=8), st.randoms(use_true_random=False))
def test_forms_carry_orders_over(case: Case, random: object) -> None:
    index_of = list(range(len(case.tasks)))
    random.shuffle(index_of)  # type: ignore[attr-defined]
    moved = {index_of[node]: replace(task, after=tuple(index_of[pred] for pred in task.after)) for node, task in enumerate(case.tasks)}
    other = replace(case, tasks=tuple(moved[node] for node in range(len(moved))), resident_bytes=case.resident_bytes + 5)
    first, second = solve_once([case.problem, other.problem], EXACT)
    assert second.peak_bytes == slow_peak(other, second.order) == first.peak_bytes + 5
    assert second.lower_bound_bytes == first.lower_bound_bytes + 5


@unhurried
@given(cases(max_nodes=5), cases(max_nodes=5))
def test_only_equal_problems_have_one_form(one: Case, two: Case) -> None:
    if form_of(one.problem).key == form_of(two.problem).key:
        least = [min(slow_peak(case, order) - case.resident_bytes for order in topological_orders(case)) for case in (one, two)]
        assert least[0] == least[1]
        assert len(list(topological_orders(one))) == len(list(topological_orders(two)))


def test_parts_must_be_some() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Partitioned(parts=0)
    empty = OrderProblem.of([3], [], kept=[0])
    assert AtWaists().solve(empty).peak_bytes == Partitioned().solve(empty).peak_bytes == 3


@dataclass
class Counting:
    """An exact solver that remembers what it was asked."""

    asked: list[OrderProblem] = field(default_factory=list)

    def solve(self, problem: OrderProblem) -> Schedule:
        self.asked.append(problem)
        return EXACT.solve(problem)
