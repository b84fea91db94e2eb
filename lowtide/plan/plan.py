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

Two more fields are there where the plan knows of them: "peak", the step at the peak and what is held then (`Snapshot`), and
"cost_report" of a plan under a limit (`CostReport`). Their tensors are [storage, bytes, start, end]: what else is known of a
storage is in the graph.

"graph" holds the lines of `text.to_text`. "program" is the hash of the captured program that the plan is for, see `program_hash`: a plan is
used for no other. What graph and order come to is counted anew when a plan is read, and a promise that is not so is refused; the checksum
is over all that cannot be counted, such as times, as well. A file of another version is refused: make the plan again. Equal plans give
equal bytes: nothing in the file depends on when or how fast it was made.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowtide.base import fields
from lowtide.base.files import read_utf8, write_whole
from lowtide.errors import CheckError, FormatError
from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.ir.graph import Graph
from lowtide.ir.operators.nodes import check_operators
from lowtide.ir.text.graph_text import parse, to_text
from lowtide.plan.contents import Contents, Provenance
from lowtide.plan.cost_report import CostReport, Eviction, cost_report_from
from lowtide.plan.promises import untrue_promise
from lowtide.plan.snapshot import Snapshot, snapshot_from
from lowtide.plan.summary import one_line, summarize
from lowtide.plan.table import table

__all__ = ["CostReport", "Eviction", "Plan", "Provenance", "Snapshot"]

_FORMAT, _VERSION = "lowtide.plan", 4
_TEXTS = ("program", "solver", "status")
_PROMISES = ("resident_bytes", "peak_bytes", "eager_peak_bytes", "lower_bound_bytes", "granule_bytes")
_SEAL = "checksum"
_PER_NODE = ("order", "reuses", "workspace_bytes")


