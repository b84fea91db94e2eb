"""Offloaded state: a parameter that is on the host for a while, and in its own block again in the end."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.cost.memory import counted_storages, order_problem, resident_storages, simulate
from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import check_graph, check_order
from lowtide.ir.graph import Graph, Kind, Node, Storage
from lowtide.remat.entries import Codes
from lowtide.remat.offload import movable_storages, offloadable_storages, storable
from lowtide.remat.write_out import rematerialise
from tests.small_graph import A, B, X, a_value

W = a_value("w", kind=Kind.PARAMETER)
W_VIEW, W_1 = a_value("w_view", W.storage), a_value("w_1", W.storage, version=1)
C = a_value("c")
FORWARD, LOOK = Node("aten.mul.Tensor", (X, W), (A,)), Node("aten.view.default", (W, (4,)), (W_VIEW,))
MIDDLE, BACKWARD = Node("aten.sin.default", (A,), (B,)), Node("aten.mul.Tensor", (B, W_VIEW), (C,))
UPDATE = Node("aten.add_.Tensor", (W, C), (), writes=((W, W_1),))
STEP = Graph((X, W), (FORWARD, LOOK, MIDDLE, BACKWARD, UPDATE), (B,))
CODES = Codes(5, 4)
STORE, DROP, LOAD = CODES.store(3), CODES.drop(3), CODES.load(3)


def test_parameters_and_optimizer_state_of_one_value_can_be_offloaded():
    state, buffer, twice = a_value("state", kind=Kind.STATE), a_value("buffer", kind=Kind.BUFFER), a_value("twice", kind=Kind.PARAMETER)
    alias, returned = a_value("alias", twice.storage), a_value("returned", kind=Kind.PARAMETER)
    empty = dataclasses.replace(a_value("empty"), shape=(0,), storage=Storage("empty", 0, "cpu", Kind.PARAMETER))
    graph = Graph((X, W, state, buffer, twice, alias, returned, empty), (), (returned,))
    assert offloadable_storages(graph) == (W.storage, state.storage)
    assert movable_storages(STEP) == (A.storage, B.storage, C.storage, W.storage)
    assert storable(STEP) == (True, False, True, False)
    assert storable(STEP, swap_state=True) == (True, False, True, True)


def test_what_is_lent_is_counted_while_it_is_there_and_kept():
    done = rematerialise(STEP, [0, STORE, DROP, 2, LOAD, 3, 4])
    check_graph(done.graph)
    assert [node.op for node in done.graph.nodes] == [
        "aten.mul.Tensor", "host.store", "host.drop", "aten.sin.default", "host.load", "aten.view.default", "aten.mul.Tensor",
        "aten.add_.Tensor",
    ]  # fmt: skip
    problem = order_problem(done.graph)
    assert [storage.name for storage in counted_storages(done.graph)] == ["w", "a", "b", "w_back", "c"]
    assert resident_storages(done.graph) == (X.storage,)
    assert problem.resident_bytes == 16
    assert simulate(problem, range(8)).footprint_bytes.tolist() == [48, 48, 48, 48, 48, 48, 64, 64]
    whole = simulate(order_problem(STEP), range(5)).footprint_bytes
    assert whole.tolist() == [48, 48, 64, 64, 64]
    offloaded = order_problem(STEP, offloadable=(W.storage,))
    assert offloaded.resident_bytes == 16
    assert simulate(offloaded, range(5)).footprint_bytes.tolist() == whole.tolist()


def test_every_reader_comes_before_the_drop_and_the_drop_before_the_load():
    done = rematerialise(STEP, [0, STORE, DROP, 2, LOAD, 3, 4])
    for order in ([1, 2, 0, 3, 4, 5, 6, 7], [0, 1, 4, 2, 3, 5, 6, 7], [0, 2, 1, 3, 4, 5, 6, 7]):
        with pytest.raises(CheckError, match="the order"):
            check_order(done.graph, order)
    check_order(done.graph, [1, 0, 3, 2, 4, 5, 6, 7])


def test_it_may_go_twice_and_be_written_in_the_end():
    done = rematerialise(STEP, [0, STORE, DROP, LOAD, DROP, 2, LOAD, 3, 4])
    check_graph(done.graph)
    (before, after), back = done.graph.nodes[-1].writes[0], done.graph.nodes[6].results[0]
    assert done.graph.nodes[6].op == "host.load"
    assert before is back
    assert (after.storage, after.version) == (back.storage, 1)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([0, STORE, 2, 3, 4], "expected w, which position 1 stores, dropped before position 4, which writes it; got no drop"),
        ([0, STORE, DROP, 2, 3, 4], r"reads \(w\) to be there, got it dropped at position 2"),
        ([0, STORE, DROP, LOAD, DROP, 2], "expected every node"),
        ([0, 2, 3, 4, STORE], "expected w not written before it is moved; position 3 writes it, position 4 is to store it"),
        ([0, STORE, DROP, LOAD, 2, 3, 4, DROP], "w not written before it is moved; position 6 writes it, position 7 is to drop it"),
        ([0, STORE, DROP, LOAD, LOAD, 2, 3, 4], "expected w dropped before position 4 loads it: it is the caller's own"),
    ],
)  # fmt: skip
def test_sequences_that_cannot_be_are_refused(entries, message):
    with pytest.raises(CheckError, match=message):
        rematerialise(STEP, entries)


def test_what_is_not_back_in_the_end_is_refused():
    read = Graph((X, W), (FORWARD,), (A,))  # nobody writes it
    codes = Codes(1, 2)
    with pytest.raises(CheckError, match="expected w, which is the caller's, loaded by the end; got it dropped at position 2"):
        rematerialise(read, [0, codes.store(1), codes.drop(1)])
    check_graph(rematerialise(read, [0, codes.store(1), codes.drop(1), codes.load(1)]).graph)


H, GONE = a_value("h", kind=Kind.HOST), a_value("w_gone", W.storage, version=1)
BACK, MORE = a_value("w_back", kind=Kind.PARAMETER), a_value("more", kind=Kind.PARAMETER)
STORED, EMPTIED = Node("host.store", (W,), (H,)), Node("host.drop", (W, H), (), writes=((W, GONE),))
FILLED = Node("host.load", (H,), (BACK,), after=(EMPTIED,))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((STORED, Node("host.drop", (W, H), ())), "a drop of what the caller lends has to write it"),
        ((STORED, EMPTIED), "is not there in the end"),
        ((STORED, EMPTIED, Node("host.load", (H,), (BACK,))), "is loaded without a drop that comes before"),
        ((STORED, EMPTIED, FILLED, Node("host.load", (H,), (MORE,), after=(EMPTIED,))), "is loaded without"),
        ((Node("aten.zero_.default", (W,), (), writes=((W, W_1),)), Node("host.store", (W_1,), (H,))), "after it has been written"),
        ((STORED, EMPTIED, FORWARD), "a version of a storage is read that is not the current one"),
    ],
)  # fmt: skip
def test_the_checker_sees_what_is_wrong(nodes, message):
    with pytest.raises(CheckError, match=message):
        check_graph(Graph((X, W), nodes, ()))


def test_the_checker_lets_it_through():
    check_graph(Graph((X, W), (STORED, EMPTIED, FILLED), ()))
