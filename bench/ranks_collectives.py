"""What DistributedDataParallel and ZeRO send in a step, alone: collectives over gloo, two ranks, by what a rank has to move.

    python -m bench.ranks_collectives [--mib 12] [--turns 15]

DDP sums all gradients everywhere; ZeRO 3 gathers parameters twice and sums each part at its owner. Without anything computed beside,
their ratio is what no plan can hide where processors move the bytes. Medians of one rank, printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import multiprocessing

_RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=12, help="of parameters, and of gradients")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--port", type=int, default=29555)
    options = parser.parse_args()
    multiprocessing.spawn(_measure, (options.mib, options.turns, options.port), nprocs=_RANKS)


def _measure(rank: int, mib: int, turns: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=_RANKS)
    whole = torch.ones(mib * 2**20 // 4)
    parts, part = whole.chunk(_RANKS), torch.empty(whole.numel() // _RANKS)
    taken_ms = {
        "all_reduce": _median_ms(lambda: dist.all_reduce(whole), turns),
        "reduce_scatter": _median_ms(lambda: dist.reduce_scatter_tensor(part, whole), turns),
        "reduce to each": _median_ms(lambda: [dist.reduce(each, owner) for owner, each in enumerate(parts)], turns),
        "broadcast by each": _median_ms(lambda: [dist.broadcast(each, owner) for owner, each in enumerate(parts)], turns),
    }
    if rank == 0:
        for name, took_ms in taken_ms.items():
            print(f"{name}: {took_ms:.1f} ms")
        for name in ("reduce_scatter", "reduce to each"):
            ratio = (2 * taken_ms["broadcast by each"] + taken_ms[name]) / taken_ms["all_reduce"]
            print(f"ZeRO 3 by {name}: {ratio:.2f} of all_reduce")
    dist.destroy_process_group()


def _median_ms(run: Callable[[], object], turns: int) -> float:
    taken = []
    for _ in range(turns):
        dist.barrier()
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return 1000 * statistics.median(taken)


if __name__ == "__main__":
    main()
