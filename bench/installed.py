"""The recipes as a reader has them: from a wheel, in a clean environment with what their page says to install, each a process of its own.

    python -m bench.installed

Nothing of the checkout can be imported there. Takes some minutes, of which installing is one; ends with the first recipe that fails.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator

from bench.clean import ROOT, Clean, clean

_SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^```python( torchrun)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INSTALL = """
python3 -m venv own
. own/bin/activate
pip wheel -q --no-deps -w wheels "$LOWTIDE"
pip install -q torch "$(echo wheels/*.whl)[frameworks]"
rm -rf "$LOWTIDE"
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = clean(folder)
        _say("install", place.run("install", _INSTALL)[1])
        for number, (title, name, script) in enumerate(recipes((ROOT / "docs/recipes.md").read_text(encoding="utf-8"))):
            _say(title, _run(place, title, name.format(number), script))


def recipes(page: str) -> Iterator[tuple[str, str, str]]:
    """Title, name of the file and script of each: the blocks of a section are one program, a script for torchrun is one by itself.

    What stands before the first section comes before each.
    """
    first = "".join(block for _, block in _BLOCK.findall(page[: page.index("\n## ")]))
    for title, text in _SECTION.findall(page):
        blocks = _BLOCK.findall(text)
        if plain := "".join(block for several, block in blocks if not several):
            yield title, "recipe_{}.py", f"{first}\n{plain}"
        yield from ((title, "torchrun_{}.py", block) for several, block in blocks if several)


def _run(place: Clean, title: str, name: str, script: str) -> float:
    (place.folder / name).write_text(script, encoding="utf-8")
    start = "torchrun --standalone --nproc-per-node 2" if name.startswith("torchrun") else "python"
    return place.run(title, f". own/bin/activate\n{start} {name}")[1]


def _say(title: str, took_s: float) -> None:
    print(f"{title}: {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
