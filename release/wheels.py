"""Wheels of lowtide with the kernels of its searches compiled, one for each Python, and the source distribution.

    python -m release.wheels [--python python3.11 ...] [--numba VERSION ...] [--out dist]

An environment of its own for each Python, with what the wheel requires; each numba that is named adds its kernels to the same wheel.
What is compiled runs on each processor of this kind (`lowtide.base.kernels.BASELINES`), so that one wheel serves all. With another
numba than these, another Python, or from the source distribution, kernels are compiled at the first step, as in a checkout.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lowtide.base.kernels import BASELINES

_ROOT = Path(__file__).parents[1]
# The oldest glibc of torch's own wheels; kernels call nothing of it.
_LINUX = "manylinux_2_28_"
_PLATFORM = "import sysconfig; print(sysconfig.get_platform().replace('-', '_').replace('.', '_'))"
_TAG = "import sys; print(f'cp{sys.version_info[0]}{sys.version_info[1]}')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--numba", nargs="+", default=[""], metavar="VERSION", help="as pip finds it, where none is named")
    parser.add_argument("--out", type=Path, default=_ROOT / "dist")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")  # as git has it: nothing that lies about gets into a wheel
        _run(["git", "clone", "--quiet", str(_ROOT), str(source)], Path(folder))
        for number, python in enumerate(options.python):
            place = Path(folder, str(number))
            place.mkdir()
            print(built(python, options.numba, source, place, options.out), flush=True)
        _run(
            [
                environment(options.python[0], Path(folder, "sdist"), "build"),
                "-m",
                "build",
                "--sdist",
                "--outdir",
                str(options.out),
                str(source),
            ],
            source,
        )


def built(python: str, numbas: Sequence[str], source: Path, place: Path, out: Path) -> Path:
    """The wheel for one Python, in `out`."""
    here = environment(python, place / "environment", "pip", "setuptools>=77", "wheel")
    _run([here, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(place / "pure"), str(source)], place)
    pure = next((place / "pure").glob("*.whl"))
    _run([here, "-m", "wheel", "unpack", "--dest", str(place / "unpacked"), str(pure)], place)
    tree = next((place / "unpacked").iterdir())
    _run([here, "-m", "pip", "install", "-qq", "torch"], place)
    _run([here, "-m", "pip", "install", "-qq", str(pure)], place)
    _run([here, "-m", "pip", "uninstall", "-q", "-y", "lowtide"], place)
    for version in numbas:
        if version:
            _run([here, "-m", "pip", "install", "-qq", f"numba=={version}"], place)
        _compile(here, tree, source, place)
    (place / "packed").mkdir()
    _run([here, "-m", "wheel", "pack", "--dest-dir", str(place / "packed"), str(tree)], place)
    tag, system = _asked(here, _TAG), _asked(here, _PLATFORM)
    tags = [
        "--python-tag",
        tag,
        "--abi-tag",
        tag,
        "--platform-tag",
        system.replace("linux_", _LINUX) if system.startswith("linux_") else system,
    ]
    _run([here, "-m", "wheel", "tags", "--remove", *tags, str(next((place / "packed").glob("*.whl")))], place)
    return Path(shutil.move(next((place / "packed").glob("*.whl")), out))


def _compile(python: str, tree: Path, source: Path, place: Path) -> None:
    """Put the kernels that a first step needs into the unpacked wheel, by the numba of the environment."""
    version = _asked(python, "import numba; print(numba.__version__)")
    kept = place / f"kernels-{version}"
    shutil.copytree(source / "release", place / "release", dirs_exist_ok=True)
    settings = {
        "NUMBA_CPU_NAME": BASELINES[platform.machine()], "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(kept),
        "PYTHONPATH": f"{tree}{os.pathsep}{place}", "LOWTIDE_CACHE": str(place / "cache"), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    _run([python, "-W", "ignore", "-m", "release.exercise"], place, settings)
    target = tree / "lowtide" / "built" / version
    target.mkdir(parents=True)
    for file in kept.glob("*/*.nbc"):
        shutil.copyfile(file, target / file.name)


def environment(python: str, folder: Path, *packages: str) -> str:
    """A new environment with these packages; its Python."""
    _run([python, "-m", "venv", str(folder)], folder.parent)
    here = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    _run([here, "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", *packages], folder.parent)
    return here


def _asked(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _run(command: Sequence[str], folder: Path, settings: dict[str, str] | None = None) -> None:
    """Raises SystemExit where it fails: what it printed stands above."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    done = subprocess.run(command, cwd=folder, env=environment | (settings or {}))
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with {done.returncode}")


if __name__ == "__main__":
    main()
