"""What a sequence's evictions say, against the graph that it is written as and against the sum of its parts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.memory import counted_storages, order_problem, simulate
from lowtide.cost.presets import preset
from lowtide.ir.graph import Graph, Kind, Node, Storage
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.operators.row import LOAD, STORE
from lowtide.remat.entries import EntryKind
from lowtide.remat.explain import evictions_of
from lowtide.remat.problem import RematProblem
from lowtide.remat.write_out import Rematerialised, rematerialise
from tests.graphs import array, compute, graphs
from tests.peaks import memory_profile
from tests.swapping import random_sequence

DEVICE = preset("rtx3090")


@st.composite
def sequences(draw, away=0.3):
    """A random graph, its remat problem with random costs, and a random right sequence."""
    graph = _as_captured(draw(graphs(bodies=False)))
    costs = draw(st.lists(st.integers(1, 99), min_size=len(graph.nodes), max_size=len(graph.nodes)))
    sequence = random_sequence(graph, random.Random(draw(st.integers(0, 10**6))), again=draw(st.sampled_from([0.0, 0.3, 0.8])), away=away)
    return graph, RematProblem.of(graph, costs, swap=DEVICE), np.array(sequence, np.int32)


def _evictions(problem, sequence, graph):
    """The evictions of a sequence, written out in its order."""
    written = rematerialise(graph, sequence.tolist()).graph
    return evictions_of(problem, sequence, graph, written, simulate(order_problem(written), range(len(written.nodes))).reuses)


def _as_captured(graph: Graph) -> Graph:
    """The same graph as a capture would leave it: nobody waits for a view, and nothing is returned as it was before a write."""
    became: dict[Node, Node] = {}
    for node in graph.nodes:
        became[node] = replace(node, after=tuple(became[before] for before in node.after if not is_view(before)))
    written = {before for node in graph.nodes for before, _ in node.writes}
    stale = {(value.storage, value.version) for value in written}
    outputs = tuple(value for value in graph.outputs if (value.storage, value.version) not in stale)
    return Graph(graph.inputs, tuple(became.values()), outputs)


@settings(max_examples=40)
@given(sequences())
def test_each_repetition_and_each_copy_is_paid_for_once(made):
    _, problem, sequence = made
    evictions = _evictions(problem, sequence, made[0])
    entries = [problem.codes.read(entry) for entry in sequence.tolist()]
    nodes = [index for deed, index in entries if deed is EntryKind.RUN]
    assert sum(eviction.runs for eviction in evictions) == len(nodes) - len(set(nodes))
    assert sum(eviction.run_us for eviction in evictions) == sum(problem.cost_us[nodes]) - sum(problem.cost_us[list(set(nodes))])
    loads = [problem.links.load_us[tensor] for deed, tensor in entries if deed is EntryKind.LOAD]
    assert np.isclose(sum(eviction.load_us for eviction in evictions), sum(loads))
    stored = {counted_storages(made[0])[tensor].name for deed, tensor in entries if deed is EntryKind.STORE}
    assert {eviction.tensor.name for eviction in evictions if eviction.store_us} <= stored


@settings(max_examples=40)
@given(sequences())
def test_no_copy_is_there_while_a_tensor_is_away_and_one_is_before_and_after(made):
    graph, problem, sequence = made
    done = rematerialise(graph, sequence.tolist())
    lives = _lives(graph, done)
    for eviction in _evictions(problem, sequence, graph):
        there = {step for start, end in lives[eviction.tensor.name] for step in range(start, end)}
        for start, end in eviction.away:
            assert there.isdisjoint(range(start, end))
            assert end in there
            assert start - 1 in there or eviction.tensor.start == start
        within = [step for step in range(eviction.tensor.start, eviction.tensor.end) if step not in there]
        assert within == [step for start, end in eviction.away for step in range(start, end)]


@settings(max_examples=40)
@given(sequences())
def test_what_is_away_at_the_peak_makes_up_for_what_is_saved_there(made):
    graph, problem, sequence = made
    done = rematerialise(graph, sequence.tolist())
    firsts = list(dict.fromkeys(entry for entry in sequence.tolist() if entry < len(graph.nodes)))
    if not firsts:
        return
    kept = rematerialise(graph, firsts)
    profile = memory_profile(kept.graph, range(len(kept.graph.nodes)))
    node = kept.origins[_peak_of_runs(kept, profile.footprint_bytes)]
    step = done.origins.index(node)  # its first run
    before = profile.footprint_bytes[kept.origins.index(node)]
    after = memory_profile(done.graph, range(len(done.graph.nodes))).footprint_bytes[step]
    spared = sum(eviction.tensor.nbytes for eviction in _evictions(problem, sequence, graph) if eviction.at_peak)
    assert after >= before - spared


def _peak_of_runs(kept: Rematerialised, footprint) -> int:
    """The step of the first node that is no view and has the highest footprint of those."""
    steps = [step for step, node in enumerate(kept.graph.nodes) if not is_view(node)]
    return max(steps, key=lambda step: footprint[step])


def _lives(graph: Graph, done: Rematerialised) -> dict[str, list[tuple[int, int]]]:
    """The lives of all copies of each storage, by its own name."""
    of: dict[Storage, str] = {storage: storage.name for storage in counted_storages(graph)}
    for node, origin in zip(done.graph.nodes, done.origins, strict=True):
        if node.op in (STORE, LOAD):
            of[node.outputs[0].storage] = of[node.inputs[0].storage]
        elif origin >= 0:
            pairs = zip(node.outputs, graph.nodes[origin].outputs, strict=True)
            of.update({new.storage: of[old.storage] for new, old in pairs if new is not None and old.storage in of})
    by_name = {storage.name: name for storage, name in of.items() if storage.kind is not Kind.HOST}
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in of.values()}
    for tensor in memory_profile(done.graph, range(len(done.graph.nodes))).tensors:
        if tensor.name in by_name:
            found[by_name[tensor.name]].append((tensor.start, tensor.end))
    return found


def test_a_chain_run_again_is_paid_for_by_the_tensor_that_asked_for_it():
    """x -> a -> b -> c -> d, and e of b and d: b comes back through a, which nobody else wants again."""
    x = array(Storage("x", 8, "cpu", Kind.INPUT))
    a = compute("a", x, nbytes=64)
    b = compute("b", a.results[0], nbytes=32)
    c = compute("c", b.results[0], nbytes=16)
    d = compute("d", c.results[0], nbytes=128)
    e = compute("e", b.results[0], d.results[0])
    graph = Graph((x,), (a, b, c, d, e), (e.results[0],))
    problem = RematProblem.of(graph, (10.0, 20.0, 30.0, 40.0, 50.0))
    sequence = np.array([0, 1, 2, 3, 0, 1, 4], np.int32)
    (eviction,) = _evictions(problem, sequence, graph)
    assert eviction.tensor.name == "b"
    assert (eviction.runs, eviction.run_us, eviction.store_us, eviction.load_us) == (2, 30.0, 0.0, 0.0)
    assert eviction.away == ((3, 5),)
    assert (eviction.tensor.start, eviction.tensor.end) == (1, 7)
    assert eviction.at_peak  # d is made while b need not be there
    assert eviction.how == "computed again"


def test_a_swap_is_away_from_its_drop_to_its_load():
    x = array(Storage("x", 8, "cpu", Kind.INPUT))
    a = compute("a", x, nbytes=64)
    b = compute("b", a.results[0], nbytes=32)
    c = compute("c", b.results[0], nbytes=256)
    d = compute("d", a.results[0], c.results[0])
    graph = Graph((x,), (a, b, c, d), (d.results[0],))
    problem = RematProblem.of(graph, (10.0,) * 4, swap=DEVICE)
    code = problem.codes
    sequence = np.array([0, code.store(0), 1, code.drop(0), 2, code.load(0), 3], np.int32)
    (eviction,) = _evictions(problem, sequence, graph)
    assert (eviction.tensor.name, eviction.away, eviction.at_peak) == ("a", ((4, 5),), True)
    assert (eviction.runs, eviction.run_us) == (0, 0.0)
    assert (eviction.store_us, eviction.load_us) == (DEVICE.store_us(64), DEVICE.load_us(64))
    assert eviction.how == "stored and loaded"


def test_the_larger_of_two_results_pays_and_both_come_back():
    x = array(Storage("x", 8, "cpu", Kind.INPUT))
    big, small = (array(Storage(name, nbytes, "cpu", Kind.ACTIVATION)) for name, nbytes in (("big", 64), ("small", 4)))
    two = Node("aten.two.default", (x,), (small, big))
    use = compute("use", big, small)
    other = compute("other", use.results[0])
    last = compute("last", big, small, other.results[0])
    graph = Graph((x,), (two, use, other, last), (last.results[0],))
    sequence = np.array([0, 1, 2, 0, 3], np.int32)
    first, second = _evictions(RematProblem.of(graph, (7.0, 1.0, 1.0, 1.0)), sequence, graph)
    assert (first.tensor.name, first.runs, first.run_us) == ("big", 1, 7.0)
    assert (second.tensor.name, second.runs, second.run_us) == ("small", 0, 0.0)
    assert first.away == second.away == ((2, 3),)
