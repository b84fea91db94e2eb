"""Local moves over the runs of a sequence: what is repeated, where, and in which order nodes first run.

Any repeated run may be taken out, and a run may be repeated wherever its inputs have been made: lifetimes follow from the sequence, so that
each move gives a right sequence, which may need too many bytes. Simulated annealing (Kirkpatrick et al. 1983) goes through both sides of
the limit. What is over the limit has a price that rises while the sequence is over it and falls while it is not, as in strategic
oscillation (Glover 1989). Unlike eviction it decides on the copies of all times at once, and it goes on where eviction finds nothing.

A move is made, counted to the byte, and undone where it is not taken (`remat.run_list`).

A move that makes room takes a moment at which too much is there, and a tensor that nobody uses then: its maker runs again before its next
reader, and so do makers of inputs that are gone by then, or those stay until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints
from lowtide.remat.cost import price_of
from lowtide.remat.eviction import little_problem
from lowtide.remat.problem import RematProblem
from lowtide.remat.run_list import around, first_entry, put_in, run_list_of, take_out, wants_room, with_room, written

MOVES_A_STATE = 48  # take about what eviction of the same sequence does
_DRAWS = 16  # random numbers for a move
_ROOM = 4  # no sequence has more entries than so many times the nodes
_HOT, _COLD = 0.1, 0.003  # temperatures at the start and the end, in mean costs of a run
_DEARER, _CHEAPER, _MOST = 1.01, 0.995, 1e4  # a move's change of the price of bytes, over the limit and within it
_REORDER, _REMOVE, _SHIFT, _SWAP = 0.1, 0.3, 0.45, 0.7  # shares of the moves, added up; the rest only make room
_FAR, _STEPS = 0.5, 8  # a run is put anywhere so often, and else no more than so many entries away
_BY_NEED = 0.7  # a repeated run goes right before its reader so often
_LOOKS, _STRIDE = 64, 7  # tensors that are looked at, no more than so far apart
_TRIES = 4  # of so many of them that could go, the one that frees the most bytes for its cost is taken
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
        if not len(sequence) or not problem.problem.tensor_count:  # there is nothing to move
            return sequence if price_of(problem, sequence)[0] <= limit_bytes else None
        draws = random.random((self.moves, _DRAWS))
        longest = max(_ROOM * problem.problem.node_count, 2 * len(sequence)) + _CHAIN
        rule = limit_bytes - problem.problem.resident_bytes, longest, self.most_runs, self.reorders
        known: Ints = _annealed(sequence, rule, draws, problem.facts, problem.first_run_order)
        return known if len(known) else None


def warm_up_local_moves() -> None:
    """Compile the kernels, or load them, so that it is not the first search that waits."""
    LocalMoves(8).improved(*little_problem(), 16, np.random.default_rng(0))


@kernel(nogil=True)
def _annealed(sequence: Any, rule: Any, draws: Any, facts: Any, order: Any) -> Any:
    """The cheapest sequence within the limit, empty where there is none."""
    limit, longest, most_runs, reorders = rule
    time = run_list_of(sequence, longest, limit, facts)
    chain = np.empty(_CHAIN, np.int32)
    best, best_us, cost_us = sequence[:0].copy(), np.inf, 0.0
    for node in sequence:
        cost_us += facts.cost_us[node]
    mean_us = max(1e-9, facts.cost_us.mean())
    price = mean_us / max(1.0, facts.tensor_bytes.mean())
    dearest = _MOST * price
    heat, cooling = _HOT * mean_us, (_COLD / _HOT) ** (1.0 / max(1, len(draws)))
    for move in range(len(draws)):
        count, over = time.sums[0], time.sums[2]
        if over == 0 and cost_us < best_us:
            best, best_us = np.empty(count, np.int32), cost_us
            written(time, best)
        heat *= cooling
        price = min(price * _DEARER, dearest) if over > 0 else price * _CHEAPER
        draw = draws[move]
        gone, target, length = _drawn(draw, most_runs, reorders, chain, time, facts, order)
        if gone < 0 and length == 0:
            continue
        node = time.node[time.slots[gone]] if gone >= 0 else -1
        is_first = gone >= 0 and time.first[node] == time.slots[gone]
        more_us = -facts.cost_us[node] if gone >= 0 else 0.0
        for each in range(length):
            more_us += facts.cost_us[chain[each]]
        if count + length > longest or not _is_taken(more_us - price * over, heat, draw):  # if nothing were over the limit any more
            continue
        if wants_room(chain, length, time, facts):
            time = with_room(time)
        target -= 0 <= gone < target
        if gone >= 0:
            take_out(gone, time, facts)
        for each in range(length):
            put_in(chain[each], target + each, time, facts)
        taken = _is_taken(more_us + price * (time.sums[2] - over), heat, draw)
        if taken and is_first:  # what it writes over is not to be read again behind it
            taken = _all_may_repeat(min(gone, target), max(gone, target), time, facts)
        if taken:
            cost_us += more_us
            continue
        for each in range(length - 1, -1, -1):
            take_out(target + each, time, facts)
        if gone >= 0:
            put_in(node, gone, time, facts)
    return best


@kernel(inner=True, borrows=True)
def _drawn(draw: Any, most_runs: Any, reorders: Any, chain: Any, time: Any, facts: Any, order: Any) -> tuple[int, int, int]:
    """A move: the entry that is taken out, -1 for none, the one before which a chain is put in, and how long that is."""
    kind = draw[0] if time.sums[2] > 0 else draw[0] * _SWAP  # what makes room alone is of no use within the limit
    if kind < _REORDER:
        return _in_other_order(draw, chain, time, order) if reorders else (-1, 0, 0)
    gone = _repeated(draw[1], time) if kind < _SWAP else -1
    if kind >= _SHIFT:
        return (gone, *_room_made(most_runs, draw, chain, time, facts))
    if gone < 0 or kind < _REMOVE:
        return gone, 0, 0
    node = time.node[time.slots[gone]]
    target = _near(gone, first_entry(node, time) + 1, time.sums[0], draw[2], draw[3])
    chain[0] = node
    return (gone, target, 1) if target not in (gone, gone + 1) and _may_repeat(node, target, time, facts) else (-1, 0, 0)


@kernel(inner=True, borrows=True)
def _is_taken(worse: Any, heat: Any, draw: Any) -> bool:
    return bool(worse <= 0 or draw[_DRAWS - 1] < np.exp(-worse / heat))


@kernel(inner=True, borrows=True)
def _may_repeat(node: Any, at: Any, time: Any, facts: Any) -> bool:
    """Whether a node may run again right before an entry."""
    may = node >= 0 and facts.repeatable[node] and first_entry(node, time) < at
    if may:
        for entry in range(facts.limit_ptr[node], facts.limit_ptr[node + 1]):
            may = may and first_entry(facts.limit_ids[entry], time) >= at
    return bool(may)


@kernel(inner=True, borrows=True)
def _all_may_repeat(start: Any, end: Any, time: Any, facts: Any) -> bool:
    """Whether all that is repeated between two entries may be."""
    may = True
    for entry in range(start, min(end + 1, time.sums[0])):
        slot = time.slots[entry]
        node = time.node[slot]
        may = may and (time.first[node] == slot or _may_repeat(node, entry, time, facts))
    return may


@kernel(inner=True, borrows=True)
def _near(origin: Any, low: Any, high: Any, draw: Any, far: Any) -> int:
    """An entry from low to high: any, or one that is near."""
    if far >= _FAR:
        low, high = max(low, origin - _STEPS), min(high, origin + _STEPS)
    return int(low + draw * (high - low + 1))


@kernel(inner=True, borrows=True)
def _repeated(draw: Any, time: Any) -> int:
    count = time.sums[0]
    at, left = int(draw * count), count
    while left > 0 and time.first[time.node[time.slots[at]]] == time.slots[at]:
        at, left = (at + 1) % count, left - 1
    return int(at if left > 0 else -1)


@kernel(inner=True, borrows=True)
def _in_other_order(draw: Any, chain: Any, time: Any, order: Any) -> tuple[int, int, int]:
    """A first run, the entry that it is to run before, and 1; -1 for none."""
    at = int(draw[1] * time.sums[0])
    node, low, high = time.node[time.slots[at]], 0, time.sums[0]
    if time.first[node] != time.slots[at]:
        return -1, 0, 0
    for entry in range(order.pred_ptr[node], order.pred_ptr[node + 1]):
        low = max(low, first_entry(order.pred_ids[entry], time) + 1)
    for entry in range(order.succ_ptr[node], order.succ_ptr[node + 1]):
        high = min(high, first_entry(order.succ_ids[entry], time))
    target = _near(at, low, high, draw[2], draw[3])
    chain[0] = node
    return (-1, 0, 0) if target in (at, at + 1) else (at, target, 1)


@kernel(inner=True, borrows=True)
def _room_made(most_runs: Any, draw: Any, chain: Any, time: Any, facts: Any) -> tuple[int, int]:
    """The entry before which a chain lets a tensor go that is not used before it, and how long the chain is; 0 for none."""
    count, limit = time.sums[0], time.sums[3]
    at = int(draw[4] * count)
    if time.sums[2] > 0:
        while time.footprint[at] <= limit:
            at = (at + 1) % count
    tensor, target, most, known = -1, 0, -1.0, 0
    candidate = int(draw[5] * len(facts.kept))
    for _ in range(_LOOKS):
        candidate = (candidate + 1 + int(draw[6] * _STRIDE)) % len(facts.kept)
        maker = facts.producer[candidate]
        if maker < 0 or not facts.repeatable[maker] or time.times[maker] >= most_runs:
            continue
        before, after = around(candidate, at, time, facts)
        if before < 0 or after <= at:
            continue
        worth = facts.tensor_bytes[candidate] / max(1e-9, facts.cost_us[maker])
        if worth > most:
            tensor, target, most = candidate, after, worth
        known += 1
        if known == _TRIES:
            break
    if tensor < 0:
        return 0, 0
    if draw[9] >= _BY_NEED:
        target = int(at + 1 + draw[10] * (target - at))
    maker = facts.producer[tensor]
    if not _may_repeat(maker, target, time, facts):
        return 0, 0
    return target, _chained(maker, target, most_runs, int(draw[11] * (1 << _CHAIN)), chain, time, facts)


@kernel(inner=True, borrows=True)
def _chained(maker: Any, at: Any, most_runs: Any, choices: Any, chain: Any, time: Any, facts: Any) -> int:
    """The runs that make something again, in their order, the makers of some inputs that are gone among them; how many there are."""
    length, done = 1, 0
    chain[0] = maker
    while done < length:
        node = chain[done]
        done += 1
        for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
            tensor = facts.read_ids[entry]
            other = facts.producer[tensor]
            if length == _CHAIN or (choices >> length) & 1 == 0 or other < 0 or time.times[other] >= most_runs:
                continue
            _, after = around(tensor, at, time, facts)
            if after < 0 and not _is_in_chain(other, length, chain) and _may_repeat(other, at, time, facts):
                chain[length] = other
                length += 1
    for position in range(1, length):  # sorted by first runs, which respect what reads what
        other = position
        while other > 0 and first_entry(chain[other - 1], time) > first_entry(chain[other], time):
            chain[other - 1], chain[other] = chain[other], chain[other - 1]
            other -= 1
    return length


@kernel(inner=True, borrows=True)
def _is_in_chain(node: Any, length: Any, chain: Any) -> bool:
    is_known = False
    for position in range(length):
        is_known = is_known or chain[position] == node
    return is_known
