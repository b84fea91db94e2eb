import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.memory import order_problem, simulate
from lowtide.errors import CheckError, FormatError
from lowtide.ir.graph import Graph, Kind, Storage
from lowtide.ir.text.graph_text import to_text
from lowtide.plan.plan import CostReport, Plan, Provenance, program_hash
from lowtide.planning.candidate import Candidate
from lowtide.planning.request import Request
from lowtide.schedule import ReadyList
from tests import planned
from tests.edits import edited
from tests.graphs import array, compute, graphs
from tests.peaks import memory_profile

PROVENANCE = Provenance("0.1.0", "2.13.0", "cpu", "3.11.7", 2)
X = array(Storage("x", 4, "cpu", Kind.INPUT))
A = compute("a", X)
B = compute("b", A.results[0], inplace=((A.results[0], "aten.make_.default"),))
C = compute("c", X)


def plan_of(graph: Graph, **fields: Any) -> Plan:
    count = len(graph.nodes)
    plan = Plan(graph, tuple(range(count)), (-1,) * count, (0,) * count, 4, 19, 20, 12, "feasible", "ProgramOrder()", PROVENANCE)
    return replace(plan, program=program_hash(graph, "2.13.0", "cpu", 1), **fields)


PLAN = plan_of(Graph((X,), (A, B, C), (C.results[0],)), order=(2, 0, 1), reuses=(-1, 0, -1), workspace_bytes=(0, 7, 0))


def sealed(data: dict[str, Any]) -> str:
    """As somebody writes it who knows of the checksum."""
    told = {name: entry for name, entry in data.items() if name != "checksum"}
    return json.dumps(told | {"checksum": hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()})


def test_a_plan_is_saved_as_it_should_be(golden: Callable[[str, str], None]) -> None:
    golden("plan.json", PLAN.to_json())


def test_a_plan_reads_back(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.to_json() == PLAN.to_json() == (tmp_path / "plan.json").read_text()
    assert replace(again, graph=PLAN.graph).__dict__ == PLAN.__dict__
    assert to_text(again.graph) == to_text(PLAN.graph)
    assert os.listdir(tmp_path) == ["plan.json"]


@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from([1, 64, 512]), st.data())
def test_every_plan_keeps_its_promises_and_reads_back(graph: Graph, granule_bytes: int, data: st.DataObject) -> None:
    candidate = Candidate(graph, tuple(data.draw(st.integers(0, 9)) for _ in graph.nodes))
    plan = planned.plan([candidate], Request(PROVENANCE, granule_bytes=granule_bytes, solver=ReadyList()))  # the checker counts by itself
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    for field in ("peak_bytes", "resident_bytes"):
        told = json.loads(plan.to_json())
        with pytest.raises(FormatError, match=f"expected '{field}' to be {told[field]}|of .* bytes, which is the promise"):
            Plan.from_json(sealed(told | {field: told[field] + data.draw(st.sampled_from([-1, 1, 10**9])) if told[field] else 1}))


def test_what_was_measured_is_not_saved() -> None:
    assert replace(PLAN, measured_peak_bytes=3).to_json() == PLAN.to_json()


