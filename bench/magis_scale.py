"""How the time to plan grows with a network: GPT-2's blocks, 3 to 48 of them, planned by the sweep of `bench.magis`.

python -m bench.magis_scale [--layers 3 6 12 24 48]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from typing import Any

from torch import nn

from bench.magis_plan import plan
from bench.models.explicit import causal_loss
from bench.models.language import language_model
from bench.models.workload import Batch, Entry, labels
from bench.results import Results

LAYERS = (3, 6, 12, 24, 48)
COLUMNS = ("layers", "operators", "states", "search_s", "states_per_s", "capture_s", "planning_s", "planning_cpu_s", "share_at_plus_10")
NOTES = (
    "transformers' GPT-2 of so many layers, 8 x 512 tokens, no dropout, attention written out, on rtx3090; recomputation alone",
    "states_per_s: by processor time; planning_s: from the model to the checked plan by the wall's clock on a shared machine",
)
_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=list(LAYERS))
    parser.add_argument("--row", type=int, metavar="LAYERS", help="one row: for the process of its own")
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(row(options.row)))
        return
    rows = []
    for layers in options.layers:
        command = [sys.executable, "-m", "bench.magis_scale", "--row", str(layers)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    results = Results("magis_scale", "Planning a GPT-2 of more and more layers", COLUMNS, tuple(rows), NOTES)
    results.save()
    results.print()


def row(layers: int) -> dict[str, Any]:
    """One network, planned in this process."""
    found = plan(network(layers), 8)
    effort = found.effort
    return {
        "layers": layers,
        "operators": effort.operators,
        "states": effort.states,
        "search_s": effort.seconds,
        "states_per_s": effort.states / effort.cpu_s,
        "capture_s": found.capture_s,
        "planning_s": found.planning_s,
        "planning_cpu_s": found.planning_cpu_s,
        "share_at_plus_10": found.share(0.1),
    }


def network(layers: int) -> Entry:
    """GPT-2 with so many layers."""
    return Entry(f"gpt2 of {layers} layers", partial(_gpt2, layers), _texts, causal_loss, "width 768, 12 heads, 512 tokens")


def _gpt2(layers: int) -> nn.Module:
    settings = dict.fromkeys(_DROPOUT, 0.0)
    return language_model("GPT2LMHeadModel", "GPT2Config", n_layer=layers, attn_implementation="eager", **settings)


def _texts(batch_size: int) -> Batch:
    return (labels(50_257, batch_size, 512),)


if __name__ == "__main__":
    main()
