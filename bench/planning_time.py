"""What a user waits for: seconds of wall clock from the model to the step under a limit, and from there to a step under another one.

    python -m bench.planning_time [--only NAME ...] [--no-overheads]

Each network has a folder of its own for what lowtide keeps, and each run is a process of its own, with all imports done and kernels
compiled. In turn: nothing is known; operators are known, and nothing was searched; all is known. GPT-Neo is planned on a simulated machine,
with swapping. Then `lowtide.explain`. The overheads are those of the default effort and of "thorough", by times as predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lowtide
from bench.in_values import in_values
from bench.models import MODELS
from bench.models.explicit import GPT_NEO_13
from bench.models.language import language_model
from bench.models.unrolled import DIFFUSION_50, GRU_500, LSTM_200
from bench.models.workload import Batch, Entry, keyword_loss, labels, plain_sgd
from bench.results import Results, with_kept

_LENGTH = 256
_SHARES = ("80%", "60%", "40%")


def _llama() -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 4096}
    return language_model("LlamaForCausalLM", "LlamaConfig", **sizes)


def _llama_batch(batch_size: int) -> Batch:
    tokens = labels(4096, batch_size, _LENGTH)
    return tokens, tokens.clone()


_LLAMA = Entry(
    "llama", _llama, _llama_batch, keyword_loss("input_ids", "labels", use_cache=False), f"4 layers of width 256, {_LENGTH} tokens"
)


@dataclass(frozen=True)
class Case:
    """A network, its batch, and what it is planned with."""

    entry: Entry
    batch_size: int
    device: str = "cpu"
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "gpt2": Case(MODELS["gpt2"], 2),
    "llama": Case(_LLAMA, 4),
    "resnet50": Case(MODELS["resnet50"], 8),
    "unetplusplus": Case(MODELS["unetplusplus"], 1),
    "gpt-neo-1.3B": Case(GPT_NEO_13, 32, "meta", {"simulate": "rtx3090"}),
    "diffusion-50": Case(DIFFUSION_50, 64),
    "lstm-200": Case(LSTM_200, 16),
    "gru-500": Case(GRU_500, 16),
}
_WAITS = ("nothing_known", "not_searched", "capture", "other_limit", "all_known", "explain")
_OVERHEADS = tuple(f"{effort}_{share[:-1]}" for effort in ("normal", "thorough") for share in _SHARES)
COLUMNS = ("network", "operators", *(f"{name}_s" for name in _WAITS), "not_searched_cpu_s", *_OVERHEADS)
NOTES = (
    'memory="60%"; not_searched_s, of which capture_s; other_limit_s: step.at("70%") in the same process',
    "all_known_s: another process that asks the same; it captures, as only that tells which program it is",
    "normal, thorough: time that a limit of 80, 60 and 40 % adds, in percent of the time without recomputation, as predicted",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--no-overheads", action="store_true", help="leave out the comparison with the thorough effort")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # what to do, and of which network, in this process
    options = parser.parse_args()
    if options.one:
        what, name = options.one
        print(json.dumps(_TASKS[what](CASES[name])))
        return
    for name in options.only:
        rows = sorted(with_kept("planning_time", [row(name, overheads=not options.no_overheads)], ["network"]), key=_position)
        results = Results("planning_time", "From the model to the step", COLUMNS, tuple(rows), NOTES)
        results.save()
    results.print()


def _position(found: Mapping[str, Any]) -> int:
    return list(CASES).index(found["network"])


def row(name: str, *, overheads: bool) -> dict[str, Any]:
    """One network, all that is waited for."""
    with tempfile.TemporaryDirectory() as folder:
        apart = partial(_apart, name, Path(folder))
        nothing = apart("plan")
        shutil.rmtree(Path(folder) / "searched")
        found = apart("plan")
        again = apart("plan")
        explained = apart("explain")
        told = apart("overheads") if overheads else {}
    return {
        "network": name,
        "operators": found["operators"],
        "nothing_known_s": nothing["seconds"],
        "not_searched_s": found["seconds"],
        "capture_s": found["stages"].get("capture", 0.0),
        "other_limit_s": found["other_limit"],
        "all_known_s": again["seconds"],
        "explain_s": explained["seconds"],
        "not_searched_cpu_s": found["cpu"],
        **told,
    }


def _apart(name: str, folder: Path, what: str) -> dict[str, Any]:
    """A task in a process of its own, which keeps what it learns in that folder."""
    command = [sys.executable, "-m", "bench.planning_time", "--one", what, name]
    done = subprocess.run(command, env=os.environ | {"LOWTIDE_CACHE": str(folder)}, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _plan(case: Case) -> dict[str, Any]:
    optimize, _ = _ready(case)
    clocks = time.perf_counter(), time.process_time()
    step = optimize(memory="60%")
    found = {"seconds": time.perf_counter() - clocks[0], "cpu": time.process_time() - clocks[1], "stages": dict(step.seconds)}
    clock = time.perf_counter()
    step.at("70%")
    return found | {"other_limit": time.perf_counter() - clock, "operators": len(step.plan.graph.nodes)}


def _explain(case: Case) -> dict[str, Any]:
    _, explain = _ready(case)
    clock = time.perf_counter()
    explain()
    return {"seconds": time.perf_counter() - clock}


def _overheads(case: Case) -> dict[str, Any]:
    optimize, _ = _ready(case)
    found: dict[str, Any] = {}
    for effort in ("normal", "thorough"):
        step = optimize(memory=_SHARES[0], planning=lowtide.Planning(effort=effort, simulate=case.settings.get("simulate")))
        for share in _SHARES:
            found[f"{effort}_{share[:-1]}"] = _overhead(step, share)
    return found


def _overhead(step: Any, share: str) -> float | None:
    """Percent of the time without recomputation; None where nothing fits."""
    import lowtide

    try:
        report = step.at(share).plan.cost_report
    except lowtide.BudgetError:
        return None
    return 100 * (report.time_us / report.order_us - 1) if report else 0.0


def _ready(case: Case) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`optimize` and `explain` of the network; all is imported."""
    import lowtide

    made = case.entry.build(case.batch_size, case.device)
    settings = {"loss": made.loss, "optimizer": plain_sgd(made.model), "progress": False} | case.settings
    return partial(lowtide.optimize, made.model, made.batch, **in_values(**settings)), partial(
        lowtide.explain, made.model, made.batch, **in_values(**settings)
    )


_TASKS = {"plan": _plan, "explain": _explain, "overheads": _overheads}

if __name__ == "__main__":
    main()
