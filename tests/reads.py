"""What a loss reads beside its model, changed between two steps: `are_alike` compares a step's losses with eager's."""

import contextvars
import math
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.api.networks import sgd

HELPERS = types.ModuleType("helpers_of_a_loss")
exec("def helper(number):\n    return number * 2.0\n", HELPERS.__dict__)

Case = tuple[Callable[[], float], Callable[[], Any]]  # what is read in each step, and what changes it


def _losses(model: nn.Module, read: Callable[[], float], change: Callable[[], Any], captured: bool) -> list[torch.Tensor]:
    """Of a step before the change, and two after it."""
    optimizer, x = sgd(model), torch.linspace(-1, 1, 12).reshape(4, 3)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * read()

    def eager(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        result = loss(model, x)
        result.backward()
        optimizer.step()
        return result.detach()

    planning, run = lowtide.Planning(progress=False, workspaces=False), lowtide.Run(check="never", arena="never")
    step = lowtide.optimize(model, (x,), loss=loss, optimizer=optimizer, planning=planning, run=run) if captured else eager
    losses = [step(x).clone()]
    change()
    return [*losses, step(x).clone(), step(x).clone()]


def are_alike(make: Callable[[], tuple[nn.Module, Callable[[], float], Callable[[], Any]]], announced: bool) -> None:
    """The losses are eager's in every step, or it was said which place is not compared."""
    results = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for captured in (False, True):
            with pytest.MonkeyPatch.context() as patch:  # what a case replaces is put back
                patch.setitem(sys.modules, HELPERS.__name__, HELPERS)
                for owner, name in ((F, "relu"), (torch.Tensor, "relu"), (math, "sqrt"), (HELPERS, "helper")):
                    patch.setattr(owner, name, getattr(owner, name))
                torch.manual_seed(0)
                results.append(contextvars.copy_context().run(_losses, *make(), captured))
    told = [str(each.message) for each in said if "not compared in each call" in str(each.message)]
    assert bool(told) == announced
    assert announced or all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], results[0][1])
