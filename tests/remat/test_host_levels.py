"""Limits of the host's memory: what sequences pin by a slow count, eviction beneath them, and the search against brute force."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.problems.order import Ints, OrderProblem, Rows, Task
from lowtide.remat.archive import Archive, Point, pinned_step
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.entries import Codes, EntryKind
from lowtide.remat.eviction import ScoreWeights
from lowtide.remat.problem import Links, RematProblem
from lowtide.remat.sweep import Sweep
from tests.problems import unhurried
from tests.sequences import RULES, evict, linked, stored_chain

SWEEP = Sweep(levels=16, max_states=600)


def slow_pinned_bytes(problem: RematProblem, sequence: Ints) -> int:
    """Buffers one by one: a copy takes a free one of its size or has one made, and gives it back after its last load or drop."""
    codes = Codes(problem.problem.node_count, problem.problem.tensor_count)
    read = [codes.read(entry) for entry in sequence.tolist()]
    free: list[int] = []
    made: list[int] = []
    for place, (deed, tensor) in enumerate(read):
        size = 1
        while deed is not EntryKind.RUN and size < problem.problem.tensor_bytes[tensor]:
            size *= 2
        if deed is EntryKind.STORE:
            if size in free:
                free.remove(size)
            else:
                made.append(size)
        elif deed is not EntryKind.RUN and all(kind in (EntryKind.RUN, EntryKind.STORE) or of != tensor for kind, of in read[place + 1 :]):
            free.append(size)
    return sum(made)


@unhurried
@given(linked(), st.data())
def test_what_is_pinned_is_that_of_a_slow_count(made, data) -> None:
    _, problem, order = made
    sequence = list(order)
    for tensor in np.flatnonzero(problem.links.storable).tolist()[:3]:
        for entry in (problem.codes.store(tensor), problem.codes.drop(tensor), problem.codes.load(tensor)):
            sequence.insert(data.draw(st.integers(0, len(sequence))), entry)
    array = np.array(sequence, np.int32)
    if first_wrong(problem, array) < 0:
        assert cost_of(problem, array).pinned_bytes == slow_pinned_bytes(problem, array)


@unhurried
@given(linked(), st.floats(0, 1), st.sampled_from(RULES), st.sampled_from([0, 1, 4, 16, 64]))
def test_eviction_beneath_a_limit_of_the_host_is_right(made, share: float, weights: ScoreWeights, host_bytes: int) -> None:
    case, problem, order = made
    if not order:
        return
    array = np.array(order, np.int32)
    limit = int(case.resident_bytes + share * (cost_of(problem, array).peak_bytes - case.resident_bytes))
    evicted = evict(problem, array, limit, weights, pinned_bytes=host_bytes)
    if evicted is None:
        return
    cost = cost_of(problem, evicted.sequence)
    assert first_wrong(problem, evicted.sequence) == -1
    assert cost.peak_bytes <= limit
    if host_bytes == 0:
        assert evicted.sequence.max() < problem.problem.node_count  # nothing is stored
    without = evict(problem, array, limit, weights, pinned_bytes=2**40)
    endless = evict(problem, array, limit, weights)
    assert without is not None
    assert endless is not None
    assert without.sequence.tolist() == endless.sequence.tolist()


def test_of_equal_layers_as_many_are_stored_as_have_buffers() -> None:
    """Each takes 128 bytes of the host for its 100."""
    problem, order = stored_chain(8), np.arange(16, dtype=np.int32)
    weights = ScoreWeights(store_above=0.0, load_weight=0.1, lead=2.0)
    for buffers in range(8):
        evicted = evict(problem, order, 801 - 100 * buffers, weights, pinned_bytes=128 * buffers)
        if buffers <= 5:
            assert evicted is not None
            assert cost_of(problem, evicted.sequence).pinned_bytes == 128 * buffers
        assert buffers == 0 or evict(problem, order, 801 - 100 * buffers, weights, pinned_bytes=128 * buffers - 1) is None


def test_steps_of_what_is_pinned() -> None:
    assert [pinned_step(each) for each in (0, 1, 7, 8, 9, 11, 33, 48, 49)] == [0, 1, 7, 8, 10, 12, 40, 48, 56]
    assert pinned_step(48 * 2**30) == 48 * 2**30


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12])), max_size=30))
def test_the_archive_answers_as_all_points_would(costs) -> None:
    nothing = np.zeros(0, np.int32)
    points = [Point(peak, float(us), 0, nothing, pinned_bytes=pinned) for peak, us, pinned in costs]
    archive = Archive.of(points)
    for peak, pinned in product(range(10), (0, 1, 3, 8, 12, None)):
        fitting = [each for each in points if each.peak_bytes <= peak and (pinned is None or each.pinned_bytes <= pinned)]
        point = archive.within(peak, pinned)
        assert (point is None) == (not fitting)
        assert point is None or point.time_us == min(each.time_us for each in fitting)
        if pinned is not None:
            assert [each.time_us for each in archive.pinning(pinned) if each.peak_bytes <= peak][-1:] == ([point.time_us] if point else [])


def little_steps(count: int) -> Iterator[tuple[RematProblem, Ints]]:
    """Forward and backward passes of three layers, whose results may be stored and cannot be made again."""
    for seed in range(count):
        rng, layers = np.random.default_rng(seed), 3
        sizes = [int(each) for each in rng.integers(1, 12, layers)] + [1] * layers
        tasks = [Task("", makes=(each,), reads=(each - 1,) if each else ()) for each in range(layers)]
        for each in reversed(range(layers)):
            tasks.append(Task("", makes=(layers + each,), reads=(each, *([layers + each + 1] if each + 1 < layers else []))))
        nodes = 2 * layers
        links = Links(np.arange(nodes) < layers, rng.integers(1, 9, nodes) + 0.0, rng.integers(1, 9, nodes) + 0.0)
        no, problem = np.zeros(nodes, np.bool_), OrderProblem.of(sizes, tasks, kept=[layers])
        yield RematProblem(problem, rng.integers(1, 9, nodes) + 0.0, no, no, Rows.of([()] * nodes), links), np.arange(nodes, dtype=np.int32)


def all_sequences(problem: RematProblem, order: Ints) -> Iterator[Ints]:
    """Each tensor is kept, or stored, dropped and loaded once, wherever that is right."""
    codes, steps, moves = problem.codes, len(order), list[list[tuple[tuple[float, int], ...]]]()
    for tensor in range(steps // 2):
        reader = steps - 1 - tensor
        away = [
            ((store + 0.1, codes.store(tensor)), (drop + 0.2, codes.drop(tensor)), (load + 0.3, codes.load(tensor)))
            for store in range(tensor, reader)
            for drop in range(max(store, tensor + 1), reader)
            for load in range(drop, reader)
        ]
        moves.append([(), *away])
    for choice in product(*moves):
        entries = [(float(step), int(node)) for step, node in enumerate(order)] + [entry for each in choice for entry in each]
        sequence = np.array([code for _, code in sorted(entries)], np.int32)
        if first_wrong(problem, sequence) < 0:
            yield sequence


@pytest.fixture(scope="module")
def optima() -> list[tuple[RematProblem, Ints, Archive]]:
    """Problems, orders, and the archive of all their sequences."""
    archives = []
    for problem, order in little_steps(16):
        archive = Archive()
        for sequence in all_sequences(problem, order):
            archive.add(Point.of(problem, 0, sequence))
        archives.append((problem, order, archive))
    return archives


def test_beneath_both_limits_the_search_is_never_better_than_all_sequences_and_no_further_from_them_than_beneath_one(optima) -> None:
    """It answers nearly all of what can be; links are hard for eviction, and a limit of the host makes them no harder."""
    one, both = [], []
    for problem, order, least in optima:
        archive = SWEEP.explore([problem], [[order]])
        for limit in sorted({each.peak_bytes for each in least.all_points}):
            one.append(_us(archive.within(limit)) / _us(least.within(limit)))
            for host in sorted({pinned_step(each.pinned_bytes) for each in least.all_points}):
                best, point = least.within(limit, host), archive.within(limit, host)
                assert best is not None or point is None
                both += [] if best is None else [_us(point) / best.time_us]
    assert len(both) > 120
    assert min(*one, *both) >= 1
    reached = np.array([each for each in both if math.isfinite(each)])
    assert len(reached) >= 0.97 * len(both)
    assert reached.mean() <= max(1.02, np.mean(one))
    assert reached.max() <= 1.5
    assert np.mean(reached == 1) >= np.mean(np.array(one) == 1) >= 0.25


def test_more_of_either_memory_is_never_slower(optima) -> None:
    for problem, order, _ in optima[:6]:
        archive = SWEEP.explore([problem], [[order]])
        limits, hosts = sorted({each.peak_bytes for each in archive.all_points}), range(40)
        times = [[_us(archive.within(limit, host)) for host in hosts] for limit in limits]
        for row in [*times, *map(list, zip(*times, strict=True))]:
            assert row == sorted(row, reverse=True)
        assert [row[-1] for row in times] == [_us(archive.within(limit)) for limit in limits]  # three tensors pin no more


def _us(point: Point | None) -> float:
    return math.inf if point is None else point.time_us
