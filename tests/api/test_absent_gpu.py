"""A program that is planned for a GPU that is not here: followed on it all the same, and nothing is left behind."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.cost.presets import preset
from lowtide.cuda import absent
from lowtide.ir.text.graph_text import to_text
from lowtide.runtime.libraries import once
from tests.gpu.programs import MODELS

pytestmark = pytest.mark.skipif(torch.cuda.is_available() or sys.platform != "linux", reason="a GPU is here, or no Linux")
PLACE = re.compile(r"cuda:0|\bcpu\b")


def _planning(device: str) -> lowtide.Planning:
    return lowtide.Planning(device=device, simulate="h100", progress=False)


def _planned(model: nn.Module, shape: tuple[int, ...], device: str, dtype: torch.dtype | None = None) -> Any:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            return model(x).float().square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    batch = torch.empty(shape, device="meta")
    return lowtide.optimize(model, (batch,), loss=loss, optimizer=optimizer, planning=_planning(device)).plan


def _on_meta(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    make, shape = MODELS[name]
    with torch.device("meta"):
        return make(), shape


@pytest.mark.parametrize(
    "name", ["hooks", "a function", "a checkpoint", "a checkpoint that calls the engine", "gradients that are kept", "shared"]
)
def test_a_backward_pass_has_the_order_hooks_and_sums_of_torchs_engine(name):
    model, shape = _on_meta(name)
    here, there = (to_text(_planned(model, shape, device).graph, sources=False) for device in ("cpu", "cuda"))
    assert "cuda:0" in there
    assert "cuda" not in here
    assert PLACE.sub("here", there) == PLACE.sub("here", here)


@pytest.mark.parametrize(
    ("name", "dtype", "operators"),
    [
        ("attention", torch.float16, ["aten._scaled_dot_product_flash_attention.default"]),
        ("attention", None, ["aten._scaled_dot_product_efficient_attention.default"]),
        ("attention with a mask", torch.bfloat16, ["aten._scaled_dot_product_efficient_attention.default", "aten.constant_pad_nd.default"]),
        ("an LSTM", None, ["aten._cudnn_rnn.default"]),
        ("an LSTM", torch.float16, ["aten.as_strided_scatter.default", "aten._cudnn_rnn.default"]),
    ],
)
def test_kernels_are_those_that_the_gpu_would_have(name, dtype, operators):
    model, shape = _on_meta(name)
    ops = {node.op for node in _planned(model, shape, "cuda", dtype).graph.nodes}
    assert ops.issuperset(operators)


def test_autocast_has_the_gpus_policy():
    """On a CPU a sum of squares stays in bfloat16, on a GPU `pow` is of float32."""

    class Powers(nn.Linear):
        def forward(self, x):
            return super().forward(x).pow(2)

    def computed(device):
        with torch.device("meta"):
            model = Powers(4, 4)
        nodes = _planned(model, (2, 4), device, torch.bfloat16).graph.nodes
        return next(node.results[0].dtype for node in nodes if node.op == "aten.pow.Tensor_Scalar" and node.results[0].shape == (2, 4))

    assert (computed("cpu"), computed("cuda")) == ("bfloat16", "float32")


def _state() -> list[Any]:
    names = ("is_available", "device_count", "get_device_properties", "get_device_capability")
    return [
        vars(FakeTensorMode)["avoid_device_init"], torch.autograd._engine_run_backward, torch._C._current_graph_task_id,
        torch._C._current_autograd_node, *(getattr(torch.cuda, name) for name in names), torch.cuda.is_available(),
    ]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_only_the_thread_that_captures_finds_the_gpu_and_only_meanwhile(fails):
    before, seen = _state(), []

    def ask() -> None:
        seen.append((torch.cuda.is_available(), torch.cuda.device_count()))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # which loops call to measure time

    with suppress(ZeroDivisionError), absent.standing_in(torch.device("cuda"), preset("h100")):
        ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        if fails:
            raise ZeroDivisionError
    assert seen == [(True, 1), (False, 0)]
    assert _state() == before
    real = nn.Linear(3, 3)
    real(torch.ones(2, 3)).sum().backward()  # torch's own engine again
    assert real.weight.grad is not None


def test_a_program_that_fails_leaves_all_as_it_was():
    model, before = nn.Linear(4, 4, device="meta"), _state()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with pytest.raises(lowtide.CaptureError, match="loss"):
        lowtide.explain(
            model, (torch.empty(2, 4, device="meta"),), loss=lambda model, x: 1 / 0, optimizer=optimizer, planning=_planning("cuda")
        )
    assert _state() == before


def test_what_is_assumed_is_said():
    model, batch = nn.Linear(4, 4, device="meta"), (torch.empty(2, 4, device="meta"),)
    why = lowtide.explain(model, batch, planning=_planning("cuda"))
    assert re.match(r"no GPU is here: .* capability 9.0", why.assumed)
    assert why.assumed in str(why)
    assert why.figures()["assumed"] == why.assumed
    assert lowtide.explain(model, batch, planning=_planning("cpu")).assumed == ""


def test_without_a_compiler_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(absent, "_backward", once(absent._backward.__wrapped__))  # as in a process that has loaded none
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(lowtide.CaptureError, match=r"device: expected .* or a C\+\+ compiler.*does not run"):
        lowtide.explain(model, (torch.empty(2, 4, device="meta"),), planning=_planning("cuda"))
    assert not torch.cuda.is_available()
