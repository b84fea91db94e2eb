"""Traces, snapshots and pictures of a plan."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from torch.cuda import _memory_viz

from lowtide.errors import FormatError
from lowtide.ir.graph import Graph
from lowtide.plan.plan import Plan
from lowtide.remat.entries import Codes
from lowtide.remat.offload import movable_storages
from lowtide.remat.write_out import rematerialise
from lowtide.report import exports, save, save_picture
from tests.graphs import graphs
from tests.planned import chain, plan_of


@pytest.fixture(scope="module")
def limited() -> Plan:
    return plan_of(chain(24), memory_bytes=12 * 4096)


def played(snapshot: dict[str, Any]) -> dict[int, int]:
    """What is allocated after all events, by address, over what was there before; no two may overlap at any time."""
    (segment,), (events,) = snapshot["segments"], snapshot["device_traces"]
    alive: dict[int, int] = {}
    most = 0
    for event in events:
        start, end = event["addr"], event["addr"] + event["size"]
        assert segment["address"] <= start <= end <= segment["address"] + segment["total_size"]
        if event["action"] == "alloc":
            assert not any(start < other + size and other < end for other, size in alive.items())
            alive[start] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(start) == event["size"]
        most = max(most, sum(alive.values()))
    return alive | {-1: most}


@settings(max_examples=30, deadline=None)
@given(graphs())
def test_a_snapshot_is_what_an_allocator_would_see(graph: Graph) -> None:
    plan = plan_of(graph)
    snapshot = exports.memory_viz(plan)
    alive = played(snapshot)
    (segment,) = snapshot["segments"]
    blocks = segment["blocks"]
    assert [block["address"] for block in blocks[1:]] == [block["address"] + block["size"] for block in blocks[:-1]]  # no gaps
    assert sum(block["size"] for block in blocks) == segment["total_size"]
    active = {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated" and block["size"]}
    del alive[-1]
    assert {address: size for address, size in alive.items() if size}.items() <= active.items()


def test_torchs_own_reader_reads_a_snapshot(limited: Plan, tmp_path: Path) -> None:
    save(limited, tmp_path / "plan.pickle")
    snapshot = pickle.loads((tmp_path / "plan.pickle").read_bytes())
    assert played(snapshot)[-1] == limited.peak_bytes - limited.resident_bytes
    assert "entries" in _memory_viz.trace(snapshot)
    assert "allocated" in _memory_viz.segsum(snapshot)


def test_a_trace_has_every_operator_and_the_memory_that_it_runs_in(limited: Plan, tmp_path: Path) -> None:
    save(limited, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    operators, counters = ([event for event in events if event["ph"] == phase] for phase in "XC")
    assert [event["dur"] for event in operators] == pytest.approx([limited.node_us[index] for index in limited.order])
    assert all(after["ts"] == pytest.approx(before["ts"] + before["dur"]) for before, after in pairwise(operators))
    assert max(sum(event["args"].values()) for event in counters) == limited.peak_bytes
    assert operators[0]["args"] == {"op": "aten.make.default", "step": 0, "module": "block.0", "line": "model.py:1"}


def test_a_trace_has_what_goes_on_beside_on_streams_of_its_own(tmp_path: Path) -> None:
    graph = chain(24)
    codes = Codes(24, len(movable_storages(graph)))
    first = 0  # of what the nodes make; read again by the node before the last
    away = [0, 1, codes.store(first), 2, 3, codes.drop(first), *range(4, 21), codes.load(first), *range(21, 24)]
    save(plan_of(rematerialise(graph, away).graph), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {event["args"]["step"]: event["args"]["op"] for event in events if event["ph"] == "X"}
    begun = {event["cat"]: event["ts"] for event in events if event["ph"] == "b"}
    ended = {event["cat"]: event["ts"] for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys() == {"to the host", "to the device"}
    assert steps[begun["to the host"]] == "host.store"
    assert steps[ended["to the host"]] == "host.drop"
    assert steps[begun["to the device"]] == "host.load"
    assert steps[ended["to the device"]] == "aten.make.default"
    assert ended["to the device"] - begun["to the device"] == 2


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(limited: Plan, tmp_path: Path, suffix: str) -> None:
    save(limited, tmp_path / f"memory.{suffix}")
    assert (tmp_path / f"memory.{suffix}").stat().st_size > 1000


def test_another_suffix_is_refused(limited: Plan, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"memory\.gif: expected a name that ends in \.html \(a page\), \.png, \.svg, \.pdf"):
        save(limited, tmp_path / "memory.gif")
    assert not list(tmp_path.iterdir())


def test_what_is_no_pictures_name_is_refused_by_a_picture(limited: Plan, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"expected a picture's name that ends in \.png, \.svg, \.pdf"):
        save_picture(limited, tmp_path / "plan.html")
