"""The first use on a machine, and later ones: seconds of wall clock from `import lowtide` to a planned step, stage by stage.

    python -m bench.first_use [--memory 60%]

Each run is a process of its own with a folder of its own for all that lowtide keeps: the first finds it empty (kernels are compiled,
operators are measured), the second finds what the first left. The model is a small transformer on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lowtide

_STAGES = ("import", "capture", "measure", "compile", "order", "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="60%", help="the limit; none for a plan by order alone")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)  # one such run, in this process
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(None if options.memory == "none" else options.memory)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'':<8}" + "".join(f"{stage:>9}" for stage in _STAGES))
        for name in ("cold", "warm"):
            seconds = run(options.memory, Path(folder))
            print(f"{name:<8}" + "".join(f"{seconds.get(stage, 0.0):9.1f}" for stage in _STAGES))


def run(memory: str, folder: Path) -> dict[str, float]:
    """One process; seconds by stage."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "kernels"), "LOWTIDE_CACHE": str(folder / "lowtide")}
    command = [sys.executable, "-m", "bench.first_use", "--once", "--memory", memory]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def once(memory: str | None) -> dict[str, float]:
    """Plans one step in this process."""
    start = time.perf_counter()
    import torch
    from torch import nn

    optimize = lowtide.optimize
    imported = time.perf_counter() - start
    model = nn.Sequential(*(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    step = optimize(
        model,
        (torch.randn(8, 128, 128),),
        loss=lambda model, x: model(x).square().mean(),
        optimizer=optimizer,
        memory=memory,
        planning=lowtide.Planning(progress=False),
    )
    return {"import": imported, **step.seconds, "all": time.perf_counter() - start}


if __name__ == "__main__":
    main()
