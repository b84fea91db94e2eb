"""A sequence that runs are put into and taken out of has the footprint, to the byte, that it has when it is counted anew."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

from lowtide.problems.order import Ints
from lowtide.remat.cost import cost_of
from lowtide.remat.problem import RematProblem
from lowtide.remat.run_list import RunList, around, put_in, run_list_of, take_out, wants_room, with_room, written
from tests.chains import in_order
from tests.optimum import small_steps

_CHANGES = 30


def main() -> None:
    """Put runs of little steps in anywhere, take repeated ones out, move first ones; compare with a count of the whole."""
    rng, limits, moves = random.Random(0), 0, 0
    for problem in small_steps(3):
        order, facts = in_order(problem), problem.facts
        resident = problem.problem.resident_bytes
        plain = cost_of(problem, order)
        limit = int(plain.footprint_bytes.mean()) - resident
        time = run_list_of(order, 4 * len(order) + 1, limit, facts)
        for _ in range(_CHANGES):
            sequence = np.empty(time.sums[0], np.int32)
            written(time, sequence)
            again = [at for at in range(len(sequence)) if time.first[sequence[at]] != time.slots[at]]
            if rng.random() < 0.4:
                moves += _moved(problem, sequence, rng, time)
            elif again and (rng.random() < 0.45 or len(sequence) > 3 * len(order)):
                take_out(rng.choice(again), time, facts)
            else:
                node = int(rng.choice([each for each in order if problem.repeatable[each]]))
                at = rng.randint(int(np.flatnonzero(sequence == node)[0]) + 1, len(sequence))
                if wants_room(np.array([node]), 1, time, facts):
                    time = with_room(time)
                put_in(node, at, time, facts)
            sequence = np.empty(time.sums[0], np.int32)
            written(time, sequence)
            counted = cost_of(problem, sequence).footprint_bytes - resident
            assert time.footprint[: len(sequence)].tolist() == counted.tolist()
            assert all(time.place[time.first[node]] == at for node, at in _first_entries(sequence).items())
            assert time.sums[2] == np.maximum(counted - limit, 0).sum()
            assert _by_entry(time) == _by_entry(run_list_of(sequence, len(sequence) + 1, limit, facts))
            limits += int(time.sums[2] > 0)
            tensor, at = rng.randrange(len(facts.kept)), rng.randrange(len(sequence))
            assert around(tensor, at, time, facts) == _around(problem, sequence, tensor, at)
    assert min(limits, moves) > _CHANGES // 2


def _moved(problem: RematProblem, sequence: Ints, rng: random.Random, time: RunList) -> bool:
    """Whether a node's first run could be moved to another place, behind the first runs of what it needs and before those that need it."""
    first, order, places = _first_entries(sequence), problem.first_run_order, []
    for node, at in first.items():
        low = max((first[each] + 1 for each in order.pred_ids[order.pred_ptr[node] : order.pred_ptr[node + 1]]), default=0)
        high = min((first[each] for each in order.succ_ids[order.succ_ptr[node] : order.succ_ptr[node + 1]]), default=len(sequence))
        places += [(node, at, place) for place in range(low, high + 1) if place not in (at, at + 1)]
    if places:
        node, at, place = rng.choice(places)
        take_out(at, time, problem.facts)
        put_in(node, place - (at < place), time, problem.facts)
    return bool(places)


def _by_entry(time: RunList) -> tuple[list[int], ...]:
    """All that is kept of a list, where the numbers of slots and the room behind rows do not matter."""
    slots = time.slots[: time.sums[0]]
    rows = [time.rows.events[begin : begin + length] for begin, length in zip(time.rows.begin, time.rows.length, strict=True)]
    events = [2 * time.place[row >> 1] + (row & 1) for row in rows]
    firsts = [time.place[slot] if slot >= 0 else -1 for slot in time.first]
    alike = time.node[slots], time.taken[slots], time.footprint[: len(slots)], time.times, time.sums[[0, 2, 3, 4]], np.array(firsts)
    return (*(each.tolist() for each in (*alike, *events)),)


def _first_entries(sequence: Ints) -> dict[int, int]:
    return {node: at for at, node in reversed([*enumerate(sequence.tolist())])}


def _around(problem: RematProblem, sequence: Ints, tensor: int, at: int) -> tuple[int, int]:
    """Entry by entry: who makes or reads a tensor before an entry, and who reads it from there on before it is made again."""
    base = problem.problem
    reads = [tensor in base.reads.ids[base.reads.ptr[node] : base.reads.ptr[node + 1]] for node in sequence]
    makes = [base.producer[tensor] == node for node in sequence]
    before = max((entry for entry in range(at) if reads[entry] or makes[entry]), default=-1)
    for entry in range(at, len(sequence)):
        if makes[entry]:
            return before, -1
        if reads[entry]:
            return before, entry
    return before, len(sequence) if base.kept[tensor] else -1


def test_footprints_are_those_of_the_whole_sequence() -> None:
    """In a process of its own, as kernels that others call are no functions of Python."""
    here = Path(__file__).parents[2]
    settings = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(here)}
    subprocess.run([sys.executable, "-m", "tests.remat.test_run_list"], check=True, env=settings, cwd=here, timeout=300)


if __name__ == "__main__":
    main()