def test_saving_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)

    def no_space(*paths: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="no space left"):
        replace(PLAN, solver="other").save(path)
    assert path.read_text() == PLAN.to_json()
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(
    ("field", "entry", "expected"),
    [
        ("format", "lowtide.order", 'expected a JSON object with "format": "lowtide.plan"'),
        ("version", 2, "expected version 4, got 2: it is of another lowtide; make the plan again"),
        ("version", "1", "expected 'version' to be an integer, got str"),
        ("order", [0, 1], "expected 'order' to have 3 entries, one for each node, got 2"),
        ("order", [0, 1, 2.0], "expected 'order' to be a list of integers, got list"),
        ("order", [0, 1, True], "expected 'order' to be a list of integers, got list"),
        ("reuses", "none", "expected 'reuses' to be a list of integers, got str"),
        ("reuses", [-1, 0, -1, -1], "expected 'reuses' to have 3 entries, one for each node, got 4"),
        ("workspace_bytes", [0, -7, 0], "expected 'workspace_bytes' to be 0 bytes or more, got -7"),
        ("peak_bytes", -1, "expected 'peak_bytes' to be 0 or more"),
        ("peak_bytes", 1.5, "expected 'peak_bytes' to be an integer, got float"),
        ("peak_bytes", None, "expected 'peak_bytes' to be an integer, got nothing"),
        ("peak_bytes", True, "expected 'peak_bytes' to be an integer, got bool"),
        ("peak_bytes", float("inf"), "expected 'peak_bytes' to be an integer, got float"),
        ("status", 1, "expected 'status' to be a string, got int"),
        ("provenance", [], "provenance: expected an object, got list"),
        ("provenance", {"lowtide": "1"}, "provenance: expected 'torch' to be a string, got nothing"),
        ("provenance", {"host": "1"}, "provenance: expected fields among device, lowtide, python, threads, torch, got 'host'"),
        ("graph", "def graph():", "expected 'graph' to be a list of lines of text, got str"),
        ("graph", [1], "expected 'graph' to be a list of lines of text, got list"),
        ("graph", ["def graph():", "    import os"], "line 2: expected a call such as"),
        ("seconds", 1, "expected fields among"),
        ("program", None, "expected 'program' to be a string, got nothing"),
        ("granule_bytes", 0, "expected 'granule_bytes' to be 1 or more"),
        ("granule_bytes", 64, "expected 'resident_bytes' to be 64, which is what graph, order and reuses come to, got 4"),
        ("peak_bytes", 1, "expected 'peak_bytes' to be 19, which is what graph, order and reuses come to, got 1"),
        ("peak_bytes", 10**400, "expected whole numbers below 2**63, got 10000000000000000000..."),
        ("peak_bytes", -(2**63), "expected whole numbers below 2**63"),
        ("resident_bytes", 5, "expected 'resident_bytes' to be 4"),
        ("workspace_bytes", [0, 2**62, 0], f"expected 'peak_bytes' to be {2**62 + 12}, which is"),
        ("reuses", [-1, -1, -1], "expected 'peak_bytes' to be 23, which is"),
        ("lower_bound_bytes", 3, "expected 'lower_bound_bytes' from 4 to 19, got 3"),
        ("lower_bound_bytes", 20, "expected 'lower_bound_bytes' from 4 to 19, got 20"),
        (
            "lower_bound_bytes",
            19,
            "expected 'status' to be optimal where 'lower_bound_bytes' meets 'peak_bytes', else feasible, got 'feasible'",
        ),
        ("status", "optimal", "expected 'status' to be optimal where"),
        ("eager_peak_bytes", 3, "expected 'eager_peak_bytes' to be 4, which are resident, or more, got 3"),
        ("eager_peak_bytes", 21, "expected the file as it was written, got one whose 'checksum' is another's"),
        ("checksum", "", "expected the file as it was written"),
        ("node_us", [1.0, 2.0], "expected 'node_us' to be 3 numbers, 0 or more"),
        ("node_us", [1.0, float("nan"), 0.0], "expected 'node_us' to be 3 numbers, 0 or more"),
        ("eager", {"nbytes": {"input": [4]}, "workspace_bytes": [0], "phases": []}, "to be 4, the most in 'eager', got 20"),
        ("first_steps", {}, "expected 'first_steps' to be a list of plans without such a field"),
        ("first_steps", [{"format": "lowtide.plan", "version": 4}], "expected 'graph' to be a list of lines of text"),
    ],
)
def test_what_is_no_plan_is_refused(field: str, entry: object, expected: str) -> None:
    data = json.loads(PLAN.to_json()) | {field: entry}
    with pytest.raises(FormatError) as caught:
        Plan.from_json(json.dumps(data))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "name", ["os.system", "os.path.join.default", "py.os.system", "host.remove", "aten.add", "aten.\u00e4dd.Tensor", "eval"]
)
def test_only_names_that_an_operator_can_have_are_read(name: str) -> None:
    for old in ("aten.make.default", "aten.make_.default"):
        data = json.loads(PLAN.to_json())
        data["graph"] = [line.replace(old, name) for line in data["graph"]]
        with pytest.raises(FormatError, match=r"expected the name of an operator|expected a call|expected clauses in their order"):
            Plan.from_json(sealed(data))


