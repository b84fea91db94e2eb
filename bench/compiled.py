"""Training steps that are compiled: torch.compile beside lowtide's `kernels="compiled"`, lowtide's exact steps and eager PyTorch.

    python -m bench.compiled [--models NAME ...] [--threads 1 2] [--turns 7] [--contenders NAME ...] [--resume] [--busy]

Rows are saved as each model is done; `--resume` leaves out what the table has of this very code. `--busy` says in the rows that other work
ran beside.

One process a model and number of threads, with empty caches; AdamW, no dropout, float32. Every contender trains a copy of the model, and
they take turns of one step: processor time, medians, and ratios to torch.compile are medians over turns. `torch.compile` compiles the model
(forward and backward), with the optimizer as users run it; `torch.compile, all`, which is measured where it is named, compiles the
optimizer's step as well. `compiled` takes the fastest of the graphs; `regions alone` is that in which the backward pass computes nothing
again, `least held` that in which it computes whatever holds less. Peaks are the allocator's level above what the caller holds between
steps: gradients are none when a step begins. Cold is until the second step has run, with empty caches, in seconds and in those of
processors; cached is the same in a second process. Deviation: how far all parameters are after two steps from where steps in float64
bring them, over how far that is.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any

from bench.machine import code
from bench.results import Results, with_kept

CASES: dict[str, int] = {
    "gpt2": 2,
    "bert-base": 2,
    "vit_b_16": 2,
    "resnet50": 4,
    "mobilenet_v2": 4,
    "small gpt2": 8,
    "small bert": 8,
}  # batch sizes
CONTENDERS = ("eager", "torch.compile", "exact", "compiled", "regions alone", "least held", "torch.compile, all")
COLUMNS = (
    "model", "batch_size", "threads", "contender", "cold_s", "cold_cpu_s", "cached_s", "cpu_ms", "over_torch_compile",
    "promised_bytes", "peak_bytes", "deviation", "regions", "nodes_in_regions", "beside", "code",
)  # fmt: skip
_WARM_UP = 1
_RATE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS[:-1]), choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WHAT"), help="measure one model, or only what it takes to be made")
    parser.add_argument("--resume", action="store_true", help="leave out what the table has of this code")
    parser.add_argument("--busy", action="store_true", help="say that other work runs beside")
    options = parser.parse_args()
    if options.one:
        name, what = options.one
        print(json.dumps(measured(name, options.contenders, options.threads[0], options.turns if what == "all" else 0)))
        return
    results = _table([])
    for name, threads in product(options.models, options.threads):
        known = [row for row in results.rows if (row["model"], row["threads"], row.get("code")) == (name, threads, code())]
        missing = [each for each in options.contenders if each not in [row["contender"] for row in known]]
        if missing or not options.resume:
            rows = _rows(name, options.contenders, threads, options.turns)
            marks = {"beside": "other work" if options.busy else None, "code": code()}
            results = _table([row | marks for row in rows])
            results.save()
    results.print()


def _table(rows: Sequence[dict[str, Any]]) -> Results:
    kept = with_kept("compiled", rows, ("model", "threads", "contender"))
    return Results("compiled", "Compiled training steps", COLUMNS, kept)


def _rows(name: str, contenders: Sequence[str], threads: int, turns: int) -> list[dict[str, Any]]:
    """One model's rows, from two processes that share caches which were empty."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"LOWTIDE_CACHE": f"{folder}/lowtide", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "OMP_NUM_THREADS": str(threads)}
        given = [sys.executable, "-m", "bench.compiled", "--contenders", *contenders, "--threads", str(threads), "--turns", str(turns)]
        found = []
        for what in ("all", "made"):
            done = subprocess.run([*given, "--one", name, what], stdout=subprocess.PIPE, text=True, check=True, env=os.environ | caches)
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    first, second = found
    shared = {"model": name, "batch_size": CASES[name], "threads": threads}
    return [
        shared | {"contender": each, "cold_s": row.pop("seconds"), "cached_s": second[each]["seconds"]} | row for each, row in first.items()
    ]


