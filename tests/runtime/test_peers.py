"""What processes tell one another: where one of them hangs, the others end within the group's time limit, and say why."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist

from lowtide.runtime.ranks import Peers
from tests.ranks import on_ranks, raised

LIMIT_S, HANGS_S = 3, 9


def hanging(rank: int) -> tuple[str, float]:
    """What a rank ends with, and after how many seconds, where rank 0 plans for all and one hangs meanwhile."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT_S))
    peers = Peers.of(group)
    peers.meet("a plan")
    if rank and group.rank() == rank:
        time.sleep(HANGS_S)
    begun = time.monotonic()
    return raised(lambda: peers.from_leader(lambda: "" if rank else str(time.sleep(HANGS_S)))), time.monotonic() - begun


def hanging_leader() -> tuple[str, float]:
    return hanging(0)


def hanging_follower() -> tuple[str, float]:
    return hanging(1)


@pytest.mark.parametrize(("program", "waiting"), [(hanging_leader, 1), (hanging_follower, 0)])
def test_a_rank_that_hangs_while_one_plans_ends_the_other_within_the_time_limit(program, waiting: int):
    (found,) = on_ranks(program)
    said, took_s = found[waiting]
    assert said.startswith("StepError: another rank does not answer: it has ended, hangs,")
    assert took_s < HANGS_S
