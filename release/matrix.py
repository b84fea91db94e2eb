"""Pythons, torches and transformers: the core of the tests in an environment of its own for each, from what a registry has.

    python -m release.matrix                                   # CELLS; a night's work where torch comes with CUDA's libraries, 5 GB each
    python -m release.matrix --cells python3.12:2.15.0:5.24.0
    python -m release.matrix --keep ~/cells                    # environments stay there: the next time takes minutes, and 30 GB of disk

A cell is a Python, a torch and a transformers; all else is what the registry gives a user on that day, not what CI pins. lowtide comes from
a clone, as git has it. Each answer goes into `release/matrix.json` at once, in the place of an older one of the same versions, and
`docs/versions.md` is written from that. Exits with 1 where a test failed, or an environment could not be made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from release.wheels import environment

_ROOT = Path(__file__).parents[1]
ANSWERS = _ROOT / "release" / "matrix.json"
PAGE = _ROOT / "docs" / "versions.md"
# Each Python and each torch at least once, and the ends of both together.
CELLS = (
    "python3.10:2.11.0:5.20.2",
    "python3.11:2.12.1:5.22.2",
    "python3.11:2.13.0:5.23.0",
    "python3.12:2.14.1:5.23.0",
    "python3.13:2.11.0:5.22.2",
    "python3.13:2.15.0:5.24.0",
)
# What breaks first where Python, torch or transformers moves: torch's private names, how programs are followed, plans, bits, generated
# kernels, files, frameworks.
TESTS = (
    "tests/test_private_torch.py", "tests/capture", "tests/test_tiny.py", "tests/api/test_exactness.py", "tests/api/test_promises.py",
    "tests/saved/test_saved.py", "tests/integrations/test_trainer.py", "tests/integrations/test_dynamo.py",
)  # fmt: skip
_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "accelerate", "peft", "expecttest")
_VERSIONS = (
    "import json, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in ('torch', 'transformers', 'numba', 'numpy')}))"
)
_HANGS_S = 1800  # of one test: the machine may be busy
_SHOWN = 3  # failures on the page


@dataclass(frozen=True)
class Answer:
    """What became of a cell."""

    python: str  # "3.12.1"
    torch: str
    transformers: str
    numba: str = ""
    numpy: str = ""
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()  # test by test; or why there was no environment
    code: str = ""  # the commit
    system: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=[*CELLS], metavar="PYTHON:TORCH:TRANSFORMERS")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make environments here, and take those that are here already")
    options = parser.parse_args()
    answers = [_answer(*cell.rsplit(":", 2), keep=options.keep) for cell in options.cells]
    sys.exit(1 if any(answer.failed for answer in answers) else 0)


def _answer(python: str, torch: str, transformers: str, *, keep: Path | None) -> Answer:
    """Of one cell; saved."""
    with tempfile.TemporaryDirectory() as folder:
        version = _output([python, "-c", "import platform; print(platform.python_version())"])
        answer = Answer(version, torch, transformers, code=_output(["git", "rev-parse", "--short", "HEAD"]), system=_system())
        try:
            home = Path(folder, "environment") if keep is None else keep.expanduser().absolute() / f"{version}-{torch}-{transformers}"
            answer = _tried(answer, python, Path(folder), home)
        except SystemExit as error:
            answer = replace(answer, failed=(f"no environment: {error}",))
    print(row(answer), *answer.failed, sep="\n  ", flush=True)
    save(answer)
    return answer


def _tried(answer: Answer, python: str, folder: Path, home: Path) -> Answer:
    """The answer with what was found in the environment `home`, which is made where it is not there."""
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", str(_ROOT), str(source)], check=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    here = environment(python, home, f"torch=={answer.torch}")
    # One more call, as a user would: torch is there, and has to stay.
    pip = [here, "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check"]
    wanted = [f"torch=={answer.torch}", f"transformers=={answer.transformers}", *_TOOLS]
    done = subprocess.run([*pip, "--editable", str(source), *wanted], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip failed")
    found: dict[str, Any] = json.loads(_output([here, "-c", _VERSIONS]))
    settings = {"OMP_NUM_THREADS": "1", "LOWTIDE_CACHE": str(folder / "cache"), "CI": "1"}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    written = folder / "answers.xml"
    options = ["-q", "-o", f"faulthandler_timeout={_HANGS_S}", "-n", "auto", "--dist", "loadgroup", "--junitxml", str(written)]
    tested = subprocess.run([here, "-m", "pytest", *options, *TESTS], cwd=source, env=clean | settings)
    if not written.exists():
        return replace(answer, **found, failed=(f"pytest ended with {tested.returncode} before its end",))
    passed, skipped, failed = counts(written.read_text(encoding="utf-8"))
    return replace(answer, **found, passed=passed, skipped=skipped, failed=failed)


def counts(text: str) -> tuple[int, int, tuple[str, ...]]:
    """Of what pytest wrote: how many tests passed and were skipped, and which failed, with the first line of why."""
    passed, skipped, failed = 0, 0, []
    for case in ET.fromstring(text).iter("testcase"):
        wrong = [each for name in ("failure", "error") for each in case.findall(name)]
        if wrong:
            failed.append(f"{case.get('classname')}::{case.get('name')}: {(wrong[0].get('message') or '').splitlines()[0][:160]}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, tuple(failed)


def answers() -> list[Answer]:
    """What is known, by versions."""
    if not ANSWERS.exists():
        return []
    found = [Answer(**entry | {"failed": tuple(entry["failed"])}) for entry in json.loads(ANSWERS.read_text(encoding="utf-8"))]
    return sorted(found, key=lambda each: [[int(part) for part in text.split("+")[0].split(".")] for text in _key(each)])


def save(answer: Answer) -> None:
    kept = [each for each in answers() if _key(each) != _key(answer)]
    ANSWERS.write_text(json.dumps([asdict(each) for each in [*kept, answer]], indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(answers()), encoding="utf-8")


def _key(answer: Answer) -> Sequence[str]:
    """Builds of one torch are one: `2.13.0+cpu` is `2.13.0`."""
    return answer.python, answer.torch.split("+")[0], answer.transformers


def page(found: Sequence[Answer]) -> str:
    """docs/versions.md."""
    lines = [
        "| Python | torch | transformers | numba | tests that passed | skipped | failed | commit |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    failures = [f"- {each.python}, torch {each.torch}: {why}" for each in found for why in each.failed[:_SHOWN]]
    return "\n".join(
        [
            "# Versions",
            "",
            "lowtide runs on Python 3.10 to 3.13 with torch 2.11 or later. `python -m release.matrix` tries that. Each row is an",
            "environment of its own with what the registry had, and the core of the tests in it: private names of torch, how programs",
            "are followed, plans, bits, generated kernels, saved functions, Trainer and torch.compile. CI runs all tests on one.",
            "",
            *lines,
            *map(row, found),
            *(["", "What failed:", "", *failures] if failures else []),
            "",
        ]
    )


def row(answer: Answer) -> str:
    cells = (answer.python, answer.torch, answer.transformers, answer.numba, answer.passed, answer.skipped, len(answer.failed), answer.code)
    return f"| {' | '.join(map(str, cells))} |"


def _system() -> str:
    return f"{platform.system()} {platform.machine()}"


def _output(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        raise SystemExit(f"{command[0]}: expected a program on the search path")
    return subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    main()
