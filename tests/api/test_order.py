"""`lowtide.order`, and that ordering does without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given

import lowtide
from lowtide.errors import FormatError
from lowtide.problems.files import load_problem
from lowtide.schedule import ProgramOrder, ReadyList, Schedule, schedule
from tests.problems import Case, cases, slow_peak, topological_orders, unhurried

INSTANCE = Path(__file__).parents[1] / "data" / "order" / "train-L15.json"


@unhurried
@given(cases(max_nodes=5))
def test_the_order_is_one_and_its_figures_are_true(case: Case) -> None:
    found = lowtide.order(case.problem)
    peaks = {order: slow_peak(case, order) for order in topological_orders(case)}
    assert peaks[found.order] == found.peak_bytes
    assert found.lower_bound_bytes <= min(peaks.values())
    assert (found.status is lowtide.Status.OPTIMAL) == (found.lower_bound_bytes == found.peak_bytes)


def test_a_problem_and_the_file_that_holds_it_are_ordered_alike() -> None:
    problem = load_problem(INSTANCE)
    assert lowtide.order(str(INSTANCE)) == lowtide.order(INSTANCE) == lowtide.order(problem) == schedule(problem)


def test_the_solver_is_the_callers() -> None:
    assert lowtide.order(INSTANCE, ProgramOrder()).solver == "ProgramOrder()"
    assert lowtide.order(INSTANCE, lowtide.schedule.ReadyList("waiting")).peak_bytes == 43999232


def test_limits_reach_the_solver() -> None:
    assert lowtide.order(INSTANCE, Limited(), max_states=7, max_seconds=1.5).stats == {"states": 7, "seconds": 1}
    assert lowtide.order(INSTANCE, Limited(), max_seconds=4).stats == {"states": 1, "seconds": 4}
    with pytest.raises(FormatError, match="can be limited by max_states"):
        lowtide.order(INSTANCE, ReadyList(), max_states=7)


def test_a_file_that_is_not_there_or_holds_no_problem(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lowtide.order(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text('{"nodes": [{"op": "Add", "inputs": [4], "bytes": 8}]}')
    with pytest.raises(FormatError, match=r"broken\.json: node 0 \(Add\)"):
        lowtide.order(tmp_path / "broken.json")


def test_every_public_name_is_there() -> None:
    assert all(getattr(lowtide, name) is not None for name in lowtide.__all__)
    assert set(lowtide.__all__) <= set(dir(lowtide))
    with pytest.raises(AttributeError, match="module 'lowtide' has no attribute 'ordr'"):
        _ = lowtide.ordr  # type: ignore[attr-defined]


def test_ordering_does_not_import_torch() -> None:
    program = f"import sys, lowtide, lowtide.cli; lowtide.order({str(INSTANCE)!r}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@dataclass(frozen=True)
class Limited:
    """Tells its limits."""

    max_states: int = 1
    max_seconds: float = 2.0

    def solve(self, problem: lowtide.OrderProblem) -> Schedule:
        found = ReadyList().solve(problem)
        stats = {"states": self.max_states, "seconds": int(self.max_seconds)}
        return Schedule(found.order, found.peak_bytes, found.lower_bound_bytes, found.status, repr(self), stats)
