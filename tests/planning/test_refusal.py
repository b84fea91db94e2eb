"""What is said when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.errors import BudgetError
from lowtide.ir.graph import Graph, Kind, Source, Storage
from lowtide.plan.plan import Plan, Provenance, Trade
from lowtide.plan.snapshot import LiveTensor, Moment, looks_by_name
from lowtide.planning.refusal import refusal
from tests.graphs import array, compute

MIB = 2**20
X = array(Storage("x", 2 * MIB, "cpu", Kind.INPUT))
A = compute("a", X, nbytes=4 * MIB, source=Source("/home/me/net.py", 12, "blocks.0.mlp"))
B = replace(compute("b", A.results[0]), outputs=(array(Storage("b", MIB, "cpu", Kind.GRADIENT)),))
GRAPH = Graph((X,), (A, B), (B.results[0],))
LOOKS = looks_by_name(GRAPH)
TENSORS = (LiveTensor.of(LOOKS["a"], 4 * MIB, 0, 2), LiveTensor.of(LOOKS["x"], 2 * MIB, 0, 2))
PEAK = Moment.of(GRAPH, 0, A, 0, TENSORS)
TRADE = Trade((0, 1), 150.0, 100.0, 9 * MIB, 3, ((6 * MIB, 150.0), (7 * MIB, 112.0), (9 * MIB, 100.0)))
LEANEST = Plan(
    GRAPH, (0, 1), (-1, -1), (0, 0), 2 * MIB, 6 * MIB, 12 * MIB, 5, "feasible", "Auto()",
    Provenance("0.1.0", "2.13.0", "cpu", "3.11.7", 2), TRADE, PEAK,
)  # fmt: skip


def test_it_names_the_least_what_is_in_the_way_and_what_would_help():
    error = refusal(LEANEST, 3 * MIB)
    assert isinstance(error, BudgetError)
    assert error.smallest_peak_bytes == 6 * MIB
    assert str(error) == (
        "memory: expected at least 6291456 bytes (6.00 MiB), the smallest peak that was found, 50% of eager's 12.00 MiB, "
        "of which 2.00 MiB are the caller's own; got 3145728 bytes (3.00 MiB). "
        "In the way at step 0 of 2 (aten.make.default of blocks.0.mlp, net.py:12): "
        "4.00 MiB a uint8[4194304] (activation by make of blocks.0.mlp, net.py:12); 2.00 MiB x uint8[2097152] (input). "
        "What would help: raise `memory` (6.00 MiB fits at +50.0% time, 7.00 MiB fits at +12.0% time, 9.00 MiB fits at +0.0% time), "
        "make the batch smaller, or cut it into micro-batches with `accumulate`"
    )


def test_where_the_callers_own_is_too_much_no_schedule_is_offered():
    told = str(refusal(LEANEST, MIB))
    assert "What would help: raise `memory`, or hold less: a smaller model, a smaller data type" in told
    assert "micro-batches" not in told


def test_inference_is_offered_no_micro_batches():
    graph = Graph((X,), (A,), (A.results[0],))
    told = str(refusal(replace(LEANEST, graph=graph), 3 * MIB))
    assert told.endswith("make the batch smaller")


@pytest.mark.parametrize(("points", "offers"), [(1, 1), (2, 2), (40, 3)])
def test_a_few_points_of_the_frontier_are_offered(points, offers):
    frontier = tuple((6 * MIB + place, 150.0 - place) for place in range(points))
    told = str(refusal(replace(LEANEST, trade=replace(TRADE, frontier=frontier)), 3 * MIB))
    assert told.count(" fits at ") == offers


def test_what_a_step_makes_is_named_before_what_the_caller_holds():
    own = tuple(replace(TENSORS[1], name=f"p{place}", nbytes=8 * MIB) for place in range(9))
    told = str(refusal(replace(LEANEST, peak=replace(PEAK, tensors=(*own, TENSORS[0]))), 3 * MIB))
    assert told.index("MiB a uint8") < told.index("MiB p0 uint8")
    assert "p4" not in told
