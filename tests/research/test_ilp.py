from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import ProgramOrder, Solver
from research.orders import cp_sat, ilp
from research.orders.common import windows
from research.orders.cp_sat import Intervals
from research.orders.ilp import TimeIndexed
from tests.problems import Case, cases, slow_peak
from tests.research.unaided import least_peak, unaided

DATA = Path(__file__).parents[1] / "data" / "order"
PROGRAMS = [TimeIndexed(solver, prune) for solver, prune in product(("highs", "scip", "cp-sat"), (True, False))]  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", PROGRAMS, ids=repr)
@settings(max_examples=15)
@given(case=cases(max_nodes=5))
def test_the_integer_program_finds_the_least_of_all_orders(solver: TimeIndexed, case: Case) -> None:
    check_optimal(solver, ilp, case)


@settings(max_examples=100)
@given(cases(max_nodes=6))
def test_the_interval_model_finds_the_least_of_all_orders(case: Case) -> None:
    check_optimal(Intervals(), cp_sat, case)


@pytest.mark.parametrize(("solver", "module"), [(TimeIndexed("scip"), ilp), (TimeIndexed("cp-sat"), ilp), (Intervals(), cp_sat)], ids=repr)
@settings(max_examples=15)
@given(case=cases(max_nodes=5), limit=st.integers(1, 12))
def test_rounded_sizes_keep_the_bound_below_the_truth(solver: Solver, module: ModuleType, case: Case, limit: int) -> None:
    with unaided(module, _LIMIT_UNITS=limit):
        found = solver.solve(case.problem)
    assert found.lower_bound_bytes <= least_peak(case) <= found.peak_bytes == slow_peak(case, found.order)


@pytest.mark.parametrize("solver", [TimeIndexed("cp-sat"), Intervals()], ids=repr)
def test_known_networks(solver: Solver) -> None:
    problem = load_problem(DATA / "train-L15.json")
    found = solver.solve(problem)
    assert (found.peak_bytes, found.status) == (42728 * 1024, Status.OPTIMAL)
    assert solver.solve(problem) == found


@pytest.mark.parametrize(
    "solver", [TimeIndexed("highs", max_seconds=0.2), TimeIndexed("scip", max_seconds=0.2), Intervals(max_effort=1e-4)], ids=repr
)
def test_cut_short_they_answer_with_what_they_have(solver: Solver) -> None:
    found = solver.solve(load_problem(DATA / "train-L15.json"))
    assert found.status is Status.FEASIBLE
    assert found.lower_bound_bytes <= 42728 * 1024 < found.peak_bytes <= 43999232  # the best heuristic's


@pytest.mark.parametrize("workspace_bytes", [0, 5])
def test_a_hint_that_the_presolve_loses_is_left_out(workspace_bytes: int) -> None:
    waits = [Task("c", after=(0, 1)), Task("d"), Task("e", after=(0, 1)), Task("f", after=(0, 1), workspace_bytes=workspace_bytes)]
    with unaided(cp_sat):
        found = Intervals().solve(OrderProblem.of([], [Task("a"), Task("b"), *waits]))
    assert (found.peak_bytes, found.status) == (workspace_bytes, Status.OPTIMAL)


def test_pruning_leaves_each_node_its_window() -> None:
    chain = [Task("c", makes=(node,), reads=(node - 1,) if node else ()) for node in range(3)]
    problem = OrderProblem.of([4, 5, 6, 1], [*chain, Task("free", after=(0,)), Task("last", reads=(2,), workspace_bytes=3)])
    pruned, whole = (TimeIndexed("scip", prune).solve(problem).stats for prune in (True, False))
    runs, held, handovers = 1 + 2 + 2 + 4 + 2, 3 + 3 + 3, 5
    assert pruned["variables"] == 1 + runs + held + handovers
    assert pruned["variables_unpruned"] == whole["variables"] == 1 + 5 * (5 + 3 + 1)
    assert pruned["constraints"] < whole["constraints"]


def test_the_paper_s_windows_by_recursion() -> None:
    edges = [(tail, tail + step) for tail in range(150) for step in (3, 64 + tail % 7) if tail + step < 150]
    problem = OrderProblem.of([], [Task("n", after=tuple(tail for tail, head in edges if head == node)) for node in range(150)])
    found = windows(problem, ProgramOrder().solve(problem).order)
    before: list[set[int]] = []
    for node in range(150):
        before.append(set().union(*({tail} | before[tail] for tail, head in edges if head == node)))
    assert found.first.tolist() == [len(ancestors) for ancestors in before]
    assert found.last.tolist() == [149 - sum(node in ancestors for ancestors in before) for node in range(150)]


@pytest.mark.parametrize("solver", [TimeIndexed(max_variables=1000), Intervals(max_nodes=59)], ids=repr)
def test_models_that_are_too_large_are_not_built(solver: Solver) -> None:
    found = solver.solve(load_problem(DATA / "train-L15.json"))
    assert (found.peak_bytes, found.status) == (43999232, Status.FEASIBLE)
    assert "constraints" not in found.stats


def check_optimal(solver: Solver, module: ModuleType, case: Case) -> None:
    with unaided(module):
        found = solver.solve(case.problem)
    assert (found.peak_bytes, found.status) == (least_peak(case), Status.OPTIMAL)
    assert slow_peak(case, found.order) == found.peak_bytes
