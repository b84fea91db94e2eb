"""Lower bounds from minimum cuts: what a node needs at the cheapest moment at which any order can run it.

Every order runs node v after some downset D, a set of nodes closed under predecessors, that holds all ancestors of v and none of its
descendants. What is alive after D is a submodular function of D, so the cheapest such D is a minimum cut, and the footprint of v after
it bounds the peak of every order from below. The other nodes are free: D may hold them or not.

Such a choice is project selection (Picard 1976), the workhorse of valleys, too: some vertices cost bytes and others gain bytes, and a
vertex can be chosen only with all that it requires. Here a free node costs the bytes that it makes and that outlive it, and a tensor whose
readers can all be in D pays its bytes once they are. Flow goes from gains, along "requires" without limit, to costs (Dinic 1970), and what
gain is left over leads to is chosen. What flow there is at any moment proves a bound, whether or not there could be more, so that effort
may be capped without losing the proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.base.kernels import kernel
from lowtide.cost.memory import simulate
from lowtide.problems.order import Bytes, OrderProblem, turned


@kernel
def select(ptr: Any, ids: Any, cost: Any, gain: Any, max_phases: Any) -> Any:
    """The most that can flow from gains to costs, and the [vertices] mask of the smallest best choice, nothing where phases ran out.

    Vertex i requires those in `ids[ptr[i]:ptr[i + 1]]`. The best choice is worth the sum of gains less the flow. `cost` and `gain` are
    used up.
    """
    size, total = len(ptr) - 1, np.int64(0)
    back_ptr, tails, arcs = turned(ptr, ids, size)  # by head: where its arcs start, their tails, their positions in `ids`
    flow, level, queue = np.zeros(len(ids), np.int64), np.empty(size, np.int32), np.empty(size, np.int32)
    path, via = np.empty(size + 1, np.int32), np.empty(size + 1, np.int32)  # vertices of a walk; the arc to each, ~arc where backwards
    for _ in range(max_phases):
        if not _levels(ptr, ids, back_ptr, tails, arcs, flow, cost, gain, level, queue):
            return total, level >= 0
        forward, backward = ptr[:-1].copy(), back_ptr[:-1].copy()
        for source in range(size):
            while gain[source] > 0 and level[source] == 0:
                path[0], depth = source, 0
                while depth >= 0 and (cost[path[depth]] == 0 or depth == 0):
                    at, moved = path[depth], False
                    while forward[at] < ptr[at + 1] and not moved:
                        arc = forward[at]
                        moved = level[ids[arc]] == level[at] + 1
                        if moved:
                            path[depth + 1], via[depth + 1] = ids[arc], arc
                        else:
                            forward[at] += 1
                    while backward[at] < back_ptr[at + 1] and not moved:
                        entry = backward[at]
                        moved = flow[arcs[entry]] > 0 and level[tails[entry]] == level[at] + 1
                        if moved:
                            path[depth + 1], via[depth + 1] = tails[entry], ~arcs[entry]
                        else:
                            backward[at] += 1
                    if moved:
                        depth += 1
                    else:
                        level[at], depth = -1, depth - 1  # leads nowhere in this phase
                if depth < 0:
                    break
                pushed = min(gain[source], cost[path[depth]])
                for position in range(1, depth + 1):
                    if via[position] < 0:
                        pushed = min(pushed, flow[~via[position]])
                for position in range(1, depth + 1):
                    if via[position] < 0:
                        flow[~via[position]] -= pushed
                    else:
                        flow[via[position]] += pushed
                gain[source] -= pushed
                cost[path[depth]] -= pushed
                total += pushed
    return total, np.zeros(size, np.bool_)


@kernel(inner=True)
def _levels(ptr: Any, ids: Any, back_ptr: Any, tails: Any, arcs: Any, flow: Any, cost: Any, gain: Any, level: Any, queue: Any) -> bool:
    """Distances from what still has gain to give, -1 where nothing leads; whether any of it reaches a cost not yet paid."""
    level[:] = -1
    head, tail, target = 0, 0, -1
    for at in range(len(level)):
        if gain[at] > 0:
            level[at], queue[tail], tail = 0, at, tail + 1
    while head < tail:
        at, head = queue[head], head + 1
        if cost[at] > 0 and target < 0:
            target = level[at]
        if target >= 0 and level[at] >= target:
            continue  # longer paths wait for a later phase
        for arc in range(ptr[at], ptr[at + 1]):
            if level[ids[arc]] < 0:
                level[ids[arc]], queue[tail], tail = level[at] + 1, ids[arc], tail + 1
        for entry in range(back_ptr[at], back_ptr[at + 1]):
            if flow[arcs[entry]] > 0 and level[tails[entry]] < 0:
                level[tails[entry]], queue[tail], tail = level[at] + 1, tails[entry], tail + 1
    return target >= 0


def lower_bound_bytes(problem: OrderProblem) -> int:
    """The most that any node, the first step, or the last step needs in every order, with what is resident.

    A node needs what it reads and makes, its workspace, and what is kept from the start, less the memory that it may at best take over.
    The first step runs a node without predecessors beside all that lives at the start, the last step one without successors beside
    all that is kept.
    """
    if problem.node_count == 0:
        return problem.resident_bytes + problem.start_bytes
    size, is_given = problem.tensor_bytes, problem.producer < 0
    own_bytes = problem.own_bytes - _taken_bytes(problem)
    always = problem.kept & is_given
    node_bytes = own_bytes + problem.sum_by_row(problem.reads, np.where(always, 0, size)) + size[always].sum()
    # What is alive at the first step is all that lives at the start, which holds whatever a first node can read.
    first_bytes = problem.start_bytes + own_bytes[np.diff(problem.pred_ptr) == 0].min()
    # At the last step all that is kept is alive, beside what its node reads or makes and nobody keeps.
    passing = problem.sum_by_row(problem.outputs_of, np.where(problem.kept, size, 0))
    last_bytes = size[problem.kept].sum() + own_bytes - passing + problem.sum_by_row(problem.reads, np.where(problem.kept, 0, size))
    last_bytes = last_bytes[np.diff(problem.succs.ptr) == 0].min()
    return problem.resident_bytes + int(max(node_bytes.max(), first_bytes, last_bytes))


def _taken_bytes(problem: OrderProblem) -> Bytes:
    """[n] the most that each node can take over: the size of its first output where some candidate may die at it."""
    candidates = problem.sum_by_row(problem.takes, (~problem.kept).astype(np.int64))
    taken_bytes = np.zeros(problem.node_count, np.int64)
    taken_bytes[candidates > 0] = problem.tensor_bytes[problem.take_output[candidates > 0]]
    return taken_bytes


_PHASES = 300  # of one flow: far more than any network seen needs, and still affordable where a network is contrived


@dataclass(frozen=True, eq=False)
class CutBound:
    """A proven lower bound on the peak of every order, and where it comes from."""

    bound_bytes: int  # with what is resident
    node: int  # that needs as much whenever it runs; -1 where the bound comes from no cut
    downset: NDArray[np.bool_]  # [n] the cheapest set of nodes to run before it
    cuts: int  # nodes that were looked at


class MinimumCut(NamedTuple):
    need_bytes: int
    downset: NDArray[np.bool_]


def cut_bound_bytes(problem: OrderProblem, order: ArrayLike, *, max_cuts: int = 64) -> CutBound:
    """The best bound of at most `max_cuts` nodes, those at which `order` needs most: no other node's bound can be higher than its step.

    Stops where the bound meets the peak of `order`, which is then optimal. Raises CheckError unless `order` is a topological order.
    """
    footprint = simulate(problem, order)
    bound_bytes, node, downset = lower_bound_bytes(problem), -1, np.zeros(problem.node_count, np.bool_)
    steps, looked = np.asarray(order, np.int32), 0
    for step in np.argsort(-footprint.footprint_bytes, kind="stable"):
        if looked == max_cuts or footprint.footprint_bytes[step] <= bound_bytes:
            break
        cut, looked = least_need(problem, int(steps[step]), above_bytes=bound_bytes), looked + 1
        if cut.need_bytes > bound_bytes:
            bound_bytes, node, downset = cut.need_bytes, int(steps[step]), cut.downset
    return CutBound(bound_bytes, node, downset, looked)


def least_need(problem: OrderProblem, node: int, *, above_bytes: int = -1) -> MinimumCut:
    """The least footprint at which any order can run `node`, with what is resident, and the downset [n] after which it needs no more.

    Where some downset after which it needs no more than `above_bytes` is seen at once, that one, whether or not it is the least.
    """
    state = _states(node, *problem.preds, *problem.succs)
    own_bytes = int(problem.own_bytes[node]) + problem.resident_bytes
    # Of several candidates one is taken over, whichever allows most: each is tried, as "any of them" is no project.
    enough_bytes = above_bytes - own_bytes
    cuts = [cut_of(problem, state, candidate, enough_bytes) for candidate in _candidates(problem, node, state)]
    cheapest = min(cuts, key=lambda cut: cut.need_bytes)
    return MinimumCut(cheapest.need_bytes + own_bytes, cheapest.downset)


def _candidates(problem: OrderProblem, node: int, state: NDArray[np.int8]) -> list[int]:
    """The tensors that `node` may take over after some downset; [-1] where there is none."""
    ptr, ids = problem.readers
    nodes = []
    for tensor in problem.take_ids[problem.take_ptr[node] : problem.take_ptr[node + 1]]:
        readers = ids[ptr[tensor] : ptr[tensor + 1]]
        if not problem.kept[tensor] and np.count_nonzero(state[readers] == LATER) == 1:  # that one is the node itself
            nodes.append(int(tensor))
    return nodes or [-1]


def cut_of(problem: OrderProblem, state: NDArray[np.int8], candidate: int, enough_bytes: int) -> MinimumCut:
    """The least bytes alive after a downset that `state` allows, less those of `candidate` where all its readers but one are in it.

    Where no more than `enough_bytes` are alive with none of the free nodes, or with all of them, that downset.
    """
    alive_bytes, free, cost, gain, arc_ptr, arc_ids = _network(candidate, state, problem.arrays)
    total_bytes = int(gain.sum())
    for free_state, nbytes in ((LATER, int(alive_bytes)), (DONE, int(alive_bytes) + int(cost.sum()) - total_bytes)):
        if nbytes <= enough_bytes:
            return MinimumCut(nbytes, (state == DONE) | (state == FREE) & (free_state == DONE))
    flow_bytes, chosen = select(arc_ptr, arc_ids, cost, gain, _PHASES)  # stopped early it proves less, and chooses nothing
    downset = state == DONE
    downset[free[chosen[: len(free)]]] = True
    return MinimumCut(int(alive_bytes) - (total_bytes - int(flow_bytes)), downset)


FREE, DONE, LATER = 0, 1, 2  # what a downset before the node holds: perhaps, always, never


@kernel
def _states(node: Any, pred_ptr: Any, pred_ids: Any, succ_ptr: Any, succ_ids: Any) -> NDArray[np.int8]:
    """[n] by node: done are the ancestors of `node`, later are its descendants and itself."""
    state = np.zeros(len(pred_ptr) - 1, np.int8)
    stack = np.empty(len(state), np.int32)
    for mark, ptr, ids in ((DONE, pred_ptr, pred_ids), (LATER, succ_ptr, succ_ids)):
        stack[0], depth = node, 1
        while depth:
            depth -= 1
            at = stack[depth]
            for entry in range(ptr[at], ptr[at + 1]):
                if state[ids[entry]] == FREE:
                    state[ids[entry]] = mark
                    stack[depth], depth = ids[entry], depth + 1
    state[node] = LATER
    return state


@kernel
def _network(candidate: Any, state: Any, problem: Any) -> Any:
    """Bytes alive after the ancestors alone, the free nodes, and cost, gain and "requires" of these, then of tensors that may gain.

    Nodes that are always or never in the downset are no vertices: of a long graph most are, whichever node is asked about.
    """
    m = len(problem.tensor_bytes)
    free = np.flatnonzero(state == FREE)
    vertex, vertices = np.empty(len(state), np.int32), len(free)
    vertex[free] = np.arange(vertices)
    alive_bytes = np.int64(0)
    cost, gain = np.zeros(vertices + m, np.int64), np.zeros(vertices + m, np.int64)
    arc_ptr, arcs = np.zeros(vertices + m + 1, np.int32), 0
    arc_ids = np.empty(len(problem.preds.ids) + len(problem.readers.ids), np.int32)
    for place, at in enumerate(free):
        for entry in range(problem.outputs_of.ptr[at], problem.outputs_of.ptr[at + 1]):
            if problem.uses[problem.outputs_of.ids[entry]]:
                cost[place] += problem.tensor_bytes[problem.outputs_of.ids[entry]]
        for entry in range(problem.preds.ptr[at], problem.preds.ptr[at + 1]):
            if state[problem.preds.ids[entry]] == FREE:
                arc_ids[arcs], arcs = vertex[problem.preds.ids[entry]], arcs + 1
        arc_ptr[place + 1] = arcs
    for tensor in range(m):
        first, later = arcs, 0
        for entry in range(problem.readers.ptr[tensor], problem.readers.ptr[tensor + 1]):
            reader = problem.readers.ids[entry]
            if state[reader] == FREE:
                arc_ids[arcs], arcs = vertex[reader], arcs + 1
            elif state[reader] == LATER:
                later += 1
        is_made = problem.producer[tensor] < 0 or state[problem.producer[tensor]] == DONE
        dies = not problem.kept[tensor] and (later == 0 or tensor == candidate)  # a candidate's only later reader is the node itself
        if is_made and problem.uses[tensor] and (problem.kept[tensor] or arcs > first or later):
            alive_bytes += problem.tensor_bytes[tensor]
        if dies and arcs > first:
            gain[vertices], vertices = problem.tensor_bytes[tensor], vertices + 1
            arc_ptr[vertices] = arcs
        else:
            arcs = first
            if tensor == candidate:
                alive_bytes -= problem.tensor_bytes[tensor]
    return alive_bytes, free, cost[:vertices], gain[:vertices], arc_ptr[: vertices + 1], arc_ids[:arcs]
