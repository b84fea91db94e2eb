"""A proven lower bound on the time of any sequence within a limit: what every order of the nodes has to do again, or wait for.

Take any node. When it runs for the first time, all that it follows from has run, and nothing that follows from it has. So whatever was made
before it and is wanted after it is there at that moment, or is made again behind it, or was copied to the host before and is loaded
behind it. What is there fits beside what the node itself needs. What was copied went over a link that carries no more than fits into the
time before the node, and as much comes back behind it: whoever copies more waits.

So each byte that is not there costs a share of its maker's time, or of its copy's once the link is full: a knapsack, whose relaxation,
filled with what costs most for its bytes, no sequence beats. It takes one walk for each node. Where it asks for the most, minimum cuts tell
what else has to run for what is made again (`crossing`), and prove more.
"""

from __future__ import annotations

import numpy as np

from lowtide.remat.crossing import Crossing
from lowtide.remat.facts import Times
from lowtide.remat.knapsack import asked_us
from lowtide.remat.problem import RematProblem

_MOST_STEPS = 20_000_000  # of walks over all edges: of larger problems fewer nodes are looked at, evenly
_CUT = 3  # moments whose crossings are looked at
_HALVINGS = 40  # of the time behind a node in which loads have to come back


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
        asked = asked_us(
            room, every, self._problem.facts._replace(cost_us=self._costs), *base.preds, *base.succs, *base.readers,
            self._again_us(), self._store_us, self._load_us, self._out_rate, self._in_rate,
        )  # fmt: skip
        most_us = float(asked.max(initial=0.0))
        if np.isfinite(most_us) and most_us > 0:
            most_us = max(most_us, *(self._crossing_us(int(node) * every, room) for node in np.argsort(-asked, kind="stable")[:_CUT]))
        return self._order_us + most_us

    def _again_us(self) -> Times:
        """[m] what it takes to make a tensor again: a run of its maker, a share of it where it makes several; infinite where nobody can."""
        base, problem = self._problem.problem, self._problem
        made = np.maximum(1, np.diff(base.outputs_of.ptr))
        found = np.full(base.tensor_count, np.inf)
        share = np.where(problem.repeatable, problem.cost_us / made, np.inf)
        found[base.producer >= 0] = share[base.producer[base.producer >= 0]]
        return found

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
