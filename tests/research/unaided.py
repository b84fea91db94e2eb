"""What the tests of reference solvers share: small problems must not be proven before the solver is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import pytest

from lowtide.problems import Status
from lowtide.problems.order import OrderProblem
from lowtide.schedule import ProgramOrder, Schedule
from tests.problems import Case, slow_peak, topological_orders


@contextmanager
def unaided(module: ModuleType, **settings: int) -> Iterator[None]:
    """A solver's module that knows no heuristic but the order as written, and no bound; its constants as given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "first_order", _as_written)
        for name, value in settings.items():
            patch.setattr(module, name, value)
        yield


def least_peak(case: Case) -> int:
    """Of all orders."""
    return min(slow_peak(case, order) for order in topological_orders(case))


def _as_written(problem: OrderProblem) -> Schedule:
    fixed_bytes = problem.resident_bytes + int(problem.tensor_bytes[problem.kept & (problem.producer < 0)].sum())
    return replace(ProgramOrder().solve(problem), lower_bound_bytes=fixed_bytes, status=Status.FEASIBLE)
