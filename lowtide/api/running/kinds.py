"""The kinds of batches that a step has programs for, by what Python reads from the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.api.running.variant import Variant
from lowtide.capture.data.facts import Facts, Reading, brief
from lowtide.runtime.caller import View


def read_unlike(now: View, variants: Iterable[Variant]) -> str:
    """What is read from the data otherwise than when another of these programs was captured; "" where nothing is."""
    facts = Facts(now.read)
    unlike = (facts.unlike(variant.captured.readings) for variant in variants if variant.fits_settings(now))
    reading = next((each for each in unlike if each is not None), None)
    return "" if reading is None else f" ({reading} gives {brief(str(facts.outcome(reading.question)))} there)"


def too_many(readings: Sequence[tuple[Reading, ...]]) -> str:
    """Why no further program is captured: what changes most often, and where it is read."""
    outcomes: dict[str, dict[str, Reading]] = {}
    for reading in (each for program in readings for each in program):
        outcomes.setdefault(reading.question.key, {})[reading.outcome] = reading
    often = max(outcomes.values(), key=len)
    first, few = next(iter(often.values())), ", ".join(brief(outcome) for outcome in list(often)[:3])
    return (
        f"{len(readings)} programs were captured for as many kinds of batches, and this batch is of yet another kind: {first} came out in "
        f"{len(often)} ways ({few}, ...) and changes with almost every batch. Python reads it, so a program is fixed for it: compute "
        "with tensors instead (torch.where, masks), or pad and bucket batches so that few kinds are left"
    )
