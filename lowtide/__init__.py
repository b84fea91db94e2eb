"""lowtide: a PyTorch program in the memory you give it, as fast as that memory allows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide import base
from lowtide.base.backend import register as _register
from lowtide.base.process import collected_seldom
from lowtide.errors import BatchError, BudgetError, CaptureError, CheckError, FormatError, LowtideError, StepError

if TYPE_CHECKING:
    from lowtide import placement, schedule
    from lowtide.api.edge import interpret, network, plan_edge
    from lowtide.api.engines import order, place
    from lowtide.api.explain import Explanation, explain
    from lowtide.api.frozen import Frozen
    from lowtide.api.load import FrozenNeeds, frozen_needs, load_frozen
    from lowtide.api.needs import Needs, needs
    from lowtide.api.optimize import optimize
    from lowtide.api.options import Parallel, Planning, Run, Shapes, Training
    from lowtide.api.step import Step
    from lowtide.api.verify import MeasuredStep, Verification
    from lowtide.base.messages import Stage
    from lowtide.cost.device import Device
    from lowtide.cost.profiler import Measurement, measure
    from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
    from lowtide.edge.plan import EdgePlan, Space
    from lowtide.placement.base import Placement
    from lowtide.plan.plan import Plan
    from lowtide.problems import Status
    from lowtide.problems.order import OrderProblem, Task
    from lowtide.problems.placement import PlaceProblem
    from lowtide.remat.sweep import Sweep
    from lowtide.schedule.base import Schedule

__all__ = [
    "BatchError", "BudgetError", "CaptureError", "CheckError", "Device", "EdgeGraph", "EdgeNode", "EdgePlan", "EdgeTensor", "Explanation",
    "FormatError", "Frozen", "FrozenNeeds", "LowtideError", "MeasuredStep", "Measurement", "Needs", "OrderProblem", "Parallel",
    "PlaceProblem", "Placement", "Plan", "Planning", "Run", "Schedule", "Shapes", "Space", "Stage", "Status", "Step", "StepError",
    "Sweep", "Task", "Training", "Verification", "explain", "frozen_needs", "interpret", "load_frozen", "measure", "needs", "network",
    "optimize", "order", "place", "placement", "plan_edge", "schedule",
]  # fmt: skip

# Imported when first asked for: torch takes seconds, and ordering and placing do without it.
_NAMES = {
    "api.edge": "interpret network plan_edge",
    "api.engines": "order place",
    "api.explain": "Explanation explain",
    "api.frozen": "Frozen",
    "api.load": "FrozenNeeds frozen_needs load_frozen",
    "api.needs": "Needs needs",
    "api.optimize": "optimize",
    "api.options": "Parallel Planning Run Shapes Training",
    "api.step": "Step",
    "api.verify": "MeasuredStep Verification",
    "base.messages": "Stage",
    "cost.device": "Device",
    "cost.profiler": "Measurement measure",
    "edge.graph": "EdgeGraph EdgeNode EdgeTensor",
    "edge.plan": "EdgePlan Space",
    "placement.base": "Placement",
    "plan.plan": "Plan",
    "problems": "Status",
    "problems.order": "OrderProblem Task",
    "problems.placement": "PlaceProblem",
    "remat.sweep": "Sweep",
    "schedule.base": "Schedule",
}
_MODULES = {name: f"lowtide.{module}" for module, names in _NAMES.items() for name in names.split()}
_FOLDERS = ("placement", "schedule")  # of the engines: their names are what callers see of them

__version__ = base.VERSION
_register()


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return import_module(f"lowtide.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collected_seldom():  # beside torch's objects there is nothing to find
        globals()[name] = getattr(import_module(_MODULES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
