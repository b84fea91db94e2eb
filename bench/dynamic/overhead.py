"""What a step for a range of shapes costs beside one that was captured for a single shape.

    python -m bench.dynamic.overhead [--layers 12] [--shapes 40] [--turns 15] [--capture-turns 3] [--only calls steps captures] [--keep]

GPT-2 in training mode with AdamW. Three questions: what choosing and preparing takes for a shape that is new and for one that is known,
with the program itself taken out; how much longer a whole step runs; and what capture and planning of the range take beside those of its
largest shape alone, kernels compiled and operators measured before.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import lowtide
from bench import torchvision_shim
from bench.in_values import in_values
from bench.results import Results, with_kept
from lowtide.api.variant import Variant

COLUMNS = ("layers", "question", "operators", "static", "ranged", "ratio", "difference", "bar", "repeats")
NOTES = (
    "new shape, known shape (processor microseconds of all threads): a whole call but for the program, median; static is a step for that"
    " shape alone; the bars are 1,000 and 50 microseconds more than static's",
    "step (processor milliseconds): medians of both in turns, without a limit; the bar is a ratio of 1.01; for the largest shape both have"
    " one order, for others the step for that shape alone may have one of its own",
    "to the step (processor seconds): capture and planning, in turns, the median; operators' bytes and times are remembered from a first"
    " time, kernels compiled; the bar is a ratio of 2",
)
_ROWS, _LENGTHS = (2, 8), (16, 128)
_QUESTIONS = ("calls", "steps", "captures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--capture-turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=_QUESTIONS, default=list(_QUESTIONS))
    parser.add_argument("--keep", action="store_true", help="keep the rows of the saved table that are not measured now")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWTIDE_CACHE"] = folder  # its searches are forgotten before each capture
        _run(options)


def _run(options: argparse.Namespace) -> None:
    gpt2 = _Gpt2(options.layers)
    questions = {
        "calls": [lambda: _calls(gpt2, options.shapes)],
        "steps": [lambda shape=shape: [_steps(gpt2, options.turns, *shape)] for shape in ((_ROWS[1], _LENGTHS[1]), (4, 100))],
        "captures": [lambda memory=memory: [_captures(gpt2, memory, options.capture_turns)] for memory in (None, "60%")],
    }
    rows: list[dict[str, Any]] = []
    for question in (each for name in options.only for each in questions[name]):
        for row in question():
            rows.append({"layers": options.layers} | row)
            print(rows[-1], flush=True)
        all_rows = with_kept("dynamic_overhead", rows, ("layers", "question")) if options.keep else tuple(rows)
        results = Results("dynamic_overhead", "What a range costs beside one shape", COLUMNS, all_rows, NOTES)
        results.save()
    results.print()


class _Gpt2:
    """The network, small in width: what is measured is not its kernels."""

    def __init__(self, layers: int) -> None:
        torchvision_shim.install()
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        sizes = {"n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": _LENGTHS[1]}
        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers, **sizes))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def batch(self, rows: int = _ROWS[1], length: int = _LENGTHS[1]) -> dict[str, torch.Tensor]:
        """Tokens, and the same as labels."""
        tokens = torch.randint(0, 1000, (rows, length))
        return {"input_ids": tokens, "labels": tokens.clone()}

    def step(self, batch: dict[str, torch.Tensor], *, ranged: bool, memory: str | None = None) -> Any:
        """A step for the range, or for that batch's shape alone."""
        named = {"input_ids": {0: ("rows", *_ROWS), 1: ("length", *_LENGTHS)}, "labels": {0: "rows", 1: "length"}}
        dynamic = named if ranged else None
        settings: dict[str, Any] = {"memory": memory, "dynamic": dynamic, "progress": False}
        return lowtide.optimize(self.model, batch, loss=_loss, optimizer=self.optimizer, **in_values(**settings))


def _loss(model: Any, **batch: torch.Tensor) -> Any:
    return model(**batch).loss


