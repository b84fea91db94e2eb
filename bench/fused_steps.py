"""Steps whose norms, activations and updates inductor has compiled (`kernels="compiled"`), beside the same steps without, taking turns.

    python -m bench.fused_steps [--models NAME ...] [--threads 1] [--turns 12]

One process a model, AdamW. Both steps train a copy of the model each and take turns of one step; processor time, and the ratio is the
median over turns. Deviation: how far all parameters are after two steps from where steps in float64 bring them, over how far that is.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.in_values import in_values
from bench.results import Results, with_kept

CASES: dict[str, int] = {"mobilenet_v2": 16, "small bert": 8, "small gpt2": 8}  # batch sizes
COLUMNS = (
    "model", "batch_size", "threads", "compiling_s", "regions", "regions_nodes", "plain_cpu_ms", "fused_cpu_ms", "cpu_ratio",
    "eager_peak_bytes", "plain_promised_bytes", "plain_peak_bytes", "fused_promised_bytes", "fused_peak_bytes",
    "eager_deviation", "plain_deviation", "fused_deviation",
)  # fmt: skip
_WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--one", metavar="MODEL", help="measure one model: for the process of its own")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options.threads, options.turns)))
        return
    given = ["--threads", str(options.threads), "--turns", str(options.turns)]
    rows = []
    for name in options.models:
        done = subprocess.run(
            [sys.executable, "-m", "bench.fused_steps", *given, "--one", name], stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
    kept = with_kept("fused_steps", rows, ("model", "threads"))
    results = Results("fused_steps", "Steps with regions compiled by inductor", COLUMNS, kept)
    results.save()
    results.print()


def measured(name: str, threads: int, turns: int) -> dict[str, Any]:
    """One model's row."""
    import torch

    from lowtide.ir.bodies import is_by_inductor

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, batch, loss = _workload(name)
    start = time.perf_counter()
    fused = _Training(copy.deepcopy(model), batch, loss, exact=False, kernels="compiled")
    seconds = time.perf_counter() - start
    plain = _Training(copy.deepcopy(model), batch, loss)
    row: dict[str, Any] = {"model": name, "batch_size": CASES[name], "threads": threads, "compiling_s": seconds}
    row |= _deviations(model, batch, loss, {"plain": plain, "fused": fused})
    for _ in range(_WARM_UP):
        plain.once(), fused.once()
    times = [(plain.cpu_ms(), fused.cpu_ms()) for _ in range(turns)]
    row |= {"plain_cpu_ms": statistics.median(one for one, _ in times), "fused_cpu_ms": statistics.median(two for _, two in times)}
    row["cpu_ratio"] = statistics.median(two / one for one, two in times)
    nodes = [node for node in fused.step.plan.graph.nodes if is_by_inductor(node)]
    row |= {"regions": len(nodes), "regions_nodes": sum(len(node.body.nodes) for node in nodes if node.body is not None)}
    for key, each in (("plain", plain), ("fused", fused)):
        row |= {f"{key}_promised_bytes": each.step.plan.peak_bytes, f"{key}_peak_bytes": each.step.measure(*batch).peak_bytes}
    return row | {"eager_peak_bytes": plain.step.plan.eager_peak_bytes}


def _workload(name: str) -> tuple[Any, Any, Callable[..., Any]]:
    from bench.models import MODELS

    if name.startswith("small "):
        return small(name, CASES[name])
    work = MODELS[name].build(CASES[name])
    return work.model, work.batch, work.loss


def small(name: str, batch_size: int) -> tuple[Any, Any, Callable[..., Any]]:
    """Four layers of width 256 on 128 tokens, without dropout: "small bert" or "small gpt2"; model, batch and loss."""
    from bench.models.language import hugging_face, language_model
    from bench.models.workload import keyword_loss, labels

    tokens = labels(1000, batch_size, 128)
    if name == "small bert":
        sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 1000}
        sizes = _calm(sizes, "hidden_dropout_prob", "attention_probs_dropout_prob")
        model = hugging_face("BertForSequenceClassification", "BertConfig", **sizes)
        return model.train(), (tokens, labels(2, batch_size)), keyword_loss("input_ids", "labels")
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
    model = language_model("GPT2LMHeadModel", "GPT2Config", **_calm(sizes, "resid_pdrop", "embd_pdrop", "attn_pdrop"))
    return model.train(), (tokens, tokens.clone()), keyword_loss("input_ids", "labels", use_cache=False)


def _calm(sizes: dict[str, Any], *dropouts: str) -> dict[str, Any]:
    """Without dropout, so that steps can be compared with one in float64."""
    return sizes | dict.fromkeys(dropouts, 0.0)


class _Training:
    """A model and its step."""

    def __init__(self, model: Any, batch: Any, loss: Callable[..., Any], **settings: Any) -> None:
        import torch

        import lowtide

        self.model, self.batch = model, batch
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, **in_values(progress=False, **settings))

    def once(self) -> None:
        self.step(*self.batch)

    def cpu_ms(self) -> float:
        start = time.process_time()
        self.once()
        return 1e3 * (time.process_time() - start)


def _deviations(model: Any, batch: Any, loss: Callable[..., Any], steps: dict[str, _Training]) -> dict[str, float]:
    """After two steps, as the first one makes the optimizer's state and is another program."""
    import torch

    def trained(dtype: torch.dtype) -> list[Any]:
        mine = copy.deepcopy(model).to(dtype)
        given = [each.to(dtype) if each.is_floating_point() else each for each in batch]
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-4)
        for _ in range(2):
            optimizer.zero_grad()
            loss(mine, *given).backward()
            optimizer.step()
        return list(mine.parameters())

    true, found = trained(torch.float64), {"eager": trained(torch.float32)}
    for key, each in steps.items():
        each.once(), each.once()
        found[key] = list(each.model.parameters())
    moved = sum(float((a.detach() - b.detach().double()).square().sum()) for a, b in zip(true, model.parameters(), strict=True))

    def off(parameters: list[Any]) -> float:
        return sum(float((a.detach() - b.detach().double()).square().sum()) for a, b in zip(true, parameters, strict=True))

    return {f"{key}_deviation": (off(parameters) / moved) ** 0.5 for key, parameters in found.items()}


if __name__ == "__main__":
    main()
