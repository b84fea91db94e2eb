"""Plan: a graph, what was decided about it, what that promises, and how it came about. Saved as JSON, without any code in it.

    {"format": "lowtide.plan", "version": 4,
    "program": "9f86d08188...", "solver": "Best()", "status": "optimal",
    "resident_bytes": 12, "peak_bytes": 36, "eager_peak_bytes": 48, "lower_bound_bytes": 36, "granule_bytes": 1,
    "provenance": {"lowtide": "0.1.0", "torch": "2.13.0", "device": "cpu", "python": "3.11.7", "threads": 2},
    "order": [1, 0], "reuses": [-1, 0], "workspace_bytes": [0, 0],
    "graph": [
    "def graph(",
    "..."
    ],
    "checksum": "2c26b46b68..."}

More fields are there where the plan knows of them: "peak", the step at the peak and what is held then (`Snapshot`); "eager", memory over
the program as it stood (`Timeline`); "node_us", what each node takes, "issue_us", what it takes the host beside, and "cost_report" of a
plan under a limit (`CostReport`); "pinned_bytes", what copies to the host have pinned there, and "host_bytes", the limit of that;
"algebra", what rules did to the graph (`RuleReport`); "first_steps", the plans of an optimizer's first steps, each an object like the
whole. Tensors are [storage, bytes, start, end]: what else is known of a storage is in the graph.

"graph" holds the lines of `graph_text.to_text`. "program" is the hash of the captured program that the plan is for, see `program_hash`: a
plan is used for no other. What graph and order come to is counted anew when a plan is read, and a promise that is not so is refused; the
checksum is over all that cannot be counted, such as times, as well. A file of another version is refused: make the plan again. Equal plans
give equal bytes: nothing in the file depends on when or how fast it was made.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowtide.base import fields
from lowtide.base.fields import SEAL, checksum
from lowtide.base.files import read_utf8, write_whole
from lowtide.errors import CheckError, FormatError
from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.ir.graph import Graph
from lowtide.ir.operators.nodes import check_operators
from lowtide.ir.text.graph_text import parse, to_text
from lowtide.plan.contents import Contents, Provenance, Timeline, timeline_from, times_from
from lowtide.plan.cost_report import CostReport, Eviction, RuleReport, cost_report_from, rule_reports_from
from lowtide.plan.promises import untrue_promise
from lowtide.plan.snapshot import Snapshot, snapshot_from
from lowtide.plan.summary import one_line, summarize, table

_FORMAT, _VERSION = "lowtide.plan", 4
_TEXTS = ("program", "solver", "status")
_PROMISES = ("resident_bytes", "peak_bytes", "eager_peak_bytes", "lower_bound_bytes", "granule_bytes")
_OF_HOST = ("pinned_bytes", "host_bytes")  # where something is copied there, and where that has a limit
_PER_NODE = ("order", "reuses", "workspace_bytes")
_TIMES = ("node_us", "issue_us")  # by node too, where the plan knows of them
_SECTIONS = ("peak", "eager", "cost_report")


def _entries(plan: Contents) -> dict[str, Any]:
    """All fields of a plan, the checksum last."""
    entries: dict[str, Any] = {"format": _FORMAT, "version": _VERSION} | {name: getattr(plan, name) for name in (*_TEXTS, *_PROMISES)}
    sections = ((name, getattr(plan, name)) for name in _SECTIONS)
    entries |= {name: section.rows() for name, section in sections if section is not None}
    entries |= {"pinned_bytes": plan.pinned_bytes} if plan.pinned_bytes else {}
    entries |= {} if plan.host_bytes is None else {"host_bytes": plan.host_bytes}
    entries |= {"provenance": asdict(plan.provenance)} | {name: list(getattr(plan, name)) for name in _PER_NODE}
    entries |= {name: list(getattr(plan, name)) for name in _TIMES if getattr(plan, name)}
    entries |= {"algebra": [report.rows() for report in plan.algebra]} if plan.algebra else {}
    entries |= {"first_steps": [_entries(each) for each in plan.first_steps]} if plan.first_steps else {}
    entries["graph"] = to_text(plan.graph).splitlines()
    return entries | {SEAL: checksum(entries)}


def _read(data: Any) -> Plan:
    _check_format(data)
    graph = parse("\n".join(fields.lines("plan", data, "graph")))
    check_operators(graph)
    plan = Plan(
        graph=graph,
        order=_per_node(data, "order", graph),
        reuses=_per_node(data, "reuses", graph),
        workspace_bytes=_per_node(data, "workspace_bytes", graph),
        resident_bytes=fields.count("plan", data, "resident_bytes"),
        peak_bytes=fields.count("plan", data, "peak_bytes"),
        eager_peak_bytes=fields.count("plan", data, "eager_peak_bytes"),
        lower_bound_bytes=fields.count("plan", data, "lower_bound_bytes"),
        status=fields.string("plan", data, "status"),
        solver=fields.string("plan", data, "solver"),
        provenance=fields.record("plan: provenance", data.get("provenance"), Provenance),
        pinned_bytes=fields.count("plan", data, "pinned_bytes") if "pinned_bytes" in data else 0,
        host_bytes=fields.count("plan", data, "host_bytes", least=1) if "host_bytes" in data else None,
        granule_bytes=fields.count("plan", data, "granule_bytes", least=1),
        program=fields.string("plan", data, "program"),
        node_us=_times(data, "node_us", graph),
        issue_us=_times(data, "issue_us", graph),
        eager=timeline_from("plan: eager", data["eager"]) if "eager" in data else None,
        first_steps=_first_steps(data),
        algebra=rule_reports_from(data.get("algebra", [])),
    )
    check_graph(plan.graph)
    check_order(plan.graph, plan.order)
    check_reuses(plan.graph, plan.order, plan.reuses)
    report = cost_report_from(data["cost_report"], plan.graph) if "cost_report" in data else None
    plan = replace(plan, cost_report=report, peak=_peak(data, plan))
    _check_true(plan, data)
    return plan


def _times(data: dict[str, Any], name: str, graph: Graph) -> tuple[float, ...]:
    return times_from("plan", data, name, len(graph.nodes)) if name in data else ()


def _check_format(data: Any) -> None:
    """Whether it is a plan of this version, with no field unknown."""
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise FormatError(f'plan: expected a JSON object with "format": "{_FORMAT}"')
    if fields.integer("plan", data, "version") != _VERSION:
        raise FormatError(f"plan: expected version {_VERSION}, got {data['version']}: it is of another lowtide; make the plan again")
    known = {"format", "version", "provenance", "graph", *_TIMES, "first_steps", "algebra", *_OF_HOST, SEAL}
    fields.check_fields("plan", data, known | {*_TEXTS, *_PROMISES, *_PER_NODE, *_SECTIONS})


def _first_steps(data: dict[str, Any]) -> tuple[Plan, ...]:
    entries = data.get("first_steps", [])
    if not isinstance(entries, list) or not all(isinstance(each, dict) and "first_steps" not in each for each in entries):
        fields.refuse("plan", "first_steps", "a list of plans without such a field", entries)
    return tuple(map(_read, entries))


def _check_true(plan: Contents, data: dict[str, Any]) -> None:
    """Raises FormatError for promises that are not so, and for a file that is not as it was written."""
    if complaint := untrue_promise(plan):
        raise FormatError(f"plan: {complaint}")
    if fields.string("plan", data, SEAL) != checksum(data):
        raise FormatError(f"plan: expected the file as it was written, got one whose {SEAL!r} is another's: make the plan again")


def _integer(digits: str) -> int:
    """A whole number; no size, count or index comes near 2**63."""
    if len(digits) > 20 or abs(int(digits)) >= 2**63:
        raise FormatError(f"plan: expected whole numbers below 2**63, got {digits[:20]}{'...' * (len(digits) > 20)}")
    return int(digits)


def _peak(data: dict[str, Any], plan: Contents) -> Snapshot | None:
    """What stands at the peak; its bytes must be the promise."""
    if "peak" not in data:
        return None
    snapshot = snapshot_from("plan: peak", data["peak"], plan.graph, plan.order)
    if snapshot.footprint_bytes != plan.peak_bytes:
        raise FormatError(f"plan: peak: expected tensors of {plan.peak_bytes} bytes, which is the promise, got {snapshot.footprint_bytes}")
    return snapshot


def _per_node(data: dict[str, Any], name: str, graph: Graph) -> tuple[int, ...]:
    entries = fields.integers("plan", data, name)
    if len(entries) != len(graph.nodes):
        raise FormatError(f"plan: expected {name!r} to have {len(graph.nodes)} entries, one for each node, got {len(entries)}")
    if name == "workspace_bytes" and any(entry < 0 for entry in entries):
        raise FormatError(f"plan: expected {name!r} to be 0 bytes or more, got {min(entries)}")
    return entries


__all__ = ["CostReport", "Eviction", "Plan", "Provenance", "RuleReport", "Snapshot", "Timeline"]


@dataclass(frozen=True, eq=False)
class Plan(Contents):
    """How to run a graph, and what that will cost. It can be saved, loaded and printed."""

    first_steps: tuple[Plan, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file. The file is replaced at once, or stays as it was. Raises OSError."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a file, checked. Raises FormatError or CheckError, which name the file, and OSError."""
        text = read_utf8(path)
        try:
            return cls.from_json(text)
        except (FormatError, CheckError) as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from error

    def to_json(self) -> str:
        """The plan as JSON, one line a field and a node. Raises FormatError for a graph that text cannot hold."""
        entries = _entries(self)
        graph, seal = entries.pop("graph"), entries.pop(SEAL)
        lines = [f'"{name}": {json.dumps(entry)}' for name, entry in entries.items()]
        lines.append('"graph": [\n' + ",\n".join(map(json.dumps, graph)) + "\n]")
        lines.append(f'"{SEAL}": "{seal}"')
        return "{" + ",\n".join(lines) + "}\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that a JSON text holds, checked; nothing in it is executed.

        Raises FormatError if the text does not follow the format, or if a promise in it does not hold. Raises CheckError if its graph,
        order or reuses break a rule.
        """
        return _read(fields.parsed("plan", text, parse_int=_integer))

    def table(self, most: int | None = None) -> str:
        """The storages of the plan that have bytes, the largest first, a line each; the first `most` where that is given."""
        return table(self, most)

    def __str__(self) -> str:
        return summarize(self)

    def __repr__(self) -> str:
        return f"Plan({one_line(self)})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def program_hash(graph: Graph, *settings: str | int) -> str:
    """What a captured program is known by: its operators, shapes, dtypes, inputs and outputs, and the settings that a plan depends on.

    "" where text cannot hold the graph.
    """
    try:
        text = to_text(graph, sources=False)
    except FormatError:
        return ""
    return hashlib.sha256(json.dumps([text, *settings]).encode()).hexdigest()
