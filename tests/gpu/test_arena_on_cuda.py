"""There are no planned addresses on a GPU: that is said, and the step runs."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import arena

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def test_it_says_so_and_computes_the_same():
    model, x = nn.Linear(6, 3).cuda(), torch.randn(4, 6, device="cuda")
    arena._warn.cache_clear()
    with pytest.warns(UserWarning, match="arenas are for steps on the CPU, this one is on cuda"):
        step = lowtide.optimize(model, x, arena=True)
    arena._warn.cache_clear()
    assert torch.equal(step(x), model(x))
    assert str(step.arena).startswith("no arena: ")