def measured(name: str, contenders: Sequence[str], threads: int, turns: int) -> dict[str, dict[str, Any]]:
    """What each contender takes; without turns only how long it takes to be made."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, batch, loss = _workload(name)
    trainings, found = dict[str, _Training](), dict[str, dict[str, Any]]()
    for each in contenders:
        start, start_cpu_s = time.perf_counter(), _cpu_s()
        trainings[each] = _Training(each, copy.deepcopy(model), batch, loss)
        trainings[each].once(), trainings[each].once()
        found[each] = {"seconds": time.perf_counter() - start, "cold_cpu_s": _cpu_s() - start_cpu_s} | trainings[each].regions()
    if not turns:
        return found
    true = _trained(model, batch, loss)
    for each, training in trainings.items():
        found[each]["deviation"] = _deviation(training.model, model, true)
    true.clear()
    for training in trainings.values():
        for _ in range(_WARM_UP):
            training.once()
    times = [{each: training.cpu_ms() for each, training in trainings.items()} for _ in range(turns)]
    for each, training in trainings.items():
        found[each]["cpu_ms"] = statistics.median(turn[each] for turn in times)
        if "torch.compile" in times[0]:
            found[each]["over_torch_compile"] = statistics.median(turn[each] / turn["torch.compile"] for turn in times)
        found[each] |= training.peaks()
    return found


def _cpu_s() -> float:
    """Seconds of processors that this process took, and those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _workload(name: str) -> tuple[Any, Any, Callable[..., Any]]:
    from torch import nn

    from bench.models import MODELS

    if name.startswith("small "):
        return _small(name, CASES[name])
    work = MODELS[name].build(CASES[name])
    for module in work.model.modules():  # so that steps can be compared with one in float64
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for dropout in ("dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, dropout, None), float):
                setattr(module, dropout, 0.0)
    return work.model, work.batch, work.loss


def _small(name: str, batch_size: int) -> tuple[Any, Any, Callable[..., Any]]:
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
    """A model and its step, which leaves no gradients."""

    def __init__(self, contender: str, model: Any, batch: Any, loss: Callable[..., Any]) -> None:
        import torch

        self.model, self.batch = model, batch
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
        self.step = self._lowtide(contender, loss, optimizer) if contender in _SETTINGS else None
        if self.step is not None:
            self.once = lambda: self.step(*batch)
            return
        called = torch.compile(model) if contender.startswith("torch.compile") else model
        update = torch.compile(optimizer.step) if contender == "torch.compile, all" else optimizer.step

        def once() -> None:
            loss(called, *batch).backward()
            update()
            optimizer.zero_grad()

        self.once = once

    def _lowtide(self, contender: str, loss: Callable[..., Any], optimizer: Any) -> Any:
        import lowtide

        planning = lowtide.Planning(progress=False)
        with ALONE[contender]() if contender in ALONE else nullcontext():
            return lowtide.optimize(self.model, self.batch, loss=loss, optimizer=optimizer, planning=planning, **_settings(contender))

    def cpu_ms(self) -> float:
        start = time.process_time()
        self.once()
        return 1e3 * (time.process_time() - start)

    def peaks(self) -> dict[str, int]:
        """The peak of a step above what the caller holds, and what was promised."""
        from lowtide.cost.profiler import measure_memory

        if self.step is None:
            return {"peak_bytes": measure_memory(self.once, warmup=1).above_bytes}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it trains is known
            taken = self.step.measure(*self.batch)
        return {"peak_bytes": taken.above_bytes, "promised_bytes": self.step.plan.peak_bytes - self.step.plan.resident_bytes}

    def regions(self) -> dict[str, int]:
        from lowtide.ir.bodies import is_by_inductor

        if self.step is None:
            return {}
        nodes = [node for node in self.step.plan.graph.nodes if is_by_inductor(node)]
        return {"regions": len(nodes), "nodes_in_regions": sum(len(node.body.nodes) for node in nodes if node.body is not None)}


_SETTINGS = ("exact", "compiled", "regions alone", "least held")


@contextmanager
def _replaced(name: str, value: Any) -> Iterator[None]:
    from lowtide.planning import machine

    usual = getattr(machine, name)
    setattr(machine, name, value)
    try:
        yield
    finally:
        setattr(machine, name, usual)


def _holding() -> AbstractContextManager[None]:
    """The backward pass computes nothing again."""
    return _replaced("leaner_graphs", lambda graph, **_: [])


def _leanest() -> AbstractContextManager[None]:
    """Of what the backward pass could compute again it computes all, whatever time that takes."""
    return _replaced("_AS_FAST", float("inf"))


ALONE = {"regions alone": _holding, "least held": _leanest}


def _settings(contender: str) -> dict[str, Any]:
    import lowtide

    return {} if contender == "exact" else {"exact": False, "run": lowtide.Run(kernels="compiled")}


def _trained(model: Any, batch: Any, loss: Callable[..., Any]) -> list[Any]:
    """The parameters after two steps in float64."""
    import torch

    mine = copy.deepcopy(model).to(torch.float64)
    given = [each.double() if each.is_floating_point() else each for each in batch]
    optimizer = torch.optim.AdamW(mine.parameters(), lr=_RATE)
    for _ in range(2):
        optimizer.zero_grad()
        loss(mine, *given).backward()
        optimizer.step()
    return [parameter.detach() for parameter in mine.parameters()]


def _deviation(trained: Any, before: Any, true: Sequence[Any]) -> float:
    def square(ones: Any) -> float:
        return sum(float((one.detach().double() - two).square().sum()) for one, two in zip(ones, true, strict=True))

    return (square(trained.parameters()) / square(before.parameters())) ** 0.5


if __name__ == "__main__":
    main()
