"""The simulated caching allocator against the real one: the same bytes allocated and reserved after every request, and of whole steps."""

import gc
import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from bench.cuda_caching import replay
from bench.cuda_device import DeviceAllocator
from lowtide.cuda.segments import CachingAllocator, ExpandableAllocator
from lowtide.placement import Portfolio
from lowtide.problems.placement import PlaceProblem
from lowtide.runtime.arena.arena import have_workspaces

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

MIB = 2**20


@pytest.fixture(params=[CachingAllocator, ExpandableAllocator])
def simulated(request: pytest.FixtureRequest) -> Iterator[CachingAllocator]:
    """Each kind, while segments of the real one are of that kind, too."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{request.param is ExpandableAllocator}")
    yield request.param()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("seed", range(5))
def test_it_reserves_what_the_real_one_does(seed: int, simulated: CachingAllocator):
    draw, real, held = random.Random(seed), DeviceAllocator(), []
    for _ in range(500):
        if held and draw.random() < 0.45:
            there, here = held.pop(draw.randrange(len(held)))
            real.free(there)
            simulated.free(here)
        else:
            nbytes = draw.randint(1, draw.choice([4096, MIB, 12 * MIB, 40 * MIB]))
            held.append((real.malloc(nbytes), simulated.malloc(nbytes)))
        assert (real.reserved_bytes, real.allocated_bytes) == (simulated.reserved_bytes, simulated.allocated_bytes)
    for there, _ in held:
        real.free(there)


def test_a_replay_is_the_same_on_both(simulated: CachingAllocator):
    step = PlaceProblem.of([4 * MIB, 4 * MIB, 12 * MIB], [0, 1, 2], [1, 3, 3])
    real, simulation = (replay([5 * MIB], step, allocator=each) for each in (DeviceAllocator(), simulated))
    assert real.reserved_by_step == simulation.reserved_by_step


@pytest.mark.parametrize(("arena", "graph"), [("never", "never"), ("always", "never"), ("never", "always"), ("always", "always")])
def test_what_a_process_allocates_and_reserves_is_promised(arena: str, graph: str):
    """Of a process that has nothing else on its stream but the workspaces that cuBLAS keeps; with a graph at most: it copies no batch."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        have_workspaces()
        gc.collect()
        torch.cuda.empty_cache()
        before, others = torch.cuda.memory_allocated(), _reserved(stream)
        layers = [each for _ in range(4) for each in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))]
        model, batch = nn.Sequential(*layers).cuda(), torch.randn(4096, 512, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, capturable=graph == "always")
        run, planning = lowtide.Run(arena=arena, graph=graph), lowtide.Planning(placer=Portfolio(), progress=False)
        step = lowtide.optimize(model, batch, loss=_loss, optimizer=optimizer, run=run, planning=planning)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step(batch)
        allocated, reserved = torch.cuda.max_memory_allocated() - before, _reserved(stream) - others
        if graph == "never":
            assert (step.plan.allocated_bytes, step.plan.reserved_bytes) == (allocated, reserved)
            assert f"and reserves {reserved / MIB:.2f} MiB" in str(step.plan)
            return
        for _ in range(3):
            step(batch)
        reserved = max(reserved, _reserved(stream) - others)
        assert step.graph.replays > 0
        assert reserved <= step.plan.reserved_bytes <= reserved + batch.nbytes + 20 * MIB  # room for a copy


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x)


def _reserved(stream: torch.cuda.Stream) -> int:
    """On a stream, and by graphs; what another stream has in common pools are workspaces."""
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if each["stream"] == stream.cuda_stream or each["segment_pool_id"] != (0, 0))
