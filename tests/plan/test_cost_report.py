"""What a plan says of its peak and of what it gave for what: saved, read back, checked, and printed in few lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lowtide.base.messages import op_text, time_text
from lowtide.errors import FormatError
from lowtide.ir.graph import Graph, Kind, Node, Source, Storage, Value
from lowtide.plan.cost_report import CostReport, Eviction
from lowtide.plan.plan import Plan, Provenance
from lowtide.plan.snapshot import LiveTensor, Snapshot, source_text, specs_by_name
from lowtide.plan.summary import alike, eviction_lines, pattern, snapshot_lines
from tests.peaks import memory_profile

BLOCKS = 20


def _vector(name: str, nbytes: int, kind: Kind) -> Value:
    return Value(name, Storage(name, nbytes, "cpu", kind), "uint8", (nbytes,), (1,))


def _deep() -> Graph:
    """A chain of blocks, each of a product and a rectifier."""
    x = _vector("x", 4096, Kind.INPUT)
    weights = [_vector(f"blocks_{block}_weight", 1024, Kind.PARAMETER) for block in range(BLOCKS)]
    nodes, last = [], x
    for block, weight in enumerate(weights):
        product, result = _vector(f"mm_{block}", 4096, Kind.ACTIVATION), _vector(f"relu_{block}", 4096, Kind.ACTIVATION)
        nodes.append(Node("aten.mm.default", (last, weight), (product,), source=Source("net.py", 12, f"blocks.{block}.linear")))
        nodes.append(Node("aten.relu.default", (product,), (result,), source=Source("net.py", 13, f"blocks.{block}.act")))
        last = result
    return Graph((x, *weights), tuple(nodes), (last,))


GRAPH = _deep()
STEPS = len(GRAPH.nodes)
LOOKS = specs_by_name(GRAPH)
STEP = STEPS - 3
TENSORS = tuple(LiveTensor.of(LOOKS[f"relu_{block}"], 4096, 2 * block + 1, STEPS) for block in range(BLOCKS - 2)) + tuple(
    LiveTensor.of(LOOKS[f"blocks_{block}_weight"], 1024, 0, STEPS) for block in range(BLOCKS)
)
PEAK = Snapshot.of(GRAPH, STEP, GRAPH.nodes[STEP], 100, TENSORS)
EVICTIONS = tuple(
    Eviction(LiveTensor.of(LOOKS[f"mm_{block}"], 4096, 2 * block, STEPS), ((2 * block + 1, STEPS),), block < 15, 2, 1500.0, 0.0, 0.0)
    for block in range(BLOCKS)
)
SWAPPED = replace(EVICTIONS[3], runs=0, run_us=0.0, store_us=40.0, load_us=60.0)
COST_REPORT = CostReport(tuple(range(STEPS)), 2e5, 1.4e5, 10**6, 2 * BLOCKS, ((10**5, 2e5), (10**6, 1.4e5)), EVICTIONS)
PLAN = Plan(
    GRAPH, tuple(range(STEPS)), (-1,) * STEPS, (0,) * STEPS, 4096 + 1024 * BLOCKS, PEAK.footprint_bytes, 10**6, 5, "feasible", "Auto()",
    Provenance("0.1.0", "2.13.0", "cpu", "3.11.7", 2), COST_REPORT, PEAK,
)  # fmt: skip
WORKSPACES = tuple(100 * (step == STEP) for step in range(STEPS))
KEPT = replace(  # with promises that it keeps
    PLAN, workspace_bytes=WORKSPACES, peak_bytes=PLAN.resident_bytes + 2 * 4096 + 100, lower_bound_bytes=PLAN.resident_bytes,
    peak=memory_profile(GRAPH, range(STEPS), WORKSPACES).snapshot(GRAPH, range(STEPS)),
)  # fmt: skip


def test_peak_and_cost_report_read_back() -> None:
    plan = replace(KEPT, cost_report=replace(COST_REPORT, evictions=(*EVICTIONS[:3], SWAPPED, replace(EVICTIONS[4], away=()))))
    again = Plan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    assert again.cost_report == plan.cost_report
    assert again.peak == plan.peak


def test_a_plan_without_either_reads_back() -> None:
    again = Plan.from_json(replace(KEPT, cost_report=None, peak=None).to_json())
    assert again.cost_report is None
    assert again.peak is None


def _changed(path: list[Any], entry: Any) -> str:
    data = json.loads(KEPT.to_json())
    inner = data
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = entry
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "entry", "expected"),
    [
        (["peak"], [], "plan: peak: expected an object, got list"),
        (["peak", "step"], STEPS, f"plan: peak: expected 'step' to be 0 or more and below {STEPS}"),
        (["peak", "step"], -1, "plan: peak: expected 'step' to be 0 or more"),
        (["peak", "step"], 0, "expected 'tensors' to be tensors that live at step 0"),
        (["peak", "workspace_bytes"], 101, "plan: peak: expected tensors of .* bytes, which is the promise, got"),
        (["peak", "workspace_bytes"], -1, "plan: peak: expected 'tensors' to be a list, and 'workspace_bytes' 0 or more"),
        (["peak", "tensors"], {}, "plan: peak: expected 'tensors' to be a list"),
        (["peak", "tensors", 0], ["relu_0", 4096, 1], r"plan: peak: expected 'tensor' to be \[storage, bytes, start, end\], got list"),
        (["peak", "tensors", 0], [["relu_0"], 4096, 1, 9], r"expected 'tensor' to be \[storage, bytes, start, end\]"),
        (["peak", "tensors", 0, 0], "nobody", "plan: peak: expected a storage of the graph, .* got .'nobody', 4096"),
        (["peak", "tensors", 0, 3], STEPS + 1, f"and a life within {STEPS} steps"),
        (["cost_report", "evictions"], None, "plan: cost_report: expected 'evictions' to be a list, got nothing"),
        (["cost_report", "evictions", 1], 7, "plan: cost_report: eviction 1: expected an object, got int"),
        (["cost_report", "evictions", 1, "cost"], 7, "plan: cost_report: eviction 1: expected fields among"),
        (["cost_report", "evictions", 1, "run_us"], float("nan"), "eviction 1: expected 'run_us' to be a number, 0 or more"),
        (["cost_report", "evictions", 1, "runs"], -1, "eviction 1: expected 'runs' to be 0 or more"),
        (["cost_report", "evictions", 1, "at_peak"], 1, "eviction 1: expected 'at_peak' to be true or false"),
        (["cost_report", "evictions", 1, "away"], [[9, 8]], "eviction 1: expected 'away' to be spans of steps within the tensor's life"),
        (["cost_report", "evictions", 1, "away"], [[8, 8]], "eviction 1: expected 'away' to be spans of steps within the tensor's life"),
        (["cost_report", "evictions", 1, "away"], [[0, 8]], "eviction 1: expected 'away' to be spans of steps within the tensor's life"),
        (["cost_report", "evictions", 1, "away"], [8, 9], "eviction 1: expected 'away' to be a list of pairs"),
        (["cost_report", "evictions", 1, "tensor", 0], "nobody", "eviction 1: expected a storage of the graph"),
        (["cost_report", "frontier"], [[1]], "plan: cost_report: expected 'frontier' to be a list of pairs"),
        (["cost_report", "order_us"], -1.0, "plan: cost_report: expected 'order_us' to be a number, 0 or more"),
        (["cost_report", "recomputed"], -1, "plan: cost_report: expected 'recomputed' to be 0 or more"),
    ],
)
def test_what_cannot_be_is_refused(path: list[Any], entry: Any, expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        Plan.from_json(_changed(path, entry))


@pytest.mark.parametrize("field", ["runs", "run_us", "store_us", "load_us", "tensor"])
def test_no_cost_may_be_left_out(field: str) -> None:
    data = json.loads(KEPT.to_json())
    del data["cost_report"]["evictions"][0][field]
    with pytest.raises(FormatError, match="eviction 0: expected"):
        Plan.from_json(json.dumps(data))


def test_the_summary_is_short_however_deep_the_network(golden: Callable[[str, str], None]) -> None:
    text = str(replace(PLAN, cost_report=replace(COST_REPORT, evictions=(*EVICTIONS[:19], SWAPPED))))
    golden("plan_summary.txt", text + "\n")
    assert len(text.splitlines()) <= 25


def test_what_is_alike_is_one_line_that_adds_up() -> None:
    line, *_ = [line for line in eviction_lines(COST_REPORT) if "mm of" in line]
    assert "80.00 KiB  20 x uint8[4096]: mm of blocks.*.linear, net.py:12" in line
    assert "(60.00 KiB of it at the peak): 40 run again, 30.00 ms" in line
    groups = alike(PEAK.tensors, lambda tensor: tensor, lambda tensor, _: tensor.kind)
    assert sum(group.nbytes for group in groups) == PEAK.footprint_bytes - PEAK.workspace_bytes
    assert [len(group.members) for group in groups] == [BLOCKS - 2, BLOCKS]


def test_a_rest_of_the_time_is_told() -> None:
    told = [line for line in eviction_lines(replace(COST_REPORT, time_us=COST_REPORT.order_us + 40 * 750.0 + 5000.0)) if "evicted" in line]
    assert told[0].endswith("40 run again, 30.00 ms; 5.00 ms more in waits for copies and in rewritten operators")
    assert "more in waits" not in "".join(eviction_lines(replace(COST_REPORT, time_us=COST_REPORT.order_us + 40 * 750.0)))


def test_kinds_beyond_the_first_are_summed_up() -> None:
    """Blocks named by letters: nothing is alike."""
    evictions = [
        replace(eviction, tensor=replace(eviction.tensor, op=f"aten.op{place}.default")) for place, eviction in enumerate(EVICTIONS)
    ]
    lines = eviction_lines(replace(COST_REPORT, evictions=tuple(evictions)), most=4)
    assert len(lines) == 6
    assert lines[-1].strip() == "64.00 KiB  in 16 more: 32 run again, 24.00 ms"
    assert snapshot_lines(PEAK, most=1)[-1].strip() == "20.00 KiB  in 20 more"


def test_swapping_tells_of_the_links() -> None:
    (line,) = [line for line in eviction_lines(replace(COST_REPORT, evictions=(SWAPPED,)), "rtx3090") if "blocks.3" in line]
    assert line.endswith("1 stored, 40.0 us to the host and 60.0 us back")
    for evictions, device in (((SWAPPED,), "cpu"), (EVICTIONS, "rtx3090")):
        assert not any("no host to swap to" in line for line in eviction_lines(replace(COST_REPORT, evictions=evictions), device))
    assert eviction_lines(COST_REPORT, "cpu")[-1] == "nothing is stored elsewhere: cpu has no host to swap to"
    assert (SWAPPED.how, EVICTIONS[0].how) == ("stored and loaded", "computed again")


def test_paths_of_repeated_blocks_have_one_pattern() -> None:
    assert pattern("blocks.3.mlp.10") == "blocks.*.mlp.*"
    assert pattern("blocks_3_weight") == "blocks_*_weight"
    assert pattern("encoder_layer_11.ln") == "encoder_layer_*.ln"
    assert pattern("conv2d.fc1") == "conv2d.fc1"
    assert pattern("3.1") == "3.1"


def test_units_for_people() -> None:
    assert [time_text(us) for us in (2.5, 250.0, 2.5e6)] == ["2.5 us", "0.25 ms", "2.50 s"]
    assert source_text(Source("a/b/net.py", 3, "head")) == "head, net.py:3"
    assert source_text(Source("a/b/net.py", 3)) == "net.py:3"
    assert source_text(None) == ""
    assert [op_text(op) for op in ("aten.add.Tensor", "host.load", "py.mul")] == ["add", "host.load", "py.mul"]
