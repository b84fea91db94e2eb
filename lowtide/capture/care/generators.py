"""Random generators during a capture: as before afterwards, and a program that seeds or steers them is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

_SEED = 0x10BD_71DE  # of torch's generators for as long as a capture lasts, so that seeding them with another number shows
_watched: list[torch.Generator] = []  # while a capture lasts: what was seeded so
_REMEDY = "which a captured step would not: seed before the step, or draw once for all"


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Every generator is as before afterwards.

    Raises CaptureError if the program drew from Python's or NumPy's, or seeded torch's, which no graph could follow.
    """
    generators = _generators()
    states = [generator.get_state() for generator in generators]
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        for generator in generators:
            generator.manual_seed(_SEED)
        _watched[:] = generators
        yield
        if _is_seeded():
            raise CaptureError(f"the program seeds torch's generator, {_REMEDY}")
        _refuse_draws(random.getstate() != python, repr(np.random.get_state(legacy=False)) != repr(numpy))
    finally:
        _watched.clear()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)


def refuse_seeded(operator: str) -> None:
    """Raise CaptureError for an operator that draws from a generator that the program has seeded, be it for a while only (`fork_rng`)."""
    if _is_seeded():
        raise CaptureError(f"operator {operator} at {users_line()} draws from torch's generator after the program has seeded it, {_REMEDY}")


def _generators() -> list[torch.Generator]:
    on_cuda = torch.cuda.default_generators if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    return [torch.default_generator, *on_cuda]


def _is_seeded() -> bool:
    return any(generator.initial_seed() != _SEED for generator in _watched)


def _refuse_draws(python: bool, numpy: bool) -> None:
    drawn: list[Any] = [name for name, changed in (("random", python), ("numpy.random", numpy)) if changed]
    if drawn:
        raise CaptureError(
            f"the program draws from {' and '.join(drawn)}: a captured step would repeat the same choice for ever; draw with torch"
        )
