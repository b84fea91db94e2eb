from hypothesis import given

from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.schedule import Auto, Best, Exact, ProgramOrder, ReadyList, schedule
from lowtide.schedule.exact import _CHUNK
from tests.problems import ORDER_FILES, Case, cases, least_peak, unhurried


@unhurried
@given(cases(max_nodes=9))
def test_left_to_itself_it_proves_small_problems(case: Case) -> None:
    found = schedule(case.problem)
    assert (found.status, found.peak_bytes) == (Status.OPTIMAL, least_peak(case))


def test_without_a_proof_windows_are_ordered_anew_and_nothing_gets_worse() -> None:
    problem = load_problem(ORDER_FILES / "randwire-s0.json")
    simple, searched = Best().solve(problem), Exact(max_states=_CHUNK).solve(problem)
    found = list(Auto(max_states=_CHUNK).answers(problem))
    assert searched.status is Status.FEASIBLE
    assert found[-1].peak_bytes < searched.peak_bytes <= simple.peak_bytes
    assert found[-1].lower_bound_bytes >= searched.lower_bound_bytes
    assert found[-1].stats["states"] == searched.stats["states"]
    assert found[-1].stats["windows"] > 0
    assert found[-1].solver.startswith("Repair(")


def test_never_worse_than_the_simple_orders() -> None:
    for path in sorted(ORDER_FILES.glob("*.json")):
        problem = load_problem(path)
        found = Auto(max_states=1, max_seconds=1e-9).solve(problem)
        assert found.peak_bytes <= min(solver.solve(problem).peak_bytes for solver in (ProgramOrder(), ReadyList()))
