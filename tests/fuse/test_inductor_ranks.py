"""Several processes train with regions that inductor compiles: all run what rank 0 has tried, and a failure of one is told on all."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.api.networks import compiled
from lowtide.ir.regions import is_by_inductor
from lowtide.runtime import inductor
from tests.ranks import on_ranks, raised
from tests.residual import Net, square


def work() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(1 + dist.get_rank())
    return model, torch.randn(32, 64)


def step_of(model: nn.Module, x: torch.Tensor) -> lowtide.Step:
    compiled.is_faster = lambda *_: True  # type: ignore[assignment]
    warnings.simplefilter("default")  # what inductor's own imports warn of
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return lowtide.optimize(DistributedDataParallel(model), (x,), loss=square, optimizer=optimizer, exact=False, fuse="inductor")


def trains() -> Any:
    """Regions, the first step's too; how far parameters are from those of DistributedDataParallel; the parameters."""
    model, x = work()
    twin = DistributedDataParallel(copy.deepcopy(model))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    step = step_of(model, x)
    for _ in range(3):
        optimizer.zero_grad()
        square(twin, x).backward()
        optimizer.step()
        step(x)
    mine, its = list(model.parameters()), list(twin.parameters())
    far = max(float((one - two).detach().abs().max()) for one, two in zip(mine, its, strict=True))
    plans = (*step.plan.first_steps, step.plan)
    return [sum(map(is_by_inductor, plan.graph.nodes)) for plan in plans], far, [parameter.detach() for parameter in mine]


def fails_on_one() -> str:
    """Rank 1 cannot load what rank 0 has compiled."""
    model, x = work()
    compiled._open.clear()
    compiled._run_of.cache_clear()
    if dist.get_rank() == 1:
        inductor.library = _no_library  # type: ignore[assignment]
    return raised(partial(step_of, model, x))


def _no_library(*_: object) -> None:
    raise inductor.NativeError("inductor cannot compile it (no compiler is here)")


def test_all_ranks_run_what_rank_0_has_tried() -> None:
    trained, failed = on_ranks(trains, fails_on_one)
    (counts, far, ones), (others, _, twos) = trained
    assert counts == others
    assert all(counts)
    assert far < 1e-5
    assert all(torch.equal(one, two) for one, two in zip(ones, twos, strict=True))
    assert all("no compiler is here" in each for each in failed)
