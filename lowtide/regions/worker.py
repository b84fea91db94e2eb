"""The other end of `workers`: a process that does nothing but have inductor compile bodies, one at a time, as it is asked to."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowtide.cost.worker import Reply, answer_all
from lowtide.ir.text.reader import parse
from lowtide.regions.compilation import make
from lowtide.regions.inductor import begin, compile_sample
from lowtide.runtime.libraries import NativeError


def serve(setup: dict[str, Any]) -> None:
    """Answer requests until there are no more. `setup` is the first line that came in."""
    answer_all(setup, partial(_warm_up, setup), _answer)


def _warm_up(setup: dict[str, Any]) -> None:
    """Import inductor; where nothing was compiled yet, have it compile what all kernels share."""
    torch.set_num_threads(setup["threads"])
    begin()
    if setup["is_first"]:
        with tempfile.TemporaryDirectory() as folder:
            compile_sample(Path(folder) / "sample.bin")


def _answer(request: dict[str, Any]) -> Reply:
    try:
        make(request["key"], parse(request["body"]))
    except NativeError as error:
        return {"failure": str(error)}
    return {}
