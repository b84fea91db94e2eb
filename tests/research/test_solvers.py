"""What holds of every solver of ortools: what it needs, when it is imported, which settings are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from lowtide.problems.order import OrderProblem
from lowtide.problems.placement import PlaceProblem
from research.addresses.cp_sat import Rectangles
from research.addresses.ilp import Addresses
from research.orders.cp_sat import Intervals
from research.orders.ilp import TimeIndexed

RUNS = {
    "TimeIndexed": lambda: TimeIndexed().solve(OrderProblem.of([], [])),
    "Intervals": lambda: Intervals().solve(OrderProblem.of([], [])),
    "Addresses": lambda: Addresses().place(PlaceProblem.of([], [], [])),
    "Rectangles": lambda: Rectangles().place(PlaceProblem.of([], [], [])),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_without_ortools_they_say_what_to_install(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(ImportError, match=r"needs ortools, which is not installed: pip install ortools"):
        run()
    monkeypatch.delitem(sys.modules, "ortools")
    monkeypatch.setitem(sys.modules, "highspy", ModuleType("highspy"))
    with pytest.raises(ImportError, match="cannot share a process with highspy"):
        run()


def test_ortools_is_imported_only_when_one_runs() -> None:
    program = """
import sys
from lowtide.placement.strip import arena_bound_bytes
from research.addresses.cp_sat import Rectangles
from research.addresses.ilp import Addresses
from research.orders.cp_sat import Intervals
from research.orders.ilp import TimeIndexed
Addresses(), Rectangles(), TimeIndexed(), Intervals()
assert "ortools" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TimeIndexed("gurobi"),  # type: ignore[arg-type]
        lambda: TimeIndexed(max_seconds=0),
        lambda: Intervals(workers=0),
        lambda: Intervals(max_effort=-1),
        lambda: Addresses("gurobi"),  # type: ignore[arg-type]
        lambda: Addresses(max_seconds=0),
        lambda: Rectangles(workers=0),
        lambda: Rectangles(max_effort=-1),
    ],
)
def test_unknown_settings_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got"):
        make()
