"""A release: what it needs is checked, everything is run green in a clean clone, and the commit is tagged.

    python -m release.tag [--dry-run] [--without-cuda]

The version is that of `lowtide/base/__init__.py`, the notes are its section of the changelog. Where something is missing, all of it is told
and nothing runs. In the clone the changelog's heading gets its date; that commit passes `make test` and `make test-cuda`, is what `make
wheels` builds, and is tagged. Only then the checkout goes on to it, if it is still as it was; `dist` has the wheels of this version alone.
Nothing is pushed: `git push --follow-tags` is for a person to say.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_CHECKS = ("test", "test-cuda", "wheels")
_UNRELEASED = "## Unreleased"
_LATER = ", to be released"
_NOTHING = "make test-cuda: nothing was tested"  # what the Makefile prints, and ends well
_OF_COMMITS = r"^(user|gpg|commit|tag)\."  # settings of git that a clone does not take over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="only tell what is missing")
    parser.add_argument("--without-cuda", action="store_true", help="leave `make test-cuda` out")
    options = parser.parse_args()
    missing = list(missing_in(_ROOT))
    for each in missing:
        print(f"release.tag: {each}", file=sys.stderr)
    if missing or options.dry_run:
        sys.exit(1 if missing else 0)
    version, before = version_of(_ROOT), _state(_ROOT)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "lowtide")
        _tagged(clone, version, without_cuda=options.without_cuda)
        if _state(_ROOT) != before:
            raise SystemExit("release.tag: the checkout has changed since the checks began: nothing is tagged, begin anew")
        _git(_ROOT, "fetch", str(clone), "tag", f"v{version}")
        _git(_ROOT, "merge", "--quiet", "--ff-only", f"v{version}")
        (_ROOT / "dist").mkdir(exist_ok=True)
        for older in (_ROOT / "dist").glob("lowtide-*"):
            older.unlink()
        shutil.copytree(clone / "dist", _ROOT / "dist", dirs_exist_ok=True)
    print(f"v{version} is tagged; `git push --follow-tags` publishes it, and `dist` has the wheels")


def _tagged(clone: Path, version: str, *, without_cuda: bool) -> None:
    """Make the clone and the release in it. Raises SystemExit where a check fails, or tests nothing."""
    _git(_ROOT, "clone", "--quiet", str(_ROOT), str(clone))
    for setting in _tried(_ROOT, "config", "--get-regexp", _OF_COMMITS).stdout.splitlines():
        _git(clone, "config", *setting.split(" ", 1))
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(dated(changelog.read_text(encoding="utf-8"), version, datetime.date.today()), encoding="utf-8")
    _git(clone, "commit", "--quiet", "-m", f"lowtide {version}", "CHANGELOG.md")
    commit = _git(clone, "rev-parse", "HEAD")
    for check in _CHECKS:
        if check == "test-cuda" and without_cuda:
            continue
        lines = []
        with subprocess.Popen(["make", check], cwd=clone, stdout=subprocess.PIPE, text=True, errors="replace") as running:
            for line in running.stdout or ():
                print(line, end="", flush=True)
                lines.append(line.strip())
        if running.returncode:
            raise SystemExit(f"release.tag: make {check} ended with {running.returncode}, as told above: nothing is tagged")
        if _NOTHING in lines:
            raise SystemExit("release.tag: make test-cuda tested nothing, as told above: mend that, or say --without-cuda")
    _git(clone, "tag", "-a", f"v{version}", "-m", f"lowtide {version}", commit)


def _state(root: Path) -> tuple[str, ...]:
    """What must be the same when all has run as when it began."""
    return _git(root, "rev-parse", "HEAD"), _git(root, "rev-parse", "--abbrev-ref", "HEAD"), _git(root, "status", "--porcelain")


def version_of(root: Path) -> str:
    """The package's version. Raises ValueError where the file has none."""
    text = (root / "lowtide" / "base" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'VERSION = "([^"]+)"', text)
    if found is None:
        raise ValueError('lowtide/base/__init__.py: expected a line VERSION = "..."')
    return found[1]


def missing_in(root: Path) -> Iterator[str]:
    """What keeps this checkout from being released, each in a sentence that says what to do."""
    version = version_of(root)
    if re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version) is None:
        yield f"version: expected one such as 0.1.0 or 0.2.0rc1, got {version}: change lowtide/base/__init__.py"
    if changed := _git(root, "status", "--porcelain"):
        yield f"git: expected a clean checkout, got {len(changed.splitlines())} changed files: commit or stash them"
    if (branch := _git(root, "rev-parse", "--abbrev-ref", "HEAD")) != "main":
        yield f"git: expected the branch main, got {branch}: switch to it"
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"git: the tag v{version} is there already: change lowtide/base/__init__.py"
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"## {version}{_LATER}" not in changelog.splitlines():
        yield f"CHANGELOG.md: expected the heading '## {version}{_LATER}': add it"
    if lines := _unsorted(changelog):
        yield f"CHANGELOG.md: {len(lines)} lines are under 'Unreleased': sort them into the groups of {version}"
    for cell in json.loads((root / "release" / "matrix.json").read_text(encoding="utf-8")):
        where = f"Python {cell['python']}, torch {cell['torch']}"
        if cell["failed"]:
            yield f"matrix: {len(cell['failed'])} tests failed on {where}: mend them, then python -m release.matrix"
        elif _tried(root, "cat-file", "-e", f"{(code := cell['code'].rstrip('+'))}^{{commit}}").returncode:
            yield f"matrix: {where} was tried at {code!r}, a commit that this clone lacks: git fetch, or python -m release.matrix"
        elif cell["code"].endswith("+") or _git(root, "diff", "--name-only", code, "HEAD", "--", "lowtide"):
            yield f"matrix: lowtide has changed since {where} was tried at {cell['code']}: python -m release.matrix"


def dated(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with the day at the version's heading, in the form of Keep a Changelog."""
    return changelog.replace(f"## {version}{_LATER}\n", f"## {version} - {day.isoformat()}\n")


def _unsorted(changelog: str) -> list[str]:
    """The entries that no release has yet."""
    section = re.split(r"^## ", changelog.partition(_UNRELEASED)[2], maxsplit=1, flags=re.MULTILINE)[0]
    return [line for line in section.splitlines() if line.startswith("- ")]


def _git(root: Path, *command: str) -> str:
    """What it prints. Raises SystemExit with what git says where it fails."""
    done = _tried(root, *command)
    if done.returncode:
        raise SystemExit(f"release.tag: git {' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def _tried(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)


if __name__ == "__main__":
    main()
