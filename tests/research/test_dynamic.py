import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.base.solver_text import described
from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import lower_bound_bytes
from research.orders import dynamic
from research.orders.dynamic import DynamicProgramme
from tests.problems import Case, cases, slow_peak, unhurried
from tests.research.unaided import least_peak, unaided

DATA = Path(__file__).parents[1] / "data" / "order"
OPTIMUM_KIB = {row["name"]: float(row["optimum_kib"]) for row in csv.DictReader((DATA / "expected.csv").read_text().splitlines())}


@pytest.mark.parametrize("solver", [DynamicProgramme(), DynamicProgramme(soft_budget=False)], ids=repr)
@unhurried
@given(case=cases(max_nodes=7))
def test_the_least_of_all_orders(solver: DynamicProgramme, case: Case) -> None:
    with unaided(dynamic):
        found = solver.solve(case.problem)
    assert (found.peak_bytes, found.status) == (least_peak(case), Status.OPTIMAL)
    assert slow_peak(case, found.order) == found.peak_bytes
    assert found.solver == described(solver)


@unhurried
@given(cases(max_nodes=7), st.integers(1, 3))
def test_budgets_fall_and_rise_where_levels_are_narrow(case: Case, first_width: int) -> None:
    with unaided(dynamic, _FIRST_WIDTH=first_width):
        found = DynamicProgramme().solve(case.problem)
    assert (found.peak_bytes, found.status) == (least_peak(case), Status.OPTIMAL)


@unhurried
@given(cases(max_nodes=7), st.integers(1, 40), st.booleans())
def test_past_its_limits_the_bound_still_holds(case: Case, max_states: int, soft_budget: bool) -> None:
    solver = DynamicProgramme(max_states, soft_budget)
    with unaided(dynamic, _FIRST_WIDTH=2):
        found = solver.solve(case.problem)
    assert found.lower_bound_bytes <= least_peak(case) <= found.peak_bytes == slow_peak(case, found.order)
    assert found.stats["states"] <= max_states
    assert solver.solve(case.problem) == solver.solve(case.problem)


@pytest.mark.parametrize("name", ["train-L15", "train-L15-res", "randwire-s1"])
def test_known_networks(name: str) -> None:
    found = DynamicProgramme().solve(load_problem(DATA / f"{name}.json"))
    assert found.status is Status.OPTIMAL
    assert found.peak_bytes / 1024 == pytest.approx(OPTIMUM_KIB[name], abs=0.051)  # rounded to a tenth


def test_the_budget_spares_states() -> None:
    problem = load_problem(DATA / "train-L15.json")
    soft, plain = DynamicProgramme(max_states=500_000), DynamicProgramme(max_states=500_000, soft_budget=False)
    assert soft.solve(problem).status is Status.OPTIMAL
    given_up = plain.solve(problem)
    assert given_up.status is Status.FEASIBLE
    assert given_up.stats == {"states": 500_000, "rounds": 1}
    assert given_up.lower_bound_bytes == lower_bound_bytes(problem)


def test_it_gives_up_within_its_memory() -> None:
    problem = load_problem(DATA / "hrnet_w18_small-256.json")
    found = DynamicProgramme(max_bytes=1_000_000).solve(problem)
    assert found.status is Status.FEASIBLE
    assert found.peak_bytes / 1024 == OPTIMUM_KIB["hrnet_w18_small-256"]  # the best heuristic's, as it happens
    assert found.stats["states"] < DynamicProgramme().max_states


def test_downsets_of_more_nodes_than_a_word_has_bits() -> None:
    chain = [Task("c", makes=(node,), reads=(node - 1,) if node else ()) for node in range(130)]
    spikes = [Task("s", makes=(tensor,), workspace_bytes=90) for tensor in (130, 131, 132)]
    sizes = [8] * 50 + [100] + [8] * 79 + [5] * 3
    problem = OrderProblem.of(sizes, [*spikes, *chain], kept=[130, 131, 132])
    with unaided(dynamic):
        found = DynamicProgramme().solve(problem)
    assert (found.peak_bytes, found.status) == (108, Status.OPTIMAL)  # the chain's own: the spikes wait until it is past that
    assert found.order.index(3 + 51) < min(map(found.order.index, (0, 1, 2)))


@pytest.mark.parametrize("settings", [{"max_states": 0}, {"max_bytes": 0}])
def test_limits_of_nothing_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1, got"):
        DynamicProgramme(**settings)  # type: ignore[arg-type]
