"""The public verb and what it hands back."""

from lowtide.api.optimize import optimize
from lowtide.api.stages import Stage
from lowtide.api.step import Step

__all__ = ["Stage", "Step", "optimize"]
