"""A release: what it needs is checked, everything is run green in a clean clone, and the commit is tagged.

    python -m release.tag [--dry-run] [--without-cuda]

The version is that of `lowtide/base/release.py`, the notes are its section of the changelog. Where something is missing, all of it is told
and nothing runs. In the clone `make test`, `make test-cuda` and `make wheels` run; the wheels are put into `dist`. Then the changelog's
heading gets its date, and that commit the tag. Nothing is pushed: `git push --follow-tags` is for a person to say.
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
    version = version_of(_ROOT)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "lowtide")
        _git(_ROOT, "clone", "--quiet", str(_ROOT), str(clone))
        for check in _CHECKS:
            if check != "test-cuda" or not options.without_cuda:
                subprocess.run(["make", check], cwd=clone, check=True)
        shutil.copytree(clone / "dist", _ROOT / "dist", dirs_exist_ok=True)
    changelog = _ROOT / "CHANGELOG.md"
    changelog.write_text(dated(changelog.read_text(encoding="utf-8"), version, datetime.date.today()), encoding="utf-8")
    _git(_ROOT, "commit", "--quiet", "-m", f"lowtide {version}", "CHANGELOG.md")
    _git(_ROOT, "tag", "-a", f"v{version}", "-m", f"lowtide {version}")
    print(f"v{version} is tagged; `git push --follow-tags` publishes it, and `dist` has the wheels")


def version_of(root: Path) -> str:
    """The package's version. Raises ValueError where the file has none."""
    text = (root / "lowtide" / "base" / "release.py").read_text(encoding="utf-8")
    found = re.search(r'VERSION = "([^"]+)"', text)
    if found is None:
        raise ValueError('lowtide/base/release.py: expected a line VERSION = "..."')
    return found[1]


def missing_in(root: Path) -> Iterator[str]:
    """What keeps this checkout from being released, each in a sentence that says what to do."""
    version = version_of(root)
    if re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version) is None:
        yield f"version: expected one such as 0.1.0 or 0.2.0rc1, got {version}: change lowtide/base/release.py"
    if changed := _git(root, "status", "--porcelain"):
        yield f"git: expected a clean checkout, got {len(changed.splitlines())} changed files: commit or stash them"
    if (branch := _git(root, "rev-parse", "--abbrev-ref", "HEAD")) != "main":
        yield f"git: expected the branch main, got {branch}: switch to it"
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"git: the tag v{version} is there already: change lowtide/base/release.py"
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"## {version}{_LATER}" not in changelog.splitlines():
        yield f"CHANGELOG.md: expected the heading '## {version}{_LATER}': add it"
    if lines := _unsorted(changelog):
        yield f"CHANGELOG.md: {len(lines)} lines are under 'Unreleased': sort them into the groups of {version}"
    for cell in json.loads((root / "release" / "matrix.json").read_text(encoding="utf-8")):
        where = f"Python {cell['python']}, torch {cell['torch']}"
        if cell["failed"]:
            yield f"matrix: {len(cell['failed'])} tests failed on {where}: mend them, then python -m release.matrix"
        elif _git(root, "diff", "--name-only", cell["code"].rstrip("+"), "HEAD", "--", "lowtide"):
            yield f"matrix: lowtide has changed since {where} was tried at {cell['code']}: python -m release.matrix"


def dated(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with the day at the version's heading, in the form of Keep a Changelog."""
    return changelog.replace(f"## {version}{_LATER}\n", f"## {version} - {day.isoformat()}\n")


def _unsorted(changelog: str) -> list[str]:
    """The entries that no release has yet."""
    section = re.split(r"^## ", changelog.partition(_UNRELEASED)[2], maxsplit=1, flags=re.MULTILINE)[0]
    return [line for line in section.splitlines() if line.startswith("- ")]


def _git(root: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
