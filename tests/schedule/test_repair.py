from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost.memory import simulate
from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import ProgramOrder, ReadyList, ReversePostOrder, Schedule
from lowtide.schedule.base import scheduled
from lowtide.schedule.beam import Beam
from lowtide.schedule.repair import Repair, highest_steps
from tests.problems import Case, cases, slow_peak, topological_orders, unhurried

DATA = Path(__file__).parents[1] / "data" / "order"


@unhurried
@given(cases(max_nodes=7))
def test_a_window_as_large_as_the_problem_is_exact(case: Case) -> None:
    least = min(slow_peak(case, order) for order in topological_orders(case))
    found = Repair(Beam(width=128), ProgramOrder(), window=8, largest=8).solve(case.problem)
    assert (found.peak_bytes, found.lower_bound_bytes, found.status) == (least, least, Status.OPTIMAL)


@unhurried
@given(cases(max_nodes=7), st.integers(2, 4))
def test_small_windows_only_improve_until_none_does(case: Case, size: int) -> None:
    orders = {order: slow_peak(case, order) for order in topological_orders(case)}
    repair = Repair(Beam(width=64), ReversePostOrder("inputs"), window=size, largest=size)
    said = list(repair.answers(case.problem))
    for before, after in pairwise(said):
        assert (after.peak_bytes, -after.lower_bound_bytes) < (before.peak_bytes, -before.lower_bound_bytes)
    last = said[-1]
    assert last == repair.solve(case.problem)
    assert max(orders[last.order], said[0].lower_bound_bytes) == last.peak_bytes <= orders[repair.first.solve(case.problem).order]
    assert last.lower_bound_bytes <= min(orders.values())
    if last.status is Status.FEASIBLE:
        step = simulate(case.problem, last.order).peak_step
        first = max(0, min(step - size // 2, len(last.order) - size))
        inside = set(range(first, first + size))
        alike = [o for o in orders if all(o[place] == node for place, node in enumerate(last.order) if place not in inside)]
        assert min(orders[o] for o in alike) == last.peak_bytes  # a step elsewhere may be as high as the one that the window lowers


@pytest.mark.parametrize(("name", "least_kib"), [("randwire-s1", 3344.2), ("randwire-s0", 3583.1), ("train-L15", 42728.0)])
def test_known_networks(name: str, least_kib: float) -> None:
    found = Repair().solve(load_problem(DATA / f"{name}.json"))
    assert abs(found.peak_bytes / 1024 - least_kib) < 0.06
    assert found.lower_bound_bytes <= found.peak_bytes


def test_a_long_order_is_mended_where_it_is_bad() -> None:
    # 30,000 pairs whose second halves run at once, but for three pairs written apart from one another.
    count = 30_000
    tasks = [Task("make", (pair,)) for pair in range(count)] + [Task("use", reads=(pair,)) for pair in range(count)]
    problem = OrderProblem.of([1] * count, tasks)
    order = np.stack([np.arange(count), np.arange(count) + count], 1)
    order[100:103] = [[100, 101], [102, 100 + count], [101 + count, 102 + count]]
    found = Repair(first=Fixed(tuple(order.ravel().tolist()))).solve(problem)
    assert (found.peak_bytes, found.status) == (1, Status.OPTIMAL)
    assert found.stats == {"windows": 1}


def test_one_look_at_a_long_order_mends_all_its_bad_places() -> None:
    count, bad = 30_000, (100, 12_000, 25_000)
    tasks = [Task("make", (pair,)) for pair in range(count)] + [Task("use", reads=(pair,)) for pair in range(count)]
    problem = OrderProblem.of([1] * count, tasks)
    order = np.stack([np.arange(count), np.arange(count) + count], 1)
    for at in bad:
        order[at : at + 3] = [[at, at + 1], [at + 2, at + count], [at + 1 + count, at + 2 + count]]
    said = list(Repair(first=Fixed(tuple(order.ravel().tolist()))).answers(problem))
    assert [each.peak_bytes for each in said] == [3, 1]
    assert said[-1].stats == {"windows": len(bad)}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 9), st.integers(0, 9))
def test_high_places_are_far_from_each_other(heights: list[int], apart: int, most: int, above: int) -> None:
    chosen = highest_steps(np.array(heights), apart, most, above)
    assert len(chosen) <= most
    assert (not chosen) == (max(heights) <= above)
    if chosen:
        assert chosen[0] == int(np.argmax(heights))
    assert sorted((heights[step] for step in chosen), reverse=True) == [heights[step] for step in chosen]
    assert all(after - before > apart for before, after in pairwise(sorted(chosen)))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="window 9 and largest 8"):
        Repair(window=9, largest=8)
    assert Repair(first=ReadyList()).solve(OrderProblem.of([], [])).order == ()


class Fixed:
    """A solver that answers with one order."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order

    def solve(self, problem: OrderProblem) -> Schedule:
        return scheduled(problem, np.array(self.order), ProgramOrder())
