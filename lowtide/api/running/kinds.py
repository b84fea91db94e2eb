"""The kinds of batches that a step has programs for, by what Python reads from the data."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.api.running.variant import Variant
from lowtide.capture.data.facts import Facts, brief
from lowtide.runtime.caller import View


def read_unlike(now: View, variants: Iterable[Variant]) -> str:
    """What is read from the data otherwise than when another of these programs was captured; "" where nothing is."""
    facts = Facts(now.read)
    unlike = (facts.unlike(variant.captured.readings) for variant in variants if variant.fits_settings(now))
    reading = next((each for each in unlike if each is not None), None)
    return "" if reading is None else f" ({reading} gives {brief(str(facts.outcome(reading.question)))} there)"


def change_of_kind(now: View, variants: Iterable[Variant]) -> str:
    """What is read from the data otherwise than when any of these programs was captured; "" where they are not for it otherwise."""
    facts = Facts(now.read)
    unlike = (facts.unlike(variant.captured.readings) for variant in variants if variant.premises.holds() and variant.fits_settings(now))
    reading = next((each for each in unlike if each is not None), None)
    return "" if reading is None else f"{reading} gives {facts.outcome(reading.question)}"
