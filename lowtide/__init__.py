"""lowtide: a PyTorch program in the memory you give it, as fast as that memory allows."""

from lowtide.api import Stage, Step, optimize
from lowtide.cost.profiler import Measurement, measure
from lowtide.errors import BatchError, CaptureError, CheckError, FormatError, LowtideError, StepError
from lowtide.ir.plan import Plan

__all__ = [
    "BatchError", "CaptureError", "CheckError", "FormatError", "LowtideError", "Measurement", "Plan", "Stage", "Step", "StepError",
    "measure", "optimize",
]  # fmt: skip
