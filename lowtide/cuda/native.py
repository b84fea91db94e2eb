"""Builds the planned allocator for CUDA with the system's C++ compiler, once for each torch, and loads it.

    takes   a folder for what can be made again, or None; a CUDA build of torch, whose packages bring the headers
    leaves  a library that ctypes has loaded, or NativeError, which says why there is none

It is the source of `runtime/arena` with what a CUDA device does otherwise; nvcc is not asked. What else a CUDA allocator has to do changes
with torch: it is read off torch's headers, as C++ that hands all but what `OWN` names on to PyTorch's.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from lowtide.runtime.arena import native
from lowtide.runtime.libraries import FLAGS, LibraryRecipe, NativeError, compile_library, library, once

OWN = frozenset({
    "allocate", "raw_alloc", "raw_alloc_with_stream", "raw_delete", "recordStream", "getBaseAllocation", "shareIpcHandle", "name",
    "attachOutOfMemoryObserver",
})  # fmt: skip
_CLASSES = (
    ("c10/cuda/CUDACachingAllocator.h", "class CUDAAllocator : public"),
    ("c10/core/CachingDeviceAllocator.h", "struct C10_API DeviceAllocator"),
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_VIRTUAL = re.compile(r"virtual\s+([\w:<>,\s*&]+?)\s*\b(\w+)\(((?:[^()]|\([^()]*\))*)\)\s*(const)?\s*(?:=\s*0\s*;|\{)")
_NAMED = re.compile(r"(.*[\s*&>])(\w+)$", re.S)


def forwarders(include: Path) -> str:
    """One function a line. Raises ValueError for headers that are not as expected, and OSError."""
    lines: dict[tuple[str, str], str] = {}
    for file, head in _CLASSES:
        text = (include / file).read_text(encoding="utf-8")
        start = text.find(head)
        if start < 0:
            raise ValueError(f"{file} has no {head!r}")
        for result, name, parameters, const in _VIRTUAL.findall(_COMMENT.sub(" ", text[start : text.index("\n};", start)])):
            types = [_type_of(each) for each in _split(parameters)]
            if name not in OWN:
                lines.setdefault((name, " ".join(types)), _forwarder(" ".join(result.split()), name, types, const))
    return "\n".join(lines.values()) + "\n"


def _forwarder(result: str, name: str, types: list[str], const: str) -> str:
    declared = ", ".join(f"{each} a{at}" for at, each in enumerate(types))
    moved = {at for at, each in enumerate(types) if "<" in each and not each.endswith(("&", "*"))}  # objects of their own
    passed = ", ".join(f"static_cast<{types[at]}&&>(a{at})" if at in moved else f"a{at}" for at in range(len(types)))
    return f"  {result} {name}({declared}) {const} override {{ return inner->{name}({passed}); }}"


def _type_of(parameter: str) -> str:
    """A parameter without its name and what it is by default."""
    words = " ".join(re.sub(r"=.*$", "", parameter, flags=re.S).split())
    named = _NAMED.match(words)
    return named[1].strip() if named is not None and named[1].strip() not in ("const", "unsigned") else words


def _split(parameters: str) -> list[str]:
    """At the commas that lie in no brackets."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter in "<({") - (letter in ">)}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


_HERE = Path(__file__).parent
_SOURCES = (native.SOURCE, _HERE / "device.hpp", _HERE / "planned.hpp", Path(__file__))


@once
def load(directory: Path | None) -> Any:
    """This process's library, built where there is none yet below `directory`. Raises NativeError."""
    if sys.platform != "linux" or torch.version.cuda is None:
        raise NativeError("the planned allocator for a GPU is made for CUDA under Linux")
    if torch.cuda.get_allocator_backend() != "native":
        raise NativeError(f"PyTorch's allocator is {torch.cuda.get_allocator_backend()}, and it is made for the native one")
    torch.cuda.init()
    name = f"cuda-allocator-{native.key(*_SOURCES)}.so"
    return library(directory, name, LibraryRecipe("the planned allocator", _compile, lambda path: native.opened(path, tries=False)))


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    generated = target.parent / "forwarders.inc"
    try:
        generated.write_text(forwarders(root / "include"), encoding="utf-8")
    except (ValueError, OSError) as error:
        raise NativeError(f"torch's headers are not as expected ({error})") from error
    include = [_HERE / "headers", root / "include", target.parent, _HERE, *_cuda(root)]
    options = [*FLAGS, "-w", "-DLOWTIDE_CUDA", *(f"-I{each}" for each in include)]
    compile_library(native.SOURCE, target, options, (f"-L{root / 'lib'}", "-lc10", "-lc10_cuda", f"-Wl,-rpath,{root / 'lib'}"))


def _cuda(root: Path) -> list[Path]:
    """Where the headers of CUDA's runtime are: among the packages that come with torch, or where CUDA is installed."""
    places = [*sorted(root.parent.glob("nvidia/*/include")), Path("/usr/local/cuda/include")]
    folders = [each for each in places if (each / "cuda_runtime_api.h").exists()]
    if not folders:
        raise NativeError("the headers of CUDA's runtime are neither beside torch nor in /usr/local/cuda: install nvidia-cuda-runtime")
    return folders[:1]
