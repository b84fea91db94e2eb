"""Programs with effects made at random, eager and optimized side by side, changed from outside between steps: equal to the last bit.

    python -m bench.any_effects [--count 2000] [--seed 0] [--steps 20] [--only SEED]

A number names a program (`bench.effect_programs`) and gives the same one each time. After each step are compared: the loss, parameters,
buffers, the optimizer's state, all places outside, and the states of random generators. What lowtide refuses is announced; so is what it
says that it leaves to the caller's own loop, where numbers are compared all the same. A change that it sees too late is a difference.
"""

from __future__ import annotations

import argparse
import collections
import gc
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from bench.effect_programs import Program, build
from bench.results import Results
from bench.sweep import portable

COLUMNS = ("verdict", "programs", "which", "example")
DIFFERENT = "different"


@dataclass(frozen=True)
class Verdict:
    """What became of a program: "right", "told" (with a warning), "refused", "refused later", "different", "not in eager"."""

    kind: str
    why: str = ""
    steps: int = 0  # that were compared


@dataclass(frozen=True)
class _Turn:
    """One call: what it gave or raised, and what it has left."""

    raised: str
    left: dict[str, str]


def trial(seed: int, steps: int) -> Verdict:
    """Both ways, step by step."""
    expected = _turns(build(seed, steps), _eager)
    if (odd := next((at for at, turn in enumerate(expected) if turn.raised and at not in build(seed, steps).failing), None)) is not None:
        return Verdict("not in eager", expected[odd].raised)
    told: list[str] = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            got = _turns(build(seed, steps), _optimized)
        except lowtide.LowtideError as error:
            return Verdict("refused", _brief(error))
        told = sorted({_kind(str(each.message)) for each in heard if "lowtide" in str(each.message) or "captured" in str(each.message)})
    if unseen := next((each for each in told if "has not seen" in each), ""):
        return Verdict(DIFFERENT, unseen)
    for at, (one, two) in enumerate(zip(expected, got, strict=False)):
        if two.raised.startswith("lowtide") and not one.raised:
            return Verdict("refused later", two.raised, at)
        if bool(one.raised) != bool(two.raised):
            return Verdict(DIFFERENT, f"step {at}: eager {one.raised or 'goes on'}, lowtide {two.raised or 'goes on'}", at)
        if one.raised and not two.raised.startswith("lowtide") and one.raised.partition(":")[0] != two.raised.partition(":")[0]:
            return Verdict(DIFFERENT, f"step {at}: eager {one.raised}, lowtide {two.raised}", at)
        places = [where for where in {**one.left, **two.left} if one.left.get(where) != two.left.get(where)]
        if places:
            first = places[0]
            shown = f"step {at}: {first} is {_short(two.left.get(first))}, eager has {_short(one.left.get(first))}; {len(places)} in all"
            return Verdict(DIFFERENT, shown + ("; told: " + "; ".join(told) if told else ""), at)
    return Verdict("told" if told else "right", "; ".join(told), len(got))


Call = Callable[..., Tensor]


def _turns(program: Program, make: Callable[[Program], Call]) -> list[_Turn]:
    call, turns = make(program), []
    for number, batch in enumerate(program.batches):
        for change in program.between.get(number, ()):
            change()
        before = {name: item.clone() for name, item in program.net.state_dict().items()}
        raised, loss = "", None
        try:
            loss = call(*batch).detach()
        except lowtide.LowtideError as error:
            raised = f"lowtide {_brief(error)}"
            if number not in program.failing:
                turns.append(_Turn(raised, {}))
                break
        except Exception as error:
            raised = f"{type(error).__name__}: {str(error)[:120]}"
        if number in program.failing:  # a step that fails leaves no places: the caller goes back to what was before
            program.net.load_state_dict(before)
            program.world.places.begin()
        left: dict[str, str] = {}
        _note({"loss": loss, **program.left()}, "", left)
        turns.append(_Turn(raised, left))
    return turns


def _eager(program: Program) -> Call:
    def step(*batch: Any) -> Tensor:
        program.optimizer.zero_grad()
        loss = program.loss(program.net, *batch)
        loss.backward()
        if program.after_backward is not None:
            program.after_backward(program.net)
        program.optimizer.step()
        return loss

    return step


def _optimized(program: Program) -> Call:
    made: Call = lowtide.optimize(
        program.net,
        program.batches[0],
        loss=program.loss,
        optimizer=program.optimizer,
        training=lowtide.Training(after_backward=program.after_backward),
        planning=lowtide.Planning(workspaces=False, progress=False),
    )
    return made


def _note(item: Any, where: str, left: dict[str, str]) -> None:
    """What lies where, so that two of the same text are the same bits."""
    if isinstance(item, Tensor):
        data = item.detach().contiguous().reshape(-1)
        kind = "Parameter" if isinstance(item, nn.Parameter) else "Tensor"
        left[where] = f"{kind} {item.dtype} {tuple(item.shape)} {_bits(data)}"
    elif isinstance(item, dict):
        left[where] = f"{type(item).__name__} {[*map(str, item)]}"
        for key, each in item.items():
            _note(each, f"{where}.{key}", left)
    elif isinstance(item, (list, tuple, collections.deque)):
        left[where] = f"{type(item).__name__} of {len(item)}"
        for at, each in enumerate(item):
            _note(each, f"{where}[{at}]", left)
    else:
        left[where] = f"{type(item).__name__} {item!r}"


def _bits(data: Tensor) -> str:
    return repr(data.tolist())  # Python tells all numbers apart, but for one nan from another


def _short(text: str | None) -> str:
    return "nothing" if text is None else text if len(text) < 120 else text[:117] + "..."


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {portable(str(error))[:400]}"


def _kind(text: str) -> str:
    """A message without what differs from program to program."""
    return re.sub(r"'[^']*'|\d+(\.\d+)?|[\w/]+\.py", "_", text)[:400]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", type=int, help="this program alone, and what it does")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.count) if options.only is None else [options.only]
    if options.only is not None:
        print("\n".join(build(options.only, options.steps).parts))
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    begun = time.monotonic()
    for number, seed in enumerate(seeds, 1):
        verdict = trial(seed, options.steps)
        kind = verdict.kind, "" if verdict.kind in ("right", DIFFERENT) else _kind(verdict.why)
        found.setdefault(kind, []).append((seed, verdict.why))
        if verdict.kind != "right":
            print(seed, verdict.kind, f"after {verdict.steps} steps:", verdict.why, flush=True)
        if not number % 10:
            gc.collect()
        if not number % 50:
            print(_summary(found), f"{(time.monotonic() - begun) / number:.2f} s each", flush=True)
            if options.only is None:
                _results(found, options.steps).save()
    print(_summary(found))


def _summary(found: dict[tuple[str, str], list[tuple[int, str]]]) -> str:
    counts = collections.Counter[str]()
    for (verdict, _), rows in found.items():
        counts[verdict] += len(rows)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def _results(found: dict[tuple[str, str], list[tuple[int, str]]], steps: int) -> Results:
    rows = [
        {"verdict": verdict, "programs": len(each), "which": " ".join(str(seed) for seed, _ in each[:20]), "example": each[0][1]}
        for (verdict, _), each in sorted(found.items(), key=lambda item: (item[0][0], -len(item[1])))
    ]
    title = f"Random programs with effects, changed from outside, {steps} steps eager and optimized, bit for bit"
    return Results("any_effects", title, COLUMNS, tuple(rows), (_summary(found), "told: equal, with a warning; refused: with a remedy"))


if __name__ == "__main__":
    main()
