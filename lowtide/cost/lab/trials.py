"""Has recipes tried where they do no harm: those for the CPU in a process of its own, those for a GPU in this one.

The process starts when the first recipe comes. Made-up data may crash an operator or make it wait for ever: then the process is ended, and
started again for the next recipe. On a GPU memory and libraries are this process's own, and so are the trials.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from lowtide.cost.lab import launched, spare, trial
from lowtide.cost.lab.apart import Apart, GoneError, LateError
from lowtide.cost.lab.definers import definers
from lowtide.cost.lab.operators import dtype_name

LIMIT_S = 60.0  # for one request; a CPU may take seconds for a large operator
_MOST_ENDS = 8  # of the process, before it is given up


class Trials:
    """Tries recipes for programs that run with gradients enabled, or not. `close` ends the process."""

    def __init__(self, gradients: bool) -> None:
        self._gradients = gradients
        self._settings = {**_settings(), "circumstances": list(trial.circumstances("cpu", gradients))}
        self._apart: Apart | None = None
        self._ends = 0
        self._given_up = ""  # why there is no process any more

    def level(self, recipe: dict[str, Any], device: str) -> dict[str, Any]:
        """{"level_bytes": ..., "results": ...}, or {"failure": ...} where the recipe gives nothing."""
        if trial.on_gpu(device):
            return trial.answer(lambda: trial.take_level(recipe, device, self._gradients))
        return self._asked({"wanted": "level", "recipes": [recipe]})

    def times(self, recipes: list[dict[str, Any]], device: str, warm_up: bool) -> dict[str, Any]:
        """{"ns": [...]}, one number a recipe, where the host itself computes; {"failure": ...} where one of them gives nothing."""
        if trial.on_gpu(device):
            raise ValueError(f"expected the host, got {device}: a device beside it has two clocks")
        return self._asked({"wanted": "times", "recipes": recipes, "warm_up": warm_up})

    def launches(self, recipes: list[dict[str, Any]], device: str) -> dict[str, Any]:
        """{"ns": [(device's, host's), ...]} by recipe, on a device beside the host; {"failure": ...} where one of them gives nothing."""
        return trial.answer(lambda: launched.take_launches(recipes, device, self._gradients))

    def close(self) -> None:
        """Leave the process to whoever needs one next, and let go what trials in this one keep."""
        if self._apart is not None:
            spare.put(self._apart)
            self._apart = None
        trial.forget_crowds()

    def stop(self) -> None:
        """End the process, whatever it does, and start no other; whoever waits for an answer gets a failure."""
        self._given_up = "it was stopped"
        if (running := self._apart) is not None:
            running.end()

    def _asked(self, request: dict[str, Any]) -> dict[str, Any]:
        operators = definers([step["op"] for recipe in request["recipes"] for step in recipe["steps"]])
        try:
            process = self._process()
            return process.ask({**request, "operators": operators, "gradients": self._gradients, "settings": self._settings}, LIMIT_S)
        except GoneError as gone:
            self._apart = None
            return {"failure": f"the process that tried it is gone: {gone}", "ended": True, "late": isinstance(gone, LateError)}
        except BaseException:  # Ctrl-C in the middle of an answer: the next request would get it
            if self._apart is not None:
                self._apart.end()
                self._apart = None
            raise

    def _process(self) -> Apart:
        """The process, started where there is none. Raises GoneError."""
        if self._given_up:
            raise GoneError(self._given_up)
        if self._apart is None:
            if self._ends > _MOST_ENDS:
                self._give_up(f"it ended {self._ends} times")
            self._apart = spare.take() or self._started()
            self._ends += 1
        return self._apart

    def _started(self) -> Apart:
        try:
            return Apart({"limit_s": LIMIT_S})
        except GoneError as gone:
            self._give_up(str(gone))

    def _give_up(self, why: str) -> NoReturn:
        self._given_up = why
        raise GoneError(why)


def _settings() -> dict[str, Any]:
    """What decides in this process which kernels run, and can be set in another."""
    return {
        "threads": torch.get_num_threads(),
        "onednn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "dtype": dtype_name(torch.get_default_dtype()),
    }
