"""Stores, drops and loads in a graph: what they become, what is refused, and that sequences, graphs and memory agree."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.memory import counted_storages, order_problem, resident_storages, simulate
from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import is_random, is_transfer, is_view, repeatable
from lowtide.ir.text.graph_text import parse, to_text
from lowtide.remat.offload import offloadable_storages, storable
from lowtide.remat.write_out import rematerialise
from research.buffers import order_buffers
from tests.graphs import graphs
from tests.small_graph import A_VIEW, CODES, DROP, GRAPH, LOAD, MUL, RELU, STORE, VIEW, A, B, X, a_value
from tests.swapping import footprints, random_sequence


def test_what_goes_to_the_host_comes_back_as_another_storage_and_views_follow_it():
    done = rematerialise(GRAPH, [0, STORE, 2, DROP, LOAD, 3])
    check_graph(done.graph)
    assert to_text(done.graph) == (
        "def graph(\n"
        "    x,  # float32[4] 16 B input cpu\n"
        "):\n"
        "    a = aten.relu.default(x)  # float32[4] 16 B activation cpu\n"
        "    a_host = host.store(a)  # float32[4] 16 B host cpu\n"
        "    b = aten.sin.default(a)  # float32[4] 16 B activation cpu\n"
        "    host.drop(a, a_host)\n"
        "    a_back = host.load(a_host)  # float32[4] 16 B activation cpu\n"
        "    a_view_again = aten.view.default(a_back, (2, 2))  # float32[4] on a_back\n"
        "    c = aten.mul.Tensor(a_view_again, b)  # float32[4] 16 B activation cpu\n"
        "    return (c,)\n"
    )
    assert done.origins == (0, -1, 2, -1, -1, 1, 3)
    assert done.of_origins("wxyz", "-") == tuple("w-y--xz")
    assert done.transfers == (1, 3, 4)
    assert not done.recomputed
    assert done.rewritten.forward.keys() == {VIEW, MUL}


def test_memory_on_the_host_is_none_of_the_devices():
    done = rematerialise(GRAPH, [0, STORE, 2, DROP, LOAD, 3])
    problem = order_problem(done.graph)
    footprint = simulate(problem, range(7))
    assert [storage.name for storage in counted_storages(done.graph)] == ["a", "b", "a_back", "c"]
    assert footprint.footprint_bytes.tolist() == [32, 32, 48, 48, 48, 48, 64]
    assert order_buffers(problem, range(7)).problem.size_bytes.tolist() == [16] * 4


def test_a_storage_may_be_loaded_twice_and_stays_on_the_host_meanwhile():
    done = rematerialise(GRAPH, [0, STORE, DROP, LOAD, 2, DROP, LOAD, 3])
    check_graph(done.graph)
    loads = [node for node in done.graph.nodes if node.op == "host.load"]
    assert loads[0].inputs == loads[1].inputs
    assert [node.results[0].name for node in loads] == ["a_back", "a_back2"]


def test_what_was_dropped_may_be_made_again_and_dropped_once_more():
    done = rematerialise(GRAPH, [0, STORE, DROP, 0, 2, DROP, LOAD, 3])
    check_graph(done.graph)
    assert [node.op for node in done.graph.nodes][3] == "aten.relu.default"
    assert done.recomputed == (3,)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([0, 2, DROP, 3], r"expected a stored before position 2, which is to drop it; got no store"),
        ([0, 2, LOAD, 3], r"expected a stored before position 2, which is to load it; got no store"),
        ([0, STORE, DROP, 2, LOAD, 3], r"what node 2 \(aten.sin.default\) reads \(a\) to be there, got it dropped at position 2"),
        ([STORE, 0, 2, DROP, 3], r"expected a to be there at position 0 to store it, got no run of its maker"),
        ([0, STORE, DROP, DROP], r"expected a to be there at position 3 to drop it, got it dropped at position 2"),
        ([0, STORE, STORE], r"expected a stored once, got it stored again at position 2"),
        ([0, STORE, 2, 3], r"expected a, which position 1 stores, dropped before position 4, the end; got no drop"),
        ([0, STORE, 0, 2, 3], r"expected a, which position 1 stores, dropped before position 2, which makes it again; got no drop"),
        ([0, STORE, LOAD, 2, 3], r"expected a, which position 1 stores, dropped before position 2, which loads it; got no drop"),
        ([0, 2, 3, CODES.store(2)], r"expected at position 3 to store a storage that can be, got c"),
        ([0, 13], r"at position 1: expected an entry of at least 0 and below 13, got 13"),
        ([-1], r"at position 0: expected an entry"),
    ],
)
def test_sequences_that_cannot_be_are_refused(entries, message):
    with pytest.raises(CheckError, match=message):
        rematerialise(GRAPH, entries)


def test_what_can_be_stored():
    def of(*nodes, outputs=(), inputs=(X,)):
        return storable(Graph(inputs, nodes, outputs))

    assert storable(GRAPH) == (True, True, False)  # the last one is returned
    assert of(RELU, outputs=(A_VIEW,)) == (False,)
    assert of(Node("aten.split.default", (X,), (A, a_value("more", A.storage)))) == (False,)  # two values of one maker
    odd = a_value("odd", A.storage)
    assert of(RELU, Node("aten.odd.default", (A,), (odd, B))) == (False, True)  # a view that only comes with something new
    nothing = Value("nothing", Storage("nothing", 0, "cpu", Kind.ACTIVATION), "float32", (0,), (1,))
    assert of(Node("aten.empty.default", (), (nothing,))) == (False,)
    assert of(Node("py.mul", (2, 3), (Value("s", Storage("s", 0, "cpu", Kind.SCALAR), "scalar", (), ()),))) == (False,)
    donated = a_value("donated")
    assert of(Node("aten.relu.default", (donated,), (A,)), inputs=(donated,)) == (False, True)
    there = a_value("there", Storage("there", 16, "cuda:0", Kind.ACTIVATION))
    assert of(RELU, Node("aten.to.device", (A,), (there,))) == (False, True)  # a is on the host already


def test_copies_are_not_random_no_views_and_not_repeatable():
    done = rematerialise(GRAPH, [0, STORE, 2, DROP, LOAD, 3])
    for node in filter(is_transfer, done.graph.nodes):
        assert not is_random(node)
        assert not is_view(node)
        assert repeatable(node) is None
    assert sum(map(is_transfer, done.graph.nodes)) == 3


H = a_value("h", Storage("h", 16, "cpu", Kind.HOST))
BACK = a_value("back")
STORED, DROPPED, LOADED = Node("host.store", (A,), (H,)), Node("host.drop", (A, H), ()), Node("host.load", (H,), (BACK,))
SMALL = Value("small", Storage("small", 8, "cpu", Kind.HOST), "float32", (2,), (1,))


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        ((RELU, STORED), (), "is not dropped after it"),
        ((RELU, STORED, Node("host.drop", (A, H), (B,))), (), "does not have the form"),
        ((RELU, STORED, DROPPED, Node("host.load", (H, H), (BACK,))), (), "does not have the form"),
        ((RELU, STORED, DROPPED, Node("host.load", (H,), (BACK,), (("k", 1),))), (), "does not have the form"),
        ((RELU, STORED, DROPPED, Node("host.load", (H,), (None,))), (), "does not have the form"),
        ((RELU, STORED, DROPPED, Node("host.load", (H,), (a_value("other", H.storage),))), (), "does not have the form"),
        ((RELU, Node("host.store", (A,), (B,)), Node("host.drop", (A, B), ())), (), "does not lie on the device at one end"),
        ((RELU, STORED, DROPPED, Node("host.store", (H,), (a_value("h2", Storage("h2", 16, "cpu", Kind.HOST)),))), (), "at one end"),
        ((RELU, Node("host.store", (A,), (SMALL,)), Node("host.drop", (A, SMALL), ())), (), "does not look like"),
        ((RELU, STORED, DROPPED, Node("aten.relu.default", (H,), (B,))), (), "used by something else"),
        ((RELU, Node("aten.relu.default", (A,), (H,))), (), "used by something else"),
        ((RELU, STORED, DROPPED), (A,), "is of an input or an output"),
        ((Node("host.store", (X,), (H,)), Node("host.drop", (X, H), ())), (), "is of an input or an output"),
        ((RELU, LOADED, STORED, DROPPED), (), "is read before it is made"),
    ],
)  # fmt: skip
def test_the_checker_sees_what_is_wrong(nodes, outputs, message):
    with pytest.raises(CheckError, match=message):
        check_graph(Graph((X,), nodes, outputs))


def test_the_checker_lets_right_copies_through():
    check_graph(Graph((X,), (RELU, STORED, DROPPED, LOADED), ()))
    check_graph(Graph((X,), (RELU, STORED, DROPPED), (H,)))  # which lies there between steps


def test_an_input_on_the_host_is_refused_and_counts_nowhere():
    graph = Graph((X, H), (LOADED,), ())
    assert counted_storages(graph) == (BACK.storage,)
    with pytest.raises(CheckError, match="is not loaded as state"):
        check_graph(graph)


def _updates(*writes: int) -> list[Node]:
    return [Node("aten.add_.Tensor", (ON[k], X), (), writes=((ON[k], ON[k + 1]),)) for k in writes]


HERE = Storage("here", 16, "cpu", Kind.STATE)
ON = [a_value(f"here_{k}", HERE, version=k) for k in range(3)]
H_1 = a_value("h_1", H.storage, version=1)
FETCHED, SAVED, LET_GO = (
    Node("host.load", (H,), (ON[0],)),
    Node("host.save", (ON[2], H), (), writes=((H, H_1),)),
    Node("host.drop", (ON[2], H_1), ()),
)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((FETCHED, *_updates(0, 1), SAVED, LET_GO), ""),
        ((FETCHED, Node("aten.add.Tensor", (ON[0], X), (A,))), ""),  # nothing was written
        ((FETCHED, *_updates(0, 1), SAVED), "is not dropped after it"),
        ((FETCHED, *_updates(0, 1)), "not saved as it is in the end"),
        ((FETCHED, *_updates(0), Node("host.save", (ON[1], H), (), writes=((H, H_1),)), Node("host.drop", (ON[1], H_1), ()), *_updates(1)),
         "not saved as it is in the end"),
        ((FETCHED, Node("host.load", (H,), (a_value("twice", kind=Kind.STATE),))), "is not loaded as state"),
        ((FETCHED, *_updates(0, 1), Node("host.save", (ON[2], H), ()), LET_GO), "does not have the form|is read before it is made"),
        ((RELU, Node("host.save", (A, H), (), writes=((H, H_1),)), Node("host.drop", (A, H_1), ())), "saved from something else"),
        ((FETCHED, *_updates(0, 1), SAVED, LET_GO, Node("aten.relu.default", (H_1,), (A,))), "used by something else"),
        ((FETCHED, Node("aten.add_.Tensor", (H, X), (), writes=((H, H_1),))), "used by something else"),
    ],
)  # fmt: skip
def test_state_between_steps_is_loaded_once_and_saved_as_it_is_in_the_end(nodes, message):
    graph = Graph((X, H), nodes, ())
    if not message:
        check_graph(graph)
        return
    with pytest.raises(CheckError, match=message):
        check_graph(graph)


@settings(max_examples=25)
@given(graphs(bodies=False), st.integers(0, 2**32), st.booleans())
def test_a_random_sequence_as_a_graph_is_right_reads_back_and_takes_what_the_sequence_says(graph, seed, swap_state):
    plain = _as_captured(graph, reuses=False)
    entries = random_sequence(plain, random.Random(seed), swap_state=swap_state)
    done = rematerialise(plain, entries)
    check_graph(done.graph)
    check_order(done.graph, range(len(done.graph.nodes)))
    assert to_text(parse(to_text(done.graph))) == to_text(done.graph)
    problem = order_problem(done.graph)
    resident_bytes = sum(storage.nbytes for storage in resident_storages(plain)) - sum(each.nbytes for each in offloadable_storages(plain))
    found = simulate(problem, range(len(done.graph.nodes))).footprint_bytes - resident_bytes
    sequence = [place for place, node in enumerate(done.graph.nodes) if not is_view(node)]
    assert found[sequence].tolist() == footprints(plain, entries)


@settings(max_examples=40)
@given(graphs(bodies=False), st.integers(0, 2**32))
def test_reuses_of_a_random_sequence_are_right(graph, seed):
    plain = _as_captured(graph)
    done = rematerialise(plain, random_sequence(plain, random.Random(seed), swap_state=True))
    order = range(len(done.graph.nodes))
    check_reuses(done.graph, order, simulate(order_problem(done.graph), order).reuses.tolist())


def _as_captured(graph, reuses=True):
    """The same graph as a capture would leave it: nobody waits for a view; where asked for, nobody works in place."""
    became = {}
    for node in graph.nodes:
        after = tuple(became[before] for before in node.after if not is_view(before))
        became[node] = dataclasses.replace(node, inplace=node.inplace if reuses else (), after=after)
    return Graph(graph.inputs, tuple(became.values()), graph.outputs)
