"""Local moves over the runs of a sequence: what is repeated, where, and in which order nodes first run.

Any repeated run may be taken out, and a run may be repeated wherever its inputs have been made: lifetimes follow from the sequence, so that
each move gives a right sequence, which may need too many bytes. Simulated annealing (Kirkpatrick et al. 1983) goes through both sides of
the limit. What is over the limit has a price that rises while the sequence is over it and falls while it is not, as in strategic
oscillation (Glover 1989). Unlike eviction it decides on the copies of all times at once, and it goes on where eviction finds nothing.

A move that makes room takes a moment at which too much is there, and a tensor that nobody uses then: its maker runs again before its next
reader, and so do makers of inputs that are gone by then, or those stay until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints
from lowtide.remat.cost import footprint_kernel
from lowtide.remat.problem import RematProblem

MOVES_A_STATE = 64  # take about what eviction of the same sequence does
_DRAWS = 16  # random numbers for a move
_ROOM = 4  # no sequence has more entries than so many times the nodes
_HOT, _COLD = 0.1, 0.003  # temperatures at the start and the end, in mean costs of a run
_DEARER, _CHEAPER, _MOST = 1.01, 0.995, 1e4  # a move's change of the price of bytes, over the limit and within it
_REORDER, _REMOVE, _SHIFT, _SWAP = 0.1, 0.3, 0.45, 0.7  # shares of the moves, added up; the rest only make room
_FAR, _STEPS = 0.5, 8  # a run is put anywhere so often, and else no more than so many entries away
_BY_NEED = 0.7  # a repeated run goes right before its reader so often
_TRIES = 4  # of so many tensors the one that frees the most bytes for its cost is taken
_CHAIN = 32  # runs that a move adds at most


@dataclass(frozen=True)
class LocalMoves:
    """How a sequence is changed.

    moves: so many are tried. most_runs: of a node. reorders: whether first runs move, too.
    """

    moves: int = 6400
    most_runs: int = 1 << 30
    reorders: bool = True

    def improved(self, problem: RematProblem, sequence: Ints, limit_bytes: int, random: np.random.Generator) -> Ints | None:
        """The cheapest sequence within the limit that was come by from this one, which swaps nothing; None where there was none."""
        draws = random.random((self.moves, _DRAWS))
        room = np.empty(max(_ROOM * problem.problem.node_count, 2 * len(sequence)) + _CHAIN, np.int32)
        room[: len(sequence)] = sequence
        rule = limit_bytes - problem.problem.resident_bytes, self.most_runs, self.reorders
        found: Ints = _annealed(room, len(sequence), rule, draws, problem.facts, problem.first_run_order)
        return found if len(found) else None


class _Seen(NamedTuple):
    """What is known of a moment right after an entry."""

    first: Any  # [n] where each node first runs
    times: Any  # [n] how often it runs
    before: Any  # [m] the last entry up to the moment that makes or reads a tensor; -1 for none
    after: Any  # [m] the first behind it that reads what is there, the end for what is kept; -1 where nothing does
    unused: Any  # [m] a list of tensors
    chain: Any  # a list of nodes


@kernel(nogil=True)
def _annealed(now: Any, count: Any, rule: Any, draws: Any, facts: Any, order: Any) -> Any:
    """The cheapest sequence within the limit, empty where there is none. `now` has room beyond the sequence."""
    limit, most_runs, reorders = rule
    new, best, best_us = np.empty_like(now), now[:0].copy(), np.inf
    footprint = footprint_kernel(now[:count], facts)
    over, cost_us = _over(footprint, limit), _cost_us(now, count, facts)
    mean_us = max(1e-9, facts.cost_us.mean())
    price = mean_us / max(1.0, facts.tensor_bytes.mean())
    dearest = _MOST * price
    heat, cooling = _HOT * mean_us, (_COLD / _HOT) ** (1.0 / max(1, len(draws)))
    seen = _Seen(*_blank_seen(len(facts.cost_us), len(facts.tensor_bytes)))
    for move in range(len(draws)):
        if over == 0 and cost_us < best_us:
            best, best_us = now[:count].copy(), cost_us
        heat *= cooling
        price = min(price * _DEARER, dearest) if over > 0 else price * _CHEAPER
        draw, new_count = draws[move], count
        new[:count] = now[:count]
        if draw[0] < _REORDER:
            new_count = _in_other_order(new, count, draw, seen, facts, order) if reorders else 0
        elif draw[0] < _SWAP:
            new_count = _without_one(new, count, draw, seen, facts)
        if new_count > 0 and draw[0] >= _SHIFT:
            new_count = _with_room(new, new_count, footprint, limit, most_runs, draw, seen, facts)
        if new_count <= 0:
            continue
        new_footprint = footprint_kernel(new[:new_count], facts)
        new_over, new_us = _over(new_footprint, limit), _cost_us(new, new_count, facts)
        worse = new_us - cost_us + price * (new_over - over)
        if worse <= 0 or draw[_DRAWS - 1] < np.exp(-worse / heat):
            now, new, count, over, cost_us, footprint = new, now, new_count, new_over, new_us, new_footprint
    return best


@kernel(inner=True)
def _blank_seen(nodes: Any, tensors: Any) -> Any:
    return (
        np.empty(nodes, np.int64),
        np.empty(nodes, np.int64),
        np.empty(tensors, np.int64),
        np.empty(tensors, np.int64),
        np.empty(tensors, np.int32),
        np.empty(_CHAIN, np.int32),
    )


@kernel(inner=True, borrows=True)
def _over(footprint: Any, limit: Any) -> float:
    """What there is over the limit, over all entries."""
    total = 0.0
    for bytes_there in footprint:
        total += max(0, bytes_there - limit)
    return total


@kernel(inner=True, borrows=True)
def _cost_us(sequence: Any, count: Any, facts: Any) -> float:
    total = 0.0
    for position in range(count):
        total += facts.cost_us[sequence[position]]
    return total


@kernel(inner=True, borrows=True)
def _look(sequence: Any, count: Any, at: Any, seen: Any, facts: Any) -> None:
    """Fills in what is known of the moment right after an entry."""
    seen.first[:] = count
    seen.times[:] = 0
    seen.before[:] = -1
    for tensor in range(len(seen.after)):
        seen.after[tensor] = count if facts.kept[tensor] else -1
    for position in range(count - 1, -1, -1):
        node = sequence[position]
        seen.first[node] = position
        seen.times[node] += 1
        for entry in range(facts.made_ptr[node], facts.made_ptr[node + 1]):
            tensor = facts.made_ids[entry]
            if position > at:
                seen.after[tensor] = -1
            else:
                seen.before[tensor] = max(seen.before[tensor], position)
        for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
            tensor = facts.read_ids[entry]
            if position > at:
                seen.after[tensor] = position
            else:
                seen.before[tensor] = max(seen.before[tensor], position)


@kernel(inner=True, borrows=True)
def _may_repeat(node: Any, at: Any, seen: Any, facts: Any) -> bool:
    """Whether a node may run again as the entry of that position."""
    if node < 0 or not facts.repeatable[node] or seen.first[node] >= at:
        return False
    for entry in range(facts.limit_ptr[node], facts.limit_ptr[node + 1]):
        if seen.first[facts.limit_ids[entry]] < at:
            return False
    return True


@kernel(inner=True, borrows=True)
def _put(sequence: Any, origin: Any, target: Any) -> None:
    """Move an entry to another position."""
    node, step = sequence[origin], 1 if target > origin else -1
    for position in range(origin, target, step):
        sequence[position] = sequence[position + step]
    sequence[target] = node


@kernel(inner=True, borrows=True)
def _near(origin: Any, low: Any, high: Any, draw: Any, far: Any) -> int:
    """A position from low to high: any, or one that is near."""
    if far >= _FAR:
        low, high = max(low, origin - _STEPS), min(high, origin + _STEPS)
    return int(low + draw * (high - low + 1))


@kernel(inner=True, borrows=True)
def _without_one(sequence: Any, count: Any, draw: Any, seen: Any, facts: Any) -> int:
    """Take a repeated run out, or put it elsewhere; how many entries there are then, 0 where nothing is repeated."""
    _look(sequence, count, -1, seen, facts)
    at, left = int(draw[1] * count), count
    while left > 0 and seen.first[sequence[at]] == at:
        at, left = (at + 1) % count, left - 1
    if left == 0:
        return 0
    node = sequence[at]
    if _REMOVE <= draw[0] < _SHIFT:
        target = _near(at, seen.first[node] + 1, count - 1, draw[2], draw[3])
        if not _may_repeat(node, target, seen, facts):
            return 0
        _put(sequence, at, target)
        return int(count)
    _put(sequence, at, count - 1)
    return int(count - 1)


@kernel(inner=True, borrows=True)
def _in_other_order(sequence: Any, count: Any, draw: Any, seen: Any, facts: Any, order: Any) -> int:
    """Put a first run elsewhere; 0 where that may not be."""
    _look(sequence, count, -1, seen, facts)
    at = int(draw[1] * count)
    node, low, high = sequence[at], 0, count - 1
    if seen.first[node] != at:
        return 0
    for entry in range(order.pred_ptr[node], order.pred_ptr[node + 1]):
        low = max(low, seen.first[order.pred_ids[entry]] + 1)
    for entry in range(order.succ_ptr[node], order.succ_ptr[node + 1]):
        high = min(high, seen.first[order.succ_ids[entry]] - 1)
    if low >= high:
        return 0
    target = _near(at, low, high, draw[2], draw[3])
    if target == at:
        return 0
    _put(sequence, at, target)
    _look(sequence, count, -1, seen, facts)
    for position in range(min(at, target), max(at, target) + 1):
        each = sequence[position]
        if seen.first[each] != position and not _may_repeat(each, position, seen, facts):
            return 0
    return int(count)


@kernel(inner=True, borrows=True)
def _with_room(sequence: Any, count: Any, footprint: Any, limit: Any, most_runs: Any, draw: Any, seen: Any, facts: Any) -> int:
    """Let a tensor go that is not used at some moment, and make it again behind that; how many entries there are then, 0 for none."""
    at = int(draw[4] * count)
    for _ in range(count):
        if footprint[at] > limit:
            break
        at = (at + 1) % count
    tensor = _unused(sequence, count, at, most_runs, draw, seen, facts)
    if tensor < 0:
        return 0
    target = seen.after[tensor]
    if draw[9] >= _BY_NEED:
        target = int(at + 1 + draw[10] * (target - at))
    maker = facts.producer[tensor]
    if not _may_repeat(maker, target, seen, facts):
        return 0
    _look(sequence, count, target - 1, seen, facts)
    length = _chain(maker, target, most_runs, int(draw[11] * (1 << _CHAIN)), seen, facts)
    if count + length > len(sequence) or length == 0:
        return 0
    for position in range(count - 1, target - 1, -1):
        sequence[position + length] = sequence[position]
    for position in range(length):
        sequence[target + position] = seen.chain[position]
    return int(count + length)


@kernel(inner=True, borrows=True)
def _unused(sequence: Any, count: Any, at: Any, most_runs: Any, draw: Any, seen: Any, facts: Any) -> int:
    """A tensor that an entry finds there and does not use, and that can be made again: the best of some; -1 where there is none."""
    _look(sequence, count, at, seen, facts)
    found = 0
    for tensor in range(len(seen.after)):
        maker = facts.producer[tensor]
        if maker >= 0 and 0 <= seen.before[tensor] < at < seen.after[tensor] and facts.repeatable[maker] and seen.times[maker] < most_runs:
            seen.unused[found] = tensor
            found += 1
    best, most = -1, -1.0
    for each in range(_TRIES if found else 0):
        tensor = seen.unused[int(draw[5 + each] * found)]
        worth = facts.tensor_bytes[tensor] / max(1e-9, facts.cost_us[facts.producer[tensor]])
        if worth > most:
            best, most = tensor, worth
    return best


@kernel(inner=True, borrows=True)
def _chain(maker: Any, at: Any, most_runs: Any, choices: Any, seen: Any, facts: Any) -> int:
    """The runs that make something again, in their order, the makers of some inputs that are gone among them; how many there are."""
    chain, length, done = seen.chain, 1, 0
    chain[0] = maker
    while done < length:
        node = chain[done]
        done += 1
        for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
            tensor = facts.read_ids[entry]
            other = facts.producer[tensor]
            if seen.after[tensor] >= 0 or length == _CHAIN or not _may_repeat(other, at, seen, facts) or seen.times[other] >= most_runs:
                continue
            known = False
            for position in range(length):
                known = known or chain[position] == other
            if not known and (choices >> length) & 1:
                chain[length] = other
                length += 1
    for position in range(1, length):  # sorted by first runs, which respect what reads what
        other = position
        while other > 0 and seen.first[chain[other - 1]] > seen.first[chain[other]]:
            chain[other - 1], chain[other] = chain[other], chain[other - 1]
            other -= 1
    return int(length)
