"""Random generators during a capture: nothing moves them, and a program that seeds them, or draws from Python's or NumPy's, is refused.

Other threads may draw meanwhile: their numbers are the next ones, as ever, and count for nothing here. A generator of the program's own
(`generator=g`) is a constant of the graph: each step draws from that very object. Whether the program had it before, and leaves its state
alone, shows where it is known beforehand: `known_generators` is for a second capture.

Draws that a program repeats under a state of the generator that it has put back, as checkpointing does, are copies of what was drawn there.
What follows a state is the same each time, for one kernel with equal inputs in one layout. The CPU's generator alone is followed so.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from itertools import count, zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.care.turns import during, listed, placed, undoing
from lowtide.capture.effects.stand_ins import DrawnError
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import is_collective, is_random, row_of
from lowtide.ir.operators.row import CLONE

_REMEDY = "which a captured step would not: seed before the step, or draw once for all"
_GENERATOR = "default_generator"  # by which functions of `torch.random` find it
_watching: ContextVar[tuple[_Seeds, _Own] | None] = ContextVar("watching", default=None)  # of the capture under way
_drawing: list[_Draws] = []  # of the captures under way, the innermost last: looked at by all threads
_lock = threading.RLock()  # around each draw that is noted
_each_step: ContextVar[bool] = ContextVar("each_step", default=False)  # whether what this thread draws each step draws
_known: ContextVar[tuple[torch.Generator, ...]] = ContextVar("known", default=())
_stand_ins = count(2**40)  # seeds that nobody else uses: no state is made up twice


@contextmanager
def untouched_randomness(states: list[weakref.ref[torch.Tensor]]) -> Iterator[None]:
    """Every generator is as before afterwards, but for what other threads drew. What the program is given as a state is added to `states`.

    Raises CaptureError if the program drew from Python's or NumPy's, or seeded torch's, which no graph could follow.
    """
    seeds, own = _Seeds(states), _Own(_known.get())
    of_numpy = [(np.random, name) for name in (*numpys_functions(), "set_state", "seed")]
    draws = (
        _Draws("random", _of_python(), random.getstate, random.setstate, lambda state: state[1:]),
        _Draws("numpy.random", of_numpy, partial(np.random.get_state, legacy=False), np.random.set_state, _words),
    )
    with undoing() as undo, during(_watching, (seeds, own)), ExitStack() as stack:
        for each in (seeds, own):
            undo(each.put_back)
        own.begin()
        stack.enter_context(seeds.followed())
        for drawn in draws:
            stack.enter_context(drawn.followed())
        yield
        if seeds.is_seeded():
            raise CaptureError(f"the program seeds torch's generator, {_REMEDY}")
        own.refuse_seeded()
        if names := [each.name for each in draws if each.drew()]:
            raise DrawnError(
                f"the program draws from {' and '.join(names)}: a captured step would repeat the same choice for ever; draw with torch, or "
                "call functions of `random` and `numpy.random` by these names (`random.random()`)"
            )


def known_generators(generators: Iterable[torch.Generator]) -> AbstractContextManager[None]:
    """What is captured inside draws from these generators of its own, or is refused: others it would make anew in each step."""
    return during(_known, tuple(generators))


def which(generator: torch.Generator) -> int:
    """The same for the same generator, of which Python may have several objects."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def is_default(generator: torch.Generator) -> bool:
    """Whether it is what torch draws from where none is named."""
    return any(which(generator) == which(each) for each in _defaults())


def _defaults() -> tuple[torch.Generator, ...]:
    on_cuda = torch.cuda.default_generators if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    return torch.default_generator, *on_cuda


def draw(node: Node, generator: torch.Generator | None = None) -> Node | None:
    """A node draws, from one of the program's own or from torch's generator; the node that drew there before, under the same state.

    Raises CaptureError where the program has seeded it, be it for a while (`fork_rng`), or has made it in this very step.
    """
    if (watching := _watching.get()) is None:
        return None
    seeds, own = watching
    if generator is None:
        return seeds.draw(node)
    own.draw(node.op, generator)
    return None


def _of_python() -> list[tuple[Any, str]]:
    """What draws from Python's generator: all else calls those two of the object behind the module."""
    inner: Any = random._inst
    return [(owner, name) for owner in (random, inner) for name in ("random", "getrandbits")] + [(random, "seed"), (random, "setstate")]


def numpys_functions() -> list[str]:
    legacy = np.random.mtrand._rand
    names = [name for name, item in vars(np.random).items() if getattr(bare(item), "__self__", None) is legacy]
    return [name for name in names if name not in ("get_state", "set_state", "seed")]


def bare(item: Any) -> Any:
    """The function that those in its place wrap."""
    while hasattr(item, "__wrapped__"):
        item = item.__wrapped__
    return item


