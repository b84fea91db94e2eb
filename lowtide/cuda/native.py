"""Builds the planned allocator for CUDA with the system's C++ compiler, once for each torch, and loads it.

    takes   a folder for what can be made again, or None; a CUDA build of torch, whose packages bring the headers
    leaves  a library that ctypes has loaded, or NativeError, which says why there is none

It is the source of `runtime/arena` with what a CUDA device does otherwise; nvcc is not asked.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch

from lowtide.cuda.forwarders import UnknownHeadersError, forwarders
from lowtide.runtime.arena import native
from lowtide.runtime.compiler import FLAGS, NativeError, compile_library
from lowtide.runtime.libraries import Making, library

__all__ = ["load"]

_HERE = Path(__file__).parent
_SOURCES = (native.SOURCE, _HERE / "device.hpp", _HERE / "planned.hpp", _HERE / "forwarders.py")
_loaded: list[Any] = []  # at most one
_loading = threading.Lock()


def load(directory: Path | None) -> Any:
    """This process's library, built where there is none yet below `directory`. Raises NativeError."""
    with _loading:
        if not _loaded:
            _loaded.append(_library(directory))
        return _loaded[0]


def _library(directory: Path | None) -> Any:
    if sys.platform != "linux" or torch.version.cuda is None:
        raise NativeError("the planned allocator for a GPU is made for CUDA under Linux")
    if torch.cuda.get_allocator_backend() != "native":
        raise NativeError(f"PyTorch's allocator is {torch.cuda.get_allocator_backend()}, and it is made for the native one")
    torch.cuda.init()
    name = f"cuda-allocator-{native.key(*_SOURCES)}.so"
    return library(directory, name, Making("the planned allocator", _compile, lambda path: native.opened(path, tries=False)))


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    generated = target.parent / "forwarders.inc"
    try:
        generated.write_text(forwarders(root / "include"), encoding="utf-8")
    except (UnknownHeadersError, OSError) as error:
        raise NativeError(f"torch's headers are not as expected ({error})") from error
    include = [_HERE / "headers", root / "include", target.parent, _HERE, *_cuda(root)]
    options = [*FLAGS, "-w", "-DLOWTIDE_CUDA", *(f"-I{each}" for each in include)]
    compile_library(native.SOURCE, target, options, (f"-L{root / 'lib'}", "-lc10", "-lc10_cuda", f"-Wl,-rpath,{root / 'lib'}"))


def _cuda(root: Path) -> list[Path]:
    """Where the headers of CUDA's runtime are: among the packages that come with torch, or where CUDA is installed."""
    places = [*sorted(root.parent.glob("nvidia/*/include")), Path("/usr/local/cuda/include")]
    found = [each for each in places if (each / "cuda_runtime_api.h").exists()]
    if not found:
        raise NativeError("the headers of CUDA's runtime are neither beside torch nor in /usr/local/cuda: install nvidia-cuda-runtime")
    return found[:1]