@dataclass(frozen=True, eq=False)
class Plan(Contents):
    """How to run a graph, and what that will cost: to be saved, loaded and printed."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, which is at every moment whole or what it was before. Raises OSError."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a file, checked. Raises FormatError or CheckError, which name the file, and OSError."""
        try:
            return cls.from_json(read_utf8(path))
        except (FormatError, CheckError) as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from error

    def to_json(self) -> str:
        """The plan as JSON, one line a field and a node. Raises FormatError for a graph that text cannot hold."""
        entries = {"format": _FORMAT, "version": _VERSION} | {name: getattr(self, name) for name in (*_TEXTS, *_PROMISES)}
        entries |= {
            name: section.rows() for name, section in (("peak", self.peak), ("cost_report", self.cost_report)) if section is not None
        }
        entries |= {"provenance": asdict(self.provenance)} | {name: list(getattr(self, name)) for name in _PER_NODE}
        lines = [f'"{name}": {json.dumps(entry)}' for name, entry in entries.items()]
        graph = to_text(self.graph).splitlines()
        lines.append('"graph": [\n' + ",\n".join(map(json.dumps, graph)) + "\n]")
        lines.append(f'"{_SEAL}": "{_checksum(entries | {"graph": graph})}"')
        return "{" + ",\n".join(lines) + "}\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that a JSON text holds, checked; nothing in it is executed.

        Raises FormatError where the text does not follow the format or promises what is not so, CheckError where its graph, order or
        reuses break a rule.
        """
        data = _parsed(text)
        graph = parse("\n".join(_lines(data)))
        check_operators(graph)
        plan = cls(
            graph=graph,
            order=_per_node(data, "order", graph),
            reuses=_per_node(data, "reuses", graph),
            workspace_bytes=_per_node(data, "workspace_bytes", graph),
            resident_bytes=_count(data, "resident_bytes"),
            peak_bytes=_count(data, "peak_bytes"),
            eager_peak_bytes=_count(data, "eager_peak_bytes"),
            lower_bound_bytes=_count(data, "lower_bound_bytes"),
            status=fields.string("plan", data, "status"),
            solver=fields.string("plan", data, "solver"),
            provenance=_provenance(data),
            granule_bytes=_count(data, "granule_bytes", least=1),
            program=fields.string("plan", data, "program"),
        )
        check_graph(plan.graph)
        check_order(plan.graph, plan.order)
        check_reuses(plan.graph, plan.order, plan.reuses)
        plan = replace(plan, cost_report=_cost_report(data, plan), peak=_peak(data, plan))
        _check_true(plan, data)
        return plan

    def table(self, most: int | None = None) -> str:
        """The storages of the plan that have bytes, the largest first, a line each; the first `most` where that is given."""
        return table(self, most)

    def __str__(self) -> str:
        return summarize(self)

    def __repr__(self) -> str:
        return f"Plan({one_line(self)})"

    def _repr_html_(self) -> str:
        """What notebooks show: the summary."""
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


def _checksum(entries: dict[str, Any]) -> str:
    """Of all fields of a plan but this one, however they are set out."""
    sealed = {name: entry for name, entry in entries.items() if name != _SEAL}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def _check_true(plan: Plan, data: dict[str, Any]) -> None:
    """Raises FormatError for promises that are not so, and for a file that is not as it was written."""
    if complaint := untrue_promise(plan):
        raise FormatError(f"plan: {complaint}")
    if fields.string("plan", data, _SEAL) != _checksum(data):
        raise FormatError(f"plan: expected the file as it was written, got one whose {_SEAL!r} is another's: make the plan again")


def _integer(digits: str) -> int:
    """A whole number; no size, count or index comes near 2**63."""
    if len(digits) > 20 or abs(int(digits)) >= 2**63:
        raise FormatError(f"plan: expected whole numbers below 2**63, got {digits[:20]}{'...' * (len(digits) > 20)}")
    return int(digits)


def _parsed(text: str) -> dict[str, Any]:
    """The fields of a plan, none of them unknown."""
    try:
        data = json.loads(text, object_pairs_hook=fields.without_repeats, parse_int=_integer)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:  # truncated, not JSON, or nested or numbered beyond reason
        raise FormatError(f"plan: expected a whole JSON text: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise FormatError(f'plan: expected a JSON object with "format": "{_FORMAT}"')
    if fields.integer("plan", data, "version") != _VERSION:
        raise FormatError(f"plan: expected version {_VERSION}, got {data['version']}: it is of another lowtide; make the plan again")
    known = {"format", "version", "provenance", "graph", "cost_report", "peak", _SEAL}
    fields.check_fields("plan", data, known | {*_TEXTS, *_PROMISES, *_PER_NODE})
    return data


def _lines(data: dict[str, Any]) -> list[str]:
    lines = data.get("graph")
    if not isinstance(lines, list) or not all(isinstance(line, str) and "\n" not in line for line in lines):
        fields.refuse("plan", "graph", "a list of lines of text", lines)
    return lines


def _provenance(data: dict[str, Any]) -> Provenance:
    item = data.get("provenance")
    fields.check_fields("plan: provenance", item, {"lowtide", "torch", "device", "python", "threads"})
    assert isinstance(item, dict)
    lowtide, torch, device, python = (fields.string("plan: provenance", item, name) for name in ("lowtide", "torch", "device", "python"))
    return Provenance(lowtide, torch, device, python, fields.integer("plan: provenance", item, "threads"))


def _cost_report(data: dict[str, Any], plan: Plan) -> CostReport | None:
    return cost_report_from(data["cost_report"], plan.graph) if "cost_report" in data else None


def _peak(data: dict[str, Any], plan: Plan) -> Snapshot | None:
    """What stands at the peak; its bytes must be the promise."""
    if "peak" not in data:
        return None
    found = snapshot_from("plan: peak", data["peak"], plan.graph, plan.order)
    if found.footprint_bytes != plan.peak_bytes:
        raise FormatError(f"plan: peak: expected tensors of {plan.peak_bytes} bytes, which is the promise, got {found.footprint_bytes}")
    return found


def _count(data: dict[str, Any], name: str, least: int = 0) -> int:
    count = fields.integer("plan", data, name)
    return count if count >= least else fields.refuse("plan", name, f"{least} bytes or more", count)


def _per_node(data: dict[str, Any], name: str, graph: Graph) -> tuple[int, ...]:
    entries = fields.integers("plan", data, name)
    if len(entries) != len(graph.nodes):
        raise FormatError(f"plan: expected {name!r} to have {len(graph.nodes)} entries, one for each node, got {len(entries)}")
    if name == "workspace_bytes" and any(entry < 0 for entry in entries):
        raise FormatError(f"plan: expected {name!r} to be 0 bytes or more, got {min(entries)}")
    return entries
