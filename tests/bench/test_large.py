import pytest

from bench.large import STEPS, growth
from lowtide.problems import Status
from lowtide.schedule import ProgramOrder
from lowtide.schedule.repair import Repair


@pytest.mark.parametrize("step", STEPS)
def test_steps_have_their_size_and_a_small_gap(step: str) -> None:
    problem = STEPS[step](3_000)
    assert 0.9 < problem.node_count / 3_000 < 1.1
    found = Repair().solve(problem)
    assert found.peak_bytes < (1.06 if step == "layered" else 1.01) * found.lower_bound_bytes
    assert found.peak_bytes < ProgramOrder().solve(problem).peak_bytes  # which holds every gradient at once
    assert found.status is (Status.OPTIMAL if found.peak_bytes == found.lower_bound_bytes else Status.FEASIBLE)


def test_growth_is_an_exponent() -> None:
    rows = [{"step": "s", "operators": 10**size, "seconds": 10 ** (2 * size - 7)} for size in (3, 4, 5)]
    assert growth(rows) == "seconds grow as operators to the power of: s 2.00"
