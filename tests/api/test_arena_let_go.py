"""The arena of a step is let go: with its step, when it is asked for, before a batch that runs eagerly."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import lowtide
from tests.api.networks import chosen_rows, convnet, cross_entropy, pictures, workload
from tests.arenas import mapped, skip_without_arenas


@pytest.fixture(autouse=True)
def _compiled():
    skip_without_arenas()


def test_the_arena_goes_with_its_step():
    torch.manual_seed(0)
    model, batch, loss, optimizer = workload(convnet, pictures, cross_entropy)()
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, run=lowtide.Run(arena="always"))
    for _ in range(3):
        step(*batch)
    assert step._memory.step_arena is not None
    assert step._memory.arena is not None
    assert step._memory.arena._region is not None
    base = step._memory.arena._region.base
    assert mapped(base)
    del step
    gc.collect()
    assert not mapped(base)


def test_an_arena_that_was_let_go_changes_no_number():
    """Before there is any, twice, with losses kept, after a batch that failed and while its error is held."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 3))
    twin = copy.deepcopy(model)
    x, right, wrong = torch.randn(4, 6), torch.tensor([0, 2]), torch.tensor([0, 7])
    step = lowtide.optimize(
        model, (x, right), loss=chosen_rows, optimizer=torch.optim.AdamW(model.parameters()), run=lowtide.Run(arena="always")
    )
    plain = lowtide.optimize(twin, (x, right), loss=chosen_rows, optimizer=torch.optim.AdamW(twin.parameters()))
    found, expected, held = [], [], []
    for turn in range(8):
        if turn == 5:
            with pytest.raises(IndexError) as told:
                step(x, wrong)
            held.append(told)
            assert step.arena.live_tensors > 0
        if turn in (0, 3, 5):
            step.empty_arena(), step.empty_arena()
            assert (step.arena.taken_bytes, step.arena.live_tensors) == (0, 0)
        found.append(step(x, right)), expected.append(plain(x, right))
    assert torch.equal(torch.stack(found), torch.stack(expected))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (step.arena.recorded_steps, step.arena.served_steps) == (2, 6)
    assert step.arena.taken_bytes > 0


def test_an_arena_is_let_go_before_an_eager_step():
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 2))
    step = lowtide.optimize(model, x, run=lowtide.Run(arena="always"), shapes=lowtide.Shapes(on_new_shape="eager"))
    step(x), step(x)
    assert step.arena.taken_bytes > 0
    assert torch.equal(step(x[:5]), model(x[:5]))
    assert step.arena.taken_bytes == 0
    assert torch.equal(step(x), model(x))
