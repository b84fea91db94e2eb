"""Optimizers on a GPU are captured as they are written: small tensors in one call, each large one as soon as its gradient exists."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import lowtide

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

FLAGS = [{}, {"fused": True}, {"foreach": True}, {"foreach": False}]


def _workload(**flags):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers).cuda()
    return model, torch.randn(8, 256, device="cuda"), torch.optim.AdamW(model.parameters(), **flags)


def _loss(model, x):
    return model(x).square().mean()


def _clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("flags", "op"), [({"fused": True}, "_fused_adamw_"), ({}, "_foreach_addcdiv_"), ({"foreach": True}, "_foreach_lerp_")]
)
def test_small_tensors_are_updated_in_one_call(flags, op):
    model, x, optimizer = _workload(**flags)
    step = lowtide.optimize(model, (x,), loss=_loss, optimizer=optimizer)
    assert len(re.findall(rf"{op}\.\w+\(\[\w+\], ", step.source)) == 4  # the weights
    assert len(re.findall(rf"{op}\.\w+\(\[\w+(, \w+){{11}}\], ", step.source)) == 1  # biases and norms


def test_clipping_takes_no_memory_of_its_own():
    model, x, optimizer = _workload()
    clipped = lowtide.optimize(model, (x,), loss=_loss, optimizer=optimizer, training=lowtide.Training(after_backward=_clip))
    assert len(re.findall(r"_foreach_mul_\.Tensor\(\[\w+\], clamp\)", clipped.source)) == 4, "in place, each by itself"


@pytest.mark.computes
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_it_trains_as_it_is_written(flags):
    eager, x, plain = _workload(**flags)
    model, _, optimizer = _workload(**flags)
    step = lowtide.optimize(model, (x,), loss=_loss, optimizer=optimizer, training=lowtide.Training(after_backward=_clip))
    for _ in range(5):
        plain.zero_grad()
        _loss(eager, x).backward()
        _clip(eager)
        plain.step()
        step(x)
    for want, got in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(want, got)
