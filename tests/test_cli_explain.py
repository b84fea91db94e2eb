"""`lowtide explain`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli import app
from tests.specs import spec_module

SPEC = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    loss = lambda model, x: model(x).square().mean()
    return model, (torch.randn(16, 64),), loss, torch.optim.AdamW(model.parameters())

def infer():
    return nn.Linear(4, 4), torch.ones(2, 4), None, None

def branching():
    model = nn.Linear(4, 4)
    loss = lambda model, x: model(x).sum() if model(x).sum() > 0 else -model(x).sum()
    return model, torch.ones(2, 4), loss, torch.optim.SGD(model.parameters(), 0.1)
"""


@pytest.fixture(autouse=True)
def _spec(tmp_path, monkeypatch):
    yield from spec_module("spec_to_explain", SPEC, tmp_path, monkeypatch)


def run(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


def test_the_peak_and_what_would_help_are_told_as_the_explanation_tells_them():
    result = run("spec_to_explain:make", "--memory", "90%")
    assert result.exit_code == 0, result.output
    for words in ("as it stands: peak", "peak at step", "0_weight", "by kind: optimizer state", "what would help", "order alone",
                  "no step was run", "it fits in"):  # fmt: skip
        assert words in result.output


def test_figures_as_json_alone_on_standard_output_and_for_another_machine():
    result = run("spec_to_explain:make", "--json", "-", "--device", "h200", "--accumulate", "2")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["device"] == "h200"
    assert figures["peak_bytes"] == sum(tensor["nbytes"] for tensor in figures["peak"]["tensors"])
    assert figures["peak_bytes"] % 512 == 0
    assert figures["remedies"][-1]["arguments"] == "training=lowtide.Training(accumulate=4)"
    (order, *_) = figures["remedies"]
    assert order["call"] == f"lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, memory={order['peak_bytes']})"


def test_inference_to_a_file():
    result = run("spec_to_explain:infer", "--json", "told.json")
    assert result.exit_code == 0, result.output
    assert "what would help" in result.output
    assert json.loads(Path("told.json").read_text())["peak"]["phase"] == "forward"


def test_a_model_of_the_bench_needs_no_memory(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    result = run("bench.models:alexnet", "--fake", "--json", "-", "--device", "rtx3090")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["by_kind"]["parameters"] > 2**27


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spec_to_explain:missing"], "cannot find spec_to_explain:missing: .*no attribute 'missing'"),
        (["spec_to_explain:branching"], "control flow depends on data"),
        (["spec_to_explain:make", "--memory", "lots"], "memory: expected bytes as a whole number, a text such as"),
        (["spec_to_explain:make", "--device", "abacus"], "expected one of .*h200.*, got 'abacus'"),
        (["spec_to_explain:make", "--accumulate", "3"], "16 rows, which 3 micro-batches cannot share equally"),
        (["spec_to_explain:make", "--json", "no/such/folder/out.json"], "No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("lowtide: ")
    assert re.search(message, line)