def _calls(gpt2: _Gpt2, shapes: int) -> Iterator[dict[str, Any]]:
    """New and known shapes, the program taken out."""
    static, ranged = (gpt2.step(gpt2.batch(), ranged=each, memory="60%") for each in (False, True))
    for step in (static, ranged):
        for _ in range(2):  # the optimizer's first step has a program of its own
            step(**gpt2.batch())
    draws = random.Random(0)
    drawn = dict.fromkeys((draws.randint(*_ROWS), draws.randint(*_LENGTHS)) for _ in range(shapes))
    batches = [gpt2.batch(*shape) for shape in drawn]
    for batch in batches[: shapes // 4]:  # each member's program is written at its first use, and kept
        ranged(**batch)
    operators = len(static.plan.graph.nodes)
    with _without_programs():
        largest = gpt2.batch()
        new, own = _in_turns(static, largest, ranged, batches[shapes // 4 :])
        yield _row("new shape, us", operators, statistics.median(own), statistics.median(new), "difference at most 1000", len(new))
        known, own = _in_turns(static, largest, ranged, 5 * batches)
    yield _row("known shape, us", operators, statistics.median(own), statistics.median(known), "difference at most 50", len(known))


def _in_turns(
    static: Any, largest: dict[str, torch.Tensor], ranged: Any, batches: list[dict[str, torch.Tensor]]
) -> tuple[list[float], list[float]]:
    """Microseconds of the range's calls, and of as many of the other step's beside them."""
    pairs = [(_us(lambda batch=batch: ranged(**batch)), _us(lambda: static(**largest))) for batch in batches]
    return [mine for mine, _ in pairs], [own for _, own in pairs]


@contextmanager
def _without_programs() -> Iterator[None]:
    """Steps do all that they do but to run their programs."""
    run = Variant.run
    Variant.run = lambda *_: (None, False)  # type: ignore[method-assign, assignment, return-value]
    gc.disable()
    try:
        yield
    finally:
        Variant.run = run  # type: ignore[method-assign]
        gc.enable()


def _us(call: Callable[[], Any]) -> float:
    begun = time.process_time_ns()
    call()
    return 1e-3 * (time.process_time_ns() - begun)


def _steps(gpt2: _Gpt2, turns: int, rows: int, length: int) -> dict[str, Any]:
    """Whole steps of both, in turns."""
    batch = gpt2.batch(rows, length)
    steps = [gpt2.step(batch, ranged=each) for each in (False, True)]
    taken: list[list[float]] = [[], []]
    for turn in range(turns + 2):
        for which in (0, 1) if turn % 2 else (1, 0):
            begun = time.process_time()
            steps[which](**batch)
            taken[which].append(1e3 * (time.process_time() - begun))
    static, ranged = (statistics.median(each[2:]) for each in taken)
    return _row(f"step of {rows} x {length}, processor ms", len(steps[0].plan.graph.nodes), static, ranged, "ratio at most 1.01", turns)


def _captures(gpt2: _Gpt2, memory: str | None, turns: int) -> dict[str, Any]:
    """From the call of `optimize` to the step, in turns; a share of the memory is searched anew each time."""
    taken: list[list[float]] = [[], []]
    operators = 0
    for turn in range(turns + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            _forget_searches()
            begun = time.process_time()
            step = gpt2.step(gpt2.batch(), ranged=bool(which), memory=memory)
            taken[which].append(time.process_time() - begun)
            operators = len(step.plan.graph.nodes)
    static, ranged = (statistics.median(each[1:]) for each in taken)  # the first measures operators
    return _row(f"to the step{'' if memory is None else f', {memory}'}, processor s", operators, static, ranged, "ratio at most 2", turns)


def _forget_searches() -> None:
    """What was searched for a program is kept on disk, in this process' own folder."""
    for path in Path(os.environ["LOWTIDE_CACHE"]).rglob("searched/*.json"):
        path.unlink()


def _row(question: str, operators: int, static: float, ranged: float, bar: str, repeats: int) -> dict[str, Any]:
    return {
        "question": question, "operators": operators, "static": static, "ranged": ranged, "ratio": ranged / static,
        "difference": ranged - static, "bar": bar, "repeats": repeats,
    }  # fmt: skip


if __name__ == "__main__":
    main()
