"""Programs for several processes on this machine, over gloo: each is run on every rank, and what it gives comes back."""

from __future__ import annotations

import datetime
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT_S = 60


def on_ranks(*programs: Callable[[], Any], size: int = 2) -> list[list[Any]]:
    """What each of the programs gives, by rank; None of one that ended its process."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_run, (programs, size, folder), size, join=False, start_method="spawn")
        for rank, process in enumerate(context.processes):
            process.join(15 * LIMIT_S)  # only so that a test that hangs ends
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
        files = [[Path(folder, f"{number}.{rank}") for rank in range(size)] for number in range(len(programs))]
        return [[torch.load(file, weights_only=False) if file.exists() else None for file in each] for each in files]


def _run(rank: int, programs: tuple[Callable[[], Any], ...], size: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=LIMIT_S))
    for number, program in enumerate(programs):
        torch.save(program(), Path(folder, f"{number}.{rank}"))
    dist.destroy_process_group()


def raised(call: Callable[[], Any]) -> str:
    """The error that a call ends with, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
