"""What to keep over a moment, and what to make again behind it: all best choices between bytes and time.

Take a node, and the moment at which it first runs. What was made before it and is wanted after it is kept over the moment, or made again
behind it; what is made again needs its inputs, which are kept or made again in turn. At a price for each byte, the cheapest choice of all
is a minimum cut (as project selection: Picard 1976). Prices from zero up give the corners of the convex hull of all choices: so many bytes
kept, so much time behind. No sequence is below it (`bound`), and what a corner keeps is a good guess at what to keep (`sweep`).
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
from lowtide.remat.problem import RematProblem
from lowtide.schedule.flow import select

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
        return Corner(kept, int(self._sizes[kept].sum()), again_us)

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
