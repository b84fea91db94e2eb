"""The optimizer's part of a training step: recorded behind forward and backward pass, as often as it takes to know what each step is given.

Twice, with other stand-in numbers, to see that none escapes. Once more where it changes attributes of its own. In both directions where it
may end early, by what it has computed. For a few parameters where all others are treated alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from lowtide.capture.care.failures import raised_in
from lowtide.capture.difference import is_same
from lowtide.capture.optimizers.alike import Few, NotAlikeError
from lowtide.capture.optimizers.optimizer import Early, Shadow, Stepping, Update
from lowtide.capture.optimizers.own_code import UndeclaredError
from lowtide.capture.optimizers.sample import Sample, copied
from lowtide.capture.optimizers.scalars import DecidesOnDataError, UndecidedError
from lowtide.capture.ranks.shards import gather, refuse_mixing
from lowtide.capture.recorder import Recorder
from lowtide.capture.trace import CapturedStep, Trace
from lowtide.errors import CaptureError
from lowtide.ir.graph import Kind, Slot

_SEEDS = 1, 2  # of the numbers that stand for an optimizer's settings
_checked: set[tuple[Any, ...]] = set()  # kinds of parameters and settings, of which no number escapes torch's optimizers


class EscapedError(CaptureError):
    """Two recordings of a step that differ."""


def optimizer_step(trace: Trace, shadow: Shadow, result: Any, *, checked: bool = True) -> tuple[CapturedStep, Shadow]:
    """Record the optimizer's step on a continuation of the recording, and see that no number escapes.

    What is compared with a program from which none did need not be checked: a number that escaped is a difference.
    """
    tail, update, following = _recorded_update(trace, shadow, _SEEDS[0])
    try:
        if checked:
            _refuse_escaped(trace, shadow, tail)
    except EscapedError:  # or a library has made something in the first recording, which it remembers from then on
        tail.draft.let_go()
        tail, update, following = _recorded_update(trace, shadow, _SEEDS[0])
        _refuse_escaped(trace, shadow, tail)
    return trace.finish(tail, result, update), following


def _refuse_escaped(trace: Trace, shadow: Shadow, whole: Recorder) -> None:
    """Raise CaptureError where two recordings with other stand-in numbers differ.

    Of an optimizer of torch's one parameter of each kind tells as much as all, and as much as another capture has seen of the same.
    """
    one, update = whole, shadow
    if (kinds := shadow.kinds()) is not None:
        seen = (*shadow.manner(), *kinds)
        if seen in _checked and trace.sharded is None:
            return
        update = shadow.sampled(frozenset(kinds.values()))
        one = _recorded_update(trace, update, _SEEDS[0])[0]
    two = _recorded_update(trace, update, _SEEDS[1])[0]
    if not is_same(one.draft, two.draft):
        raise EscapedError(
            f"{type(shadow.optimizer).__name__} turns a hyper-parameter into a constant (through `math`, `torch.tensor` or the like), or "
            "goes on with something that is not in its state (a generator, an array, a counter in a closure or a global), so later "
            "changes would go unseen: it cannot be captured"
        )
    if kinds is not None:
        _checked.add(seen)
    for each in {one, two} - {whole}:
        each.draft.let_go()


def _recorded_update(trace: Trace, shadow: Shadow, seed: int) -> tuple[Recorder, Update, Shadow]:
    """One recording of the optimizer's step, on a continuation of its own. Attributes that it changes are given to the next one."""
    while True:
        try:
            try:
                return _update(trace, shadow, seed)
            except DecidesOnDataError as error:
                return _ending_update(trace, shadow, seed, error)
        except UndeclaredError as error:
            shadow = shadow.with_attributes(error.slots, trace.recorder.draft)