WITH_PEAK = replace(
    PLAN,
    peak=memory_profile(PLAN.graph, PLAN.order, PLAN.workspace_bytes).snapshot(PLAN.graph, PLAN.order),
    cost_report=CostReport((2, 0, 1, 0), 2.5, 2.0, 23, 1, ((19, 2.5),)),
).to_json()


@given(st.data())
def test_an_edited_plan_is_refused_or_keeps_its_promises(data: st.DataObject) -> None:
    told = json.loads(WITH_PEAK)
    for _ in range(data.draw(st.integers(1, 3))):
        told = edited(told, data)
    for text, seal in ((json.dumps(told), True), (sealed(told) if isinstance(told, dict) else "[]", False)):
        try:
            plan = Plan.from_json(text)
        except (FormatError, CheckError):
            continue
        assert not seal or plan.to_json() == WITH_PEAK
        again = simulate(order_problem(plan.graph, plan.workspace_bytes, round_to=plan.granule_bytes), plan.order)
        assert again.peak_bytes <= plan.peak_bytes
        str(plan)


@given(st.text(alphabet='{}[]",:0123456789eE+-. abnfrtlu', max_size=40), st.integers(0, 10**4), st.integers(0, 30))
def test_a_damaged_text_is_refused_or_the_same_plan(noise: str, start: int, length: int) -> None:
    start %= len(WITH_PEAK)
    text = WITH_PEAK[:start] + noise + WITH_PEAK[start + length :]
    with suppress(FormatError, CheckError):
        assert Plan.from_json(text).to_json() == WITH_PEAK


@pytest.mark.parametrize("field", json.loads(PLAN.to_json()))
def test_no_field_may_be_left_out(field: str) -> None:
    data = json.loads(PLAN.to_json())
    del data[field]
    with pytest.raises(FormatError, match="expected"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("size", range(0, len(PLAN.to_json()) - 2, 37))
def test_a_truncated_plan_is_refused(size: int) -> None:
    with pytest.raises(FormatError, match="expected a whole JSON text"):
        Plan.from_json(PLAN.to_json()[:size])


@pytest.mark.parametrize("text", ["[]", "1", "null", '"format"', "{}", "[" * 100_000, '{"format": ' + "9" * 5000 + "}", '{"a": 1, "a": 2}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="expected"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"order": [0, 0, 1]}, "the order does not name every node once"),
        ({"order": [1, 0, 2]}, "the order runs a node before one that makes what it reads"),
        ({"reuses": [-1, 1, -1]}, "a node takes over an input that it does not list for that"),
        ({"reuses": [0, -1, -1]}, "a node takes over an input that it does not list for that"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckError, match=f"^{expected}"):
        Plan.from_json(json.dumps(json.loads(PLAN.to_json()) | fields))


def test_a_plan_with_a_wrong_graph_is_refused() -> None:
    data = json.loads(PLAN.to_json())
    data["graph"] = [line.replace("uint8[4] 4 B activation", "uint8[5] 4 B activation") for line in data["graph"]]
    with pytest.raises(CheckError, match=r"^a value reaches beyond the bytes of its storage"):
        Plan.from_json(json.dumps(data))


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(FormatError, match=r"plan\.json: plan: expected a whole JSON text"):
        Plan.load(path)
    path.write_text(json.dumps(json.loads(PLAN.to_json()) | {"order": [1, 0, 2]}))
    with pytest.raises(CheckError, match=r"plan\.json: the order runs"):
        Plan.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match=r"^[^:]*plan\.json: expected text in UTF-8"):
        Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")
