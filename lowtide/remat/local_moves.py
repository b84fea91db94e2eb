"""Local moves over the runs of a sequence: what is repeated, where, and in which order nodes first run.

Any repeated run may be taken out, and a run may be repeated wherever its inputs have been made: lifetimes follow from the sequence, so that
each move gives a right sequence, which may need too many bytes. Simulated annealing (Kirkpatrick et al. 1983) goes through both sides of
the limit. What is over the limit has a price that rises while the sequence is over it and falls while it is not, as in strategic
oscillation (Glover 1989). Unlike eviction it decides on the copies of all times at once, and it goes on where eviction finds nothing.

What a move does to the bytes that are there is estimated from where its tensors are used next and were used last. Only what seems worth it
is built and counted.

A move that makes room takes a moment at which too much is there, and a tensor that nobody uses then: its maker runs again before its next
reader, and so do makers of inputs that are gone by then, or those stay until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints
from lowtide.remat.cost import footprint_kernel, price_of
from lowtide.remat.eviction import little_problem
from lowtide.remat.problem import RematProblem

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
        room = np.empty(max(_ROOM * problem.problem.node_count, 2 * len(sequence)) + _CHAIN, np.int32)
        room[: len(sequence)] = sequence
        rule = limit_bytes - problem.problem.resident_bytes, self.most_runs, self.reorders
        known: Ints = _annealed(room, len(sequence), rule, draws, problem.facts, problem.first_run_order)
        return known if len(known) else None


def warm_up_local_moves() -> None:
    """Compile the kernels, or load them, so that it is not the first search that waits."""
    LocalMoves(8).improved(*little_problem(), 16, np.random.default_rng(0))


class _MoveLists(NamedTuple):
    """What is known of a sequence, and lists to work in."""

    first: Any  # [n] where each node first runs, the end for none
    times: Any  # [n] how often it runs
    slope: Any  # by entry, by how much more a move changes the bytes there than at the entry before; zeros between moves
    chain: Any  # nodes that a move runs again


class _TensorUses(NamedTuple):
    """By tensor, as rows: twice each entry that reads it, and twice each that makes it and 1; the end reads what is kept."""

    ptr: Any
    ids: Any


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
    seen = _MoveLists(*_lists(len(facts.cost_us), len(now)))
    uses = _TensorUses(*_uses_of(now, count, seen, facts))
    for move in range(len(draws)):
        if over == 0 and cost_us < best_us:
            best, best_us = now[:count].copy(), cost_us
        heat *= cooling
        price = min(price * _DEARER, dearest) if over > 0 else price * _CHEAPER
        draw = draws[move]
        kind = draw[0] if over > 0 else draw[0] * _SWAP  # what makes room alone is of no use within the limit
        gone, target, length = -1, 0, 0
        if kind < _REORDER:
            if not reorders:
                continue
            gone, target, length = _in_other_order(now, count, draw, seen, order)
            if gone < 0:
                continue
        else:
            if kind < _SWAP:
                gone = _repeated(now, count, draw[1], seen)
                if gone < 0 and kind < _SHIFT:
                    continue
            if _REMOVE <= kind < _SHIFT:
                target, length = _near(gone, seen.first[now[gone]] + 1, count, draw[2], draw[3]), 1
                seen.chain[0] = now[gone]
                if not _may_repeat(now[gone], target, seen, facts):
                    continue
            elif kind >= _SHIFT:
                target, length = _room_made(count, footprint, limit, most_runs, draw, seen, uses, facts)
                if length == 0 or count + length > len(now):
                    continue
        more_us = -facts.cost_us[now[gone]] if gone >= 0 else 0.0
        for each in range(length):
            more_us += facts.cost_us[seen.chain[each]]
        if kind >= _SHIFT or _REORDER <= kind < _REMOVE:
            more_bytes = _estimated(now, footprint, limit, gone, target, length, seen, uses, facts)
            if not _is_taken(more_us + price * more_bytes, heat, draw):
                continue
        new_count = _built(now, count, new, gone, target, length, seen)
        if kind < _REORDER and not _all_may_repeat(new, new_count, min(gone, target), max(gone, target), seen, facts):
            _look(now, count, seen)
            continue
        new_footprint = footprint_kernel(new[:new_count], facts)
        new_over = _over(new_footprint, limit)
        if _is_taken(more_us + price * (new_over - over), heat, draw):
            now, new, count, over, footprint, cost_us = new, now, new_count, new_over, new_footprint, cost_us + more_us
            uses = _TensorUses(*_uses_of(now, count, seen, facts))
        elif kind < _REORDER:
            _look(now, count, seen)
    return best


@kernel(inner=True)
def _lists(nodes: Any, longest: Any) -> Any:
    return np.empty(nodes, np.int64), np.empty(nodes, np.int64), np.zeros(longest + 2, np.int64), np.empty(_CHAIN, np.int32)


@kernel(inner=True, borrows=True)
def _is_taken(worse: Any, heat: Any, draw: Any) -> bool:
    return bool(worse <= 0 or draw[_DRAWS - 1] < np.exp(-worse / heat))


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
def _look(sequence: Any, count: Any, seen: Any) -> None:
    """Where nodes first run, and how often they do."""
    seen.first[:] = count
    seen.times[:] = 0
    for position in range(count - 1, -1, -1):
        seen.first[sequence[position]] = position
        seen.times[sequence[position]] += 1


@kernel(inner=True)
def _uses_of(sequence: Any, count: Any, seen: Any, facts: Any) -> Any:
    """The rows of `_TensorUses`; looks at nodes, too."""
    _look(sequence, count, seen)
    ptr = np.zeros(len(facts.kept) + 2, np.int64)
    for tensor in range(len(facts.kept)):
        ptr[tensor + 2] += facts.kept[tensor]
    for node in range(len(seen.times)):
        for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
            ptr[facts.read_ids[entry] + 2] += seen.times[node]
        for entry in range(facts.made_ptr[node], facts.made_ptr[node + 1]):
            ptr[facts.made_ids[entry] + 2] += seen.times[node]
    for row in range(1, len(ptr)):
        ptr[row] += ptr[row - 1]
    ids = np.empty(ptr[len(ptr) - 1], np.int64)
    for position in range(count):
        node = sequence[position]
        for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
            tensor = facts.read_ids[entry]
            ids[ptr[tensor + 1]] = 2 * position
            ptr[tensor + 1] += 1
        for entry in range(facts.made_ptr[node], facts.made_ptr[node + 1]):
            tensor = facts.made_ids[entry]
            ids[ptr[tensor + 1]] = 2 * position + 1
            ptr[tensor + 1] += 1
    for tensor in range(len(facts.kept)):
        if facts.kept[tensor]:
            ids[ptr[tensor + 1]] = 2 * count
            ptr[tensor + 1] += 1
    return ptr, ids


@kernel(inner=True, borrows=True)
def _around(tensor: Any, at: Any, uses: Any) -> tuple[int, int]:
    """The last entry before this one that makes or reads a tensor, and the first from there on that reads what is there; -1 for none."""
    low, high = uses.ptr[tensor], uses.ptr[tensor + 1]
    while low < high:
        middle = (low + high) // 2
        if uses.ids[middle] < 2 * at:
            low = middle + 1
        else:
            high = middle
    before = uses.ids[low - 1] // 2 if low > uses.ptr[tensor] else -1
    is_read = low < uses.ptr[tensor + 1] and uses.ids[low] % 2 == 0
    return before, uses.ids[low] // 2 if is_read else -1


@kernel(inner=True, borrows=True)
def _may_repeat(node: Any, at: Any, seen: Any, facts: Any) -> bool:
    """Whether a node may run again right before an entry."""
    may = node >= 0 and facts.repeatable[node] and seen.first[node] < at
    if may:
        for entry in range(facts.limit_ptr[node], facts.limit_ptr[node + 1]):
            may = may and seen.first[facts.limit_ids[entry]] >= at
    return bool(may)


@kernel(inner=True, borrows=True)
def _all_may_repeat(sequence: Any, count: Any, start: Any, end: Any, seen: Any, facts: Any) -> bool:
    """Whether all that is repeated between two entries may be, in a sequence that is looked at anew."""
    _look(sequence, count, seen)
    may = True
    for position in range(start, min(end + 1, count)):
        node = sequence[position]
        may = may and (seen.first[node] == position or _may_repeat(node, position, seen, facts))
    return may


@kernel(inner=True, borrows=True)
def _near(origin: Any, low: Any, high: Any, draw: Any, far: Any) -> int:
    """An entry from low to high: any, or one that is near."""
    if far >= _FAR:
        low, high = max(low, origin - _STEPS), min(high, origin + _STEPS)
    return int(low + draw * (high - low + 1))


@kernel(inner=True, borrows=True)
def _repeated(sequence: Any, count: Any, draw: Any, seen: Any) -> int:
    """A repeated run, -1 where there is none."""
    at, left = int(draw * count), count
    while left > 0 and seen.first[sequence[at]] == at:
        at, left = (at + 1) % count, left - 1
    return at if left > 0 else -1


@kernel(inner=True, borrows=True)
def _in_other_order(sequence: Any, count: Any, draw: Any, seen: Any, order: Any) -> tuple[int, int, int]:
    """A first run, the entry that it is to run before, and 1; -1 for none."""
    at = int(draw[1] * count)
    node, low, high = sequence[at], 0, count
    if seen.first[node] != at:
        return -1, 0, 0
    for entry in range(order.pred_ptr[node], order.pred_ptr[node + 1]):
        low = max(low, seen.first[order.pred_ids[entry]] + 1)
    for entry in range(order.succ_ptr[node], order.succ_ptr[node + 1]):
        high = min(high, seen.first[order.succ_ids[entry]])
    target = _near(at, low, high, draw[2], draw[3])
    seen.chain[0] = node
    return (-1, 0, 0) if target in (at, at + 1) else (at, target, 1)


@kernel(inner=True, borrows=True)
def _built(now: Any, count: Any, new: Any, gone: Any, target: Any, length: Any, seen: Any) -> int:
    """Write the sequence without an entry, and with a chain before another; how long it is."""
    at = 0
    for position in range(count + 1):
        if length > 0 and position == target:
            for each in range(length):
                new[at] = seen.chain[each]
                at += 1
        if position < count and position != gone:
            new[at] = now[position]
            at += 1
    return at


@kernel(inner=True, borrows=True)
def _room_made(count: Any, footprint: Any, limit: Any, most_runs: Any, draw: Any, seen: Any, uses: Any, facts: Any) -> tuple[int, int]:
    """The entry before which a chain lets a tensor go that is not used before it, and how long the chain is; 0 for none."""
    at = int(draw[4] * count)
    for _ in range(count):
        if footprint[at] > limit:
            break
        at = (at + 1) % count
    tensor, target, most, known = -1, 0, -1.0, 0
    candidate = int(draw[5] * len(facts.kept))
    for _ in range(_LOOKS):
        candidate = (candidate + 1 + int(draw[6] * _STRIDE)) % len(facts.kept)
        maker = facts.producer[candidate]
        if maker < 0 or not facts.repeatable[maker] or seen.times[maker] >= most_runs:
            continue
        before, after = _around(candidate, at, uses)
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
    if not _may_repeat(maker, target, seen, facts):
        return 0, 0
    return target, _chain(maker, target, most_runs, int(draw[11] * (1 << _CHAIN)), seen, uses, facts)


@kernel(inner=True, borrows=True)
def _chain(maker: Any, at: Any, most_runs: Any, choices: Any, seen: Any, uses: Any, facts: Any) -> int:
    """The runs that make something again, in their order, the makers of some inputs that are gone among them; how many there are."""
    chain, length, done = seen.chain, 1, 0
    chain[0] = maker
    while done < length:
        node = chain[done]
        done += 1
        for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
            tensor = facts.read_ids[entry]
            other = facts.producer[tensor]
            if length == _CHAIN or (choices >> length) & 1 == 0 or other < 0 or seen.times[other] >= most_runs:
                continue
            _, after = _around(tensor, at, uses)
            if after < 0 and not _is_in_chain(other, length, chain) and _may_repeat(other, at, seen, facts):
                chain[length] = other
                length += 1
    for position in range(1, length):  # sorted by first runs, which respect what reads what
        other = position
        while other > 0 and seen.first[chain[other - 1]] > seen.first[chain[other]]:
            chain[other - 1], chain[other] = chain[other], chain[other - 1]
            other -= 1
    return length


@kernel(inner=True, borrows=True)
def _is_in_chain(node: Any, length: Any, chain: Any) -> bool:
    is_known = False
    for position in range(length):
        is_known = is_known or chain[position] == node
    return is_known


@kernel(inner=True, borrows=True)
def _estimated(now: Any, footprint: Any, limit: Any, gone: Any, target: Any, length: Any, seen: Any, uses: Any, facts: Any) -> float:
    """About how much more there is over the limit without an entry, and with a chain before another."""
    low, high, slope = len(footprint), 0, seen.slope
    if gone >= 0:
        node = now[gone]
        low, high = gone, gone + 1
        for entry in range(facts.made_ptr[node], facts.made_ptr[node + 1]):
            tensor = facts.made_ids[entry]
            before, _ = _around(tensor, gone, uses)
            _, after = _around(tensor, gone + 1, uses)
            if after >= 0:  # the copy from before stays
                slope[before + 1] += facts.tensor_bytes[tensor]
                slope[gone] -= facts.tensor_bytes[tensor]
                low = min(low, before + 1)
        for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
            tensor = facts.read_ids[entry]
            before, _ = _around(tensor, gone, uses)
            _, after = _around(tensor, gone + 1, uses)
            if after < 0:  # it read it last
                slope[before + 1] -= facts.tensor_bytes[tensor]
                slope[gone] += facts.tensor_bytes[tensor]
                low = min(low, before + 1)
    for each in range(length):
        node = seen.chain[each]
        for entry in range(facts.made_ptr[node], facts.made_ptr[node + 1]):
            tensor = facts.made_ids[entry]
            before, after = _around(tensor, target, uses)
            if after >= 0:
                slope[before + 1] -= facts.tensor_bytes[tensor]
                slope[target] += facts.tensor_bytes[tensor]
                low, high = min(low, before + 1), max(high, target)
        for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
            tensor = facts.read_ids[entry]
            before, after = _around(tensor, target, uses)
            if after < 0 and not _is_in_chain(facts.producer[tensor], length, seen.chain):
                slope[before + 1] += facts.tensor_bytes[tensor]
                slope[target] -= facts.tensor_bytes[tensor]
                low, high = min(low, before + 1), max(high, target)
    more, change = 0.0, 0
    for position in range(low, min(high, len(footprint))):
        change += slope[position]
        slope[position] = 0
        there = footprint[position] - limit
        more += (0 if position == gone else max(0, there + change)) - max(0, there)
    slope[min(high, len(footprint))] = 0
    return more
