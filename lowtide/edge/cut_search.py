"""Which operators to cut and how: least bytes within some multiplications, or least multiplications within some bytes, and the bound.

It looks at all partitions of the operators, in the order of the network, into single ones and cuts of up to 64: each along any axis, in
bands of any one size along any other, or without bands, then also with its input through a ring. Other cuts (several sizes of bands in
one, bands with that ring, bands beside channels, one operator that goes over nothing, longer ones) are in no search, and in no bound:
"optimal" is said of these. What one part needs depends on nothing but itself and what is alive around it. So for a limit of bytes the least
multiplications are a shortest path over positions, and the least bytes are a search by halves over the limits (msf-CNN, NeurIPS 2025,
section 4, walks the same graph). Here cuts have residual additions in them, rings of whole slices, and results that go over an input.
The bound is the same path with what is alive around a part in every order: no partition needs less, in whatever order its parts run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.edge.cuts import Cut, CutStages, can_be_cut, first_source
from lowtide.edge.graph import EdgeGraph
from lowtide.edge.plan import rounded_up
from lowtide.edge.problem import EdgeProblem, EdgeTask, ps

_LONGEST = 64  # operators of one cut


@dataclass(frozen=True, slots=True)
class CutOption:
    """Operators [first, end) as one cut, or one operator as it is."""

    first: int
    end: int
    macs: int
    needs_bytes: int  # with what is alive around it in the network's order
    least_bytes: int  # with what is alive around it in every order
    cut: Cut | None


@dataclass(frozen=True, slots=True)
class CutChoice:
    cuts: tuple[Cut, ...]
    macs: int
    needs_bytes: int  # by bytes alive in the network's order


@dataclass(frozen=True, slots=True)
class CutPart:
    """Operators [first, end) as one cut in one of several spaces, whose time counts."""

    first: int
    end: int
    task: EdgeTask  # by storages of the network that is not cut
    extra_macs: int
    cut: Cut


class CutSearch:
    """All parts of a network, whose slices are multiples of the largest alignment."""

    def __init__(self, graph: EdgeGraph, problem: EdgeProblem) -> None:
        self.graph, self.problem = graph, problem
        self.align = max(memory.align_bytes for memory in problem.spaces)
        self.size = problem.sizes_in(0)
        count, tasks = len(graph.nodes), problem.tasks
        self.maker, self.users, self.last = [-1] * len(self.size), [0] * len(self.size), [-1] * len(self.size)
        self.before = [0] * count
        self.last_read = {tensor: at for at, node in enumerate(graph.nodes) for tensor in node.inputs} | dict.fromkeys(graph.outputs, count)
        self.in_parts = {storage for task in tasks[count:] for storage in task.makes}  # which begin with the first part that is written
        for at, task in enumerate(tasks[:count]):
            for earlier in (each for each in task.before if each < count):
                self.before[at] |= self.before[earlier] | 1 << earlier
            for storage in task.makes:
                self.maker[storage] = at
            for storage in (*task.reads, *task.makes):
                self.users[storage] |= 1 << at
                self.last[storage] = at
                self.maker[storage] = at if storage in self.in_parts and self.maker[storage] < 0 else self.maker[storage]
        self.last = [count if storage in problem.kept else last for storage, last in enumerate(self.last)]
        self._known: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._start_of = {at: start for both in zip(problem.tensors, problem.starts, strict=True) for at, start in zip(*both, strict=True)}
        self._storage_of = {tensor: storage for storage, tensors in enumerate(problem.tensors) for tensor in tensors}
        self.after = [sum(1 << later for later in range(count) if self.before[later] >> at & 1) for at in range(count)]

    @cached_property
    def parts(self) -> tuple[tuple[CutOption, ...], ...]:
        """By position the parts that end there; none that another of the same operators is better than in every way."""
        return tuple(_best(self._ending(end)) for end in range(1, len(self.graph.nodes) + 1))

    def _ending(self, end: int) -> Iterator[CutOption]:
        task, node = self.problem.tasks[end - 1], self.graph.nodes[end - 1]
        workspace = rounded_up(task.workspace_bytes, self.align)
        yield self._part(end - 1, end, node.macs, [*task.makes], workspace, task.takes, None)
        for first, run in self._runs(end):
            yield from self._of_run(run, first, end)

    def _runs(self, end: int) -> Iterator[tuple[int, CutStages]]:
        """All runs that end here, by their first operator, along each axis and in all bands."""
        node = self.graph.nodes[end - 1]
        shape = self.graph.tensors[node.outputs[0]].shape if node.outputs else ()
        for axis in (each for each in range(len(shape)) if can_be_cut(self.graph, node, each)):
            for band_axis in (-1, *(other for other in range(len(shape)) if other != axis)):
                if can_be_cut(self.graph, node, axis, band_axis):
                    yield from self._led(end, axis, band_axis)

    def _led(self, end: int, axis: int, band_axis: int) -> Iterator[tuple[int, CutStages]]:
        """Each is the one before it with an operator more at its front."""
        last = self.graph.nodes[end - 1]
        extent = self.graph.tensors[last.outputs[0]].shape[band_axis] if band_axis >= 0 else 0
        sizes = range(1, extent) if band_axis >= 0 else (0,)
        run = CutStages.of(self.graph, last, axis, band_axis, sizes, self.align) if sizes else None
        first = end - 1
        while run is not None:
            if not self._is_over_its_input(run):
                yield first, run
            first -= 1
            if first < max(0, end - _LONGEST):
                return
            node = self.graph.nodes[first]
            odd = any(self.last_read.get(tensor, -1) >= end for tensor in node.outputs)
            if odd or not can_be_cut(self.graph, node, axis, band_axis):
                return
            run = run.led_by(node)

    def _is_over_its_input(self, run: CutStages) -> bool:
        """Whether the result is a part that has the bytes of an input: the operators alone write it there, one over the other."""
        result = self._storage(run.output)
        spans = [(self._start_of[at], self._start_of[at] + self.graph.tensors[at].size_bytes)
                 for at in (run.output, *run.inputs) if self._storage(at) == result]  # fmt: skip
        return result in self.in_parts and any(low < spans[0][1] and spans[0][0] < high for low, high in spans[1:])

    def _of_run(self, run: CutStages, first: int, end: int) -> Iterator[CutOption]:
        results = [*self.problem.tasks[end - 1].makes]
        over = self._taken(run)
        for size, macs, workspace in zip(run.sizes, run.macs, run.workspace_bytes().tolist(), strict=True):
            cut = Cut(first, end - 1, run.axis, run.band_axis, size)
            if first < end - 1 or over:  # one operator with whole tensors around it gains nothing else
                yield self._part(first, end, macs, results, workspace, over, cut)
        staged = run.staged(first_source(self.graph, self.graph.nodes[first:end]))
        if staged is not None and (over := self._taken(staged)):
            cut = Cut(first, end - 1, run.axis, staged=True)
            yield self._part(first, end, run.macs[0], results, int(staged.workspace_bytes()[0]), over, cut)

    def _taken(self, run: CutStages) -> list[int]:
        """Storages that the result may be written over: of each it reads one tensor alone."""
        if self._storage(run.output) in self.in_parts:
            return []
        read = [self._storage(tensor) for tensor in run.inputs]
        over = [self._storage(tensor) for tensor in run.written_over()]
        return [storage for storage in over if storage >= 0 and read.count(storage) == 1]

    def _storage(self, tensor: int) -> int:
        return self._storage_of.get(tensor, -1)

    def in_time(self, macs_per_s: float | None, constants_bytes_per_s: float | None, most_extra_macs: int) -> list[CutPart]:
        """The cuts of which none is at least as good in all that takes time or bytes, within so many multiplications done again.

        Rows that a cut leaves out, as nobody reads them, are no credit for another one.
        """
        parts: list[CutPart] = []
        for end in range(1, len(self.graph.nodes) + 1):
            by_first: dict[int, list[tuple[tuple[int, ...], CutPart]]] = {}
            for first, run in self._runs(end):
                for figures, part in self._timed(run, first, end, macs_per_s, constants_bytes_per_s, most_extra_macs):
                    by_first.setdefault(first, []).append((figures, part))
            for options in by_first.values():
                rows = np.array([each for each, _ in options])
                as_good, alike = (rows[:, None] <= rows[None]).all(2), (rows[:, None] == rows[None]).all(2)
                beaten = (as_good & (~alike | np.tri(len(rows), k=-1, dtype=bool).T)).any(0)
                parts += [part for (_, part), worse in zip(options, beaten, strict=True) if not worse]
        return parts

    def _timed(
        self, run: CutStages, first: int, end: int, macs_per_s: float | None, constants_bytes_per_s: float | None, most_extra_macs: int
    ) -> Iterator[tuple[tuple[int, ...], CutPart]]:
        members = self.graph.nodes[first:end]
        inner = {node.outputs[0] for node in members}
        inputs = list(dict.fromkeys(at for node in members for at in node.inputs if at >= 0 and at not in inner))
        if constants_bytes_per_s is None:  # what has no storage takes no time
            inputs = [at for at in inputs if self._storage(at) >= 0]
        once = sum(node.macs for node in members)
        before = sorted({each for task in self.problem.tasks[first:end] for each in task.before} - {*range(first, end)})
        result, sizes = self._storage(run.output), self.problem.size_bytes
        parts = self.in_parts.intersection([result])
        staged = run.staged(first_source(self.graph, members))
        for each in (run,) if staged is None else (run, staged):
            read, written, from_rings = each.traffic(members, inputs)
            takes = tuple(at for at in self._taken(each) if at not in self.problem.kept and sizes[at] == sizes[result])
            if first == end - 1 and not takes:
                continue  # one operator with whole tensors around it gains nothing
            for at, (size, macs, workspace) in enumerate(zip(each.sizes, each.macs, each.workspace_bytes().tolist(), strict=True)):
                if macs - once > most_extra_macs:
                    continue
                amounts = dict(zip(inputs, read[at].tolist(), strict=True))
                constants = [nbytes for tensor, nbytes in amounts.items() if self._storage(tensor) < 0]
                traffic = tuple((self._storage(tensor), nbytes) for tensor, nbytes in amounts.items() if self._storage(tensor) >= 0)
                task = EdgeTask(
                    name=f"{members[0].name} to {members[-1].name}", makes=() if parts else (result,),
                    reads=tuple(dict.fromkeys((*(one for one, _ in traffic), *parts))),
                    takes=takes, before=tuple(before), read_traffic=traffic,
                    write_traffic=((result, self.graph.tensors[run.output].size_bytes),),
                    macs_ps=0 if macs_per_s is None else ps(macs, macs_per_s),
                    constants_ps=0 if constants_bytes_per_s is None else sum(ps(each, constants_bytes_per_s) for each in constants),
                    workspace_bytes=workspace, only_views=False, ring_bytes=(int(written[at]), int(from_rings[at])),
                )  # fmt: skip
                cut = Cut(first, end - 1, run.axis, run.band_axis, size, staged=each is staged)
                figures: tuple[int, ...] = (workspace, macs, *task.ring_bytes, task.constants_ps, *(nbytes for _, nbytes in traffic))
                figures += tuple(one not in takes for one in task.reads)
                yield figures, CutPart(first, end, task, max(0, macs - once), cut)

    def _part(
        self, first: int, end: int, macs: int, results: Sequence[int], workspace: int, over: Sequence[int], cut: Cut | None
    ) -> CutOption:
        """What is alive: storages from before that are read here or later, those that come out, and the workspace."""
        needs, least, later = self._around(first, end)
        own = workspace + sum(self.size[storage] for storage in results)
        alike = [storage for storage in over if storage not in self.problem.kept and self.size[storage] == self.size[results[0]]]
        dying = next((self.size[storage] for storage in alike if self.last[storage] < end), 0)
        perhaps = next((self.size[storage] for storage in alike if not self.users[storage] & later), 0)
        return CutOption(first, end, macs, needs + own - dying, least + own - perhaps, cut)

    def _around(self, first: int, end: int) -> tuple[int, int, int]:
        """Bytes alive around operators [first, end): in the network's order, in every order; and who runs later in every order."""
        if (first, end) not in self._known:
            within = (1 << end) - (1 << first)
            inside = set().union(*(self.problem.tasks[at].makes for at in range(first, end)))
            ancestors = descendants = needs = least = 0
            for at in range(first, end):
                ancestors |= self.before[at]
                descendants |= self.after[at]
            for storage, size in enumerate(self.size):
                if storage in inside or not size:
                    continue
                maker, is_part = self.maker[storage], storage in self.in_parts
                needs += size if maker < (end if is_part else first) and self.last[storage] >= first else 0
                wanted = self.users[storage] & (within | descendants) or storage in self.problem.kept
                there = self.users[storage] & (ancestors | within) if is_part else maker < 0 or ancestors >> maker & 1
                least += size if wanted and there else 0
            self._known[first, end] = (needs, least, descendants & ~within)
        return self._known[first, end]

    def _path(self, limit_bytes: int, *, least: bool) -> tuple[int, tuple[CutOption, ...]] | None:
        """The fewest multiplications with parts that need no more bytes, and these parts; None where there is no way."""
        best: list[tuple[int, CutOption | None] | None] = [(0, None)]
        for parts in self.parts:
            best_here: tuple[int, CutOption | None] | None = None
            for part in parts:
                before = best[part.first]
                if before is not None and (part.least_bytes if least else part.needs_bytes) <= limit_bytes:
                    macs = before[0] + part.macs
                    best_here = (macs, part) if best_here is None or macs < best_here[0] else best_here
            best.append(best_here)
        if best[-1] is None:
            return None
        path: list[CutOption] = []
        step = best[-1][1]
        while step is not None:
            path.append(step)
            before = best[step.first]
            step = before[1] if before is not None else None
        return best[-1][0], tuple(reversed(path))

    def _smallest(self, most_macs: int, *, least: bool) -> int:
        """The smallest limit of bytes with which that few multiplications are enough."""
        limits = sorted({part.least_bytes if least else part.needs_bytes for parts in self.parts for part in parts})
        low, high = 0, len(limits) - 1
        while low < high:
            middle = (low + high) // 2
            answer = self._path(limits[middle], least=least)
            if answer is not None and answer[0] <= most_macs:
                high = middle
            else:
                low = middle + 1
        return limits[low]

    @property
    def macs(self) -> int:
        return sum(node.macs for node in self.graph.nodes)

    def of_least_bytes(self, extra_macs: float) -> CutChoice:
        """With at most this share of multiplications done again."""
        most = int(self.macs * (1 + extra_macs))
        return self._partition(self._smallest(most, least=False))

    def of_least_macs(self, room_bytes: int) -> CutChoice | None:
        """In no more bytes than these; None where there is none."""
        return None if self._path(room_bytes, least=False) is None else self._partition(room_bytes)

    def _partition(self, limit_bytes: int) -> CutChoice:
        answer = self._path(limit_bytes, least=False)
        macs, parts = answer if answer is not None else (self.macs, ())
        cuts = tuple(part.cut for part in parts if part.cut is not None)
        return CutChoice(cuts, macs, max((part.needs_bytes for part in parts), default=0))

    def bound_bytes(self, macs: int) -> int:
        """No partition with that few multiplications needs less, in any order."""
        return self._smallest(macs, least=True)


def _best(parts: Iterator[CutOption]) -> tuple[CutOption, ...]:
    """Without those that another of the same operators is at least as good as."""
    kept: dict[int, list[CutOption]] = {}
    for part in parts:
        others = kept.setdefault(part.first, [])
        if not any(_as_good(other, part) for other in others):
            kept[part.first] = [other for other in others if not _as_good(part, other)] + [part]
    return tuple(part for each in kept.values() for part in each)


def _as_good(one: CutOption, other: CutOption) -> bool:
    return one.macs <= other.macs and one.needs_bytes <= other.needs_bytes and one.least_bytes <= other.least_bytes
