"""`lowtide needs`: models by name, what it prints, writes and refuses."""

from __future__ import annotations

import json
import types

import pytest
from typer.testing import CliRunner

from bench import torchvision_shim
from lowtide.cli import app
from lowtide.integrations import architectures
from lowtide.report.page import needs_page
from tests.specs import spec_module

SPEC = """
import torch
from torch import nn

def make(batch_size=4, device=None):
    model = nn.Sequential(nn.Linear(64, 256, device=device), nn.ReLU(), nn.Linear(256, 8, device=device))
    loss = lambda model, x: model(x).square().mean()
    return model, (torch.empty(batch_size, 64, device=device),), loss, torch.optim.AdamW(model.parameters())

def here():
    return make()
"""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _spec(tmp_path, monkeypatch):
    yield from spec_module("spec_of_needs", SPEC, tmp_path, monkeypatch)


def run(*arguments: str):
    return CliRunner().invoke(app, ["needs", *arguments])


def _config(folder, **other):
    (folder / "config.json").write_text(json.dumps(LLAMA | other), encoding="utf-8")
    return str(folder)


def test_a_function_of_the_users_own(tmp_path):
    page = tmp_path / "needs.html"
    result = run("spec_of_needs:make", "--batch-size", "16", "--cards", "h100,rtx4090", "--html", str(page))
    assert result.exit_code == 0, result.output
    for words in ("rtx4090", "24.00 GiB", "h100", "fits", "parameters; peak"):
        assert words in result.output
    assert "rtx4090" in page.read_text(encoding="utf-8")


def test_what_a_function_decides_itself_is_not_an_option():
    result = run("spec_of_needs:make", "--optimizer", "sgd")
    assert result.exit_code == 2
    assert "expected no --length, --optimizer or --dtype" in " ".join(result.output.split())


def test_a_function_has_to_take_a_device():
    result = run("spec_of_needs:here")
    assert result.exit_code != 0
    assert "needs, which runs nothing: spec_of_needs:here has to take an argument `device`" in " ".join(result.output.split())


def test_a_transformers_that_lacks_what_it_imports(tmp_path, monkeypatch):
    def lacking(name):
        raise ModuleNotFoundError("Could not import module 'GPT2Config'.") from RuntimeError("operator torchvision::nms does not exist")

    transformers = types.SimpleNamespace(AutoConfig=types.SimpleNamespace(from_pretrained=lacking))
    monkeypatch.setattr(architectures, "_library", {"transformers": transformers}.__getitem__)
    result = run(_config(tmp_path))
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert said.endswith("transformers cannot import its model: operator torchvision::nms does not exist")


def test_a_configuration_of_transformers(tmp_path, monkeypatch):
    torchvision_shim.install()
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    monkeypatch.setattr(architectures, "_library", {"transformers": transformers}.__getitem__)  # timm, which may be broken, is not asked
    result = run(_config(tmp_path), "--length", "32", "--cards", "h100", "--json", "-")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["program"].startswith(f"{tmp_path.name}: transformers' LlamaForCausalLM, 1 x 32 tokens")
    assert "float32 weights under bfloat16 autocast" in figures["program"]
    assert [card["verdict"] for card in figures["cards"]] == ["fits"]
    half = json.loads(run(_config(tmp_path), "--length", "32", "--cards", "h100", "--dtype", "bfloat16", "--json", "-").stdout)
    assert half["by_kind"]["parameters"] < 0.6 * figures["by_kind"]["parameters"]
    inference = json.loads(run(_config(tmp_path), "--length", "32", "--cards", "h100", "--optimizer", "none", "--json", "-").stdout)
    assert "optimizer state" not in inference["by_kind"]


@pytest.mark.parametrize(
    ("arguments", "other", "words"),
    [
        (["--length", "100"], {}, "--length: expected at most 64"),
        (["--optimizer", "lion"], {}, "--optimizer: expected one of adamw"),
        (["--dtype", "int8"], {}, "--dtype: expected one of amp"),
        (["--length", "8", "--cards", "a1000"], {}, "cards: expected one of"),
        (["--length", "8"], {"architectures": ["LlamaForQuestionAnswering"]}, "LlamaForQuestionAnswering: expected a model for"),
        ([], {"model_type": "nothing"}, "expected a folder or file with a transformers configuration"),
    ],
)
def test_what_is_refused(tmp_path, arguments, other, words):
    torchvision_shim.install()
    result = run(_config(tmp_path, **other), *arguments)
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())


def test_a_folder_without_a_configuration(tmp_path):
    torchvision_shim.install()
    result = run(str(tmp_path))
    assert result.exit_code != 0
    assert "expected a folder or file with a transformers configuration" in " ".join(result.output.split())


def test_the_page_escapes_what_it_is_given():
    page = needs_page("<script>", "a & b", "<i>", [("<b>", "1")], "said")
    assert "<script>" not in page
    assert "&lt;b&gt;" in page
