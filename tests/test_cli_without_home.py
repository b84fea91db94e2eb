"""Every command, run by somebody without a home, without an entry among the users, and with nothing but a place for temporary files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.strangers import as_stranger, bare, reachable

_REPOSITORY = Path(__file__).parents[1]
_SPEC = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(5, 8),), lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all commands, so that what one compiles is there for the next."""
    folder = reachable(tmp_path_factory.mktemp("stranger"))
    (folder / "temporary").mkdir()
    (folder / "temporary").chmod(0o1777)
    (folder / "spec.py").write_text(_SPEC)
    (folder / "buffers.csv").write_text("id,lower,upper,size\na,0,3,4\nb,1,2,5\nc,2,4,6\n")
    return folder


@pytest.mark.parametrize(
    ("command", "said"),
    [(("place", "buffers.csv"), "arena"), (("optimize", "spec:build", "--arena"), "arena")],
    ids=lambda each: each[0],
)
def test_commands_work(folder: Path, command: tuple[str, ...], said: str):
    source = "from lowtide.cli import main; main()"
    done = subprocess.run(
        [*as_stranger(), sys.executable, "-c", source, *command], cwd=folder, check=False, capture_output=True, text=True, timeout=300,
        env=bare({"PYTHONPATH": str(_REPOSITORY), "TMPDIR": str(folder / "temporary"), "PYTHONDONTWRITEBYTECODE": "1"}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert done.stderr.count("RuntimeWarning") <= 1, done.stderr
