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
from bench.in_values import in_values
from lowtide.ir.bodies import is_by_inductor
from lowtide.regions import compilation as compiled
from lowtide.regions import inductor
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
    return lowtide.optimize(
        DistributedDataParallel(model), (x,), loss=square, optimizer=optimizer, exact=False, run=lowtide.Run(kernels="compiled")
    )


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


def trains_in_shards(shard: str, kernels: str, **limit: Any) -> Any:
    """Regions of the plan; how far losses and parameters are from those of DistributedDataParallel, clipped alike; the parameters."""
    model, x = work()
    twin = DistributedDataParallel(copy.deepcopy(model))
    mine, its = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin))
    compiled.is_faster = lambda *_: True  # type: ignore[assignment]
    warnings.simplefilter("default")
    said = {"process_group": dist.group.WORLD, "shard": shard, "exact": False, "kernels": kernels, **limit}
    step = lowtide.optimize(model, (x,), loss=square, optimizer=mine, **in_values(after_backward=clipped, **said))
    far = 0.0
    for _ in range(4):
        its.zero_grad()
        loss = square(twin, x)
        loss.backward()
        clipped(twin)
        its.step()
        value, _ = step(x)
        far = max(far, float((value - loss.detach()).abs()))
    with step.gathered():
        parameters = [parameter.detach().clone() for parameter in model.parameters()]
    far = max(far, *(float((one - two).detach().abs().max()) for one, two in zip(parameters, twin.parameters(), strict=True)))
    return sum(map(is_by_inductor, step.plan.graph.nodes)), far, parameters


def clipped(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def test_what_is_in_shards_is_trained_by_regions_too() -> None:
    """Each way to shard, with and without inductor, and within a limit."""
    shards = ("optimizer", "gradients", "parameters")
    ways = [partial(trains_in_shards, shard, kernels) for shard in shards for kernels in ("compiled", "auto")]
    limited = partial(trains_in_shards, "parameters", "compiled", memory="200%")
    for way, ((count, far, ones), (others, too_far, twos)) in zip([*ways, limited], on_ranks(*ways, limited), strict=True):
        assert count == others
        assert way is limited or bool(count) == (way.args[1] == "compiled")  # within a limit, whatever was faster
        assert max(far, too_far) < 1e-5
        assert all(torch.equal(one, two) for one, two in zip(ones, twos, strict=True))
