"""Local moves give right sequences within the limit, find what eviction does not, and a search with more states is never worse."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.remat.cost import cost_of, price_of, runs_all
from lowtide.remat.local_moves import LocalMoves
from lowtide.remat.neighbours import RULES
from lowtide.remat.sweep import Sweep
from tests.chains import in_order
from tests.optimum import least_us, levels, small_steps
from tests.problems import unhurried
from tests.sequences import evict, layered, repeating, stored_chain


@settings(unhurried, max_examples=60)
@given(repeating(), st.floats(0, 1), st.booleans(), st.integers(1, 3))
def test_what_comes_out_is_right_and_keeps_the_limit(made, share: float, reorders: bool, most_runs: int) -> None:
    case, problem, order, _ = made
    assume(order)
    base = np.array(order, np.int32)
    plain = cost_of(problem, base)
    limit_bytes = int(case.resident_bytes + share * (plain.peak_bytes - case.resident_bytes))
    found = LocalMoves(600, most_runs, reorders).improved(problem, base, limit_bytes, np.random.default_rng(0))
    if found is None:
        assert limit_bytes < plain.peak_bytes
        return
    assert runs_all(problem, found)
    assert price_of(problem, found)[0] <= limit_bytes
    nodes, first, times = np.unique(found, return_index=True, return_counts=True)
    position = dict(zip(nodes.tolist(), first.tolist(), strict=True))
    preds = problem.problem.preds
    for node in nodes.tolist():
        assert all(position[pred] < position[node] for pred in preds.ids[preds.ptr[node] : preds.ptr[node + 1]].tolist())
    assert times.max() <= most_runs
    if not reorders:
        assert nodes[np.argsort(first)].tolist() == list(order)
        assert price_of(problem, found)[1] >= least_us(problem, list(order), limit_bytes)


def test_they_find_the_optimum_of_little_steps() -> None:
    """From the order itself: of ten limits that any sequence keeps, nine in the least time of its order or less."""
    found, least_found = 0, 0
    for problem in small_steps(8):
        order = in_order(problem)
        for limit_bytes in levels(problem, order.tolist(), cost_of(problem, order).peak_bytes):
            sequence = LocalMoves(4000).improved(problem, order, limit_bytes, np.random.default_rng(0))
            found += 1
            if sequence is not None:
                least_found += price_of(problem, sequence)[1] <= least_us(problem, order.tolist(), limit_bytes)
    assert found > 10
    assert least_found >= 0.9 * found


def test_the_same_draws_give_the_same_sequence() -> None:
    problem = layered(60)
    order = in_order(problem)
    limit_bytes = price_of(problem, order)[0] * 9 // 10
    one, other = (LocalMoves(3000).improved(problem, order, limit_bytes, np.random.default_rng(1)) for _ in range(2))
    assert one is not None
    assert other is not None
    assert one.tolist() == other.tolist()


def test_nothing_runs_again_behind_what_writes_over_what_it_reads() -> None:
    """Also where first runs move while the limit is kept, so that a writer could pass by."""
    problem = layered(60, writers=30)
    order, repeated = in_order(problem), 0
    for seed, share in product(range(4), (80, 90, 99)):
        limit_bytes = price_of(problem, order)[0] * share // 100
        found = LocalMoves(20_000).improved(problem, order, limit_bytes, np.random.default_rng(seed))
        if found is None:
            continue
        first = {int(node): place for place, node in reversed([*enumerate(found)])}
        for place, node in enumerate(found.tolist()):
            over = problem.limits.ids[problem.limits.ptr[node] : problem.limits.ptr[node + 1]].tolist()
            assert all(place < first[each] for each in over)
            repeated += place > first[node]
    assert repeated > 10


def test_a_search_finds_an_answer_where_eviction_has_none_by_any_rule() -> None:
    problem = layered(200)
    order = in_order(problem)
    limit_bytes = price_of(problem, order)[0] * 88 // 100
    assert all(evict(problem, order, limit_bytes, rule) is None for rule in RULES)
    assert Sweep(max_states=600).explore([problem], [[order]]).within(limit_bytes) is not None


@pytest.mark.parametrize("swap", [False, True])
def test_more_states_are_never_worse(swap: bool) -> None:
    """Without swapping wherever a search is stopped, with it at the ends of rounds."""
    problem = stored_chain(8)
    problem = problem if swap else replace(problem, links=None)
    order = np.arange(16, dtype=np.int32)
    states = (600, 6600) if swap else (20, 90, 350, 600, 700, 2000, 6600)
    archives = [Sweep(max_states=each).explore([problem], [[order]]) for each in states]
    for fewer, more in pairwise(archives):
        for point in fewer.points:
            same = more.within(point.peak_bytes)
            assert same is not None
            assert same.time_us <= point.time_us
