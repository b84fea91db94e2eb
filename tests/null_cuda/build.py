"""Builds the null device for the torch at hand, once for each state of its sources and of torch.

takes   a folder to keep it in; a CUDA build of torch, whose wheels bring CUDA's headers; the system's C compiler
leaves  libraries in a folder: those of `LOADED`, which are to be loaded before all others, libcuda.so.1 and libnvidia-ml.so.1
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_SOURCES = tuple(_HERE / name for name in ("runtime.c", "libraries.c", "driver.c", "compiler.c"))
LOADED = ("libnull.so", "libnvrtc.so")
_MISSING = _HERE.parents[1] / "lowtide" / "cuda" / "headers"  # what CUDA's headers want and the packages lack
_NEEDING = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
_CUDAS = re.compile(r"(__cuda|cuda[A-Z]|cublas|cusparse|cusolver|cufft|curand|cudnn|nccl|cupti|cu[A-Z])\w*")
_FLAGS = ("-w", "-O1", "-fPIC", "-shared", "-D_GNU_SOURCE")


class NoNullDeviceError(Exception):
    """Why there can be none here."""


def libraries() -> Path:
    """Torch's own, without importing it: that would look for a device. Raises NoNullDeviceError where it is no CUDA build."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else None
    if folder is None or not (folder / "libtorch_cuda.so").exists():
        raise NoNullDeviceError("this Python has no CUDA build of torch")
    return folder


def built(cache: Path) -> Path:
    """The folder with these libraries. Raises NoNullDeviceError."""
    torch = libraries()
    include = _include(torch)
    key = hashlib.sha256(b"".join(path.read_bytes() for path in (*_SOURCES, Path(__file__))))
    key.update(f"{torch} {(torch / 'libtorch_cuda.so').stat().st_mtime_ns}".encode())
    target = cache / f"null-cuda-{key.hexdigest()[:12]}"
    if target.is_dir():
        return target
    cc = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if cc is None or shutil.which("nm") is None or shutil.which("objdump") is None:
        raise NoNullDeviceError("it takes a C compiler, nm and objdump (binutils)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name) / "built"
        folder.mkdir()
        _compile(cc, folder, torch, include)
        try:
            folder.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    return target


def _compile(cc: str, folder: Path, torch: Path, include: list[str]) -> None:
    flags = [*_FLAGS, *(f"-I{each}" for each in include), "-idirafter", str(_MISSING)]
    runtime, libraries, driver, compiler = _SOURCES
    rest = folder / "rest.c"
    rest.write_text(_nothing(_undefined(torch) - _defined(runtime, libraries)))
    _run([cc, *flags, str(runtime), str(libraries), str(rest), "-o", str(folder / "libnull.so"), "-lpthread"])
    header = next(path for each in include if (path := Path(each, "cuda.h")).exists())
    names = set(re.findall(r"CUDAAPI (cu\w+)", header.read_text()))
    names |= {name + suffix for name in names for suffix in ("_v2", "_v3", "_v4")}
    rest.write_text(_nothing(names - _defined(driver)))
    _run([cc, *flags, "-Wl,-soname,libcuda.so.1", str(driver), str(rest), "-o", str(folder / "libcuda.so.1")])
    header = next(path for each in include if (path := Path(each, "nvrtc.h")).exists())
    rest.write_text(_nothing(set(re.findall(r"nvrtcResult (nvrtc\w+)\(", header.read_text())) - _defined(compiler)))
    soname = next(name for name in _needed(torch / "libcaffe2_nvrtc.so") if name.startswith("libnvrtc."))
    _run([cc, *flags, f"-Wl,-soname,{soname},--default-symver", str(compiler), str(rest), "-o", str(folder / "libnvrtc.so")])
    wanted = {name.decode() for name in re.findall(rb"nvml[A-Z]\w+", (torch / "libc10_cuda.so").read_bytes())}
    rest.write_text("\n".join(f"int {name}() {{ return 0; }}" for name in sorted(wanted)))
    _run([cc, *flags, "-Wl,-soname,libnvidia-ml.so.1", str(rest), "-o", str(folder / "libnvidia-ml.so.1")])
    rest.unlink()


def _include(torch: Path) -> list[str]:
    packages = torch.parent.parent / "nvidia"
    found = [
        str(path.parent) for name in ("cuda_runtime_api.h", "cudnn.h", "nvrtc.h") for path in sorted(packages.glob(f"*/include/{name}"))
    ]
    if len(found) < 3:
        raise NoNullDeviceError(
            f"the headers of CUDA's runtime, of its compiler and of cuDNN are not among the packages beside torch, in {packages}"
        )
    return found


def _needed(library: Path) -> list[str]:
    return re.findall(r"NEEDED\s+(\S+)", _run(["objdump", "-p", str(library)]))


def _undefined(torch: Path) -> set[str]:
    """The functions of CUDA that torch wants."""
    lines = (_run(["nm", "-D", "--undefined-only", str(torch / name)]) for name in _NEEDING if (torch / name).exists())
    symbols = (line.split()[-1].split("@")[0] for text in lines for line in text.splitlines())
    return {symbol for symbol in symbols if _CUDAS.fullmatch(symbol)}


def _defined(*sources: Path) -> set[str]:
    """What the sources define, by the name the headers give it: `cuMemMap` may be a macro for another version."""
    return {name for path in sources for name in re.findall(r"\b(\w+)\(", path.read_text())} | {
        f"cudnn{verb}{kind}Descriptor"
        for path in sources
        for kind in re.findall(r"^DESCRIPTOR\((\w+)", path.read_text(), re.M)
        for verb in ("Create", "Destroy")
    } | {
        f"cudnnGetConvolution{way}{what}"
        for path in sources
        for way in re.findall(r"^CONVOLUTION\((\w+)", path.read_text(), re.M)
        for what in ("WorkspaceSize", "Algorithm_v7")
    }  # fmt: skip


def _nothing(names: set[str]) -> str:
    return "\n".join(f"long {name}() {{ return 0; }}" for name in sorted(names))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoNullDeviceError(f"{command[0]} failed: {done.stderr.strip().splitlines()[:3]}")
    return done.stdout
