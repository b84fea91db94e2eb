import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from lowtide.errors import CheckError, FormatError
from lowtide.ir.graph import Graph, Kind, Storage
from lowtide.ir.plan import Plan, Provenance
from lowtide.ir.text import to_text
from tests.graphs import array, compute, graphs

PROVENANCE = Provenance("0.1.0", "2.13.0", "cpu", "3.11.7", 2)
X = array(Storage("x", 4, "cpu", Kind.INPUT))
A = compute("a", X)
B = compute("b", A.results[0], inplace=((A.results[0], "aten.make_.default"),))
C = compute("c", X)


def plan_of(graph: Graph, **fields: Any) -> Plan:
    count = len(graph.nodes)
    plan = Plan(graph, tuple(range(count)), (-1,) * count, (0,) * count, 4, 16, 20, 12, "feasible", "ProgramOrder()", PROVENANCE)
    return replace(plan, **fields)


PLAN = plan_of(Graph((X,), (A, B, C), (C.results[0],)), order=(2, 0, 1), takeovers=(-1, 0, -1), workspace_bytes=(0, 7, 0))


def test_a_plan_is_saved_as_it_should_be(golden: Callable[[str, str], None]) -> None:
    golden("plan.json", PLAN.to_json())


def test_a_plan_reads_back(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.to_json() == PLAN.to_json() == (tmp_path / "plan.json").read_text()
    assert replace(again, graph=PLAN.graph).__dict__ == PLAN.__dict__
    assert to_text(again.graph) == to_text(PLAN.graph)
    assert os.listdir(tmp_path) == ["plan.json"]


@given(graphs())
def test_every_plan_reads_back(graph: Graph) -> None:
    text = plan_of(graph).to_json()
    assert Plan.from_json(text).to_json() == text


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
        ("version", 1, "expected version 2, got 1: it is of another lowtide; make the plan again"),
        ("version", "1", "expected 'version' to be an integer, got str"),
        ("order", [0, 1], "expected 'order' to have 3 entries, one for each node, got 2"),
        ("order", [0, 1, 2.0], "expected 'order' to be a list of integers, got list"),
        ("order", [0, 1, True], "expected 'order' to be a list of integers, got list"),
        ("takeovers", "none", "expected 'takeovers' to be a list of integers, got str"),
        ("takeovers", [-1, 0, -1, -1], "expected 'takeovers' to have 3 entries, one for each node, got 4"),
        ("workspace_bytes", [0, -7, 0], "expected 'workspace_bytes' to be 0 bytes or more, got -7"),
        ("peak_bytes", -1, "expected 'peak_bytes' to be 0 bytes or more"),
        ("peak_bytes", 1.5, "expected 'peak_bytes' to be an integer, got float"),
        ("peak_bytes", None, "expected 'peak_bytes' to be an integer, got nothing"),
        ("status", 1, "expected 'status' to be a string, got int"),
        ("provenance", [], "provenance: expected an object, got list"),
        ("provenance", {"lowtide": "1"}, "provenance: expected 'torch' to be a string, got nothing"),
        ("provenance", {"host": "1"}, "provenance: expected fields among device, lowtide, python, threads, torch, got 'host'"),
        ("graph", "def graph():", "expected 'graph' to be a list of lines of text, got str"),
        ("graph", [1], "expected 'graph' to be a list of lines of text, got list"),
        ("graph", ["def graph():", "    import os"], "line 2: expected a call such as"),
        ("seconds", 1, "expected fields among"),
    ],
)
def test_what_is_no_plan_is_refused(field: str, entry: object, expected: str) -> None:
    data = json.loads(PLAN.to_json()) | {field: entry}
    with pytest.raises(FormatError) as caught:
        Plan.from_json(json.dumps(data))
    assert expected in str(caught.value)


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
        ({"takeovers": [-1, 1, -1]}, "a node takes over an input that it does not list for that"),
        ({"takeovers": [0, -1, -1]}, "a node takes over an input that it does not list for that"),
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
    with pytest.raises(FormatError, match=r"plan\.json: expected text in UTF-8"):
        Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")
