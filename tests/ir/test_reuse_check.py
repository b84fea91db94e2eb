import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import check_reuses
from lowtide.ir.check.verdict import Verdict
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from tests.graphs import array, compute, graphs, view

P = array(Storage("p", 4, "cpu", Kind.PARAMETER))
GIVEN_AWAY = array(Storage("given_away", 4, "cpu", Kind.ACTIVATION))
A = compute("a", P)
FIRST = A.results[0]
IN_PLACE = "aten.make_.default"


def taker(name: str, of: Value, *others: Value, nbytes: int = 4) -> Node:
    return compute(name, of, *others, nbytes=nbytes, inplace=((of, IN_PLACE),))


def check(nodes: tuple[Node, ...], reuses: tuple[int, ...], outputs: tuple[Value, ...] = (), order: tuple[int, ...] | None = None) -> None:
    check_reuses(Graph((P, GIVEN_AWAY), nodes, outputs), order or tuple(range(len(nodes))), reuses)


B = taker("b", FIRST)
VIEW = view(FIRST, "v")
OTHER_LAYOUT = replace(FIRST, name="t", shape=(2, 2), stride=(1, 2))


def test_memory_that_dies_may_be_taken_over() -> None:
    check((A, B), (-1, 0))
    check((A, B, taker("c", B.results[0])), (-1, 0, 0))
    check((A, VIEW, taker("b", VIEW.results[0])), (-1, -1, 0))
    check((A, VIEW, taker("b", FIRST, VIEW.results[0])), (-1, -1, 0))
    check((taker("b", GIVEN_AWAY),), (0,))


@pytest.mark.parametrize(
    ("verdict", "nodes", "reuses", "outputs", "where"),
    [
        (Verdict.REUSE_COUNT, (A, B), (-1,), (), "expected 2, got 1"),
        (Verdict.REUSE_NOT_LISTED, (A, B), (0, -1), (), "node 0 (aten.make.default -> a) lists 0, got index 0"),
        (Verdict.REUSE_NOT_LISTED, (A, B), (-1, 1), (), "lists 1, got index 1"),
        (Verdict.REUSE_NOT_LISTED, (A, B), (-1, -2), (), "lists 1, got index -2"),
        (Verdict.REUSE_FOR_NOTHING, (A, replace(VIEW, inplace=((FIRST, IN_PLACE),))), (-1, 0), (), "-> v) takes over a"),
        (Verdict.REUSE_FOR_NOTHING, (A, replace(B, outputs=(None,))), (-1, 0), (), "takes over a"),
        (Verdict.REUSE_FOR_NOTHING, (A, replace(B, outputs=())), (-1, 0), (), "takes over a"),
        (Verdict.REUSE_OWNED, (taker("b", P),), (0,), (), "takes over p"),
        (Verdict.REUSE_KEPT, (A, B), (-1, 0), (FIRST,), "takes over a"),
        (Verdict.REUSE_KEPT, (A, VIEW, B), (-1, -1, 0), (VIEW.results[0],), "takes over a"),
        (Verdict.REUSE_UNFIT, (A, taker("b", FIRST, nbytes=5)), (-1, 0), (), "takes over a: 4 bytes on cpu, needs 5 on cpu"),
        (
            Verdict.REUSE_UNFIT,
            (A, replace(B, outputs=(array(Storage("b", 4, "cuda:0", Kind.ACTIVATION)),))),
            (-1, 0),
            (),
            "4 bytes on cpu, needs 4 on cuda:0",
        ),
        (
            Verdict.REUSE_ALIASED,
            (A, Node("aten.t.default", (FIRST,), (OTHER_LAYOUT,)), taker("b", FIRST, OTHER_LAYOUT)),
            (-1, -1, 0),
            (),
            "takes over a and reads t",
        ),
        (
            Verdict.REUSE_ALIVE,
            (A, B, compute("c", FIRST)),
            (-1, 0, -1),
            (),
            "node 1 (aten.make.default -> b) takes over a at step 1; last used at step 2",
        ),
        (Verdict.REUSE_ALIVE, (A, VIEW, B, compute("c", VIEW.results[0])), (-1, -1, 0, -1), (), "last used at step 3"),
    ],
)
def test_a_wrong_reuse_is_refused(
    verdict: Verdict, nodes: tuple[Node, ...], reuses: tuple[int, ...], outputs: tuple[Value, ...], where: str
) -> None:
    with pytest.raises(CheckError, match=f"^{re.escape(verdict.value)}: .*{re.escape(where)}"):
        check(nodes, reuses, outputs)


def test_it_is_the_order_that_says_what_dies() -> None:
    nodes = (A, B, compute("c", FIRST))
    check(nodes, (-1, 0, -1), order=(0, 2, 1))
    with pytest.raises(CheckError, match=re.escape(Verdict.REUSE_ALIVE.value)):
        check(nodes, (-1, 0, -1), order=(0, 1, 2))


@given(graphs(bodies=False), st.data())
def test_a_run_with_reuses_that_pass_reads_what_was_written(graph: Graph, data: st.DataObject) -> None:
    """Plays the program on blocks of memory that remember who holds them: no reader ever finds another holder."""
    reuses = tuple(data.draw(st.integers(-1, len(node.inplace) - 1)) for node in graph.nodes)
    try:
        check_reuses(graph, range(len(graph.nodes)), reuses)
    except CheckError:
        return
    block_of: dict[Storage, object] = {value.storage: object() for value in graph.inputs}
    holder: dict[object, Storage] = {block: storage for storage, block in block_of.items()}
    for node, slot in zip(graph.nodes, reuses, strict=True):
        assert all(holder[block_of[value.storage]] is value.storage for value in node.inputs)
        for value in node.results:
            if value.storage not in block_of:
                takes = slot >= 0 and node.outputs[0] is not None and value.storage is node.outputs[0].storage
                block_of[value.storage] = block_of[node.inplace[slot][0].storage] if takes else object()
                holder[block_of[value.storage]] = value.storage
    kept = {value.storage for value in (*graph.inputs, *graph.outputs) if value.storage.kind.caller_owned or value in graph.outputs}
    assert all(holder[block_of[storage]] is storage for storage in kept)
