"""Collectives keep their order, and nobody touches what one of them still fills."""

import re
from dataclasses import replace

import pytest

from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import Verdict, check_graph
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import repeatable
from lowtide.ir.operators.own import GATHER, WAIT, WAIT_APART
from lowtide.remat.offload import bases
from tests.graphs import array

REDUCE = "_c10d_functional.all_reduce.default"
P = array(Storage("p", 4, "cpu", Kind.PARAMETER))


def made(name: str, op: str, given: Value, *after: Node) -> Node:
    more = ("sum", "0") if op == REDUCE else ()
    return Node(op, (given, *more), (array(Storage(name, 4, "cpu", Kind.GRADIENT)),), after=after)


FIRST = made("first", REDUCE, P)
SECOND = made("second", REDUCE, P, FIRST)
WAITS = made("mean", WAIT, FIRST.results[0]), made("other", WAIT, SECOND.results[0])


def test_collectives_in_order_are_right():
    check_graph(Graph((P,), (FIRST, SECOND, *WAITS), (WAITS[0].results[0],)))


@pytest.mark.parametrize(
    ("verdict", "nodes", "outputs"),
    [
        (Verdict.COLLECTIVE_FREE, (FIRST, replace(SECOND, after=())), ()),
        (Verdict.COLLECTIVE_TOUCHED, (FIRST, made("early", "aten.neg.default", FIRST.results[0])), ()),
        (Verdict.COLLECTIVE_TOUCHED, (FIRST,), FIRST.results),
    ],
)
def test_what_keeps_no_order_or_comes_too_early_is_refused(verdict: Verdict, nodes: tuple[Node, ...], outputs: tuple[Value, ...]):
    with pytest.raises(CheckError, match=f"^{re.escape(verdict.value)}"):
        check_graph(Graph((P,), nodes, outputs))


@pytest.mark.parametrize("op", [GATHER, "lowtide.exchange.default"])
def test_what_a_collective_reads_is_held_until_it_ends(op: str):
    gather = Node(op, (P, 2, "0"), (array(Storage("both", 8, "cpu", Kind.ACTIVATION)),))
    ended = Node(WAIT_APART, (gather.results[0], P), (array(Storage("whole", 8, "cpu", Kind.ACTIVATION)),))
    check_graph(Graph((P,), (gather, ended), ended.results))
    with pytest.raises(CheckError, match="does not hold what the collective reads until then"):
        check_graph(Graph((P,), (gather, replace(ended, op=WAIT, args=gather.results)), ()))


def test_what_a_collective_makes_is_neither_made_again_nor_copied_before_it_is_whole():
    graph = Graph((P,), (FIRST, SECOND, *WAITS), ())
    assert [repeatable(node) for node in graph.nodes] == [None] * 4
    assert {storage.name for storage in bases(graph)} == {"p", "mean", "other"}
