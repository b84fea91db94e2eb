"""Builds the null device for the torch at hand, once for each state of its sources and of torch.

takes   a folder to keep it in; a CUDA build of torch, and the headers of CUDA's runtime beside it; the system's C compiler
leaves  libraries in a folder: those of `LOADED`, which are to be loaded before all others and hold all functions, and one without any for
        each further library that torch wants to find by its name. Of NVIDIA's packages only nvidia-cuda-runtime has to be there
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
_CUDAS = re.compile(r"(__cuda|cuda[A-Z]|cublas|cusparse|cusolver|cufft|curand|cudnn|nccl|cupti|cu[A-Z]|nvshmem)\w*")
_NVIDIAS = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
_CUDNN = re.compile(r"^Requires-Dist: nvidia-cudnn-\w+ *\(?==(\d+)\.(\d+)\.(\d+)", re.M)
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
    key = hashlib.sha256(b"".join(path.read_bytes() for path in (*_SOURCES, _HERE / "cudnn.h", Path(__file__))))
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


def _compile(cc: str, folder: Path, torch: Path, include: Path) -> None:
    flags = [*_FLAGS, *_cudnn_version(torch), f"-I{include}", "-idirafter", str(_MISSING)]
    runtime, libraries, driver, compiler = _SOURCES
    torches = sorted(torch.glob("*.so"))
    undefined, rest = _undefined(torches), folder / "rest.c"
    drivers = set(re.findall(r"CUDAAPI (cu\w+)", (include / "cuda.h").read_text()))
    drivers |= {name + suffix for name in drivers for suffix in ("_v2", "_v3", "_v4")}
    rest.write_text(_nothing({name for name in undefined if _CUDAS.fullmatch(name)} - drivers - _defined(runtime, libraries)))
    _run([cc, *flags, str(runtime), str(libraries), str(rest), "-o", str(folder / "libnull.so"), "-lpthread"])
    rest.write_text(_nothing(drivers - _defined(driver)))
    _run([cc, *flags, "-Wl,-soname,libcuda.so.1", str(driver), str(rest), "-o", str(folder / "libcuda.so.1")])
    needed = _needed(torches)
    nvrtc = next(name for name in needed if name.startswith("libnvrtc."))
    rest.write_text(_nothing({name for name in undefined if name.startswith("nvrtc")} - _defined(compiler)))
    _run([cc, *flags, f"-Wl,-soname,{nvrtc},--default-symver", str(compiler), str(rest), "-o", str(folder / "libnvrtc.so")])
    wanted = {name.decode() for name in re.findall(rb"nvml[A-Z]\w+", (torch / "libc10_cuda.so").read_bytes())}
    rest.write_text(_nothing(wanted))
    _run([cc, *flags, "-Wl,-soname,libnvidia-ml.so.1", str(rest), "-o", str(folder / "libnvidia-ml.so.1")])
    for name, versions in needed.items():
        if _NVIDIAS.fullmatch(name) and name not in (nvrtc, "libcuda.so.1"):
            rest.write_text("\n".join(f"{version} {{ }};" for version in sorted(versions)) or "{ local: *; };")
            _run([cc, *flags, f"-Wl,-soname,{name},--version-script,{rest}", "-x", "c", os.devnull, "-o", str(folder / name)])
    rest.unlink()


def _include(torch: Path) -> Path:
    packages = torch.parent.parent / "nvidia"
    for path in sorted(packages.glob("*/include/cuda_runtime_api.h")):
        return path.parent
    raise NoNullDeviceError(f"the headers of CUDA's runtime (nvidia-cuda-runtime) are not among the packages beside torch, in {packages}")


def _cudnn_version(torch: Path) -> list[str]:
    """As the compiler is told of it: that which torch was built for, as it would refuse an older one."""
    for path in sorted(torch.parent.parent.glob("torch-*.dist-info/METADATA")):
        if found := _CUDNN.search(path.read_text(encoding="utf-8")):
            return [f"-DCUDNN_{part}={number}" for part, number in zip(("MAJOR", "MINOR", "PATCHLEVEL"), found.groups(), strict=True)]
    raise NoNullDeviceError(f"the package of torch beside {torch} does not say for which cuDNN it was built")


def _needed(libraries: list[Path]) -> dict[str, set[str]]:
    """The libraries that these want to find, and the versions of symbols that they want in each."""
    found: dict[str, set[str]] = {}
    for path in libraries:
        text = _run(["objdump", "-p", str(path)])
        for name in re.findall(r"NEEDED\s+(\S+)", text):
            found.setdefault(name, set())
        for name, lines in re.findall(r"required from (\S+):\n((?:\s+0x.*\n)+)", text):
            found.setdefault(name, set()).update(line.split()[-1] for line in lines.splitlines())
    return found


def _undefined(libraries: list[Path]) -> set[str]:
    lines = (_run(["nm", "-D", "--undefined-only", str(path)]) for path in libraries)
    return {line.split()[-1].split("@")[0] for text in lines for line in text.splitlines()}


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
