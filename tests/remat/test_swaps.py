"""Sequences with swapping: their footprint and time against a slow simulation, and eviction that stores and loads."""

import dataclasses
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.presets import preset
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.problems.order import OrderProblem, Task
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.entries import Codes, EntryKind
from lowtide.remat.eviction import Bias, ScoreWeights, attempt
from lowtide.remat.problem import Links, RematProblem
from lowtide.remat.sweep import Sweep
from lowtide.remat.write_out import rematerialise
from tests.problems import unhurried
from tests.sequences import RULES, evict, linked, stored_chain


def slow(case, problem, sequence):
    """(footprint by entry, time), by keeping every copy of every tensor as a record of its own; None for a wrong sequence."""
    codes = Codes(len(case.tasks), len(case.tensor_bytes))
    copies = []  # [tensor, born, last use]
    current = dict.fromkeys(range(len(case.tensor_bytes)))
    made = {tensor for task in case.tasks for tensor in task.makes}
    for tensor in current:
        if tensor not in made:
            current[tensor] = [tensor, -1, -2]
            copies.append(current[tensor])
    host, dropped, pending, done, written = {}, set(), set(), set(), set()
    offloaded = set(np.flatnonzero(problem.links.storable).tolist()) - made
    writes = [set(ids.tolist()) for ids in np.split(problem.writes.ids, problem.writes.ptr[1:-1])]
    clock = to_host = from_host = 0.0
    arrived, extra = {}, []
    for place, entry in enumerate(sequence):
        deed, index = codes.read(entry)
        used = 0
        if deed is EntryKind.RUN:
            task = case.tasks[index]
            if any(current[tensor] is None for tensor in task.reads) or (index in done and not problem.repeatable[index]):
                return None
            if pending & (set(task.makes) | writes[index]):
                return None
            written |= writes[index]
            clock = max([clock, *(arrived.get(id(current[tensor]), 0.0) for tensor in task.reads)]) + problem.cost_us[index]
            for tensor in task.reads:
                current[tensor][2] = place
            for tensor in task.makes:
                current[tensor] = [tensor, place, place]
                copies.append(current[tensor])
            done.add(index)
            used = task.workspace_bytes
        elif deed is EntryKind.STORE:
            if current[index] is None or index in host or not problem.links.storable[index] or index in written:
                return None
            to_host = max(to_host, clock, arrived.get(id(current[index]), 0.0)) + problem.links.store_us[index]
            host[index] = to_host
            current[index][2] = place
            pending.add(index)
        elif deed is EntryKind.DROP:
            if current[index] is None or index not in host or index in written:
                return None
            clock = max(clock, host[index])
            current[index][2] = place
            current[index] = None
            pending.discard(index)
            dropped.add(index)
        else:
            if index not in dropped or (index in offloaded and current[index] is not None):
                return None
            from_host = max(from_host, clock) + problem.links.load_us[index]
            current[index] = [index, place, place]
            copies.append(current[index])
            arrived[id(current[index])] = from_host
        extra.append(used)
    if pending or any(current[tensor] is None for tensor in offloaded):
        return None
    for tensor in case.kept:
        if current[tensor] is not None:
            clock = max(clock, arrived.get(id(current[tensor]), 0.0))
            current[tensor][2] = len(sequence)
    alive = [case.resident_bytes] * len(sequence)
    for tensor, born, last in copies:
        for place in range(max(born, 0), min(last, len(sequence) - 1) + 1):
            alive[place] += case.tensor_bytes[tensor]
    return [live + used for live, used in zip(alive, extra, strict=True)], clock


@unhurried
@given(linked(), st.data())
def test_footprint_and_time_are_those_of_a_slow_simulation(made, data):
    case, problem, order = made
    problem = dataclasses.replace(problem, problem=_without_reuses(case))
    codes, sequence = problem.codes, list(order)
    for tensor in np.flatnonzero(problem.links.storable).tolist()[:2]:
        for entry in (codes.store(tensor), codes.drop(tensor), codes.load(tensor)):
            sequence.insert(data.draw(st.integers(0, len(sequence))), entry)
    if order and data.draw(st.booleans()):
        sequence.insert(data.draw(st.integers(0, len(sequence))), data.draw(st.sampled_from(order)))
    expected, array = slow(case, problem, sequence), np.array(sequence, np.int32)
    assert (first_wrong(problem, array) < 0) == (expected is not None)
    if expected is not None:
        cost = cost_of(problem, array)
        assert cost.footprint_bytes.tolist() == expected[0]
        assert cost.time_us == expected[1]


