"""lowtide: a PyTorch program in the memory you give it, as fast as that memory allows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.errors import BatchError, CaptureError, CheckError, FormatError, LowtideError, StepError

if TYPE_CHECKING:
    from lowtide import schedule
    from lowtide.api.optimize import optimize
    from lowtide.api.order import order
    from lowtide.api.stages import Stage
    from lowtide.api.step import Step
    from lowtide.cost.profiler import Measurement, measure
    from lowtide.ir.plan import Plan
    from lowtide.ir.problem import OrderProblem
    from lowtide.ir.problem_check import Task
    from lowtide.schedule.base import Schedule, Status

__all__ = [
    "BatchError", "CaptureError", "CheckError", "FormatError", "LowtideError", "Measurement", "OrderProblem", "Plan", "Schedule", "Stage",
    "Status", "Step", "StepError", "Task", "measure", "optimize", "order", "schedule",
]  # fmt: skip

# Imported when first asked for: torch takes seconds, and ordering does without it.
_MODULES = {
    "Measurement": "lowtide.cost.profiler",
    "OrderProblem": "lowtide.ir.problem",
    "Plan": "lowtide.ir.plan",
    "Schedule": "lowtide.schedule.base",
    "Stage": "lowtide.api.stages",
    "Status": "lowtide.schedule.base",
    "Step": "lowtide.api.step",
    "Task": "lowtide.ir.problem_check",
    "measure": "lowtide.cost.profiler",
    "optimize": "lowtide.api.optimize",
    "order": "lowtide.api.order",
}


def __getattr__(name: str) -> Any:
    if name == "schedule":
        return import_module("lowtide.schedule")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(_MODULES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
