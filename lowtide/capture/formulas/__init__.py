"""What eager computes where ATen takes another path as soon as a dispatch mode is active."""

from lowtide.capture.formulas import gradients, recurrent, values
from lowtide.capture.formulas.dispatch import as_eager

__all__ = ["as_eager", "gradients", "recurrent", "values"]
