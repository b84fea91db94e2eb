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
from lowtide.remat.run_list import around, put_in, run_list_of, take_out, wants_room, with_room, written
from tests.chains import in_order
from tests.optimum import small_steps

_CHANGES = 40


def main() -> None:
    """Put runs of little steps in anywhere and take any of the repeated ones out again; compare with a count of the whole."""
    rng, limits = random.Random(0), 0
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
            if again and (rng.random() < 0.45 or len(sequence) > 3 * len(order)):
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
            assert time.sums[2] == np.maximum(counted - limit, 0).sum()
            limits += int(time.sums[2] > 0)
            tensor, at = rng.randrange(len(facts.kept)), rng.randrange(len(sequence))
            assert around(tensor, at, time, facts) == _around(problem, sequence, tensor, at)
    assert limits > _CHANGES


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
