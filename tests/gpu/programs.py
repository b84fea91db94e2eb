"""Programs on a GPU, planned for an h100 and written as text: by test_without_a_gpu.py, with a device and without any.

python -m tests.null_cuda [--no-device] python -m tests.gpu.programs          # as JSON: by name the peak, eager's, and the program
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.ir.text.graph_text import to_text


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        return 2 * grad + 0 * x


class Attention(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype | None = None, **options: Any) -> None:
        super().__init__()
        self.dtype = dtype
        self.to_all, self.width, self.options = nn.Linear(width, 3 * width), width, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (each.unflatten(-1, (2, self.width // 2)).transpose(1, 2) for each in self.to_all(x).chunk(3, -1))
        parts = parts if self.dtype is None else (each.to(self.dtype) for each in parts)
        mask = self.options.get("attn_mask")
        options = {
            **self.options,
            "attn_mask": None if mask is None else torch.ones(x.shape[1], x.shape[1], device=x.device).tril().to(mask),
        }
        return F.scaled_dot_product_attention(*parts, **options)


class Reshaped(nn.Module):
    """A layer in the middle of a network, called as is told."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.call = nn.Linear(16, 16), layer, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, self.first(x))


def _hooked(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    y.register_hook(lambda grad: 3 * grad)
    y.grad_fn.register_hook(lambda made, _: tuple(each if each is None else each + 1 for each in made))
    return y


def _twice_derived(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    return grad


def _again(layer: nn.Module, x: torch.Tensor, reentrant: bool = False) -> torch.Tensor:
    return checkpoint(lambda y: layer(y).sin(), x, use_reentrant=reentrant)


def _kept(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    y.retain_grad()
    return y


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.ConvTranspose2d(16, 8, 2),
        nn.Dropout(0.1),
    )


ROWS, SEQUENCES, PICTURES = (8, 16), (4, 12, 16), (4, 3, 16, 16)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 4)), ROWS),
    "convolutions": (_convolutions, PICTURES),
    "an encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), SEQUENCES),
    "attention": (lambda: Attention(16), SEQUENCES),
    "attention of what is cast": (lambda: Attention(16, torch.float32), SEQUENCES),
    "causal attention": (lambda: Attention(16, is_causal=True), SEQUENCES),
    "attention with a mask": (lambda: Attention(16, attn_mask=torch.bool), SEQUENCES),
    "attention of odd heads": (lambda: Attention(12, dropout_p=0.1), (4, 12, 12)),
    "an LSTM": (lambda: Reshaped(nn.LSTM(16, 8, 2, batch_first=True), lambda layer, x: layer(x)[0]), SEQUENCES),
    "a GRU of both directions": (lambda: Reshaped(nn.GRU(16, 8, bidirectional=True), lambda layer, x: layer(x)[0]), SEQUENCES),
    "projections": (lambda: Reshaped(nn.LSTM(16, 8, proj_size=4), lambda layer, x: layer(x)[0]), SEQUENCES),
    "hooks": (lambda: Reshaped(nn.Linear(16, 16), _hooked), ROWS),
    "a gradient of a gradient": (lambda: Reshaped(nn.Linear(16, 16), _twice_derived), ROWS),
    "a function": (lambda: Reshaped(nn.Linear(16, 16), lambda layer, x: Doubled.apply(layer(x))), ROWS),
    "a checkpoint": (lambda: Reshaped(nn.Linear(16, 16), _again), ROWS),
    "a checkpoint that calls the engine": (lambda: Reshaped(nn.Linear(16, 16), partial(_again, reentrant=True)), ROWS),
    "gradients that are kept": (lambda: Reshaped(nn.Linear(16, 16), _kept), ROWS),
    "shared": (lambda: Reshaped(nn.Linear(16, 16), lambda layer, x: layer(layer(x) + x).tanh() * x), ROWS),
}  # fmt: skip


def planned(name: str, dtype: torch.dtype | None) -> Any:
    make, shape = MODELS[name]
    with torch.device("meta"):
        model, batch = make(), torch.empty(shape)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            return model(x).float().square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    planning = lowtide.Planning(device="cuda", simulate="h100", progress=False)
    return lowtide.optimize(model, (batch,), loss=loss, optimizer=optimizer, planning=planning).plan


def by_order(text: str) -> str:
    """A program whose values are called by the order in which they are made."""
    names = dict.fromkeys(name for line in text.splitlines() for name in re.split(r",\s*", line.partition(" = ")[0].strip()))
    numbers = {name: f"v{at}" for at, name in enumerate(names) if name.isidentifier()}
    return re.sub(r"(?<![.\w])[a-z_]\w*\b", lambda found: numbers.get(found[0], found[0]), text)


def main() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # the null device has none
    found: dict[str, Any] = {"device": torch.cuda.is_available()}
    for name in MODELS:
        for dtype in (None, torch.float16):
            try:
                plan = planned(name, dtype)
                answer = [plan.peak_bytes, plan.eager_peak_bytes, by_order(to_text(plan.graph, sources=False))]
            except lowtide.LowtideError as error:
                answer = [0, 0, str(error)]
            found[f"{name}, {dtype}"] = answer
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
