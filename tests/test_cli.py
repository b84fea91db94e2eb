"""The command line: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lowtide
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

def three():
    return 1, 2, 3

def half():
    model = nn.Linear(4, 4)
    return model, torch.ones(2, 4), lambda model, x: model(x).sum(), None

def branching():
    model = nn.Linear(4, 4)
    loss = lambda model, x: model(x).sum() if model(x).sum() > 0 else -model(x).sum()
    return model, torch.ones(2, 4), loss, torch.optim.SGD(model.parameters(), 0.1)

def sized(batch_size=3):
    model, _, loss, optimizer = make()
    return model, (torch.randn(batch_size, 64),), loss, optimizer

def heedless(device):
    return nn.Linear(4, 4), torch.ones(2, 4), None, None

number = 3
"""


@pytest.fixture(autouse=True)
def _spec(tmp_path, monkeypatch):
    yield from spec_module("spec_of_a_test", SPEC, tmp_path, monkeypatch)


def run(*arguments: str):
    return CliRunner().invoke(app, ["optimize", *arguments])


def test_a_table_and_a_measurement():
    result = run("spec_of_a_test:make", "--repeats", "1")
    assert result.exit_code == 0, result.output
    for words in ("promised peak", "peak at step", "measured peak: eager", "measured time: eager", "saved"):
        assert words in result.output


def test_figures_as_json_alone_on_standard_output():
    result = run("spec_of_a_test:make", "--json", "-", "--repeats", "1")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["peak_bytes"] < figures["eager_peak_bytes"]
    assert figures["measured_peak_bytes"] == figures["promised_peak_bytes"] == figures["peak_bytes"]
    assert figures["saving"] > 0
    assert set(figures["seconds"]) >= {"capture", "order"}


def test_without_measuring():
    result = run("spec_of_a_test:make", "--no-measure", "--json", "figures.json")
    assert result.exit_code == 0, result.output
    assert "measured time" not in result.output
    assert "measured_peak_bytes" not in json.loads(Path("figures.json").read_text())


def test_plan_and_program_are_written():
    result = run("spec_of_a_test:make", "--no-measure", "--save", "plan.json", "--program", "program.py")
    assert result.exit_code == 0, result.output
    plan = lowtide.Plan.load("plan.json")
    assert plan.peak_bytes <= plan.eager_peak_bytes
    compile(Path("program.py").read_text(), "program.py", "exec")


def test_inference():
    result = run("spec_of_a_test:infer", "--repeats", "1", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["operators"] >= 1


def test_a_limit_of_memory_is_told_with_what_it_costs():
    result = run("spec_of_a_test:make", "--memory", "90%", "--json", "-", "--no-measure")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["peak_bytes"] <= 0.9 * figures["eager_peak_bytes"]
    assert figures["time_us"] >= figures["order_us"] > 0
    assert figures["frontier"]
    assert "promised time" in run("spec_of_a_test:make", "--latency", "1.2", "--no-measure").output


def test_a_machine_that_is_not_here_can_be_planned_for():
    result = run("spec_of_a_test:make", "--memory", "90%", "--device", "h100", "--simulate", "--state", "swap", "--json", "-")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["peak_bytes"] % 512 == 0
    assert figures["order_us"] > 5 * 20  # each of a few dozen launches takes 5 us
    assert "measured_peak_bytes" not in figures


def test_its_version_is_that_of_the_package():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"lowtide {lowtide.__version__}\n")


