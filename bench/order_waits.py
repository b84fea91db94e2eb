"""How long the order stage takes where it takes long: processor time, and the proven gap, on architectures of the coverage sweep.

    python -m bench.order_waits [--only NAME ...]

Whole training steps with momentum, operators' temporaries left out, kernels compiled; each is a process of its own. NAME is a part of a
name, as `transformers/mamba2`. The gap is that of the peak over the proven bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from typing import Any

import torch

import lowtide
from bench import torchvision_shim
from bench.coverage.subject import Subject, scalar_loss
from bench.coverage.subjects import SUBJECTS
from bench.in_values import in_values
from bench.results import Results


def _raft() -> tuple[Any, tuple[Any, ...]]:
    torchvision_shim.install()
    from torchvision.models.optical_flow import raft_small

    return raft_small(), (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128))


ALL = (*SUBJECTS, Subject("torchvision/raft_small", _raft))
SLOW = ("raft_small", "transformers/mamba2", "transformers/pegasus", "GRU", "transformers/convnext/", "timm/convnext")
COLUMNS = ("subject", "operators", "order_cpu_s", "status", "gap_percent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SLOW), metavar="NAME")
    parser.add_argument("--row", help=argparse.SUPPRESS)  # one, in this process
    options = parser.parse_args()
    if options.row:
        print(json.dumps(row(options.row)))
        return
    rows = []
    for name in [each.name for each in ALL if any(part in each.name for part in options.only)]:
        done = subprocess.run([sys.executable, "-m", "bench.order_waits", "--row", name], stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    results = Results("order_waits", "Orders that take long", COLUMNS, tuple(rows), ("order_cpu_s: processor time of the order stage",))
    if options.only == list(SLOW):
        results.save()
    results.print()


def row(name: str) -> dict[str, Any]:
    """One architecture, in this process."""
    warnings.simplefilter("ignore")
    subject = next(each for each in ALL if each.name == name)
    torch.manual_seed(0)
    model, batch = subject.build()
    spent: dict[str, float] = {}

    def listen(stage: Any) -> None:
        sign = 1 if stage.seconds is not None else -1
        spent[stage.name] = spent.get(stage.name, 0.0) + sign * time.process_time()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    settings: dict[str, Any] = {"workspaces": False, "progress": False, "callback": listen}
    plan = lowtide.optimize(model, batch, loss=scalar_loss, optimizer=optimizer, **in_values(**settings)).plan
    gap = plan.peak_bytes / plan.lower_bound_bytes - 1
    return {
        "subject": name,
        "operators": len(plan.graph.nodes),
        "order_cpu_s": spent["order"],
        "status": plan.status,
        "gap_percent": 100 * gap,
    }


if __name__ == "__main__":
    main()
