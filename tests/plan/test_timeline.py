"""Memory over steps by kind: against counting step by step."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import FormatError
from lowtide.ir.graph import Kind, Node, Storage
from lowtide.plan.contents import Timeline, timeline_from
from tests.graphs import array, compute

STEPS = 6
X = array(Storage("x", 4, "cpu", Kind.INPUT))
NODES = tuple(compute(f"n{step}", X) for step in range(STEPS))
_MADE = (Kind.ACTIVATION, Kind.ACTIVATION, Kind.GRADIENT, Kind.TEMPORARY, Kind.GRADIENT)
SPANS = st.lists(st.tuples(st.sampled_from(list(Kind)), st.integers(0, 99), st.integers(0, STEPS), st.integers(0, STEPS)), max_size=8)


@given(SPANS, st.lists(st.integers(0, 9), min_size=STEPS, max_size=STEPS))
def test_each_step_has_what_lives_then(spans: list[tuple[Kind, int, int, int]], workspace_bytes: list[int]) -> None:
    found = Timeline.of(spans, workspace_bytes, NODES)
    for step in range(STEPS):
        alive = [(kind, nbytes) for kind, nbytes, start, end in spans if start <= step < end]
        assert {kind: of[step] for kind, of in found.nbytes.items() if of[step]} == {
            kind: total for kind in Kind if (total := sum(nbytes for each, nbytes in alive if each is kind))
        }
        assert found.footprint_bytes[step] == sum(nbytes for _, nbytes in alive) + workspace_bytes[step]
    assert timeline_from("timeline", json.loads(json.dumps(found.rows()))) == found


def test_phases_are_told_where_they_change() -> None:
    nodes = [Node("aten.make.default", (X,), (array(Storage(kind.value, 4, "cpu", kind)),)) for kind in _MADE]
    assert Timeline.of((), [0] * len(nodes), nodes).phases == (("forward", 0), ("backward", 2), ("optimizer", 3), ("backward", 4))


RIGHT: dict[str, Any] = {"nbytes": {"input": [4, 4]}, "workspace_bytes": [0, 1], "phases": [["forward", 0]], "us": [1.0, 2.5]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"nbytes": []},
        {"nbytes": {"input": [4]}},
        {"nbytes": {"input": [4, -1]}},
        {"nbytes": {"script": [4, 4]}},
        {"workspace_bytes": [0, -1]},
        {"phases": [["forward", 1]]},
        {"phases": [["forward", 0], ["backward", 2]]},
        {"phases": [["sideways", 0]]},
        {"us": [1.0]},
        {"us": [1.0, float("inf")]},
        {"us": [True, 1.0]},
        {"more": 1},
    ],
)
def test_what_is_none_is_refused(wrong: dict[str, Any]) -> None:
    assert timeline_from("timeline", RIGHT).us == (1.0, 2.5)
    with pytest.raises(FormatError, match="timeline"):
        timeline_from("timeline", RIGHT | wrong)
