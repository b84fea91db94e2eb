"""Plan: a graph, what was decided about it, what that promises, and how it came about. Saved as JSON, see `plan.plan_json`."""

from __future__ import annotations

import hashlib
import html
import json
import os
from dataclasses import dataclass

from lowtide.base.files import read_utf8, write_whole
from lowtide.errors import CheckError, FormatError
from lowtide.ir.graph import Graph
from lowtide.ir.text.graph_text import to_text
from lowtide.plan.contents import Contents, Provenance
from lowtide.plan.cost_report import CostReport, Eviction, RuleReport
from lowtide.plan.plan_json import read, written
from lowtide.plan.snapshot import Snapshot
from lowtide.plan.summary import one_line, summarize
from lowtide.plan.table import table
from lowtide.plan.timeline import Timeline

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
        try:
            return cls.from_json(read_utf8(path))
        except (FormatError, CheckError) as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from error

    def to_json(self) -> str:
        """The plan as JSON, one line a field and a node. Raises FormatError for a graph that text cannot hold."""
        return written(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that a JSON text holds, checked; nothing in it is executed.

        Raises FormatError if the text does not follow the format, or if a promise in it does not hold. Raises CheckError if its graph,
        order or reuses break a rule.
        """
        return cls._of(read(text))

    @classmethod
    def _of(cls, contents: Contents) -> Plan:
        return cls(**vars(contents) | {"first_steps": tuple(map(cls._of, contents.first_steps))})

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
