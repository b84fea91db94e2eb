"""What peers read: networks as ONNX, their examples, and what float64 gives for these."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import numpy as np
import torch

from bench.ago.contenders import onnx_file
from bench.ago.networks import case


def export(name: str, folder: Path) -> None:
    """Into `folder`, where it is not there yet."""
    file = onnx_file(name, folder)
    if file.with_suffix(".npz").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    model, args = case(name).built()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, args, file, dynamo=True, external_data=False, verbose=False, optimize=True)
        doubles = [arg.double() if arg.is_floating_point() else arg for arg in args]
        expected = copy.deepcopy(model).double()(*doubles)
    np.savez(file.with_suffix(".npz"), **{f"arg{at}": arg.numpy() for at, arg in enumerate(args)}, reference=expected.numpy())


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest element of float64's result."""
    return float(np.abs(found.astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), 1e-30))
