"""The simulated caching allocator against the real one: the same bytes reserved after every request."""

import os
import random

import pytest
import torch

from bench.cuda_caching import CachingAllocator, replay
from bench.cuda_device import DeviceAllocator
from lowtide.problems.placement import PlaceProblem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

MIB = 2**20


@pytest.mark.skipif("expandable" in os.environ.get("PYTORCH_ALLOC_CONF", ""), reason="another allocator's rules")
@pytest.mark.parametrize("seed", range(5))
def test_it_reserves_what_the_real_one_does(seed: int):
    draw = random.Random(seed)
    real, simulated, held = DeviceAllocator(), CachingAllocator(), []
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


def test_a_replay_is_the_same_on_both():
    step = PlaceProblem.of([4 * MIB, 4 * MIB, 12 * MIB], [0, 1, 2], [1, 3, 3])
    assert replay([5 * MIB], step, allocator=DeviceAllocator()).reserved_by_step == replay([5 * MIB], step).reserved_by_step
