"""`lowtide compile`: the file that it writes, and what it refuses; and the server of the page on inference, which reads such a file."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from typer.testing import CliRunner

import lowtide
from lowtide.cli import app
from tests.specs import spec_module

ROOT = Path(__file__).parents[1]
SPEC = """
import torch
from torch import nn

def build(batch_size=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), (torch.randn(batch_size, 16),)

def by_name():
    return Named().eval(), {"x": torch.ones(2, 4)}

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu()

def trains():
    model = nn.Linear(4, 4)
    return model, (torch.ones(2, 4),), lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1)

def training_mode():
    return nn.Linear(4, 4), (torch.ones(2, 4),)

def one():
    return (nn.Linear(4, 4),)
"""


@pytest.fixture(autouse=True)
def _spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from spec_module("spec_to_compile", SPEC, tmp_path, monkeypatch)


def run(*arguments: str):
    return CliRunner().invoke(app, ["compile", *arguments])


@pytest.mark.parametrize("spec", ["spec_to_compile:build", "spec_to_compile.py:build", "./spec_to_compile.py:build"])
def test_the_file_gives_the_models_numbers(spec: str):
    result = run(spec, "--out", "model.lowtide", "--batch-size", "3", "--json", "figures.json")
    assert result.exit_code == 0, result.output
    assert "relative deviation" in result.stdout or "bit-equal" in result.stdout
    model, (x,) = sys.modules["spec_to_compile"].build(3)
    torch.testing.assert_close(lowtide.load_frozen("model.lowtide")(x), model(x).detach())
    figures = json.loads(Path("figures.json").read_text())
    needs = CliRunner().invoke(app, ["needs", "model.lowtide", "--json", "-"])
    assert {key: figures[key] for key in json.loads(needs.stdout)} == json.loads(needs.stdout)
    assert figures["file_bytes"] == Path("model.lowtide").stat().st_size
    assert figures["held_bytes"] >= sum(weight.nbytes for weight in model.parameters())
    assert figures["deviation"] < 1e-5


def test_a_batch_by_name():
    assert run("spec_to_compile:by_name", "--out", "model.lowtide").exit_code == 0
    assert lowtide.load_frozen("model.lowtide")(x=torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spec_to_compile:trains", "--out", "model.lowtide"], r"expected \(model, batch\), to infer; got a loss and an optimizer, too"),
        (["spec_to_compile:training_mode", "--out", "model.lowtide"], r"expected a model in eval mode, .*: return model.eval\(\)"),
        (["spec_to_compile:one", "--out", "model.lowtide"], r"or for inference \(model, batch\); got a tuple of Linear"),
        (["spec_to_compile:build", "--out", "none/model.lowtide"], "expected a file in a folder that exists"),
        (["none.py:build", "--out", "model.lowtide"], "cannot find none.py:build: no such file: none.py"),
        (["a-b/c d.py:build", "--out", "model.lowtide"], "expected module:function, .* or train.py:build"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr), result.stderr
    assert not Path("model.lowtide").exists()


def test_the_server_of_the_page_answers(tmp_path: Path):
    assert run("spec_to_compile:build", "--out", "model.lowtide").exit_code == 0
    model, (x,) = sys.modules["spec_to_compile"].build()
    page = (ROOT / "docs/how/cpu_inference.md").read_text(encoding="utf-8")
    script = re.search(r"^```python serve\.py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert script is not None
    Path("serve.py").write_text(script[1], encoding="utf-8")
    with _server(tmp_path) as connection:
        for _ in range(3):
            torch.testing.assert_close(_asked(connection, x), model(x).detach())
        with pytest.raises(http.client.HTTPException):  # for another shape no answer comes, and the server goes on
            _asked(connection, torch.randn(5, 16))
        torch.testing.assert_close(_asked(connection, x), model(x).detach())


def _asked(connection: http.client.HTTPConnection, x: torch.Tensor) -> torch.Tensor:
    body = io.BytesIO()
    numpy.save(body, x.numpy())
    try:
        connection.request("POST", "/", body.getvalue())
        return torch.from_numpy(numpy.load(io.BytesIO(connection.getresponse().read())))
    finally:
        connection.close()


@contextmanager
def _server(folder: Path) -> Iterator[http.client.HTTPConnection]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "serve.py", "model.lowtide", str(port)], cwd=folder, stderr=subprocess.PIPE)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, process.communicate()[1].decode()
                time.sleep(0.1)
        yield http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    finally:
        process.kill()
        process.communicate()
