"""What was searched, kept on disk: another process answers every limit of the same program at once.

One file a program, named after all that a search depends on: the program, what its operators need and take, the links, the solver, and
lowtide's own sources. It holds the orders of least peak and every sequence that is best at something under some limits; what these cost is
counted anew when they are read, and a file that does not read, or holds what is no right sequence, is as good as none. Files are replaced
as a whole; where they come to too many bytes, those that were used longest ago go.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.base import fields
from lowtide.base.fields import SEAL, checksum
from lowtide.base.files import directory, locked, read_utf8, warn_not_cached, write_whole
from lowtide.base.solver_text import described
from lowtide.cost.memory import simulate
from lowtide.errors import CheckError, FormatError
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.candidate import Candidate
from lowtide.planning.request import Request
from lowtide.problems import Status
from lowtide.problems.order import Ints
from lowtide.remat.archive import Point
from lowtide.remat.cost import runs_all
from lowtide.remat.problem import RematProblem
from lowtide.remat.sweep import Sweep
from lowtide.schedule import Auto, Schedule, lower_bound_bytes

_FORMAT, _VERSION = "lowtide.searched", 1
_WHERE = "searched"
_FOLDER = "searched"
_MOST_BYTES, _MOST_ALL_BYTES = 2**24, 2**27  # of a file, and of all
_MOST_ENTRIES = 2**26  # of all sequences of a file
_DEPENDS_ON = ("cost", "planning", "problems", "remat", "schedule")  # rooms whose sources decide what a search finds


@dataclass(frozen=True, eq=False)
class SearchCache:
    """The file of one program's searches."""

    programs: Sequence[Sequence[Candidate]]
    request: Request
    key: str
    path: Path

    @classmethod
    def of(cls, programs: Sequence[Sequence[Candidate]], request: Request) -> SearchCache | None:
        """None where there is no place for files, where a search or solver is of the caller's own kind, or where a clock stops orders."""
        folder, solver = directory(), request.solver
        if folder is None or any(type(sweep) is not Sweep for sweep in request.sweeps):
            return None
        if type(solver) is not Auto or solver.max_seconds < inf:  # of others the key does not tell all that an order depends on
            return None
        key = _key(programs, request)
        return cls(programs, request, key, folder / _FOLDER / f"{key[:32]}.json")

    def recall(self) -> CandidateArchive | None:
        """What is known of the last program, with the orders of all; None where nothing is."""
        try:
            data = self._parsed(read_utf8(self.path, regular=True))
            pairs = [pair for of, program in _pairs(data["orders"], self.programs) for pair in _pairs(of, program)]
            orders = [(candidate, _schedule(item, candidate, self.request)) for item, candidate in pairs]
            for candidate, order in orders:
                candidate.know_order(self.request.solver, self.request.granule_bytes, order)
            main = CandidateArchive.bare(self.programs[-1], self.request)
            archive = main.archive.copy(fields.integer(_WHERE, data, "states"))
            done = tuple(map(_sweep, data["done"]))
            for which, sequence in _sequences(data):
                archive.add(_point(main.problems, which, sequence))
        except (OSError, ValueError, CheckError, zlib.error, RecursionError, MemoryError, OverflowError):
            return None  # as good as none: it is written anew
        with suppress(OSError):
            os.utime(self.path)  # those that were used longest ago go first
        return replace(main, archive=archive, done=done)

    def keep(self, main: CandidateArchive) -> None:
        """Write what is known of the last program; what another process has found meanwhile stays. A file that cannot be is one warning."""
        if main.stopped or not main.done:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.parent / "lock"):
                other = self.recall()
                content = self._text(main if other is None else main.and_known(other))
                if len(content) <= _MOST_BYTES:
                    write_whole(self.path, content, regular=True)
                    _let_go(self.path.parent)
        except OSError as error:
            warn_not_cached(error)

    def _text(self, main: CandidateArchive) -> str:
        orders = [[_row(each.ordered(self.request.solver, self.request.granule_bytes)) for each in program] for program in self.programs]
        points = list(main.archive.all_points)
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "key": self.key,
            "orders": orders,
            "states": main.archive.states,
            "done": [[sweep.levels, sweep.max_states, sweep.max_runs] for sweep in main.done],
            "points": [[point.problem, len(point.sequence)] for point in points],
            "sequences": _packed([point.sequence for point in points]),
        }
        return json.dumps(data | {SEAL: checksum(data)})

    def _parsed(self, text: str) -> dict[str, Any]:
        """The fields of the file, of this key and as they were written. Raises ValueError."""
        data = json.loads(text)
        if not isinstance(data, dict) or (data.get("format"), data.get("version"), data.get("key")) != (_FORMAT, _VERSION, self.key):
            raise FormatError(f"{_WHERE}: expected a file of this program")
        if data.pop(SEAL, None) != checksum(data):
            raise FormatError(f"{_WHERE}: expected the file as it was written")
        if not all(isinstance(data.get(name), list) for name in ("orders", "done", "points")):
            raise FormatError(f"{_WHERE}: expected lists of orders, searches and points")
        return data


