"""A small Llama in transformers' Trainer, Lightning, and a loop with accelerate: alone, checkpointed, and with lowtide.

    python -m bench.frameworks [--steps 12] [--only trainer lightning]

Each way to train is a process of its own, twice: once timed step by step, once for four steps under the profiler, for the peak above what
was there before training: gradients, optimizer state, activations. "within" has as many bytes as checkpointing took. Losses are compared
bit for bit with the framework's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

import lowtide
from bench import torchvision_shim
from bench.results import Results

COLUMNS = ("framework", "how", "peak_mib", "step_ms", "time_ratio", "first_step_s", "losses_equal")
FRAMEWORKS = ("trainer", "lightning", "accelerate")
HOWS = ("alone", "checkpointing", "lowtide", "within")
NOTES = (
    "peak_mib: above weights, measured; step_ms: the median without the first two; time_ratio: over the framework alone; first_step_s has "
    "capture and planning in it. Llama of 4 layers, width 256, vocabulary 4,096; 4 x 256 tokens, float32, AdamW, no clipping",
)
_PROFILED = 4
Ticks = list[tuple[float, float]]  # by step: when it was over, its loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--one", nargs=4, metavar=("FRAMEWORK", "HOW", "WHAT", "BYTES"), help="for the process of its own")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one, options.steps)))
        return
    results = Results(
        "frameworks", "Where people train", COLUMNS, tuple(row for name in options.only for row in rows(name, options.steps)), NOTES
    )
    results.save()
    results.print()


def rows(framework: str, steps: int) -> list[dict[str, Any]]:
    """One framework, each way."""
    found: list[dict[str, Any]] = []
    alone: dict[str, Any] = {}
    limit_bytes = 0
    for how in HOWS:
        limited = limit_bytes if how == "within" else 0
        peak = _process(framework, how, "peak", limited, steps)
        timed = _process(framework, how, "time", limited, steps)
        alone = alone or timed
        if how == "checkpointing":
            limit_bytes = peak["above_bytes"] + peak["weights_bytes"]
        step_ms = _step_ms(timed)
        found.append(
            {
                "framework": framework, "how": how, "peak_mib": round(peak["above_bytes"] / 2**20, 1), "step_ms": round(step_ms, 1),
                "time_ratio": round(step_ms / _step_ms(alone), 3), "first_step_s": round(timed["at"][0], 2),
                "losses_equal": str(timed["losses"] == alone["losses"]),
            }
        )  # fmt: skip
        print(found[-1], file=sys.stderr, flush=True)
    return found


def _step_ms(timed: dict[str, Any]) -> float:
    at = timed["at"]
    return 1000 * statistics.median(later - before for before, later in pairwise(at[1:]))


def _process(framework: str, how: str, what: str, limit_bytes: int, steps: int) -> dict[str, Any]:
    asked = [framework, how, what, str(limit_bytes), "--steps", str(steps)]
    done = subprocess.run([sys.executable, "-m", "bench.frameworks", "--one", *asked], capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def one(framework: str, how: str, what: str, limit: str, steps: int) -> dict[str, Any]:
    """Train one way: when each step was over and what its loss was, or the peak."""
    torchvision_shim.install()
    train, weights_bytes = _WAYS[framework](how, int(limit) or None, _PROFILED if what == "peak" else steps)
    if what == "peak":
        return {"above_bytes": lowtide.measure(lambda: train([])).above_bytes, "weights_bytes": weights_bytes}
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
    kind, given = (LowtideTrainer, {"memory": limit}) if how in ("lowtide", "within") else (Trainer, {})
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
    strategy = LowtideStrategy(limit) if how in ("lowtide", "within") else "auto"
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
        if how in ("lowtide", "within"):
            step = lowtide.optimize(
                model, next(iter(loader)), loss=lambda model, **batch: model(**batch).loss, optimizer=optimizer, memory=limit
            )
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