def test_machines_are_listed_with_this_one():
    result = CliRunner().invoke(app, ["devices", "--json", "-"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert {"cpu", "rtx3090", "rtx4090", "l40s", "a100", "h100", "h200"} == figures.keys()
    assert figures["rtx3090"]["bandwidth_bytes_per_s"] == 936e9
    assert figures["cpu"]["float32_flops_per_s"] > 1e8
    assert "TFLOP/s" in CliRunner().invoke(app, ["devices", "--no-measure"]).output


def test_an_arena_says_what_it_served():
    result = run("spec_of_a_test:make", "--arena", "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert re.search(r"arena of [\d.]+ MiB .* of \d+ requests|no arena: ", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spec_of_a_test:missing"], "cannot find spec_of_a_test:missing: .*no attribute 'missing'"),
        (["no_such_module:make"], "cannot find no_such_module:make: No module named"),
        (["resnet18"], "expected module:function, .* got 'resnet18'"),
        (["spec_of_a_test:three"], r"expected \(model, batch, loss, optimizer\).*got a tuple of int, int, int"),
        (["spec_of_a_test:half"], "expected both a loss and an optimizer, or for inference neither"),
        (["spec_of_a_test:number"], r"expected a function that returns \(model, .*got a int"),
        (["spec_of_a_test:branching"], "control flow depends on data"),
        (["spec_of_a_test:make", "--memory", "lots"], "memory: expected bytes as a whole number, a text such as"),
        (["spec_of_a_test:make", "--memory", "1%"], "memory: expected at least [0-9]+ bytes"),
        (["spec_of_a_test:make", "--latency", "0.5"], "latency: expected 1 or more"),
        (["spec_of_a_test:make", "--latency", "1.5", "--memory", "1GiB"], "expected one limit or none, got both"),
        (
            ["spec_of_a_test:make", "--state", "swap", "--no-swap"],
            'state: expected "device" where nothing is swapped .*, got "swap"',
        ),
        (["spec_of_a_test:make", "--state", "card"], "state: expected one of 'device', 'swap', 'host', got 'card'"),
        (
            ["spec_of_a_test:make", "--kernels", "compiled"],
            "--kernels: compiled ones round otherwise than eager, .* say exact=False too",
        ),
        (["spec_of_a_test:make", "--kernels", "xla", "--no-exact"], "--kernels: expected one of 'auto', 'eager', 'compiled', got 'xla'"),
        (
            ["spec_of_a_test:make", "--kernels", "compiled", "--no-exact", "--simulate", "--device", "h100"],
            "--kernels: .* only planned",
        ),
        (
            ["spec_of_a_test:make", "--kernels", "compiled", "--no-exact", "--dynamic", "auto"],
            "--kernels: a region is compiled for one shape",
        ),
        (["spec_of_a_test:make", "--simulate"], "--device and --simulate: expected both"),
        (
            ["spec_of_a_test:make", "--simulate", "--device", "abacus"],
            "expected one of cpu, rtx3090, rtx4090, .*, got 'abacus'",
        ),
        (["spec_of_a_test:make", "--fake"], "--fake: spec_of_a_test:make has to take an argument `device` for that; it takes no arguments"),
        (["spec_of_a_test:sized", "--fake"], "--fake: .* has to take an argument `device` for that; it takes only batch_size"),
        (["spec_of_a_test:make", "--batch-size", "2"], "--batch-size: .* has to take an argument `batch_size`"),
        (
            ["spec_of_a_test:heedless", "--fake"],
            'device="meta" and has to make its model there; its parameter weight is elsewhere',
        ),
        (["spec_of_a_test:make", "--no-measure", "--save", "no/such/folder/plan.json"], "No such file or directory"),
        (["spec_of_a_test:make", "--no-measure", "--json", "no/such/folder/out.json"], "No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("lowtide: ")

    assert re.search(message, lines[0])


def test_regions_are_compiled_on_demand(monkeypatch):
    monkeypatch.setattr("lowtide.regions.compilation.is_faster", lambda *_: True)
    given = "spec_of_a_test:make", "--no-measure", "--no-exact", "--json", "-"
    plain, fused = (run(*given, *more) for more in ((), ("--kernels", "compiled")))
    assert (plain.exit_code, fused.exit_code) == (0, 0), fused.output
    assert json.loads(fused.stdout)["operators"] < json.loads(plain.stdout)["operators"]


def test_a_model_of_the_bench_on_the_meta_device(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    result = run("bench.models:transformer", "--fake", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["operators"] > 500


def test_a_batch_size_is_given_to_a_function_that_takes_it():
    bytes_of = {}
    for arguments in ([], ["--batch-size", "3"], ["--batch-size", "300"]):
        result = run("spec_of_a_test:sized", "--no-measure", "--json", "-", *arguments)
        assert result.exit_code == 0, result.output
        bytes_of[tuple(arguments[1:])] = json.loads(result.stdout)["peak_bytes"]
    assert bytes_of[()] == bytes_of["3",] < bytes_of["300",]


def test_help_says_what_it_takes():
    result = CliRunner().invoke(app, ["optimize", "--help"])
    assert result.exit_code == 0
    assert "module:function" in result.output


def test_a_range_of_shapes():
    result = run("spec_of_a_test:make", "--dynamic", '{"0": {"0": ["rows", 4, 64]}}', "--no-measure")
    assert result.exit_code == 0
    assert re.search(r"for rows from 4 to 64\n  rows = 64: peak [\d,]+ bytes\n  rows = 4: peak", result.stdout)


@pytest.mark.parametrize("text", ["rows", "[1]", '{"0": {"x": [1, 2]}}', '{"0": 3}'])
def test_a_range_that_is_no_json_is_refused(text):
    result = run("spec_of_a_test:make", "--dynamic", text)
    assert result.exit_code == 2
    assert "--dynamic: expected" in result.stderr
