"""`lowtide.place`, and that placing does without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings

import lowtide
from lowtide.errors import FormatError
from lowtide.placement.base import Placement
from lowtide.placement.greedy import Greedy
from lowtide.problems.files import load_buffers
from lowtide.problems.placement import check_placement
from tests.placements import least_arena_bytes, problems

EXAMPLE = Path(__file__).parents[1] / "data" / "place" / "example.12.csv"


@settings(max_examples=60)
@given(problems(max_buffers=6))
def test_the_placement_is_one_and_its_figures_are_true(problem: lowtide.PlaceProblem) -> None:
    found = lowtide.place(problem)
    check_placement(problem, found.offsets, found.arena_bytes)
    assert found.lower_bound_bytes <= least_arena_bytes(problem) <= found.arena_bytes
    assert (found.status.name == "OPTIMAL") == (found.lower_bound_bytes == found.arena_bytes)


def test_a_problem_and_the_file_that_holds_it_are_placed_alike() -> None:
    problem = load_buffers(EXAMPLE)
    assert lowtide.place(str(EXAMPLE)) == lowtide.place(EXAMPLE) == lowtide.place(problem)
    assert lowtide.place(EXAMPLE).arena_bytes == 12


def test_a_capacity_is_another_question() -> None:
    assert lowtide.place(EXAMPLE, capacity_bytes=11).status is lowtide.Status.INFEASIBLE
    assert lowtide.place(EXAMPLE, capacity_bytes=20).fits


def test_the_solver_is_the_callers() -> None:
    assert lowtide.place(EXAMPLE, solver=Greedy("start")).solver == "Greedy(order='start')"


def test_limits_reach_the_solver() -> None:
    assert lowtide.place(EXAMPLE, Limited(), max_nodes=7, max_seconds=1.5).stats == {"nodes": 7, "seconds": 1}
    assert lowtide.place(EXAMPLE, max_nodes=7, max_seconds=1.5).arena_bytes >= 12
    with pytest.raises(FormatError, match="can be limited by max_nodes"):
        lowtide.place(EXAMPLE, Greedy(), max_nodes=7)


def test_a_file_that_is_not_there_or_holds_no_problem(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lowtide.place(tmp_path / "missing.csv")
    (tmp_path / "broken.csv").write_text("id,lower,upper,size\na,0,-1,8\n")
    with pytest.raises(FormatError, match=r"broken\.csv: line 2: buffer a"):
        lowtide.place(tmp_path / "broken.csv")


def test_placing_does_not_import_torch() -> None:
    program = f"import sys, lowtide, lowtide.cli; lowtide.place({str(EXAMPLE)!r}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@dataclass(frozen=True)
class Limited:
    """Tells its limits."""

    max_nodes: int = 1
    max_seconds: float = 2.0

    def place(self, problem: lowtide.PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        found = Greedy().place(problem)
        stats = {"nodes": self.max_nodes, "seconds": int(self.max_seconds)}
        return Placement(found.offsets, found.arena_bytes, found.lower_bound_bytes, found.status, repr(self), stats)
