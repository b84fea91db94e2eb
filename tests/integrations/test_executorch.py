"""ExecuTorch's programs in lowtide's order and at its addresses, run by ExecuTorch's own runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("executorch")  # one process runs its programs, once: importing it takes long
APART = Path(sys.prefix) / "executorch"  # `make` puts the packages there: others change what they do where they find them
PAGE = ROOT / "docs/how/microcontroller.md"


def ran(*command: str) -> str:
    paths = os.pathsep.join(map(str, (ROOT, APART)))
    done = subprocess.run([sys.executable, *command], env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    if not APART.is_dir():
        pytest.skip("ExecuTorch is not there: make")
    return json.loads(ran("-m", "tests.executorch_programs").splitlines()[-1])


# With several conditions `greedy` has other branches write over what is still read: its bytes are too few, its numbers wrong.
ALL = ["irregular", "counter", "branches", "conditions", "same", "irregular in order", "counter outside", "two memories"]
NETS = ["irregular", "counter", "branches", "same", "irregular in order"]


@pytest.mark.parametrize("name", ALL)
def test_the_runtime_computes_what_eager_computes(found: dict[str, Any], name: str):
    assert found[name]["near"]
    assert found[name]["same"] or name == "conditions"


@pytest.mark.parametrize("name", NETS)
def test_one_memory_is_never_larger_than_greedy(found: dict[str, Any], name: str):
    assert found[name]["lowtide"][0] <= found[name]["greedy"][0]
    assert set(found[name]["status"]) == {"OPTIMAL"}


def test_another_order_needs_less(found: dict[str, Any]):
    assert found["irregular"]["lowtide"][0] < 0.9 * found["irregular in order"]["lowtide"][0]


def test_arenas_are_numbered_as_memories_are_given_and_hold_what_fits(found: dict[str, Any]):
    slow, fast = found["two memories"]["lowtide"]
    assert 0 < fast <= 12_000 < slow


def test_what_cannot_be_is_said(found: dict[str, Any]):
    assert found["loop"].startswith("FormatError: while_loop: expected torch.cond")
    assert found["too small"].startswith("BudgetError: ")
    assert found["no space"].startswith("FormatError: memories: expected values like Space(")
    assert found["no flag"] == "FormatError: reorder: expected True or False, got 'yes'"
    assert found["shared"].startswith("FormatError: share_mutable_buffers: expected one memory")


def test_the_page_runs(found: dict[str, Any]):
    block = PAGE.read_text(encoding="utf-8").split("```python executorch\n")[1].split("```")[0]
    assert "optimal" in ran("-c", block)