def _key(programs: Sequence[Sequence[Candidate]], request: Request) -> str:
    digest = hashlib.sha256(json.dumps([_sources(), described(request.solver), request.granule_bytes]).encode())
    for program in programs:
        digest.update(program[0].program(request.provenance.torch, request.granule_bytes).encode())
        for candidate in program:
            problem = candidate.remat_problem(request.granule_bytes, request.links, request.swap_state)
            digest.update(f"{problem.problem.resident_bytes} {problem.problem.start_bytes};".encode())
            for array in (*problem.facts, problem.is_view, *problem.problem.preds):
                digest.update(f"{array.dtype} {array.shape};".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@cache
def _sources() -> str:
    """Of the files that decide what a search finds: another version of them searches anew."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for room in _DEPENDS_ON:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


def _row(schedule: Schedule) -> dict[str, Any]:
    return {"order": list(schedule.order), "lower_bound_bytes": schedule.lower_bound_bytes, "solver": schedule.solver}


def _schedule(item: Any, candidate: Candidate, request: Request) -> Schedule:
    """An order as it was written, its peak counted anew. Raises FormatError and CheckError."""
    fields.check_fields(_WHERE, item, {"order", "lower_bound_bytes", "solver"})
    problem, order = candidate.order_problem(request.granule_bytes), fields.integers(_WHERE, item, "order")
    peak_bytes, bound_bytes = simulate(problem, order).peak_bytes, fields.integer(_WHERE, item, "lower_bound_bytes")
    if not lower_bound_bytes(problem) <= bound_bytes <= peak_bytes:
        raise FormatError(f"{_WHERE}: expected a bound of at most {peak_bytes}, got {bound_bytes}")
    status = Status.OPTIMAL if peak_bytes == bound_bytes else Status.FEASIBLE
    return Schedule(order, peak_bytes, bound_bytes, status, fields.string(_WHERE, item, "solver"))


def _sweep(item: Any) -> Sweep:
    levels, states, runs = _integers(item, 3, "levels, states and runs of a search")
    return Sweep(levels, states, runs, inf)


def _integers(item: Any, count: int, what: str) -> list[int]:
    if not isinstance(item, list) or [type(each) for each in item] != [int] * count:
        raise FormatError(f"{_WHERE}: expected {what}, got {item!r}")
    return item


def _packed(sequences: Sequence[Ints]) -> str:
    """Sequences end to end; neighbouring entries mostly follow one another, which packs well."""
    whole = np.concatenate([*sequences, np.zeros(0, np.int32)]).astype("<i4")
    return base64.b64encode(zlib.compress(np.diff(whole, prepend=np.int32(0)).astype("<i4").tobytes())).decode()


def _sequences(data: dict[str, Any]) -> list[tuple[int, Ints]]:
    """The sequences, and which problem each is of. Raises ValueError."""
    points = [_integers(point, 2, "problem and length of a sequence") for point in data["points"]]
    total = sum(length for _, length in points)
    if any(length < 0 for _, length in points) or total > _MOST_ENTRIES:
        raise FormatError(f"{_WHERE}: expected at most {_MOST_ENTRIES} entries, got {total}")
    raw = zlib.decompressobj().decompress(base64.b64decode(fields.string(_WHERE, data, "sequences"), validate=True), 4 * total + 1)
    if len(raw) != 4 * total:
        raise FormatError(f"{_WHERE}: expected {total} entries")
    whole = np.cumsum(np.frombuffer(raw, "<i4"), dtype=np.int64).astype(np.int32)
    ends = np.cumsum([length for _, length in points])
    return [(which, whole[end - length : end].copy()) for (which, length), end in zip(points, ends.tolist(), strict=True)]


def _point(problems: Sequence[RematProblem], which: int, sequence: Ints) -> Point:
    """A sequence with what it costs. Raises FormatError where it is none of the problem."""
    if not 0 <= which < len(problems):
        raise FormatError(f"{_WHERE}: expected one of {len(problems)} problems, got {which}")
    problem = problems[which]
    if not runs_all(problem, sequence):
        raise FormatError(f"{_WHERE}: expected right sequences of all nodes")
    return Point.of(problem, which, sequence)


def _pairs(one: Any, other: Sequence[Any]) -> list[tuple[Any, Any]]:
    if not isinstance(one, list) or len(one) != len(other):
        raise FormatError(f"{_WHERE}: expected {len(other)} entries")
    return list(zip(one, other, strict=True))


def _let_go(folder: Path) -> None:
    """Delete what was used longest ago until the rest is no more than may be."""
    files = []
    for path in folder.glob("*.json"):
        with suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime_ns, status.st_size, path))
    room = _MOST_ALL_BYTES
    for _, size, path in sorted(files, reverse=True):
        room -= size
        if room < 0:
            with suppress(OSError):
                path.unlink()
