"""What can be done with one block: how much it keeps from its forward to its backward pass, and what that costs.

Each option is a sequence of the block problem. Eviction finds them: the boundary is given so much to find free that no more than some
bytes fit beside it, and the whole a limit. A few of either, under a few weights, give the handful of options that no other beats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints
from lowtide.remat.blocks import BlockProblem
from lowtide.remat.cost import footprint_kernel, time_kernel
from lowtide.remat.eviction import ScoreWeights, attempt
from lowtide.remat.pruning import is_needed, pruned, repeats


@dataclass(frozen=True, eq=False)
class Option:
    """A sequence of a block problem, and what it costs. Bytes count what the block itself makes, and what flows into its backward pass."""

    sequence: Ints  # of the block problem: forward pass, boundary, backward pass
    boundary: int  # the node between them
    forward_bytes: int  # the peak of the forward pass
    checkpoint_bytes: int  # while later blocks run, beside what is pinned
    backward_bytes: int  # the peak of the backward pass
    extra_us: float  # beyond running everything once
    again_us: float  # of running the forward pass once more, for what it keeps and hands on
    inner_us: float  # the same where nothing is to be handed on


_FEWEST = 8  # calls of eviction for a block, however large it is


@dataclass(frozen=True)
class OptionEffort:
    """How far to look for options.

    checkpoints: even steps from what is handed on to what is held where nothing is repeated. rooms: shares of what the block takes there,
    as limits. weights: of eviction. rounds: of leaving out some repeated runs of each option and having eviction repair that. most:
    options.
    """

    checkpoints: int = 12
    rooms: tuple[float, ...] = (1.0, 0.8, 0.6, 0.45)
    weights: tuple[ScoreWeights, ...] = tuple(ScoreWeights(a, 1.0, c) for a in (0.5, 1.0, 1.6) for c in (0.0, 1.0))
    rounds: int = 4
    most: int = 40
    work: int = 20_000_000  # calls of eviction times the square of the nodes, of each kind

    def calls(self, block: BlockProblem) -> int:
        """How often eviction may be called for a block: what one call takes grows with the square of its nodes."""
        return max(_FEWEST, self.work // len(block.nodes) ** 2)


REPEATED = OptionEffort()  # for a block that stands for several
SINGLE = OptionEffort(checkpoints=8, rooms=(1.0, 0.7, 0.5), weights=(ScoreWeights(), ScoreWeights(1.0, 1.0, 0.0)), rounds=1)


def options_of(block: BlockProblem, pieces: Sequence[Sequence[Option]] = (), effort: OptionEffort = REPEATED) -> list[Option]:
    """The options that no other beats, the fastest first: that one keeps all.

    Where the block is made of smaller ones, `pieces` are their options, and each combination of them is one of this block.
    """
    best = _unbeaten([*_distinct(_sequences(block, effort), block), *_combined(block, pieces)])
    random, most = np.random.default_rng(0), effort.most
    for _ in range(effort.rounds):
        every = -(-len(best) * effort.rounds // effort.calls(block))
        sequences = [sequence for option in best[::every] if (sequence := _improved(block, option, random, effort)) is not None]
        best = _unbeaten([*best, *_distinct(sequences, block)])
    while len(best) > most:
        best = [*best[: most // 2], *best[most // 2 :: 2]]
    return best


def _unbeaten(options: Sequence[Option]) -> list[Option]:
    """Those that no other beats, the fastest first."""
    costs = np.array([(each.extra_us, each.checkpoint_bytes, each.backward_bytes, each.forward_bytes) for each in options], np.float64)
    return [options[index] for index in _unbeaten_rows(costs.reshape(-1, 4))]


def _unbeaten_rows(costs: NDArray[np.float64]) -> list[int]:
    """The rows that no other beats or equals in every column, ascending; of equals the first."""
    order = np.lexsort(costs.T[::-1])
    rows: list[int] = order[_unbeaten_mask(costs[order])].tolist()
    return rows


@kernel
def _unbeaten_mask(costs: Any) -> Any:
    """By row of an ascending list, whether none before is as good in every column."""
    best, unbeaten, count = np.empty(len(costs), np.int64), np.zeros(len(costs), np.bool_), 0
    for row in range(len(costs)):
        beaten = False
        for each in range(count):
            as_good = True
            for column in range(1, costs.shape[1]):  # in the first it is no worse, as rows ascend
                as_good = as_good and costs[best[each], column] <= costs[row, column]
            beaten = beaten or as_good
        if not beaten:
            best[count], unbeaten[row] = row, True
            count += 1
    return unbeaten


def _sequences(block: BlockProblem, effort: OptionEffort) -> Iterator[Ints]:
    """Many sequences of the block: the given one, the one that runs the whole forward pass once more, and what eviction makes of it."""
    yield block.sequence
    yield forward_twice(block)
    plain = option_of(block, block.sequence)
    handed_bytes = int(block.problem.problem.tensor_bytes[block.outgoing].sum())
    full_bytes = _limit_bytes(block, plain)
    checkpoints = np.linspace(handed_bytes, plain.checkpoint_bytes, effort.checkpoints).astype(int).tolist()
    tries = list(product(checkpoints, effort.rooms, effort.weights))
    known = set()
    for checkpoint_bytes, room, weights in tries[:: -(-len(tries) // effort.calls(block))]:
        limit_bytes = max(int(full_bytes * room), checkpoint_bytes + _beside_bytes(block))
        if (checkpoint_bytes, limit_bytes, weights) in known:
            continue
        known.add((checkpoint_bytes, limit_bytes, weights))
        evicted = attempt(
            block.problem, block.sequence, limit_bytes, weights, reserve=_room_for(block, checkpoint_bytes, limit_bytes)
        ).result
        if evicted is not None:
            yield evicted.sequence


def forward_twice(block: BlockProblem) -> Ints:
    """The sequence that keeps nothing for the backward pass that can be made again, and then makes all of it."""
    forward, backward = block.sequence[: block.boundary], block.sequence[block.boundary + 1 :]
    return pruned(block.problem, np.concatenate([forward, [block.boundary], forward, backward]).astype(np.int32))


def _beside_bytes(block: BlockProblem) -> int:
    """What is there at the boundary whatever is kept."""
    return block.incoming_bytes + block.pinned_bytes


def _limit_bytes(block: BlockProblem, option: Option) -> int:
    return max(option.forward_bytes, option.backward_bytes, option.checkpoint_bytes + _beside_bytes(block))


def _improved(block: BlockProblem, option: Option, random: np.random.Generator, effort: OptionEffort) -> Ints | None:
    """What eviction makes of an option without some of its repeated runs, within the same bytes."""
    again = repeats(option.sequence, len(block.nodes))
    if len(again) == 0:
        return None
    gone = random.choice(again, min(int(random.integers(1, 5)), len(again)), replace=False)
    limit_bytes = _limit_bytes(block, option)
    weights, reserve = effort.weights[random.integers(len(effort.weights))], _room_for(block, option.checkpoint_bytes, limit_bytes)
    evicted = attempt(block.problem, np.delete(option.sequence, gone), limit_bytes, weights, reserve=reserve).result
    return None if evicted is None else evicted.sequence


def _combined(block: BlockProblem, pieces: Sequence[Sequence[Option]]) -> list[Option]:
    """Each choice of one option for each part, as options of the whole: those that no other seems to beat."""
    joined_options = [_JoinedOptions((), 0, 0, 0, 0.0)]
    for options in pieces:
        joined_options = _unbeaten_wholes([whole.then(option) for whole in joined_options for option in options])
    return [option_of(block, _joined(block, whole.options)) for whole in joined_options if whole.options]


@dataclass(frozen=True, eq=False)
class _JoinedOptions:
    """Options of neighbouring blocks one after another, and what they seem to cost together."""

    options: tuple[Option, ...]
    forward_bytes: int
    checkpoint_bytes: int
    backward_bytes: int
    extra_us: float

    def then(self, option: Option) -> _JoinedOptions:
        return _JoinedOptions(
            (*self.options, option),
            max(self.forward_bytes, self.checkpoint_bytes + option.forward_bytes),
            self.checkpoint_bytes + option.checkpoint_bytes,
            max(self.backward_bytes, self.checkpoint_bytes + option.backward_bytes),
            self.extra_us + option.extra_us,
        )


def _unbeaten_wholes(wholes: Sequence[_JoinedOptions]) -> list[_JoinedOptions]:
    """Those that no other beats; forward bytes count for nothing."""
    costs = np.array([(each.extra_us, each.checkpoint_bytes, each.backward_bytes) for each in wholes], np.float64)
    return [wholes[index] for index in _unbeaten_rows(costs)]


def _joined(block: BlockProblem, options: Sequence[Option]) -> Ints:
    """The sequences of neighbouring blocks as one of the block that they make together."""
    forward, backward = [], []
    begin, end = 0, len(block.nodes)
    for option in options:
        boundary, count = option.boundary, int(option.sequence.max()) + 1
        position = int(np.flatnonzero(option.sequence == boundary)[0])
        end -= count - boundary - 1
        # A backward pass runs nodes of its forward pass, too.
        sequence = np.where(option.sequence < boundary, option.sequence + begin, option.sequence - (boundary + 1) + end)
        forward.append(sequence[:position])
        backward.append(sequence[position + 1 :])
        begin += boundary
    return np.concatenate([*forward, [block.boundary], *reversed(backward)]).astype(np.int32)


def _room_for(block: BlockProblem, checkpoint_bytes: int, limit_bytes: int) -> tuple[int, int]:
    """What the boundary has to find free so that no more than so many bytes are held while it runs."""
    return block.boundary, limit_bytes - _beside_bytes(block) - checkpoint_bytes


def _distinct(sequences: Iterable[Ints], block: BlockProblem) -> list[Option]:
    known = {sequence.tobytes(): sequence for sequence in sequences}
    return [option_of(block, sequence) for sequence in known.values()]


def option_of(block: BlockProblem, sequence: Ints) -> Option:
    forward, checkpoint, backward, time_us, again_us, inner_us = _priced(sequence, block.boundary, block.problem.facts)
    return Option(
        sequence=sequence,
        boundary=block.boundary,
        forward_bytes=int(forward),
        checkpoint_bytes=int(checkpoint) - block.incoming_bytes - block.pinned_bytes,
        backward_bytes=int(backward),
        extra_us=time_us - block.once_us,
        again_us=again_us,
        inner_us=inner_us,
    )


@kernel
def _priced(sequence: Any, boundary: Any, facts: Any) -> tuple[int, int, int, float, float, float]:
    """The peaks before, at and after the boundary, the time, and that of running the forward pass once more, handing on and not."""
    footprint, at, forward, backward = footprint_kernel(sequence, facts), 0, 0, 0
    while sequence[at] != boundary:
        forward = max(forward, footprint[at])
        at += 1
    for position in range(at + 1, len(sequence)):
        backward = max(backward, footprint[position])
    again_us, inner_us = _again_us(sequence, at, True, facts), _again_us(sequence, at, False, facts)
    return forward, footprint[at], backward, time_kernel(sequence, facts), again_us, inner_us


@kernel(inner=True)
def _again_us(sequence: Any, at: Any, handing_on: Any, facts: Any) -> float:
    """Of running what the forward pass keeps once more, and what it hands on or not. The boundary is at position `at`."""
    wanted, total = facts.kept.copy(), 0.0
    for position in range(len(sequence) - 1, -1, -1):
        node = sequence[position]
        needed = is_needed(node, position > at or (position == at and handing_on), wanted, facts)
        if needed and position < at and facts.repeatable[node]:
            total += facts.cost_us[node]
    return total
