from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule.beam import Beam
from tests.problems import Case, cases, slow_peak, topological_orders, unhurried

DATA = Path(__file__).parents[1] / "data" / "order"


@unhurried
@given(cases(max_nodes=7))
def test_wide_enough_it_is_exact(case: Case) -> None:
    least = min(slow_peak(case, order) for order in topological_orders(case))
    found = Beam(width=2**7).solve(case.problem)
    assert (found.peak_bytes, found.lower_bound_bytes, found.status) == (least, least, Status.OPTIMAL)


@unhurried
@given(cases(max_nodes=7), st.integers(1, 4), st.integers(1, 8))
def test_a_narrow_beam_claims_no_more_than_is_true(case: Case, width: int, max_states: int) -> None:
    orders = {order: slow_peak(case, order) for order in topological_orders(case)}
    found = Beam(width, max_states).solve(case.problem)
    assert found.peak_bytes == orders[found.order]
    assert found.lower_bound_bytes <= min(orders.values())
    assert Beam(width, max_states).solve(case.problem) == found


@pytest.mark.parametrize(("name", "least_kib"), [("train-L15", 42728), ("train-L15-res", 43512)])
def test_width_finds_what_greed_misses(name: str, least_kib: int) -> None:
    problem = load_problem(DATA / f"{name}.json")
    greedy, wide = Beam(width=1).solve(problem), Beam(width=256).solve(problem)
    assert (wide.peak_bytes, wide.status) == (1024 * least_kib, Status.OPTIMAL)
    assert greedy.peak_bytes > wide.peak_bytes
    assert greedy.stats["states"] < wide.stats["states"]


def test_more_nodes_than_a_word_has_bits() -> None:
    fan = [Task("x", (0,)), *(Task("y", (node,), (0,)) for node in range(1, 200)), Task("z", (200,), tuple(range(1, 200)))]
    found = Beam(width=4).solve(OrderProblem.of([9, *[1] * 200], fan, kept=[200]))
    assert found.order == tuple(range(201))
    assert found.peak_bytes == 9 + 199


@pytest.mark.parametrize("settings", [(0, 1), (1, 0)])
def test_nothing_can_be_found_without_states(settings: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Beam(*settings)
