"""A proven lower bound on the time of any sequence within a limit: what every order of the nodes has to do again, or wait for.

Take any node. When it runs for the first time, all that it follows from has run, and nothing that follows from it has. So whatever was made
before it and is wanted after it is there at that moment, or is made again behind it, or was copied to the host before and is loaded
behind it. What is there fits beside what the node itself needs. What was copied went over a link that carries no more than fits into the
time before the node, and as much comes back behind it: whoever copies more waits.

So each byte that is not there costs a share of its maker's time, or of its copy's once the link is full: a knapsack, whose relaxation,
filled with what costs most for its bytes, no sequence beats. It takes one walk for each node. Where it asks for the most, the crossing of
that moment tells what else has to run for what is made again, and proves more: what is made again needs its inputs, which are kept or made
again in turn. At a price for each byte, the cheapest choice of all is a minimum cut (as project selection: Picard 1976). Prices from zero
up give the corners of the convex hull of all choices: so many bytes kept, so much time behind. No sequence is below it, and what a corner
keeps is a good guess at what to keep (`sweep`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints
from lowtide.remat.entries import Times
from lowtide.remat.problem import RematProblem
from lowtide.schedule.cuts import select

_PHASES = 300  # of one flow; a flow that is stopped there proves a little less
_CUTS = 48  # of a moment
_UNITS = 1e10  # of time, in all: flows are of whole numbers
_MOST, _NEVER = 10**13, 10**17  # such units: for a tensor, and for a run that may not be repeated
_DEAREST = 1000.0  # times the average price: there a thousandth of the bytes is worth all of the time
_SAME = 1 - 1e-6  # values this near are one

Mask = NDArray[np.bool_]
Prices = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Corner:
    """A choice that nothing beats at some price: what is kept over a moment, and what making the rest again takes."""

    kept: Mask  # [m]
    held_bytes: int
    again_us: float


@dataclass(frozen=True, eq=False)
class Crossing:
    """What crosses the moment at which a node first runs."""

    problem: RematProblem
    node: int
    before: Mask  # [n] the nodes that come before it in every order
    after: Mask  # [n] those that come after it
    present: Mask  # [m] what was made before, or is there from the start
    wanted: Mask  # [m] of this, what is wanted after the moment, and not read by the node itself
    needs_bytes: int  # what the node itself needs: arguments, results and workspace, less what it may take over

    @classmethod
    def of(cls, problem: RematProblem, node: int) -> Crossing:
        base = problem.problem
        before, after = _closed(node, *base.preds), _closed(node, *base.succs)
        made_before = np.where(base.producer >= 0, before[base.producer], True)
        later = np.zeros(base.tensor_count, np.bool_)
        later[base.read_ids[np.repeat(after, np.diff(base.read_ptr))]] = True
        wanted = made_before & (later | base.kept)
        own = base.read_ids[base.read_ptr[node] : base.read_ptr[node + 1]]
        wanted[own] = False
        needs = int(base.tensor_bytes[own].sum() + base.made_bytes[node] + base.workspace_bytes[node])
        if base.take_ptr[node] < base.take_ptr[node + 1]:
            needs -= int(base.tensor_bytes[base.take_output[node]])
        return cls(problem, node, before, after, made_before, wanted, needs)

    @cached_property
    def corners(self) -> Sequence[Corner]:
        """The corners of the hull, the most bytes first: the first keeps all that is wanted, and makes nothing again."""
        return self._hull[0]

    def least_us(self, room_bytes: float, rate: float) -> float:
        """What is made again takes at least so long where so many bytes fit over the moment; of more, `rate` bytes go in a microsecond.

        By weak duality: at any price, what all bytes and runs cost at least, less what the room is worth.
        """
        prices, values = self._hull[1]
        if rate > 0 and prices[-1] * rate > 1:  # nobody pays more for a byte than its copy takes; values are concave in prices
            below = prices * rate <= 1
            values = np.append(values[below], np.interp(1 / rate, prices, values))
            prices = np.append(prices[below], 1 / rate)
        return max(0.0, float((values - prices * room_bytes).max()))

    @cached_property
    def _hull(self) -> tuple[Sequence[Corner], tuple[Prices, Prices]]:
        """Its corners; prices, ascending, and what the cheapest choice costs at each."""
        rich = Corner(self.wanted, int(self._sizes[self.wanted].sum()), 0.0)
        if not rich.held_bytes:
            return (rich,), (np.zeros(1), np.zeros(1))
        known = {0.0: 0.0}
        corners = self._between(rich, self._at(_DEAREST * self._total_us / rich.held_bytes, known), known)
        lines = np.array(sorted(known.items()))
        return tuple(corners), (lines[:, 0], lines[:, 1])

    def _between(self, rich: Corner, lean: Corner, known: dict[float, float]) -> list[Corner]:
        """Two corners and all between them, as far as cuts may be taken."""
        if lean.held_bytes >= rich.held_bytes:
            return [rich]
        price = (lean.again_us - rich.again_us) / (rich.held_bytes - lean.held_bytes)
        if price in known or len(known) > _CUTS:
            return [rich, lean]
        corner = self._at(price, known)
        if corner.again_us + price * corner.held_bytes >= (rich.again_us + price * rich.held_bytes) * _SAME:
            return [rich, lean]
        return [*self._between(rich, corner, known), *self._between(corner, lean, known)[1:]]

    def _at(self, price: float, known: dict[float, float]) -> Corner:
        """The cheapest choice where each byte that is kept costs so many microseconds; what it costs is noted.

        Costs are rounded down, so that what is noted is never too much.
        """
        tensors, nodes = len(self._tensors), len(self._nodes)
        keep = np.minimum(np.floor(price * self._units * self._sizes[self._tensors]), _MOST).astype(np.int64)
        cost, gain = np.zeros(2 * tensors + nodes, np.int64), np.zeros(2 * tensors + nodes, np.int64)
        keep[self._own[self._tensors]] = 0  # the node itself holds them, whoever reads them afterwards
        cost[:tensors] = np.where(self.wanted[self._tensors], 0, keep)
        cost[2 * tensors :] = self._again
        gain[tensors : 2 * tensors] = np.where(self.problem.problem.producer[self._tensors] >= 0, keep, 0)
        all_kept, most = int(keep[self.wanted[self._tensors]].sum()), int(gain.sum())
        flow, chosen = select(*self._requires, cost, gain, _PHASES)
        known[price] = (all_kept - most + int(flow)) / self._units
        remade = np.zeros_like(self.present)
        remade[self._tensors] = chosen[tensors : 2 * tensors]
        kept = self.wanted.copy()
        kept[self._tensors] |= chosen[:tensors]
        kept &= ~remade
        again_us = float(self.problem.cost_us[self._nodes[chosen[2 * tensors :] & ~self.problem.is_view[self._nodes]]].sum())
        return Corner(kept, int(self._sizes[kept & ~self._own].sum()), again_us)

    @property
    def _own(self) -> Mask:
        """[m] what the node itself reads."""
        base, own = self.problem.problem, np.zeros_like(self.present)
        own[base.read_ids[base.read_ptr[self.node] : base.read_ptr[self.node + 1]]] = True
        return own

    @property
    def _sizes(self) -> NDArray[np.int64]:
        return self.problem.problem.tensor_bytes

    @cached_property
    def _total_us(self) -> float:
        return max(1e-3, float(self.problem.cost_us.sum()))

    @property
    def _units(self) -> float:
        return _UNITS / self._total_us

    @cached_property
    def _tensors(self) -> NDArray[np.intp]:
        return np.flatnonzero(self.present)

    @cached_property
    def _nodes(self) -> NDArray[np.intp]:
        return np.flatnonzero(self.before)

    @cached_property
    def _again(self) -> NDArray[np.int64]:
        """By node before the moment, what one more run costs."""
        problem, nodes = self.problem, self._nodes
        units = np.floor(problem.cost_us[nodes] * self._units).astype(np.int64)
        return np.where(problem.is_view[nodes], 0, np.where(problem.repeatable[nodes], units, _NEVER))

    @cached_property
    def _requires(self) -> tuple[Ints, Ints]:
        """Rows of what each vertex requires: tensors there, tensors made again, and runs.

        A tensor that is made again is there, and its maker runs; a run's inputs are there.
        """
        base, tensors = self.problem.problem, self._tensors
        number, runs = np.full(base.tensor_count, -1, np.int32), np.full(base.node_count, -1, np.int32)
        number[tensors] = np.arange(len(tensors))
        runs[self._nodes] = 2 * len(tensors) + np.arange(len(self._nodes))
        makers = base.producer[tensors]
        remade = np.stack([number[tensors], runs[makers]], 1)[makers >= 0].ravel()
        reads = number[base.read_ids[np.repeat(self.before, np.diff(base.read_ptr))]]
        lengths = [np.zeros(len(tensors), np.int64), np.where(makers >= 0, 2, 0), np.diff(base.read_ptr)[self._nodes]]
        ptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32)
        return ptr, np.concatenate([remade, reads]).astype(np.int32)


@kernel
def _closed(start: Any, ptr: Any, ids: Any) -> Any:
    """[n] what is reached from a node, itself aside."""
    closed, stack, top = np.zeros(len(ptr) - 1, np.bool_), np.empty(len(ptr) - 1, np.int32), 1
    stack[0] = start
    while top > 0:
        top -= 1
        node = stack[top]
        for entry in range(ptr[node], ptr[node + 1]):
            other = ids[entry]
            if not closed[other]:
                closed[other] = True
                stack[top] = other
                top += 1
    return closed


_HALVINGS = 40  # of the time behind a node in which loads have to come back


@kernel(nogil=True)
def asked_us(room: Any, every: Any, facts: Any, order: Any, again: Any, store_us: Any, load_us: Any, out_rate: Any, in_rate: Any) -> Any:
    """[nodes looked at] the microseconds that each asks for, infinite where it can never run."""
    n, m = len(facts.cost_us), len(facts.tensor_bytes)
    out_costs, in_costs = np.minimum(again, store_us), np.minimum(again, load_us)
    out_order, in_order = _dearest_first(out_costs, facts.tensor_bytes), _dearest_first(in_costs, facts.tensor_bytes)
    marks, stack = np.zeros(n, np.int8), np.empty(n, np.int32)
    alive, costs_us = np.zeros(m, np.bool_), np.zeros((n + every - 1) // every)
    total_us = facts.cost_us.sum()
    for at in range(len(costs_us)):
        node = at * every
        marks[:] = 0
        before_us = _walk(node, np.int8(1), order.preds, facts.cost_us, marks, stack)
        after_us = _walk(node, np.int8(2), order.succs, facts.cost_us, marks, stack)
        left = room - _needs(node, facts) - _alive(node, facts, marks, order.readers, out_costs, alive)
        if left < 0:
            costs_us[at] = np.inf
            continue
        window_us = total_us - after_us - facts.cost_us[node]
        costs_us[at] = _unfit_us(left + out_rate * window_us, out_order, out_costs, facts.tensor_bytes, alive)
        if in_rate > 0:
            window_us = total_us - before_us - facts.cost_us[node]
            costs_us[at] = _loaded_us(left, window_us, in_rate, in_order, in_costs, facts.tensor_bytes, alive, costs_us[at])
    return costs_us


@kernel(inner=True)
def _dearest_first(costs: Any, sizes: Any) -> Any:
    """Tensors by what a byte of them costs."""
    ratios = np.zeros(len(costs))
    for tensor in range(len(costs)):
        ratios[tensor] = -costs[tensor] / sizes[tensor] if sizes[tensor] > 0 else 0.0
    return np.argsort(ratios)


@kernel(inner=True)
def _walk(start: Any, mark: Any, rows: Any, cost_us: Any, marks: Any, stack: Any) -> float:
    """Marks all that comes before a node, or after it, itself aside; the time that those take."""
    top, total = 1, 0.0
    stack[0] = start
    while top > 0:
        top -= 1
        node = stack[top]
        for entry in range(rows.ptr[node], rows.ptr[node + 1]):
            other = rows.ids[entry]
            if marks[other] != mark:
                marks[other] = mark
                total += cost_us[other]
                stack[top] = other
                top += 1
    return total


@kernel(inner=True)
def _needs(node: Any, facts: Any) -> Any:
    """Bytes that a node cannot run without: what it reads and makes, and its workspace, less what it may take over."""
    needs = facts.made_bytes[node] + facts.workspace_bytes[node]
    for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
        needs += facts.tensor_bytes[facts.read_ids[entry]]
    if facts.take_ptr[node] < facts.take_ptr[node + 1]:
        needs -= facts.tensor_bytes[facts.take_output[node]]
    return needs


@kernel(inner=True)
def _alive(node: Any, facts: Any, marks: Any, readers: Any, costs: Any, alive: Any) -> Any:
    """Fills in what was made before a node and is wanted after it, what it reads aside; the bytes of what can be had in no other way."""
    pinned = np.int64(0)
    for tensor in range(len(alive)):
        maker = facts.producer[tensor]
        wanted = maker < 0 or marks[maker] == 1
        if wanted and not facts.kept[tensor]:
            wanted = False
            for entry in range(readers.ptr[tensor], readers.ptr[tensor + 1]):
                if marks[readers.ids[entry]] == 2:
                    wanted = True
                    break
        alive[tensor] = wanted
    for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
        alive[facts.read_ids[entry]] = False
    for tensor in range(len(alive)):
        if alive[tensor] and costs[tensor] == np.inf:
            pinned += facts.tensor_bytes[tensor]
            alive[tensor] = False
    return pinned


@kernel(inner=True)
def _unfit_us(room: Any, order: Any, costs: Any, sizes: Any, alive: Any) -> Any:
    """What does not fit costs at least so much: the dearest bytes are kept, as if tensors could be kept in part."""
    total = 0.0
    for tensor in order:
        if alive[tensor]:
            kept = min(max(room, 0.0), sizes[tensor])
            room -= kept
            if kept < sizes[tensor]:
                total += costs[tensor] * (1.0 - kept / sizes[tensor])
    return total


@kernel(inner=True)
def _loaded_us(room: Any, window_us: Any, rate: Any, order: Any, costs: Any, sizes: Any, alive: Any, known_us: Any) -> Any:
    """The least time more behind a node in which what does not fit comes back; what is made again takes of that time, too."""
    low, high = known_us, _unfit_us(room + rate * window_us, order, costs, sizes, alive)
    if high <= low:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _unfit_us(room + rate * (window_us + middle), order, costs, sizes, alive) > middle:
            low = middle
        else:
            high = middle
    return low


_MOST_STEPS = 20_000_000  # of walks over all edges: of larger problems fewer nodes are looked at, evenly
_CUT = 3  # moments whose crossings are looked at


class TimeBound:
    """Proves times of one problem, within any limits."""

    def __init__(self, problem: RematProblem) -> None:
        self._problem = problem
        self._costs: Times = np.where(problem.is_view, 0.0, problem.cost_us)  # views are in no sequence
        self._costs.setflags(write=False)  # as all that kernels are given
        self._order_us = float(self._costs.sum())
        self._store_us, self._load_us, self._out_rate, self._in_rate = _links(problem)
        self._moments: dict[int, Crossing] = {}

    def us(self, limit_bytes: int) -> float:
        """Microseconds that every sequence takes at least whose peak is no more than the limit, what is resident included.

        Infinite where there is none: what a moment has to hold and cannot have again is too much.
        """
        base, room = self._problem.problem, limit_bytes - self._problem.problem.resident_bytes
        steps = base.node_count * (len(base.pred_ids) + len(base.read_ids) + base.tensor_count)
        every = max(1, steps // _MOST_STEPS)
        costs_us = asked_us(
            room,
            every,
            self._problem.facts._replace(cost_us=self._costs),
            base.arrays,
            self._again_us(),
            self._store_us,
            self._load_us,
            self._out_rate,
            self._in_rate,
        )
        most_us = float(costs_us.max(initial=0.0))
        if np.isfinite(most_us) and most_us > 0:
            most_us = max(most_us, *(self._crossing_us(int(node) * every, room) for node in np.argsort(-costs_us, kind="stable")[:_CUT]))
        return self._order_us + most_us

    def _again_us(self) -> Times:
        """[m] what it takes to make a tensor again: a run of its maker, a share of it where it makes several; infinite where nobody can."""
        base, problem = self._problem.problem, self._problem
        counts = np.maximum(1, np.diff(base.outputs_of.ptr))
        again_us = np.full(base.tensor_count, np.inf)
        share = np.where(problem.repeatable, problem.cost_us / counts, np.inf)
        again_us[base.producer >= 0] = share[base.producer[base.producer >= 0]]
        return again_us

    def _crossing_us(self, node: int, room: float) -> float:
        """What the best choice at a node's moment takes, over the links as far as they carry."""
        moment = self._moments.get(node) or self._moments.setdefault(node, Crossing.of(self._problem, node))
        room -= moment.needs_bytes
        costs = self._costs
        others_us = self._order_us - float(costs[node])
        most_us = moment.least_us(room + self._out_rate * (others_us - float(costs[moment.after].sum())), self._out_rate)
        if self._in_rate > 0:
            most_us = max(most_us, self._loaded_us(moment, room, others_us - float(costs[moment.before].sum())))
        return most_us

    def _loaded_us(self, moment: Crossing, room: float, window_us: float) -> float:
        """The least time more behind a moment in which what is not there comes back; what is made again takes of that time, too."""
        low, high = 0.0, moment.least_us(room + self._in_rate * window_us, self._in_rate)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if moment.least_us(room + self._in_rate * (window_us + middle), 0.0) > middle:
                low = middle
            else:
                high = middle
        return low


def _links(problem: RematProblem) -> tuple[Times, Times, float, float]:
    """[m] microseconds to store and to load each tensor, infinite where it may not go; and the most bytes that a link carries in one."""
    count = problem.problem.tensor_count
    if problem.links is None or not problem.links.storable.any():
        return np.full(count, np.inf), np.full(count, np.inf), 0.0, 0.0
    links, sizes = problem.links, problem.problem.tensor_bytes
    store_us = np.where(links.storable, links.store_us, np.inf)
    load_us = np.where(links.storable, links.load_us, np.inf)
    return store_us, load_us, float((sizes / store_us).max()), float((sizes / load_us).max())
