"""Plans of a range as JSON, without any code in it: for each part of the range and each program what was measured, and the members.

    {"format": "lowtide.range", "version": 1, "torch": "2.13.0", "lowtide": "0.1.0", "device": "cpu",
    "granule_bytes": 1, "memory_bytes": 8000000, "latency": null,
    "parts": [{"dimensions": "rows in 2..8", "programs": [
        {"program": "9f86d08188...", "candidates": [...], "orders": [...], "members": [...]}]}],
    "checksum": "2c26b46b68..."}

A candidate is known by the hash of its graph and by what algebra did; its graph is made anew from the captured program. What members take
follows from sizes, and is counted anew as well. A file of another version is refused: make the plans again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from lowtide.base import fields
from lowtide.errors import FormatError
from lowtide.planning.search_cache import checksum

FORMAT, _VERSION = "lowtide.range", 1
_WHERE = "plans of a range"
_SEAL = "checksum"
_MOST_CHARACTERS = 2**28
Item = TypeVar("Item")


@dataclass(frozen=True)
class WrittenMember:
    """An order of a candidate's nodes, or a sequence in which some run again."""

    candidate: int
    order: tuple[int, ...]
    sequence: tuple[int, ...] | None


@dataclass(frozen=True)
class WrittenCandidate:
    """What is known of one graph."""

    graph: str  # its hash
    applied_rules: tuple[tuple[str, str, float], ...]  # what algebra did: rule, storage that was held, microseconds
    smallest_us: float  # by how much longer it takes at the smallest point; without end where nobody knows
    points: tuple[tuple[int, ...], ...]  # [k] that were measured
    workspace_bytes: tuple[tuple[int, ...], ...]  # [k, nodes]
    node_us: tuple[tuple[float, ...], ...]  # [k, nodes]; empty where times do not matter


@dataclass(frozen=True)
class WrittenProgram:
    """One of the programs of a step."""

    program: str  # hash of the captured program
    candidates: tuple[WrittenCandidate, ...]
    orders: tuple[WrittenMember, ...]
    members: tuple[WrittenMember, ...]


@dataclass(frozen=True)
class WrittenPart:
    """A part of the range for which programs were captured together."""

    dimensions: str  # as people read it
    programs: tuple[WrittenProgram, ...]


@dataclass(frozen=True)
class WrittenRange:
    """All that was planned for a range."""

    torch: str  # version
    lowtide: str  # version
    device: str
    granule_bytes: int
    memory_bytes: int | None  # the limit
    latency: float | None
    parts: tuple[WrittenPart, ...]

    @property
    def is_limited(self) -> bool:
        """Whether there is something to keep to."""
        return self.memory_bytes is not None or self.latency is not None

    def to_json(self) -> str:
        """As text. The same plans give the same text."""
        data = {"format": FORMAT, "version": _VERSION} | asdict(self)
        finite = json.loads(json.dumps(data), parse_constant=lambda _: None)  # JSON has no infinity
        return json.dumps(finite | {_SEAL: checksum(finite)}, allow_nan=False) + "\n"


def read_range(text: str) -> WrittenRange:
    """What `to_json` wrote; nothing in it is executed. Raises FormatError for any other text."""
    if len(text) > _MOST_CHARACTERS:
        raise FormatError(f"{_WHERE}: expected at most {_MOST_CHARACTERS:,} characters, got {len(text):,}")
    try:
        data = json.loads(text, object_pairs_hook=fields.without_repeats, parse_constant=lambda _: None)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{_WHERE}: expected a whole JSON text: {error}") from error
    _check_format(data)
    if fields.string(_WHERE, data, _SEAL) != checksum({name: item for name, item in data.items() if name != _SEAL}):
        raise FormatError(f"{_WHERE}: expected the file as it was written, got one whose {_SEAL!r} is another's: save it again")
    torch, lowtide, device = (fields.string(_WHERE, data, name) for name in ("torch", "lowtide", "device"))
    memory_bytes, latency = data.get("memory_bytes"), data.get("latency")
    if memory_bytes is not None:
        memory_bytes = _whole(data, "memory_bytes", 1)
    if latency is not None:
        latency = _number("latency", latency)
    return WrittenRange(torch, lowtide, device, _whole(data, "granule_bytes", 1), memory_bytes, latency, _each(data, "parts", _part))


