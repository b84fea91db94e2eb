"""Trains a small GPT on the standard library's own sources twice, by eager PyTorch and by lowtide, and compares: `make demo`.

Both start from the same seed and take turns, each with random numbers of its own, so that dropout is the same in both and a machine
that slows down slows both. Ends with exit code 1 unless losses, parameters, optimizer state and random numbers are equal to the last bit.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import lowtide
from bench.bits import same_bits
from bench.models.char_gpt import CharGPT, Shape, batches, next_character_loss, standard_library
from lowtide.cost.profiler import Timing, measure_memory

SHAPE = Shape()
BATCH_SIZE = 1  # where gradients outweigh activations, as in fine-tuning: what order alone can save
STEPS, ROW = 60, 15  # in all, and in each row of the table
PATIENCE_S = 60.0  # no row is begun after that: a slow or busy machine trains fewer steps
UNCOUNTED = 3  # the first steps make optimizer state and warm caches
SEED = 0

Batch = tuple[Tensor, Tensor]


@dataclass
class Run:
    """One of the two trainings: its objects, and its own random numbers."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    randomness: Tensor
    step: Callable[..., Tensor]
    losses: list[Tensor] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)

    def train(self, batch: Batch) -> None:
        """One step, timed."""
        with self.own_randomness():
            start = time.perf_counter_ns()
            loss = self.step(*batch)
            self.times_us.append((time.perf_counter_ns() - start) / 1e3)
        self.losses.append(loss)

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """The generator as this run left it; afterwards as the other one did."""
        others = torch.get_rng_state()
        torch.set_rng_state(self.randomness)
        try:
            yield
        finally:
            self.randomness = torch.get_rng_state()
            torch.set_rng_state(others)

    @property
    def timing(self) -> Timing:
        """Of the steps that count."""
        return Timing(tuple(self.times_us[UNCOUNTED:]))


def main() -> int:
    """Train, compare, print; 0 if all is equal."""
    console = Console(soft_wrap=True)
    data = _read(console)
    eager, (optimized, step) = _eager_run(), _lowtide_run(console, data[0])
    _train(console, eager, optimized, data[:STEPS])
    _show(console, eager, optimized, step.plan, _measured_peaks(eager, optimized, step, data[STEPS]))
    unequal = differences(eager, optimized)
    if unequal:
        console.print(f"[red]NOT EQUAL: {', '.join(unequal)}[/red]")
        return 1
    console.print(f"equal to the last bit: {len(eager.losses)} losses, all parameters, all optimizer state, the random numbers")
    return 0


def differences(one: Run, two: Run) -> list[str]:
    """What is not the same in two runs, by name; empty where all bits are."""
    pairs: dict[str, tuple[Any, Any]] = {f"loss {index}": pair for index, pair in enumerate(zip(one.losses, two.losses, strict=True))}
    pairs["random numbers"] = (one.randomness, two.randomness)
    names = dict(one.model.named_parameters())
    for name, theirs in two.model.named_parameters():
        pairs[name] = (names[name], theirs)
        states = one.optimizer.state[names[name]], two.optimizer.state[theirs]
        pairs |= {f"{name}.{key}": (states[0].get(key), states[1].get(key)) for key in states[0] | states[1]}
    return [name for name, (first, second) in pairs.items() if not _same(first, second)]


def _same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and first == second
    return same_bits(first, second)


def _read(console: Console) -> list[Batch]:
    text = standard_library()
    console.print(f"data:  {len(text):,} characters, the sources of this Python's standard library")
    return batches(text, STEPS + 1, BATCH_SIZE, SHAPE.length, SEED)


def _made() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """A model, its optimizer and the state of the generator, always the same."""
    torch.manual_seed(SEED)
    model = CharGPT(SHAPE).train()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False), torch.get_rng_state()


def _eager_run() -> Run:
    """The plain loop. Gradients are dropped at its end, so that no step starts with those of the one before."""
    model, optimizer, randomness = _made()

    def step(*batch: Tensor) -> Tensor:
        loss = next_character_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Run("eager PyTorch", model, optimizer, randomness, step)


def _lowtide_run(console: Console, batch: Batch) -> tuple[Run, lowtide.Step]:
    model, optimizer, randomness = _made()
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"model: GPT of {SHAPE.blocks} blocks, width {SHAPE.width}, dropout {SHAPE.dropout}; {count / 1e6:.1f} M parameters")
    console.print(f"       batches of {BATCH_SIZE} x {SHAPE.length} characters, AdamW, {torch.get_num_threads()} threads")
    start = time.perf_counter()
    step = lowtide.optimize(model, batch, loss=next_character_loss, optimizer=optimizer)
    seconds = time.perf_counter() - start
    console.print(f"plan:  made in {seconds:.1f} s; the first on a machine compiles and measures, later ones remember\n")
    console.print(str(step.plan), highlight=False)
    return Run("lowtide", model, optimizer, randomness, step), step


def _train(console: Console, eager: Run, optimized: Run, data: list[Batch]) -> None:
    """Both trainings in turns."""
    console.print(f"\ntraining twice, in turns, {len(data)} steps or {PATIENCE_S:.0f} seconds")
    table = Table("steps", "eager, mean loss", "lowtide, mean loss", "each equal")
    start = time.perf_counter()
    for first in range(0, len(data), ROW):
        if time.perf_counter() - start < PATIENCE_S:
            _train_row(table, eager, optimized, data[first : first + ROW])
    console.print(table)


def _train_row(table: Table, eager: Run, optimized: Run, data: list[Batch]) -> None:
    """Some steps of both; who goes first changes, for whoever goes second finds warmer caches."""
    for index, batch in enumerate(data):
        for run in (eager, optimized) if index % 2 else (optimized, eager):
            run.train(batch)
    one, two = torch.stack(eager.losses[-len(data) :]), torch.stack(optimized.losses[-len(data) :])
    steps = f"{len(eager.losses) + 1 - len(data)} to {len(eager.losses)}"
    table.add_row(steps, f"{one.mean():.6f}", f"{two.mean():.6f}", "yes" if same_bits(one, two) else "[red]NO[/red]")


def _measured_peaks(eager: Run, optimized: Run, step: lowtide.Step, batch: Batch) -> tuple[int, int]:
    """One more step of each under the profiler: the allocator's highest level, with what is resident."""
    with eager.own_randomness():
        above_bytes = measure_memory(lambda: eager.step(*batch)).above_bytes
    with optimized.own_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it trains is known: both do
        own = step.measure(*batch)
    return own.resident_bytes + above_bytes, own.peak_bytes


def _show(console: Console, eager: Run, optimized: Run, plan: lowtide.Plan, peaks_bytes: tuple[int, int]) -> None:
    """The two trainings side by side."""
    held, (theirs, ours) = plan.resident_bytes, peaks_bytes
    first, second = eager.timing, optimized.timing
    table = Table("", "eager PyTorch", "lowtide", "ratio")
    table.add_row("peak, promised before the first step", "", _mib(plan.peak_bytes), "")
    table.add_row("peak, measured", _mib(theirs), _mib(ours), f"{ours / theirs:.3f}")
    table.add_row("  of it parameters, AdamW's state, batch", _mib(held), _mib(held), "1.000")
    table.add_row("  of it the step's own", _mib(theirs - held), _mib(ours - held), f"{(ours - held) / (theirs - held):.3f}")
    table.add_row("time of a step, median", _ms(first.median_us), _ms(second.median_us), f"{second.ratio_to(first):.3f}")
    console.print(table)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