def _without_reuses(case):
    tasks = [dataclasses.replace(task, takes=()) for task in case.tasks]
    return OrderProblem.of(case.tensor_bytes, tasks, kept=case.kept, resident_bytes=case.resident_bytes)


@unhurried
@given(linked(), st.floats(0, 1), st.sampled_from(RULES), st.data())
def test_eviction_with_swapping_keeps_its_limit_and_is_right(made, share, weights, data):
    case, problem, order = made
    if not order:
        return
    array = np.array(order, np.int32)
    peak = cost_of(problem, array).peak_bytes
    limit = int(case.resident_bytes + share * (peak - case.resident_bytes))
    factor = st.sampled_from([0.02, 1.0, 50.0])
    m = len(case.tensor_bytes)
    bias = Bias(
        np.array(data.draw(st.lists(factor, min_size=m, max_size=m))), np.array(data.draw(st.lists(factor, min_size=m, max_size=m)))
    )
    for exceptions in (None, bias):
        found = evict(problem, array, limit, weights, exceptions)
        if found is not None:
            assert first_wrong(problem, found.sequence) == -1
            assert cost_of(problem, found.sequence).peak_bytes <= limit
            assert list(dict.fromkeys(code for code in found.sequence.tolist() if code < len(case.tasks))) == list(order)


def test_a_fast_link_makes_swapping_free_where_nothing_can_be_repeated():
    problem = stored_chain(8)
    order = np.arange(16, dtype=np.int32)
    plain = cost_of(problem, order)
    assert (plain.peak_bytes, plain.time_us) == (801, 160)
    assert evict(problem, order, 400) is None  # recomputation alone cannot
    found = evict(problem, order, 400, ScoreWeights(store_above=0.0, load_weight=0.1, lead=2.0))
    assert found is not None
    assert first_wrong(problem, found.sequence) == -1
    cost = cost_of(problem, found.sequence)
    assert cost.peak_bytes <= 400
    assert cost.time_us == plain.time_us  # every copy is hidden behind an operator


@pytest.mark.parametrize("launch_us", [0.01, 10.0, 1e6])
def test_a_limit_is_met_by_copies_however_quick_they_are(launch_us):
    """Beside a launch a copy takes nothing, or everything: room is what it makes."""
    problem, order = stored_chain(8), np.arange(16, dtype=np.int32)
    link = dataclasses.replace(preset("h100"), launch_us=launch_us, issue_us=launch_us)
    linked_by = dataclasses.replace(problem, links=Links.of(problem.problem, problem.links.storable, link))
    assert (linked_by.links.storable == problem.links.storable).all()
    found = evict(linked_by, order, 400, ScoreWeights(store_above=0.0))
    assert cost_of(linked_by, found.sequence).peak_bytes <= 400


def test_what_makes_no_room_is_not_worth_a_quick_copy():
    link = dataclasses.replace(preset("h100"), launch_us=10.0)
    tasks = [Task(f"n{i}", makes=(i,)) for i in range(12)]
    sizes = [10**6] * 5 + [400, 400, 3 * 10**5] + [10**8] * 4  # the quick ones make room only beside one another
    for these, wanted in ((range(12), [*[False] * 8, *[True] * 4]), (range(8), [*[True] * 5, False, False, True])):
        problem = OrderProblem.of([sizes[i] for i in these], tasks[: len(these)], kept=[0])
        assert Links.of(problem, [True] * len(these), link).storable.tolist() == wanted