def is_range(text: str) -> bool:
    """Whether a text seems to be plans of a range, and not a plan of one shape."""
    return f'"{FORMAT}"' in text[:200]


def _check_format(data: Any) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        of_one = isinstance(data, dict) and data.get("format") == "lowtide.plan"
        more = ", got a plan of one shape: leave `dynamic` out to use it, or save the step of a range by step.save(path)" if of_one else ""
        raise FormatError(f'{_WHERE}: expected a JSON object with "format": "{FORMAT}"{more}')
    if fields.integer(_WHERE, data, "version") != _VERSION:
        raise FormatError(f"{_WHERE}: expected version {_VERSION}, got {data['version']}: it is of another lowtide; make the plans again")
    known = {"format", "version", "torch", "lowtide", "device", "granule_bytes", "memory_bytes", "latency", "parts", _SEAL}
    fields.check_fields(_WHERE, data, known)


def _part(item: Any) -> WrittenPart:
    fields.check_fields(_WHERE, item, {"dimensions", "programs"})
    return WrittenPart(fields.string(_WHERE, item, "dimensions"), _each(item, "programs", _program))


def _program(item: Any) -> WrittenProgram:
    fields.check_fields(_WHERE, item, {"program", "candidates", "orders", "members"})
    name, candidates = fields.string(_WHERE, item, "program"), _each(item, "candidates", _candidate)
    program = WrittenProgram(name, candidates, _each(item, "orders", _member), _each(item, "members", _member))
    if not (program.candidates and program.orders and program.members):
        raise FormatError(f"{_WHERE}: expected candidates, orders and members of each program")
    for member in (*program.orders, *program.members):
        if not 0 <= member.candidate < len(program.candidates):
            raise FormatError(f"{_WHERE}: expected one of {len(program.candidates)} candidates, got {member.candidate}")
    return program


def _candidate(item: Any) -> WrittenCandidate:
    fields.check_fields(_WHERE, item, {"graph", "applied_rules", "smallest_us", "points", "workspace_bytes", "node_us"})
    smallest_us = item.get("smallest_us")
    return WrittenCandidate(
        fields.string(_WHERE, item, "graph"),
        _each(item, "applied_rules", _applied_rule),
        math.inf if smallest_us is None else _number("smallest_us", smallest_us),
        _each(item, "points", lambda row: _row(row, "points", _integer)),
        _each(item, "workspace_bytes", lambda row: _row(row, "workspace_bytes", _integer)),
        _each(item, "node_us", lambda row: _row(row, "node_us", lambda each: _number("node_us", each, least=0.0))),
    )


def _applied_rule(item: Any) -> tuple[str, str, float]:
    if not isinstance(item, list) or len(item) != 3 or not all(isinstance(each, str) for each in item[:2]):
        fields.refuse(_WHERE, "applied_rules", "a rule, a storage and microseconds", item)
    return item[0], item[1], _number("applied_rules", item[2])


def _member(item: Any) -> WrittenMember:
    fields.check_fields(_WHERE, item, {"candidate", "order", "sequence"})
    sequence, order = item.get("sequence"), _row(item.get("order"), "order", _integer)
    runs = None if sequence is None else _row(sequence, "sequence", _integer)
    return WrittenMember(fields.integer(_WHERE, item, "candidate"), order, runs)


def _each(item: dict[str, Any], name: str, read: Callable[[Any], Item]) -> tuple[Item, ...]:
    entries = item.get(name)
    return tuple(map(read, entries)) if isinstance(entries, list) else fields.refuse(_WHERE, name, "a list", entries)


def _row(item: Any, name: str, read: Callable[[Any], Item]) -> tuple[Item, ...]:
    return tuple(map(read, item)) if isinstance(item, list) else fields.refuse(_WHERE, name, "a list of numbers", item)


def _integer(item: Any) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**62:
        raise FormatError(f"{_WHERE}: expected whole numbers from 0 to below 2**62, got {str(item)[:40]}")
    return item


def _whole(item: dict[str, Any], name: str, least: int) -> int:
    number = _integer(item.get(name))
    return number if number >= least else fields.refuse(_WHERE, name, f"{least} or more", number)


def _number(name: str, item: Any, least: float = -math.inf) -> float:
    if isinstance(item, bool) or not isinstance(item, (int, float)) or not math.isfinite(item) or item < least:
        fields.refuse(_WHERE, name, "a number", item)
    return float(item)
