"""The README's and the guide's Python runs as it stands there, block after block."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_the_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "page"}
    blocks = list(_BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        first_line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * first_line + block[1], page, "exec"), names)  # so that a traceback names the page's own line