def _training_step(layers, nbytes):
    """Parameters, all read forward, backward and by their update; between them activations as large."""

    def value(name, kind, nbytes=nbytes):
        return Value(name, Storage(name, nbytes, "cpu", kind), "float32", (nbytes // 4,), (1,))

    x = value("x", Kind.INPUT, 16)
    params = [value(f"w{i}", Kind.PARAMETER) for i in range(layers)]
    acts = [value(f"a{i}", Kind.ACTIVATION) for i in range(layers)]
    grads = [value(f"g{i}", Kind.GRADIENT) for i in range(layers)]
    nodes = [Node("aten.mul.Tensor", ((x, *acts)[i], params[i]), (acts[i],)) for i in range(layers)]
    nodes += [Node("aten.mul.Tensor", (acts[i], params[i]), (grads[i],)) for i in reversed(range(layers))]
    for param, grad in zip(params, grads, strict=True):
        after = dataclasses.replace(param, name=f"{param.name}_1", version=1)
        nodes.append(Node("aten.add_.Tensor", (param, grad), (), writes=((param, after),)))
    return Graph((x, *params), tuple(nodes), ())


def test_what_is_lent_makes_room_for_activations_and_is_back_before_it_is_written():
    graph = _training_step(6, 1_600_000)
    own, offloaded = (
        RematProblem.of(graph, [500.0] * len(graph.nodes), swap=preset("rtx3090"), swap_state=swap_state) for swap_state in (False, True)
    )
    order = own.sequence_of(range(len(graph.nodes)))
    assert cost_of(own, order).footprint_bytes.tolist() == cost_of(offloaded, order).footprint_bytes.tolist()
    least = {}
    for name, problem in (("own", own), ("offloaded", offloaded)):
        archive = Sweep(max_states=2000).explore([problem], [[order]])
        least[name] = archive.points[0].peak_bytes
        for point in archive.points:
            assert first_wrong(problem, point.sequence) == -1
            done = rematerialise(graph, point.sequence.tolist())
            check_graph(done.graph)
            assert simulate(order_problem(done.graph), range(len(done.graph.nodes))).peak_bytes == point.peak_bytes
    assert own.problem.resident_bytes == 6 * 1_600_000 + 16
    assert offloaded.problem.resident_bytes == 16
    assert least["own"] >= 8 * 1_600_000  # all parameters, and what an operator reads and makes
    assert least["offloaded"] < 8 * 1_600_000


def test_a_slow_link_is_waited_for():
    problem = stored_chain(4)
    slow_links = dataclasses.replace(problem, links=Links(problem.links.storable, np.full(8, 100.0), np.full(8, 100.0)))
    found = evict(slow_links, np.arange(8, dtype=np.int32), 300, ScoreWeights(store_above=0.0))
    assert found is not None
    cost = cost_of(slow_links, found.sequence)
    assert cost.time_us >= 80 + 100  # at least one store or load that nothing hides
    assert cost.peak_bytes <= 300


def test_the_archive_is_the_same_each_time_and_better_with_links():
    problem = stored_chain(10)
    problem = dataclasses.replace(problem, repeatable=np.arange(20) < 10)
    order = [np.arange(20, dtype=np.int32)]
    with_links, again, without = (
        Sweep(max_states=1500).explore([each], [order]) for each in (problem, problem, dataclasses.replace(problem, links=None))
    )
    assert [(p.peak_bytes, p.time_us, p.sequence.tolist()) for p in with_links.points] == [
        (p.peak_bytes, p.time_us, p.sequence.tolist()) for p in again.points
    ]
    assert with_links.states <= 2.25 * 1500  # without swapping, with, and beneath limits of the host
    for limit in (900, 700, 500):
        assert with_links.within(limit).time_us < without.within(limit).time_us


@pytest.mark.parametrize("entry", [-1, 8 + 3 * 8, 10**6])
def test_what_is_no_entry_is_wrong(entry):
    problem = stored_chain(4)
    assert first_wrong(problem, np.array([0, entry], np.int32)) == 1
    with pytest.raises(IndexError, match="expected an entry"):
        problem.codes.read(entry)


def test_an_interrupted_search_keeps_what_it_has(monkeypatch):
    problem, calls = stored_chain(6), count(1)  # of two threads, each counted once
    problem = dataclasses.replace(problem, repeatable=np.arange(12) < 6)

    def interrupted(*args):
        if next(calls) > 20:
            raise KeyboardInterrupt
        return attempt(*args)

    monkeypatch.setattr("lowtide.remat.sweep.attempt", interrupted)
    archive = Sweep().explore([problem], [[np.arange(12, dtype=np.int32)]])
    assert archive.interrupted
    assert archive.states >= 19  # the twentieth may be under way in the other thread
    assert archive.points[0].peak_bytes < 606
