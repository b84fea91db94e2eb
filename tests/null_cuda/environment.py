"""Makes the Python that the null device needs: a CUDA build of torch without NVIDIA's libraries, for which the device stands in.

    python -m tests.null_cuda.environment .venv-cuda [torch==2.14.1]

With these libraries it would be 5.5 GB; without them it is 1.5 GB. Of NVIDIA's packages it takes the headers of CUDA's runtime.
Exits with 0 where the environment is there, else with 77 and why there is none; after `LIMIT_S` it gives up.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.null_cuda.__main__ import NONE

TORCH = "torch==2.14.1"
LIMIT_S = 600
SPARE_BYTES = 4 * 10**9  # what is unpacked, and the packages while they are
_ROOT = Path(__file__).parents[2]
_TOOLS = ("pytest", "pytest-xdist", "hypothesis")
_NVIDIAS = re.compile(r"nvidia-|cuda-|triton|torch\b", re.I)


class NoEnvironmentError(Exception):
    """Why there can be none here."""


def main(folder: str = ".venv-cuda", torch: str = TORCH) -> int:
    """Finds the environment ready, or makes it."""
    target, ends = Path(folder).absolute(), time.monotonic() + LIMIT_S
    ready, key = target / ".ready", _key(torch)
    if ready.exists() and ready.read_text(encoding="utf-8") == key:
        return 0
    print(f"setting up {folder}: {torch} without NVIDIA's libraries, a minute or two, once", flush=True)
    try:
        _look_around(target)
        _make(target, torch, ends)
    except NoEnvironmentError as why:
        shutil.rmtree(target, ignore_errors=True)
        print(f"no CUDA build of torch: {why}", file=sys.stderr)
        return NONE
    ready.write_text(key, encoding="utf-8")
    return 0


def _key(torch: str) -> str:
    """Of all that says what belongs into the environment."""
    parts = (Path(__file__), _ROOT / "pyproject.toml", _ROOT / "constraints.txt")
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts) + f"{torch} {sys.version}".encode()).hexdigest()


def _look_around(target: Path) -> None:
    if (system := (platform.system(), platform.machine())) != ("Linux", "x86_64"):
        raise NoEnvironmentError(f"the null device is made for Linux on x86_64, and this is {' on '.join(system)}")
    if missing := [name for name in ("cc", "c++", "nm", "objdump") if shutil.which(name) is None]:
        raise NoEnvironmentError(f"the null device is built with compilers and binutils, and there is no {', '.join(missing)}")
    if (free := shutil.disk_usage(target.parent).free) < SPARE_BYTES:
        raise NoEnvironmentError(f"{free / 1e9:.1f} GB are free on the disk of {target}, and it takes {SPARE_BYTES / 1e9:.0f} GB")


def _make(target: Path, torch: str, ends: float) -> None:
    _run([sys.executable, "-m", "venv", "--clear", str(target)], ends)
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", torch], ends)
    _run([*pip, "--no-deps", _headers(target)], ends)
    _run([*pip, "--no-deps", "--editable", str(_ROOT)], ends)
    rest = {each for name in ("torch", "lowtide") for each in _needs(target, name) if not _NVIDIAS.match(each)}
    _run([*pip, "--constraint", str(_ROOT / "constraints.txt"), *sorted(rest), *_TOOLS], ends)


def _needs(target: Path, name: str) -> list[str]:
    """What a package asks for, but for its extras."""
    places = [str(path) for path in target.glob("lib/python*/site-packages")]
    asked = next(iter(importlib.metadata.distributions(name=name, path=places))).requires or []
    return [each.partition(";")[0].strip() for each in asked if "extra ==" not in each]


def _headers(target: Path) -> str:
    """The package with the headers of the runtime that torch was built for: either torch names it, or a release of the whole toolkit."""
    for need in _needs(target, "torch"):
        if need.startswith("nvidia-cuda-runtime"):
            return need
        if toolkit := re.match(r"cuda-toolkit\[.*==(\d+\.\d+)", need):
            return f"nvidia-cuda-runtime=={toolkit[1]}.*"
    raise NoEnvironmentError("the torch that was found wants no CUDA: it is another build")


def _run(command: list[str], ends: float) -> None:
    """In a group of its own, so that nothing of it stays behind."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True) as process:
        try:
            said, _ = process.communicate(timeout=max(0.0, ends - time.monotonic()))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise NoEnvironmentError(f"it was not there after {LIMIT_S} s, at {' '.join(command[-2:])}") from None
            raise
    if process.returncode:
        raise NoEnvironmentError(f"{' '.join(command[-2:])} failed: {' '.join(said.strip().splitlines()[-1:])}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
