"""What DistributedDataParallel and ZeRO send in a step, alone: collectives over gloo, by what a rank has to move.

    python -m bench.ranks_collectives [--ranks 2] [--mib 0.25 4 12] [--turns 25]

DDP sums all gradients everywhere; ZeRO 3 gathers parameters twice and sums each part at its owner: by `reduce_scatter`, by a `reduce` to
each owner, or by an exchange of parts that their owners add, which is lowtide's way. Without anything computed beside, their ratio is what
no plan can hide where processors move the bytes. Ways take turns; medians of one rank, from one meeting to the next, printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import multiprocessing

import lowtide.capture.ranks.shards  # noqa: F401  (defines what is measured)
from lowtide.kernels.parts import RANK_OF

_WARM = 3  # turns before one is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 4.0, 12.0], help="of parameters, and of gradients")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--port", type=int, default=29555)
    options = parser.parse_args()
    multiprocessing.spawn(_measure, (options.ranks, options.mib, options.turns, options.port), nprocs=options.ranks)


def _measure(rank: int, ranks: int, sizes_mib: Sequence[float], turns: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    RANK_OF[dist.group.WORLD.group_name] = rank
    for mib in sizes_mib:
        taken_ms = _medians_ms(_ways(ranks, int(mib * 2**20 / 4) // ranks), turns)
        if rank == 0:
            print(f"{mib} MiB: " + ", ".join(f"{name} {took_ms:.2f} ms" for name, took_ms in taken_ms.items()))
            for name in ("reduce_scatter", "reduce to each", "exchange and sum"):
                ratio = (2 * taken_ms["gather"] + taken_ms[name]) / taken_ms["all_reduce"]
                print(f"  ZeRO 3 by {name}: {ratio:.2f} of all_reduce")
    dist.destroy_process_group()


def _ways(ranks: int, count: int) -> dict[str, Callable[[], object]]:
    """By name: what a step may do with tensors of which each rank has so many elements."""
    own, group, functional = torch.ops.lowtide, dist.group.WORLD.group_name, torch.ops._c10d_functional
    whole, part = torch.ones(ranks * count), torch.ones(count)

    def exchanged() -> torch.Tensor:
        received = own.wait_for(own.exchange(whole, ranks, group), whole)
        total: torch.Tensor = own.sum_parts(received, ranks)
        return total

    return {
        "all_reduce": lambda: functional.wait_tensor(functional.all_reduce_(whole, "sum", group)),
        "reduce_scatter": lambda: functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", ranks, group)),
        "reduce to each": lambda: [dist.reduce(each, owner) for owner, each in enumerate(whole.chunk(ranks))],
        "exchange and sum": exchanged,
        "gather": lambda: own.load_parts(part, ranks, group),
    }


def _medians_ms(ways: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + _WARM):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            ways[name]()
            dist.barrier()
            taken[name].append(time.perf_counter() - begun)
    return {name: 1000 * statistics.median(took[_WARM:]) for name, took in taken.items()}


if __name__ == "__main__":
    main()