def _ending_update(trace: Trace, shadow: Shadow, seed: int, error: DecidesOnDataError) -> tuple[Recorder, Update, Shadow]:
    """The same of an optimizer that may end its step early, by what the step has computed (D-Adaptation and Prodigy where nothing moves).

    Both outcomes are recorded. Raises what was refused where neither is the end.
    """
    since, given = len(trace.recorder.draft.nodes), len(trace.recorder.draft.inputs)
    recordings: dict[bool, tuple[Recorder, Stepping]] = {}
    for assumed in (True, False):
        with _recording_update(trace, shadow) as tail, _refused_as(error):
            recordings[assumed] = tail, shadow.begin(tail.draft, seed, tail.reader, assumed).run()
    ended = next((outcome for outcome, (tail, each) in recordings.items() if each.scalars.end == len(tail.draft.nodes) - 1), None)
    if ended is None or trace.scaler is not None or trace.sharded is not None:
        raise error
    (short, early), (tail, stepping) = recordings[ended], recordings[not ended]
    update, following = stepping.end()
    last = len(short.draft.nodes) - 1
    early_update = early.end()[0]
    twins = dict(zip(short.draft.inputs[given:], tail.draft.inputs[given:], strict=False))
    for one, other in zip(short.draft.nodes[since:last], tail.draft.nodes[since:last], strict=True):
        twins.update((mine, its) for mine, its in zip(one.outputs, other.outputs, strict=True) if mine is not None and its is not None)
    numbers = {node.outputs[0]: node.args[0] for node in short.draft.nodes[last:] if node.outputs}  # written out: 0 * 1
    assigned, left = dict(enumerate(value for _, value in update.assigned)), list[Early]()
    places = {value: at for at, value in assigned.items()}
    for slot, value in early_update.assigned:
        at = None if value in numbers else places.setdefault(twins.get(value, value), len(places))
        left.append((slot, at, numbers.get(value)))
    for at, slot, item in reversed(early_update.constants):
        left.insert(at, (slot, None, item))
    tail.end_early(tail.draft.nodes[last], [twins.get(value, value) for _, value in early_update.assigned if value not in numbers])
    short.draft.let_go()
    only_then = tuple((Slot("early", (at,)), value) for value, at in places.items() if at not in assigned)
    return tail, replace(update, assigned=(*update.assigned, *only_then), early=tuple(left)), following


@contextmanager
def _refused_as(error: DecidesOnDataError) -> Iterator[None]:
    """What is refused further on was refused at the first decision."""
    try:
        yield
    except (UndeclaredError, UndecidedError):
        raise
    except CaptureError:
        raise error from None


def _update(trace: Trace, shadow: Shadow, seed: int) -> tuple[Recorder, Update, Shadow]:
    if trace.sharded is None and shadow.sample is None and (few := Few.of(shadow.keys_of_looks(trace.recorder.draft))) is not None:
        with suppress(NotAlikeError):
            return _copied_update(trace, shadow, few, seed)
    with _recording_update(trace, shadow) as tail:
        before = len(tail.draft.nodes)
        update, following = shadow.begin(tail.draft, seed, tail.reader).run().end()
        if trace.sharded is not None:
            refuse_mixing(shadow.optimizer, tail.draft.nodes[before:])
            if trace.sharded[1].shard != "parameters" and shadow.sample is None:
                with torch.no_grad():
                    gather(*trace.sharded)
    return tail, update, following


def _copied_update(trace: Trace, shadow: Shadow, few: Few, seed: int) -> tuple[Recorder, Update, Shadow]:
    """The same of a recording for a few parameters. Raises NotAlikeError."""
    with ExitStack() as sampled:
        with _recording_update(trace, shadow) as one:
            sampled.callback(one.draft.let_go)
            sample = Sample.of(few, shadow, one.draft, seed)
        with ExitStack() as refused, _recording_update(trace, shadow) as tail:
            refused.callback(tail.draft.let_go)
            update, following = copied(sample, shadow.begin(tail.draft, seed))
            refused.pop_all()
        return tail, update, following


@contextmanager
def _recording_update(trace: Trace, shadow: Shadow) -> Iterator[Recorder]:
    tail = trace.recorder.fork()
    tail.draft.kind = Kind.TEMPORARY
    with trace.recording(tail), raised_in(f"{type(shadow.optimizer).__name__}.step()"):
        yield tail
