"""Eight simulated H200 that train together: the least memory of a rank, and time against limit, without shards, with ZeRO 1, 2 and 3.

    python -m bench.ranks_simulated [--models gpt-neo-1.3B llama-7B] [--layers 32]

Nothing runs and nothing is sent: the model is on the meta device, the group is torch's own fake one, and the step is captured and
planned as rank 0 of eight would. Times are by the roofline, those of collectives by the links as the maker gives them (450 GB/s each
way), one after the other with the computation that they would run beside: an upper bound.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import lowtide
from bench.models.language import GPT_NEO
from bench.results import Results, with_kept
from lowtide.cost import bodies
from lowtide.cost.device import Device
from lowtide.cost.presets import preset
from lowtide.ir.operators.nodes import is_collective
from lowtide.runtime.ranks import ALONE, Peers

RANKS, DEVICE, TOKENS = 8, "h200", 2048
OVER = (0.0, 0.05, 0.10, 0.30)  # shares of time beyond the order alone
COLUMNS = (
    "model", "layers", "shard", "operators", "held_gib", "eager_gib", "order_gib",
    *(f"within_{round(100 * over)}_gib" for over in OVER[1:]), "least_gib", "least_time_ratio", "step_ms", "links_ms", "planning_s",
)  # fmt: skip
NOTES = (
    "a rank's peak, weights and optimizer state included: held_gib between steps, eager_gib in PyTorch's order with lowtide's messages, "
    "order_gib by order alone, within_5_gib in 5 % more time, least_gib the least found, in least_time_ratio of the time; step_ms by "
    "order alone, of which links_ms on links. bfloat16, AdamW, one text of 2,048 tokens a rank, effort quick",
)
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--layers", type=int, help="of each model, in place of its own number")
    parser.add_argument("--shards", nargs="+", default=["none", "optimizer", "gradients", "parameters"])
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    _begin()
    for name in options.models:
        for shard in options.shards:
            found = row(name, shard, options.layers)
            print(found, flush=True)
            results = Results(
                "ranks_simulated", "Eight simulated H200", COLUMNS, with_kept("ranks_simulated", [found], ("model", "shard")), NOTES
            )
            if not options.no_save:
                results.save()


def _begin() -> None:
    """A group of eight of which the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())


def row(name: str, shard: str, layers: int | None) -> dict[str, Any]:
    """One model, one way to share what it holds."""
    make, own = MODELS[name]
    count = layers or own
    with torch.device("meta"):
        model = make(count).to(torch.bfloat16).train()
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    machine, begun = preset(DEVICE), time.perf_counter()
    nobody = patch.object(Peers, "of", lambda group: ALONE)  # there are no others to be told anything
    nccl = patch.object(bodies, "_of_gloo", lambda node: 0)  # it works in what it is given; captured is as for a CPU, where gloo does not
    with nobody, nccl:
        step = lowtide.optimize(
            model,
            {"input_ids": tokens},
            loss=loss_of,
            optimizer=torch.optim.AdamW(model.parameters(), foreach=False),
            latency=1.0,
            parallel=lowtide.Parallel(group=dist.group.WORLD, shard=None if shard == "none" else shard),
            planning=lowtide.Planning(simulate=machine, effort="quick", progress=False),
            run=lowtide.Run(swap=False),
        )
    plan, report, took_s = step.plan, step.plan.cost_report, time.perf_counter() - begun
    assert report is not None, "a limit was asked for"
    gib = {over: min(peak for peak, us in report.frontier if us <= (1 + over) * report.order_us) / 2**30 for over in OVER}
    least_bytes, least_us = report.frontier[0]
    return {
        "model": name, "layers": count, "shard": shard, "operators": len(plan.graph.nodes), "held_gib": plan.resident_bytes / 2**30,
        "eager_gib": plan.eager_peak_bytes / 2**30, "order_gib": gib[0.0],
        **{f"within_{round(100 * over)}_gib": gib[over] for over in OVER[1:]},
        "least_gib": least_bytes / 2**30, "least_time_ratio": least_us / report.order_us, "step_ms": report.order_us / 1e3,
        "links_ms": _links_ms(plan, machine), "planning_s": took_s,
    }  # fmt: skip


def _links_ms(plan: lowtide.Plan, machine: Device) -> float:
    return sum(machine.node_us(node) for node in plan.graph.nodes if is_collective(node)) / 1e3


def loss_of(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
    return loss


def _made(model: str, config: str, layers: str, count: int, **settings: Any) -> nn.Module:
    from bench import torchvision_shim

    torchvision_shim.install()
    import transformers

    if "attention_types" in settings:
        settings["attention_types"] = [[["global", "local"], count // 2]]
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings | {layers: count}))
    made.__dict__["loss_type"] = "ForCausalLM"  # what transformers chooses anyway, after a warning
    return made


# Llama's own configuration is that of 7B: 32 layers, width 4,096, vocabulary 32,000.
MODELS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "gpt-neo-1.3B": (partial(_made, "GPTNeoForCausalLM", "GPTNeoConfig", "num_layers", **GPT_NEO), 24),
    "llama-7B": (partial(_made, "LlamaForCausalLM", "LlamaConfig", "num_hidden_layers"), 32),
}

if __name__ == "__main__":
    main()
