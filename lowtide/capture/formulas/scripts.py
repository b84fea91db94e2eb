"""Functions that torch.jit.script compiled: torch differentiates them by formulas of its own once they ran, which no mode sees."""

from __future__ import annotations

import torch

from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

_NOTHING = "def nothing(number: int) -> int:\n    return number\n"


class Scripts:
    """What TorchScript runs in this thread from here on."""

    def __init__(self) -> None:
        torch.jit.CompilationUnit(_NOTHING).nothing(0)  # so that a known graph was the last to run
        self._last = torch._C._last_executed_optimized_graph()

    def refuse(self) -> None:
        """Raise CaptureError where a compiled function took a tensor that requires gradients. Others compute what eager does."""
        last = torch._C._last_executed_optimized_graph()
        if last is self._last:
            return
        self._last = last
        text = str(last)
        if "requires_grad=1" in text or "DifferentiableGraph" in text:
            raise CaptureError(
                f"a function compiled by torch.jit.script ran before {users_line()}: torch differentiates it by formulas of its own, which "
                "change after its first calls, so that no capture can follow. Call the plain function (without torch.jit.script), or set "
                "PYTORCH_JIT=0 in the environment before torch is imported, where a library compiles it"
            )
