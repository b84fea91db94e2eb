"""Random generators during a capture: nothing moves them, and a program that seeds them, or draws from Python's or NumPy's, is refused.

Other threads may draw meanwhile: their numbers are the next ones, as ever, and count for nothing here.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.care.turns import listed, placed, undoing
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

_REMEDY = "which a captured step would not: seed before the step, or draw once for all"
_GENERATOR = "default_generator"  # by which functions of `torch.random` find it
_seeds: list[_Seeds] = []  # of the captures under way, the innermost last


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Every generator is as before afterwards, but for what other threads drew.

    Raises CaptureError if the program drew from Python's or NumPy's, or seeded torch's, which no graph could follow.
    """
    seeds = _Seeds()
    draws = (
        _Draws("random", _of_python(), random.getstate, random.setstate, lambda state: state[1]),
        _Draws("numpy.random", _of_numpy(), partial(np.random.get_state, legacy=False), np.random.set_state, _words),
    )
    with undoing() as undo, ExitStack() as stack:
        for each in (seeds, *draws):
            undo(each.put_back)
        stack.enter_context(listed(_seeds, seeds))
        stack.enter_context(seeds.followed())
        for drawn in draws:
            stack.enter_context(drawn.followed())
        yield
        if seeds.is_seeded():
            raise CaptureError(f"the program seeds torch's generator, {_REMEDY}")
        if names := [each.name for each in draws if each.drew()]:
            raise CaptureError(
                f"the program draws from {' and '.join(names)}: a captured step would repeat the same choice for ever; draw with torch"
            )


def draw(operator: str) -> None:
    """An operator draws from torch's generator. Raises CaptureError where the program has seeded it, be it for a while (`fork_rng`)."""
    if _seeds and _seeds[-1].is_seeded():
        raise CaptureError(f"operator {operator} at {users_line()} draws from torch's generator after the program has seeded it, {_REMEDY}")
    if _seeds:
        _seeds[-1].draw()


def _of_python() -> list[tuple[Any, str]]:
    """What draws from Python's generator: all else calls those two of the object behind the module."""
    inner: Any = random._inst
    return [(owner, name) for owner in (random, inner) for name in ("random", "getrandbits")] + [(random, "seed"), (random, "setstate")]


def _of_numpy() -> list[tuple[Any, str]]:
    legacy = np.random.mtrand._rand
    methods = [name for name, item in vars(np.random).items() if getattr(item, "__self__", None) is legacy]
    return [(np.random, name) for name in (*methods, "seed") if name != "get_state"]


def _words(state: Any) -> tuple[Any, ...]:
    """What of a state of NumPy's tells it from others."""
    return state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]


class _Draws:
    """Who draws from one generator of Python's. What nobody else was seen to do, this thread did."""

    def __init__(
        self,
        name: str,
        functions: list[tuple[Any, str]],
        state: Callable[[], Any],
        set_state: Callable[[Any], None],
        words: Callable[[Any], Any],
    ) -> None:
        self.name, self._functions, self._state, self._set_state, self._words = name, functions, state, set_state, words
        self._before, self._thread, self._lock = state(), threading.get_ident(), threading.RLock()
        self._known = words(self._before)  # after the last draw that was seen
        self._is_mine, self._others = False, False

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While this lasts, who draws is noted."""
        with ExitStack() as stack:
            for owner, name in self._functions:
                stack.enter_context(placed(owner, name, self._noting(getattr(owner, name))))
            yield

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function, updated=())
        def noting(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                mine = threading.get_ident() == self._thread
                self._is_mine |= mine or self._is_moved()
                self._others |= not mine
                try:
                    return function(*args, **kwargs)
                finally:
                    self._known = self._words(self._state())

        return noting

    def drew(self) -> bool:
        """Whether this thread did, and left it at that."""
        return (self._is_mine and self._words(self._state()) != self._words(self._before)) or self._is_moved()

    def put_back(self) -> None:
        """The generator as it was, unless others have gone on with it."""
        if not self._others and self._words(self._state()) != self._words(self._before):
            self._set_state(self._before)

    def _is_moved(self) -> bool:
        return bool(self._words(self._state()) != self._known)


class _Seeds:
    """Who seeds torch's generators, or puts other states into them: of the CPU's, this thread only believes to do so.

    Nothing is drawn during a capture. So a state that the program asks for is made up: one for each number of draws so far, by which it is
    known again where the program puts it back (as `fork_rng` and checkpointing do).
    """

    def __init__(self) -> None:
        on_cuda = torch.cuda.default_generators if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
        self._before = [(each, each.initial_seed(), each.get_state()) for each in (torch.default_generator, *on_cuda)]
        self._stands_in, self.thread, self._others_seed = torch.Generator(), threading.get_ident(), False
        self._drawn = 0
        self._at: int | None = 0  # where in the sequence of draws the program believes to be; None where that cannot be known
        self._states: dict[bytes, int] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While this lasts, `torch.manual_seed`, `torch.set_rng_state` and their like come here."""
        with placed(torch.random, _GENERATOR, _Followed(self, vars(torch.random)[_GENERATOR])):
            yield

    def draw(self) -> None:
        self._drawn += 1
        self._at = None if self._at is None else self._at + 1

    def is_seeded(self) -> bool:
        """Whether the program goes on from elsewhere than eager PyTorch would in a second step."""
        return self._at != self._drawn or (not self._others_seed and any(_starts_anew(*each) for each in self._before))

    def is_mine(self) -> bool:
        """Whether this thread calls, and not another, which may seed."""
        mine = threading.get_ident() == self.thread
        self._others_seed |= not mine
        return mine

    def seed(self) -> None:
        self._at = None

    def state(self) -> torch.Tensor:
        """The state at this number of draws."""
        with _disable_current_modes():
            state = self._stands_in.manual_seed(-1 if self._at is None else self._at).get_state()
            if self._at is not None:
                self._states[bytes(state.numpy())] = self._at
            return state

    def set_state(self, state: torch.Tensor) -> None:
        with _disable_current_modes():
            self._at = self._states.get(bytes(state.numpy()))

    def put_back(self) -> None:
        """What was seeded on another path than torch's functions (`torch.default_generator.manual_seed`)."""
        for generator, seed, state in self._before:
            if not self._others_seed and _starts_anew(generator, seed, state):
                generator.set_state(state)


def _starts_anew(generator: torch.Generator, seed: int, state: torch.Tensor) -> bool:
    """Whether a generator of this seed and state was seeded since. Draws of other threads move it on."""
    if generator.initial_seed() != seed:
        return True
    with _disable_current_modes():
        now = generator.get_state()
        return not torch.equal(now, state) and torch.equal(now, torch.Generator(generator.device).manual_seed(seed).get_state())


class _Followed:
    """Torch's generator for the functions of `torch.random`: they find it by name."""

    def __init__(self, seeds: _Seeds, generator: torch.Generator) -> None:
        self._seeds, self._generator = seeds, generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def manual_seed(self, seed: int) -> torch.Generator:
        if not self._seeds.is_mine():
            return self._generator.manual_seed(seed)
        self._seeds.seed()
        return self._generator

    def seed(self) -> int:
        if not self._seeds.is_mine():
            return self._generator.seed()
        self._seeds.seed()
        return self._generator.initial_seed()

    def get_state(self) -> torch.Tensor:
        return self._seeds.state() if threading.get_ident() == self._seeds.thread else self._generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        if self._seeds.is_mine():
            self._seeds.set_state(state)
        else:
            self._generator.set_state(state)
