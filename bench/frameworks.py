"""A small Llama in transformers' Trainer, Lightning, and a loop with accelerate: alone, checkpointed, and with lowtide.

    python -m bench.frameworks [--steps 50] [--turns 3] [--only trainer lightning] [--answers FILE]

Each way to train is a process of its own: once for four steps under the profiler, for the peak above what was there before training
(gradients, optimizer state, activations), and in each turn once more, timed step by step. "arena" is what Trainer and Lightning have by
default, and a loop by `Run(arena="always")`; "no arena" is `Run(arena="never")`; "within" is in an arena, and has as many bytes as
checkpointing took.
Losses are compared bit for bit with the framework's own. The table is saved after each framework's turn; what stands in the file of
answers is not measured again, so that a run that was stopped goes on where it was. A way that fails, or is not over within its limit,
has a row without numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch

import lowtide
from bench import torchvision_shim
from bench.in_values import in_values
from bench.results import Cell, Results, with_kept
from lowtide.cost.profiler import measure_memory

COLUMNS = ("framework", "how", "peak_mib", "step_ms", "time_ratio", "to_checkpointing", "first_step_s", "losses_equal")
FRAMEWORKS = ("trainer", "lightning", "accelerate")
HOWS = ("alone", "checkpointing", "no arena", "arena", "within")
OURS = ("no arena", "arena", "within")
NOTES = (
    "peak_mib: above weights, measured; step_ms: the median without the first two, of all turns; time_ratio: over the framework alone, "
    "to_checkpointing: over the framework with gradient checkpointing, medians over turns; first_step_s has capture and planning in it, "
    "the most of the turns; arena: the default of Trainer and Lightning, whose steps fetch no pages anew. "
    "Llama of 4 layers, width 256, vocabulary 4,096; 4 x 256 tokens, float32, AdamW, no clipping",
)
_PROFILED = 4
Ticks = list[tuple[float, float]]  # by step: when it was over, its loss
Answer: TypeAlias = Mapping[str, Any]  # of a process; empty where it failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--answers", type=Path, help="where answers are kept, and taken from")
    parser.add_argument("--limit", type=float, default=600, help="seconds a process may take")
    parser.add_argument("--dry", action="store_true", help="print the table without saving it")
    parser.add_argument("--one", nargs=4, metavar=("FRAMEWORK", "HOW", "WHAT", "BYTES"), help="for the process of its own")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one, options.steps)))
        return
    processes = Processes(options.steps, options.limit, options.answers)
    measured: dict[str, list[dict[str, Cell]]] = {}
    results = Results("frameworks", "Where people train", COLUMNS, (), NOTES)
    for turns in range(1, options.turns + 1):
        for name in options.only:
            measured[name] = rows(name, turns, processes)
            all_rows = [row for each in measured.values() for row in each]
            kept = all_rows if options.dry else with_kept("frameworks", all_rows, ("framework", "how"))
            results = Results("frameworks", "Where people train", COLUMNS, tuple(kept), NOTES)
            if not options.dry:
                results.save()
    results.print()


@dataclass
class Processes:
    """Runs each process once; what was answered is kept in a file, if there is one."""

    steps: int
    limit_s: float
    file: Path | None
    answers: dict[str, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file and self.file.exists():
            self.answers |= json.loads(self.file.read_text(encoding="utf-8"))

    def ask(self, framework: str, how: str, what: str, limit_bytes: int, turn: int = 0) -> Answer:
        """Train one way. `turn` tells apart what is measured several times."""
        asked = [framework, how, what, str(limit_bytes), "--steps", str(self.steps)]
        key = " ".join((*asked, str(turn)))
        if key not in self.answers:
            self.answers[key] = self._run(asked)
            if self.file:  # what failed is tried again by the next run
                done = {each: answer for each, answer in self.answers.items() if answer}
                self.file.write_text(json.dumps(done), encoding="utf-8")
        return self.answers[key]

    def _run(self, asked: list[str]) -> Answer:
        try:
            command = [sys.executable, "-m", "bench.frameworks", "--one", *asked]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            print(f"{' '.join(asked)}: not over within {self.limit_s:.0f} s", file=sys.stderr, flush=True)
            return {}
        if done.returncode:
            print(f"{' '.join(asked)}: {done.stderr[-2000:]}", file=sys.stderr, flush=True)
            return {}
        answer: Answer = json.loads(done.stdout.splitlines()[-1])
        return answer


def rows(framework: str, turns: int, processes: Processes) -> list[dict[str, Cell]]:
    """One framework, each way, by what this many turns have measured."""
    peaks: dict[str, Answer] = {}
    timed: dict[str, list[Answer]] = {}
    for how in HOWS:
        limit_bytes = sum(peaks["checkpointing"].values()) if how == "within" else 0  # weights, and all above them
        if how == "within" and not limit_bytes:
            continue
        peaks[how] = processes.ask(framework, how, "peak", limit_bytes)
        timed[how] = [processes.ask(framework, how, "time", limit_bytes, turn) for turn in range(turns)] if peaks[how] else [{}]
    found = [_row(framework, how, peaks.get(how, {}), timed) for how in HOWS]
    for row in found:
        print(row, file=sys.stderr, flush=True)
    return found


def _row(framework: str, how: str, peak: Answer, timed: Mapping[str, list[Answer]]) -> dict[str, Cell]:
    own = timed.get(how, [{}])
    if not peak or not all(own):
        return {"framework": framework, "how": how}
    return {
        "framework": framework, "how": how, "peak_mib": round(peak["above_bytes"] / 2**20, 1),
        "step_ms": round(statistics.median(map(_step_ms, own)), 1), "time_ratio": _ratio(own, timed["alone"]),
        "to_checkpointing": _ratio(own, timed["checkpointing"]), "first_step_s": round(max(each["at"][0] for each in own), 2),
        "losses_equal": str(all(each["losses"] == other.get("losses") for each, other in zip(own, timed["alone"], strict=False))),
    }  # fmt: skip


def _ratio(times: list[Answer], others: list[Answer]) -> float | None:
    """The median over turns; None where the other way has failed."""
    if not all(others):
        return None
    return round(statistics.median(_step_ms(one) / _step_ms(other) for one, other in zip(times, others, strict=True)), 3)


def _step_ms(timed: Answer) -> float:
    at = timed["at"]
    return 1000 * statistics.median(later - before for before, later in pairwise(at[1:]))


def one(framework: str, how: str, what: str, limit: str, steps: int) -> dict[str, Any]:
    """Train one way: when each step was over and what its loss was, or the peak."""
    torchvision_shim.install()
    train, weights_bytes = _WAYS[framework](how, int(limit) or None, _PROFILED if what == "peak" else steps)
    if what == "peak":
        return {"above_bytes": measure_memory(lambda: train([])).above_bytes, "weights_bytes": weights_bytes}
    ticks: Ticks = []
    begun = time.perf_counter()
    train(ticks)
    return {"at": [at - begun for at, _ in ticks], "losses": [loss for _, loss in ticks]}


def _model(how: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, use_cache=False)
    )
    if how == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _weights_bytes(model: Any) -> int:
    return sum(each.nbytes for each in model.parameters())


def _rows(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(4096, (256,), generator=generator) for _ in range(4 * steps)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)


def _further(how: str) -> dict[str, Any]:
    """What an adapter hands on to `optimize` beside a limit."""
    return {"run": lowtide.Run(arena="never")} if how == "no arena" else {}


def _trainer(how: str, limit: int | None, steps: int) -> tuple[Callable[[Ticks], Any], int]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lowtide.integrations.transformers import LowtideTrainer

    class Tick(TrainerCallback):  # type: ignore[misc]
        ticks: Ticks

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                self.ticks.append((time.perf_counter(), logs["loss"]))

    model, tick = _model(how), Tick()
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "max_grad_norm": 0.0}
    arguments = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=steps, **quiet)
    kind, given = (LowtideTrainer, {"memory": limit, "optimize": _further(how)}) if how in OURS else (Trainer, {})
    made = kind(model, arguments, train_dataset=_rows(steps), callbacks=[tick], optimizers=(_adamw(model), None), **given)

    def train(ticks: Ticks) -> None:
        tick.ticks = ticks
        made.train()

    return train, _weights_bytes(model)


def _lightning(how: str, limit: int | None, steps: int) -> tuple[Callable[[Ticks], Any], int]:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from lowtide.integrations.lightning import LowtideStrategy

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(how)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return _adamw(self.model)

    class Tick(Callback):  # type: ignore[misc]
        ticks: Ticks

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            self.ticks.append((time.perf_counter(), outputs["loss"].item()))

    module, tick = Module(), Tick()
    strategy = LowtideStrategy(limit, optimize=_further(how)) if how in OURS else "auto"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, callbacks=[tick], **quiet)

    def train(ticks: Ticks) -> None:
        tick.ticks = ticks
        trainer.fit(module, torch.utils.data.DataLoader(_rows(steps), batch_size=4))

    return train, _weights_bytes(module)


def _accelerate(how: str, limit: int | None, steps: int) -> tuple[Callable[[Ticks], Any], int]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _model(how)
    loader = torch.utils.data.DataLoader(_rows(steps), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), loader)

    def eager(**batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def train(ticks: Ticks) -> None:
        step = eager
        if how in OURS:
            said = {"optimizer": optimizer, "memory": limit, "arena": how != "no arena"}
            step = lowtide.optimize(model, next(iter(loader)), loss=lambda model, **batch: model(**batch).loss, **in_values(**said))
        for batch in loader:
            ticks.append((time.perf_counter(), step(**batch).item()))
            ticks[-1] = (time.perf_counter(), ticks[-1][1])

    return train, _weights_bytes(model)


_WAYS: dict[str, Callable[[str, int | None, int], tuple[Callable[[Ticks], Any], int]]] = {
    "trainer": _trainer,
    "lightning": _lightning,
    "accelerate": _accelerate,
}

if __name__ == "__main__":
    main()
