"""Any program that does something beside computing leaves what eager leaves, whatever its caller changes between steps."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.any_effects import DIFFERENT, trial
from lowtide.capture.effects.actions import StepOutputs

PROGRAMS = int(os.environ.get("LOWTIDE_EFFECT_PROGRAMS", "3"))  # `python -m bench.any_effects` runs thousands, for 20 steps
STEPS = int(os.environ.get("LOWTIDE_EFFECT_STEPS", "6"))


@settings(deadline=None, max_examples=PROGRAMS)
@given(st.integers(0, 2**32))
def test_a_program_leaves_what_eager_leaves_or_is_refused(seed: int):
    verdict = trial(seed, STEPS)
    assert verdict.kind != DIFFERENT, verdict.why


@pytest.mark.parametrize("seed", [1, 4])
def test_what_a_step_leaves_out_is_seen(seed: int, monkeypatch: pytest.MonkeyPatch):
    put = StepOutputs.put

    def put_but_the_last(self: StepOutputs, results: Any, before: Any) -> None:
        last = len(self.actions) - 1
        put(replace(self, actions=(*self.actions[:last], *(lambda results, before: None for _ in self.actions[last:]))), results, before)

    monkeypatch.setattr(StepOutputs, "put", put_but_the_last)
    assert trial(seed, 3).kind == DIFFERENT


def test_a_number_that_a_capture_has_not_met_is_read_like_any_other():
    """It was taken for an input of the step, where the program had it for a constant."""
    assert trial(796, 15).kind == "right"
