from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem
from lowtide.schedule import Auto, Exact, ProgramOrder, schedule, schedule_all
from tests.problems import ORDER_FILES, Case, cases, least_peak, unhurried


@unhurried
@given(st.lists(cases(max_nodes=8), min_size=1, max_size=4), st.sampled_from([Auto(), Exact(first=ProgramOrder(), max_cuts=0)]))
def test_the_best_of_all_is_that_of_solving_each(drawn: list[Case], solver: Auto | Exact) -> None:
    least = [least_peak(case) for case in drawn]
    found = schedule_all([case.problem for case in drawn], solver)
    assert min(each.peak_bytes for each in found) == min(least)
    assert min(range(len(found)), key=lambda index: found[index].peak_bytes) == least.index(min(least))
    for each, case in zip(found, drawn, strict=True):
        assert each.lower_bound_bytes <= least_peak(case) <= each.peak_bytes


def test_solvers_with_one_answer_give_it() -> None:
    problems = [load_problem(ORDER_FILES / f"{name}.json") for name in ("randwire-s0", "randwire-s1")]
    assert schedule_all(problems, ProgramOrder()) == [schedule(problem, ProgramOrder()) for problem in problems]


def test_a_problem_that_cannot_win_is_not_searched() -> None:
    small = load_problem(ORDER_FILES / "randwire-s0.json")
    large = _ten_times(small)
    alone = schedule(small, Auto())
    left, best = schedule_all([large, small], Auto())
    assert alone.stats["states"] > 0
    assert best.peak_bytes == alone.peak_bytes
    assert (left.status, left.stats["states"]) == (Status.FEASIBLE, 0)


def _ten_times(problem: OrderProblem) -> OrderProblem:
    """The same problem, of tensors ten times as large."""
    return replace(problem, tensor_bytes=10 * problem.tensor_bytes)
