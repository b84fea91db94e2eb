"""Captures for a GPU that is not here: builds what autograd's engine cannot do without it, and says what is taken for granted.

    takes   the device that a capture is for, and the machine that is simulated, if one is
    leaves  a context in which this thread captures (`capture/formulas/absent.py`)

The system's C++ compiler builds it once for each torch, as `runtime/libraries.py` says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lowtide.base.files import directory
from lowtide.capture.formulas.absent import as_on
from lowtide.cost.device import Device
from lowtide.errors import CaptureError
from lowtide.runtime.arena.native import key
from lowtide.runtime.libraries import FLAGS, LibraryRecipe, NativeError, compile_library, library, loaded, once

_SOURCE = Path(__file__).with_name("backward.cpp")


def is_absent(device: torch.device) -> bool:
    """Whether it is a GPU, and none is here."""
    return device.type == "cuda" and not torch.cuda.is_available()


def assumptions(device: torch.device, machine: Device | None) -> str:
    """What is taken for granted of a GPU that is not here, as a sentence; "" where one is, or is not asked for."""
    if machine is None or not is_absent(device):
        return ""
    major, minor = machine.capability
    norms = ", norms by ATen's kernels, as this torch is built without CUDA" if torch.version.cuda is None else ""
    return (
        f"no GPU is here: the program was followed as torch {torch.__version__} runs it on one of capability {major}.{minor}; "
        f"attention by flash or memory-efficient kernels, not cuDNN's{norms}"
    )


@contextmanager
def standing_in(device: torch.device, machine: Device | None) -> Iterator[None]:
    """While this lasts, this thread's captures find the machine where they look for a GPU that is not here. Raises CaptureError."""
    if machine is None or not is_absent(device):
        yield
        return
    try:
        backward = _backward(directory())
    except NativeError as error:
        raise CaptureError(
            f"device: expected a device that is here, or a C++ compiler, with which a program is followed without it, got {device}: "
            f"{error}; or leave `device` out, and `simulate` alone plans the program as it runs on a CPU"
        ) from error
    engine, evaluated = torch.ops.lowtide_absent, backward.lowtide_evaluated
    with as_on(machine.name, machine.capability, machine.memory_bytes, engine, evaluated):
        yield


@once
def _backward(folder: Path | None) -> Any:
    return library(folder, f"absent-{key(_SOURCE)}.so", LibraryRecipe("the backward pass without a GPU", _compile, _opened))


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    linked = (f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python")
    compile_library(_SOURCE, target, (*FLAGS, "-w", f"-I{root / 'include'}"), linked)


def _opened(path: Path) -> Any:
    with loaded(path, ctypes.PyDLL) as opened:
        torch.ops.load_library(path)
        opened.lowtide_evaluated.restype = ctypes.py_object
    return opened
