"""Messages between ranks: whatever is under way at a time, each comes into its place, as a collective of PyTorch's would bring it."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

import lowtide.capture.ranks.shards  # noqa: F401  (defines the operators)
from tests.ranks import on_ranks

OWN = torch.ops.lowtide


def begun(draw: random.Random, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is under way, what it reads, and what it is to become: a gather, or an exchange."""
    size, group, rank = dist.get_world_size(), dist.group.WORLD.group_name, dist.get_rank()
    count, exchanges = draw.choice([1, 3, 1000, 70_000]), draw.random() < 0.3
    dtype = torch.float32 if exchanges else draw.choice([torch.float32, torch.float16, torch.bool, torch.complex64])
    of_rank = [torch.randint(0, 100, (size, count), generator=torch.Generator().manual_seed(seed + each)).to(dtype) for each in range(size)]
    sent = of_rank[rank].view(-1) if exchanges else of_rank[rank][0]
    whole = (OWN.exchange if exchanges else OWN.all_gather)(sent, size, group)
    return whole, sent, torch.cat([each[rank if exchanges else 0] for each in of_rank])


def all_come() -> bool:
    draw, right = random.Random(0), []
    for turn in range(20):
        under_way = [begun(draw, 1000 * turn + 10 * each) for each in range(draw.randrange(1, 12))]
        dist.all_reduce(torch.ones(5))
        draw.shuffle(under_way)
        right += [torch.equal(OWN.wait_for(whole, sent), expected) for whole, sent, expected in under_way]
    return all(right)


def test_many_at_a_time_come_into_their_places():
    assert on_ranks(all_come, size=3) == [[True] * 3]
