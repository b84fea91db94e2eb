"""MODeL's experiments (its sections 5.3 to 5.5): what order and addresses save together, against PyTorch with its fragmentation.

    python -m bench.model_paper [--networks NAME ...] [--batch-sizes 1 32] [--inputs paper list] [--plots] [--name NAME]

Nothing runs and nothing takes memory: a training step with plain SGD is captured under fake tensors and planned. PyTorch's side is the same
step in program order, replayed through its allocator for CUDA, parameters, buffers and batch first: the real one where there is a GPU, else
a simulation of it (`lowtide.cuda.segments`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from bench.cuda_caching import Allocator
from bench.model_paper_networks import INPUTS, NETWORKS, network
from bench.results import Cell, Results

COLUMNS = (
    "network", "model", "inputs", "batch_size", "operators", "resident_bytes", "pytorch_bytes", "pytorch_live_bytes", "planned_bytes",
    "saving", "saving_1_11", "saving_on_device", "pytorch_fragmentation", "reordered_fragmentation", "fragmentation",
    "program_order_fragmentation", "ordering_saving", "capture_s", "order_s", "place_s", "planning_s", "planning_cpu_s", "order", "settled",
)  # fmt: skip
AVERAGED = (
    "saving", "saving_1_11", "saving_on_device", "pytorch_fragmentation", "reordered_fragmentation", "fragmentation",
    "program_order_fragmentation", "ordering_saving", "capture_s", "order_s", "place_s", "planning_s", "planning_cpu_s",
)  # fmt: skip
MEAN = "mean"
PAPER = "MODeL"
# What the paper says in words; its figures have no numbers beside their bars.
_PAPER_MEANS: Mapping[int, Mapping[str, Cell]] = {
    1: {"saving": 0.314, "pytorch_fragmentation": 0.078, "fragmentation": 0.0, "ordering_saving": 0.239},
    32: {"saving": 0.328, "pytorch_fragmentation": 0.213, "fragmentation": 0.0, "ordering_saving": 0.117},
}
_PAPER_SECONDS = 7.4  # the mean over both batch sizes; 18.1 at worst
NOTES = (
    "tensors only, sizes rounded up to 512 bytes, on both sides: operators' temporaries (cuDNN's workspaces, say) are on neither, though "
    "an allocator on a GPU sees them, as it did in MODeL's measurements of PyTorch",
    "pytorch_bytes: what the simulated allocator has reserved in the steady state of repeated steps; pytorch_live_bytes: alive of that",
    "planned_bytes: arena and what is resident; saving: of these against pytorch_bytes (figure 5)",
    "saving_1_11: against PyTorch 1.11, which MODeL was measured on: its zero_grad keeps the gradients and fills them with zeros",
    "saving_on_device: with the arena as one segment, and what is resident in the segments that PyTorch's allocator takes for it",
    "fragmentation: (reserved - alive) / reserved at the peak (figure 7): of PyTorch, of PyTorch's allocator with lowtide's order, "
    "of lowtide's addresses, and of lowtide's addresses in program order",
    "ordering_saving: of the most bytes alive, against PyTorch's (figure 8); order: whether it is proven to need the least of all",
    "planning_s: order and addresses, by the wall clock (figure 6); the paper's is the mean over both batch sizes, 18.1 s at worst",
    "inputs: 'paper' as in MODeL's published program (clips of one frame, sentences of four tokens), 'list' as in bench.models",
)
SHOWN = (
    "network", "inputs", "batch_size", "pytorch_bytes", "planned_bytes", "saving", "saving_1_11", "pytorch_fragmentation",
    "reordered_fragmentation", "fragmentation", "ordering_saving", "planning_s", "order",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--inputs", nargs="+", default=list(INPUTS), choices=INPUTS)
    parser.add_argument("--plots", action="store_true", help="draw figures 5 to 8 as well")
    parser.add_argument("--name", default="model_paper", help="of the result file, and of the folder of the figures")
    options = parser.parse_args()
    rows: list[dict[str, Cell]] = []
    _warm_up()
    for inputs in options.inputs:
        for batch_size in options.batch_sizes:
            for name in options.networks:
                rows.append(row(name, batch_size, inputs))
                print(name, inputs, batch_size, {key: rows[-1][key] for key in AVERAGED[:4]}, flush=True)
    results = Results(options.name, "MODeL's experiments", COLUMNS, (*rows, *averages(rows)), NOTES)
    results.save()
    shown(results).print()
    print(seconds_in_words(rows))
    if options.plots:
        from bench.model_paper_plots import draw

        draw(rows, options.name)


def row(name: str, batch_size: int, inputs: str) -> dict[str, Cell]:
    """One network at one batch size."""
    from bench.model_paper_step import InPyTorch, captured_step, planned_step

    entry = network(name, inputs)
    start = time.perf_counter()
    captured = captured_step(entry, batch_size)
    capture_s = time.perf_counter() - start
    found, eager = planned_step(captured), InPyTorch(captured, _allocator())
    pytorch, pytorch_1_11, reordered = eager.replayed(), eager.replayed_1_11(), eager.replayed_in(found.buffers)
    seconds = found.seconds
    return {
        "network": name,
        "model": entry.name,
        "inputs": inputs,
        "batch_size": batch_size,
        "operators": len(captured.graph.nodes),
        "resident_bytes": found.plan.resident_bytes,
        "pytorch_bytes": pytorch.reserved_bytes,
        "pytorch_live_bytes": pytorch.live_bytes,
        "planned_bytes": found.whole_bytes,
        "saving": 1 - found.whole_bytes / pytorch.reserved_bytes,
        "saving_1_11": 1 - found.whole_bytes / pytorch_1_11.reserved_bytes,
        "saving_on_device": 1 - found.reserved_bytes(eager.resident) / pytorch.reserved_bytes,
        "pytorch_fragmentation": pytorch.fragmentation,
        "reordered_fragmentation": reordered.fragmentation,
        "fragmentation": found.fragmentation,
        "program_order_fragmentation": eager.placed_fragmentation(),
        "ordering_saving": 1 - found.plan.peak_bytes / found.plan.eager_peak_bytes,
        "capture_s": capture_s,
        **seconds,
        "planning_s": seconds["order_s"] + seconds["place_s"],
        "order": found.plan.status,
        "settled": "yes" if pytorch.settled and pytorch_1_11.settled and reordered.settled else "no",
    }


def shown(results: Results) -> Results:
    """The columns that fit on a page."""
    rows = tuple({column: line.get(column) for column in SHOWN} for line in results.rows)
    return Results(results.name, results.title, SHOWN, rows, results.notes)


def averages(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Cell]]:
    """The mean over the networks, by inputs and batch size, and the paper's beside it."""
    found: list[dict[str, Cell]] = []
    for inputs, batch_size in dict.fromkeys((line["inputs"], line["batch_size"]) for line in rows):
        group = [line for line in rows if (line["inputs"], line["batch_size"]) == (inputs, batch_size)]
        where = {"inputs": inputs, "batch_size": batch_size}
        found.append({"network": MEAN, **where, **{column: mean(line[column] for line in group) for column in AVERAGED}})
        if batch_size in _PAPER_MEANS:
            found.append({"network": PAPER, **where, **_PAPER_MEANS[batch_size], "planning_s": _PAPER_SECONDS})
    return found


def seconds_in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Median, worst and mean of the planning seconds, by the wall clock and of the processor."""
    found = []
    for what, column in (("wall clock", "planning_s"), ("processor", "planning_cpu_s")):
        seconds = [line[column] for line in rows]
        found.append(f"{what}: median {median(seconds):.2f} s, worst {max(seconds):.2f} s, mean {mean(seconds):.2f} s")
    return "planning (order and addresses) by " + "; ".join(found)


def _allocator() -> Callable[[], Allocator]:
    """What requests are replayed on: the allocator of the GPU where there is one, else the simulated one."""
    import torch

    from bench.cuda_device import DeviceAllocator
    from lowtide.cuda.segments import CachingAllocator

    return DeviceAllocator if torch.cuda.is_available() else CachingAllocator


def _warm_up() -> None:
    """Load the compiled kernels, so that planning seconds are planning seconds."""
    row("AlexNet", 1, "paper")


if __name__ == "__main__":
    main()
