"""Freezes what a step runs: makes of it a function without the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.api.frozen import Frozen
from lowtide.api.running.variant import Variant
from lowtide.errors import StepError
from lowtide.runtime.batch import BatchSpec


def freeze(variant: Variant, batch: BatchSpec, inputs: Sequence[Any]) -> Frozen:
    """A variant on what it ran on last. Raises StepError for one that cannot be frozen."""
    check_can_be_frozen(variant)
    return Frozen(variant, batch, inputs, {name: network.frozen() for name, network in variant.networks.items()})


def check_can_be_frozen(variant: Variant) -> None:
    """Raise StepError for what is no inference by generated kernels alone."""
    if not (variant.is_generated and variant.leaves_only_its_result):
        raise StepError(_REFUSED)


_REFUSED = (
    "frozen: expected an inference function with generated kernels (exact=False, on a CPU, with a C++ compiler) that changes nothing of "
    "the model's, of one shape; this step is none: keep the step itself, it holds no weights but the model's"
)
