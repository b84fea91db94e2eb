"""What is said when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.errors import BudgetError
from lowtide.ir.graph import Graph, Kind, Source, Storage
from lowtide.plan.plan import CostReport, Plan, Provenance
from lowtide.plan.snapshot import LiveTensor, Snapshot, specs_by_name
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.candidate import Candidate
from lowtide.planning.refusal import needs_bytes, refusal
from lowtide.planning.request import Budget
from lowtide.remat.cost import cost_of
from lowtide.remat.sweep import Sweep
from tests.graphs import array, compute
from tests.planned import plan
from tests.planning.networks import REQUEST, network

MIB = 2**20
X = array(Storage("x", 2 * MIB, "cpu", Kind.INPUT))
A = compute("a", X, nbytes=4 * MIB, source=Source("/home/me/net.py", 12, "blocks.0.mlp"))
B = replace(compute("b", A.results[0]), outputs=(array(Storage("b", MIB, "cpu", Kind.GRADIENT)),))
GRAPH = Graph((X,), (A, B), (B.results[0],))
LOOKS = specs_by_name(GRAPH)
TENSORS = (LiveTensor.of(LOOKS["a"], 4 * MIB, 0, 2), LiveTensor.of(LOOKS["x"], 2 * MIB, 0, 2))
PEAK = Snapshot.of(GRAPH, 0, A, 0, TENSORS)
COST_REPORT = CostReport((0, 1), 150.0, 100.0, 9 * MIB, 3, ((6 * MIB, 150.0), (7 * MIB, 112.0), (9 * MIB, 99.99)))
LEANEST = Plan(
    GRAPH, (0, 1), (-1, -1), (0, 0), 2 * MIB, 6 * MIB, 12 * MIB, 5, "feasible", "Auto()",
    Provenance("0.1.0", "2.13.0", "cpu", "3.11.7", 2), COST_REPORT, PEAK,
)  # fmt: skip


def test_it_names_the_least_what_is_in_the_way_and_what_would_help():
    error = refusal(LEANEST, 3 * MIB)
    assert isinstance(error, BudgetError)
    assert error.smallest_peak_bytes == 6 * MIB
    assert str(error).splitlines() == [
        "memory: expected at least 6291456 bytes (6.00 MiB), the smallest peak that was found, 50% of eager's 12.00 MiB; "
        "got 3145728 bytes (3.00 MiB)",
        "resident throughout: 2.00 MiB: batch 2.00 MiB",
        "peak at step 0 of 2, forward: make of blocks.0.mlp, net.py:12",
        "      4.00 MiB  uint8[4194304] activation: make of blocks.0.mlp, net.py:12",
        "what would help: memory=6291456 (6.00 MiB) at +50.0% time, memory=7340032 (7.00 MiB) at +12.0% time, "
        "memory=9437184 (9.00 MiB) at +0.0% time; or a smaller batch, or micro-batches (Training(accumulate=2)): "
        "lowtide.explain(...) says what these would do",
    ]


def test_inference_is_offered_no_micro_batches():
    graph = Graph((X,), (A,), (A.results[0],))
    told = str(refusal(replace(LEANEST, graph=graph), 3 * MIB))
    assert told.endswith("or a smaller batch")


@pytest.mark.parametrize(("points", "offers"), [(1, 1), (2, 2), (40, 3)])
def test_a_few_points_of_the_frontier_are_offered(points, offers):
    frontier = tuple((6 * MIB + place, 150.0 - place) for place in range(points))
    told = str(refusal(replace(LEANEST, cost_report=replace(COST_REPORT, frontier=frontier)), 3 * MIB))
    assert told.count("% time") == offers


def test_what_a_step_makes_is_named_and_what_the_caller_holds_is_summed_up():
    own = tuple(replace(TENSORS[1], name=f"p{place}", nbytes=8 * MIB) for place in range(9))
    told = str(refusal(replace(LEANEST, peak=replace(PEAK, tensors=(*own, TENSORS[0]))), 3 * MIB))
    assert "batch 72.00 MiB" in told
    assert "MiB  uint8[4194304] activation" in told
    assert "p4" not in told
    assert len(told.splitlines()) <= 8


def test_below_what_the_caller_holds_nothing_is_searched(monkeypatch):
    searches = []
    monkeypatch.setattr(Sweep, "explore", lambda *args: searches.append(args))
    monkeypatch.setattr("lowtide.planning.candidate.schedule_all", lambda *args: searches.append(args))
    graph = network(nbytes=MIB)
    candidate = Candidate(graph, (0,) * len(graph.nodes), (1.0,) * len(graph.nodes))
    with pytest.raises(BudgetError) as told:
        plan([candidate], replace(REQUEST, budget=Budget(MIB // 2)))
    assert str(told.value).startswith(
        "memory: expected at least 5242880 bytes (5.00 MiB), which any plan takes that leaves every number as it is; "
        "got 524288 bytes (512.00 KiB)"
    )
    assert "resident throughout: 1.00 MiB: batch 1.00 MiB" in str(told.value)
    assert "4.00 MiB, arguments, results and workspace of make" in str(told.value)
    assert "to hold less" in str(told.value)
    with pytest.raises(BudgetError) as told:
        plan([candidate], replace(REQUEST, budget=Budget(4 * MIB)))
    assert "a smaller batch" in str(told.value)
    assert not searches
    assert told.value.smallest_peak_bytes == 5 * MIB
    assert not told.value.searched


def test_nothing_that_a_search_finds_is_below_the_floor():
    graph = network()
    candidate = Candidate(graph, (0,) * len(graph.nodes), (1.0,) * len(graph.nodes))
    problem = candidate.remat_problem(1)
    floor_bytes = problem.problem.resident_bytes + int(needs_bytes(problem.problem).max())
    found = CandidateArchive.bare([candidate], REQUEST).by(REQUEST.sweeps).archive.points
    assert min(point.peak_bytes for point in found) >= floor_bytes
    assert all(cost_of(problem, point.sequence).peak_bytes >= floor_bytes for point in found)