@contextmanager
def drawn_in_each_step() -> Iterator[None]:
    """What this thread draws meanwhile from Python's or NumPy's generator is no refusal: each step draws it again."""
    with _lock, during(_each_step, True):
        yield
        for each in _drawing:
            each.note_done(each.name)


def _words(state: Any) -> tuple[Any, ...]:
    """What of a state of NumPy's tells it from others."""
    return state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]


class _Draws:
    """Who draws from one generator of Python's. What nobody else was seen to do, this thread did."""

    def __init__(
        self, name: str, functions: list[tuple[Any, str]], state: Callable[[], Any], set_state: Callable[[Any], None],
        words: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self.name, self._functions, self._state, self._set_state, self._words = name, functions, state, set_state, words
        self._before, self._thread = state(), threading.get_ident()
        self._known = words(self._before)  # after the last draw that was seen
        self._is_mine, self._others = False, False

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While this lasts, who draws is noted; what others drew before everything was noted counts for nothing."""
        with ExitStack() as stack:
            for owner, name in self._functions:
                stack.enter_context(placed(owner, name, self._noting(getattr(owner, name))))
            with undoing() as undo:
                undo(self._put_back)
                with _lock:
                    self._before, self._is_mine = self._state(), False
                    self.note_done(self.name)
                    stack.enter_context(listed(_drawing, self))
                yield

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function, updated=())
        def noting(*args: Any, **kwargs: Any) -> Any:  # a thread may be in it that found it during an earlier capture
            with _lock:
                for each in _drawing:
                    each.note_draw(self.name)
                try:
                    return function(*args, **kwargs)
                finally:
                    for each in _drawing:
                        each.note_done(self.name)

        return noting

    def note_draw(self, name: str) -> None:
        if name == self.name and _each_step.get():
            self._is_mine |= self._is_moved()
        elif name == self.name:
            mine = threading.get_ident() == self._thread
            self._is_mine |= mine or self._is_moved()
            self._others |= not mine

    def note_done(self, name: str) -> None:
        if name == self.name:
            self._known = self._words(self._state())

    def drew(self) -> bool:
        with _lock:
            return (self._is_mine and self._words(self._state()) != self._words(self._before)) or self._is_moved()

    def _put_back(self) -> None:
        """The generator as it was, unless others have gone on with it."""
        with _lock:
            if not self._others and self._words(self._state()) != self._words(self._before):
                self._set_state(self._before)

    def _is_moved(self) -> bool:
        return bool(self._words(self._state()) != self._known)


class _Own:
    """The generators of the program's own that it draws from, by their addresses.

    Nothing is drawn during a capture: each draw puts a made-up state there, so that one shows which the program puts there itself.
    """

    def __init__(self, known: tuple[torch.Generator, ...]) -> None:
        self._known = known
        self._before: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._now: dict[int, bytes] = {}

    def begin(self) -> None:
        for each in self._known:
            self._move(each)

    def draw(self, operator: str, generator: torch.Generator) -> None:
        where = f"operator {operator} at {users_line()}"
        if self._known and which(generator) not in self._before:
            raise CaptureError(
                f"{where} draws from a generator that the program makes anew in each step, which a captured step would not: make it once, "
                "before the step, and hold it (`self.noise = torch.Generator().manual_seed(0)`)"
            )
        if self._now.get(which(generator), state := _bytes_of(generator)) != state:
            raise CaptureError(f"{where} draws from a generator after the program has seeded it, or has put back its state, {_REMEDY}")
        self._move(generator)

    def refuse_seeded(self) -> None:
        """Raise CaptureError where one has another state than its last draw has left."""
        if any(_bytes_of(generator) != self._now[at] for at, (generator, _) in self._before.items()):
            raise CaptureError(f"the program seeds a generator that it draws from, or puts back its state, {_REMEDY}")

    def put_back(self) -> None:
        with _disable_current_modes():
            for generator, state in self._before.values():
                generator.set_state(state)

    def _move(self, generator: torch.Generator) -> None:
        with _disable_current_modes():
            self._before.setdefault(which(generator), (generator, generator.get_state()))
            generator.set_state(torch.Generator(generator.device).manual_seed(next(_stand_ins)).get_state())
        self._now[which(generator)] = _bytes_of(generator)


def _bytes_of(generator: torch.Generator) -> bytes:
    with _disable_current_modes():
        return bytes(generator.get_state().numpy())


class _Seeds:
    """Who seeds torch's generators, or puts other states into them: of the CPU's, this thread only believes to do so.

    Nothing is drawn during a capture. So a state that the program asks for is made up: one for each number of draws so far, by which it is
    known again where the program puts it back (as `fork_rng` and checkpointing do).
    """

    def __init__(self, states: list[weakref.ref[torch.Tensor]]) -> None:
        self._given = states
        self._before = [(each, each.initial_seed(), each.get_state()) for each in _defaults()]
        self._stands_in, self.thread, self._others_seed = torch.Generator(), threading.get_ident(), False
        self._drawn: list[Node] = []
        self._at: int | None = 0  # where in the sequence of draws the program believes to be; None where that cannot be known
        self._states: dict[bytes, int] = {}

    def followed(self) -> AbstractContextManager[None]:
        """While this lasts, `torch.manual_seed`, `torch.set_rng_state` and their like come here."""
        return placed(torch.random, _GENERATOR, _Followed(self, vars(torch.random)[_GENERATOR]))

    def draw(self, node: Node) -> Node | None:
        if self._at is None or self._is_reached():
            raise CaptureError(
                f"operator {node.op} at {users_line()} draws from torch's generator after the program has seeded it, {_REMEDY}"
            )
        self._at += 1
        if self._at <= len(self._drawn):  # the program has put back a state that it had asked for
            return self._drawn[self._at - 1]
        self._drawn.append(node)
        return None

    def is_seeded(self) -> bool:
        """Whether the program goes on from elsewhere than eager PyTorch would in a second step."""
        return self._at != len(self._drawn) or self._is_reached()

    def _is_reached(self) -> bool:
        """Whether a generator was seeded on another path than torch's functions."""
        return not self._others_seed and any(_starts_anew(*each) for each in self._before)

    def is_mine(self) -> bool:
        """Whether this thread calls, and not another, which may seed."""
        mine = threading.get_ident() == self.thread
        self._others_seed |= not mine
        return mine

    def seed(self) -> None:
        self._at = None

    def state(self) -> torch.Tensor:
        with _disable_current_modes():
            state = self._stands_in.manual_seed(-1 if self._at is None else self._at).get_state()
            if self._at is not None:
                self._states[bytes(state.numpy())] = self._at
            self._given.append(weakref.ref(state))
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

    def initial_seed(self) -> int:
        if threading.get_ident() == self._seeds.thread:
            raise CaptureError(f"the program reads the seed of torch's generator at {users_line()}, {_REMEDY}")
        return self._generator.initial_seed()

    def get_state(self) -> torch.Tensor:
        return self._seeds.state() if threading.get_ident() == self._seeds.thread else self._generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        if self._seeds.is_mine():
            self._seeds.set_state(state)
        else:
            self._generator.set_state(state)


def copies(node: Node, drawn: Node, nodes: Iterable[Node]) -> list[Node]:
    """What makes the results of `node` from those of the one that `drawn` was. Raises CaptureError where they are others."""
    pairs = list(zip_longest(node.outputs, drawn.outputs))
    alike = not node.writes and all(old is not None and _layout(new) == _layout(old) for new, old in pairs if new is not None)
    on_cpu = all(value.storage.device == "cpu" for value in drawn.results)
    if node.op != drawn.op or not alike or not on_cpu or not _same_arguments(node, drawn, nodes):
        raise CaptureError(
            f"operator {node.op} at {users_line()} draws random numbers after the program has put back a state of torch's generator, and "
            f"not what {drawn.op} drew there before: seed before the step, or draw once for all. Where checkpointing does so, remove it "
            "(take the plain loss for one that caches): lowtide decides what to recompute; or set the dropout to 0"
        )
    return [Node(CLONE, (old,), (new,), source=node.source) for new, old in pairs if new is not None and old is not None]


def _layout(value: Value | None) -> Any:
    return None if value is None else (value.dtype, value.shape, value.stride, value.storage.device)


def _same_arguments(one: Node, two: Node, nodes: Iterable[Node]) -> bool:
    """Whether two calls are given the same, be it computed twice; of what they write over, the same layout."""
    makers = {value: node for node in nodes for value in node.results}
    unread = row_of(one.op).unread
    waiting: list[tuple[Any, Any]] = [(one.kwargs, two.kwargs)]
    for at, (new, old) in enumerate(zip_longest(one.args, two.args)):
        if at in unread and isinstance(new, Value) and isinstance(old, Value):  # written over
            new, old = _layout(new), _layout(old)
        waiting.append((new, old))
    seen = set[tuple[Value, Value]]()
    while waiting:
        new, old = waiting.pop()
        if new is old:
            continue
        if type(new) is not type(old):
            return False
        if isinstance(new, tuple):
            waiting.extend(zip_longest(new, old))
        elif not isinstance(new, Value):
            if repr(new) != repr(old):
                return False
        elif (new, old) not in seen:
            seen.add((new, old))
            first, second = makers.get(new), makers.get(old)
            if first is None or second is None or first.op != second.op or _layout(new) != _layout(old):
                return False
            if any(each.writes or is_random(each) or is_collective(each) for each in (first, second)):  # may give something else each time
                return False
            if first.results.index(new) != second.results.index(old):
                return False
            waiting.extend(((first.args, second.args), (first.kwargs, second.kwargs)))
    return True
