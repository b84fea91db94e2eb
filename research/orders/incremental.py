"""Incremental scheduling: the order of a rewritten problem from the order of the problem that was rewritten.

After MAGIS (Chen et al., ASPLOS 2024, section 6.1, Algorithm 2): nodes outside a window around the change stay as they stood, the window is
scheduled anew, and its bounds are narrow waists. Three things differ. The order that is carried over is looked at first: where a
minimum cut at its peak proves it optimal, or where the peak has nothing to do with the change, there is no window at all. Of the steps
that changed, only those around the peak are ordered anew, since no others can lower it. And a waist is where little memory is live, not
where few nodes are independent: an order can be led through a downset of least live memory at no loss (see `commits`), which
is what MAGIS's count of independent nodes stands for and takes the whole graph to know.
"""

from __future__ import annotations

from typing import NamedTuple

from numpy.typing import ArrayLike

from lowtide.cost.memory import Footprint, simulate
from lowtide.problems import Status
from lowtide.problems.order import Bytes, Ints, OrderProblem
from lowtide.schedule.base import Schedule, Solver
from lowtide.schedule.cuts import least_need, lower_bound_bytes
from lowtide.schedule.exact import Exact
from lowtide.schedule.greedy import ProgramOrder
from lowtide.schedule.repair import OrderLine
from research.orders.carry import Carried, Moved, carry_over

_REACH = 3  # each end of a window may move by one in so many of its steps to find a waist: 21 of 64, where MAGIS has 20
_GROWTH = 4  # of a window that did not help
_INNER = Exact(max_states=2_000, max_cuts=1, first=ProgramOrder())  # a window as written is the order that it has


def reschedule(
    problem: OrderProblem, old_order: ArrayLike, moved: Moved, *, old_peak_bytes: int | None = None, solver: Solver = _INNER,
    window: int = 64, largest: int = 64, max_windows: int = 8,
) -> Schedule:  # fmt: skip
    """An order of `problem` from the order of the problem that it was rewritten from; never worse than that order carried over.

    `moved` says what each old node became: a sequence by old node, -1 where it is gone, or a mapping without those. Nodes that are no old
    node's are new. Around the peak, windows of about `window` steps are ordered by `solver`; one that does not help grows up to
    `largest`, one that does is followed by the next, `max_windows` in all. A few passes over the problem beside.

    With `old_peak_bytes`, the peak of the old order where that was as good as the caller could get it, windows are left out where the peak
    is still the same and lies apart from what changed (see `carry_over`: nodes new, gone and moved, and what is around them; a change
    of sizes is not seen). The bound is one of the whole problem, and the status OPTIMAL where it meets the peak.

    Raises CheckError where `old_order` and `moved` are not those of one problem rewritten into this one (see `carry_over`), ValueError
    where `window` is less than 2 or more than `largest`.
    """
    if not 2 <= window <= largest or max_windows < 0:
        got = f"window {window}, largest {largest} and max_windows {max_windows}"
        raise ValueError(f"expected 2 <= window <= largest and max_windows of at least 0, got {got}")
    carried = carry_over(problem, old_order, moved)
    known = _known(problem, carried.order)
    if known.is_open and not _is_apart(known, carried, old_peak_bytes, window):
        known = _improved(problem, known, solver, window, largest, max_windows)
    bound_bytes = max(known.bound_bytes, lower_bound_bytes(problem)) if known.is_open else known.bound_bytes
    peak_bytes = known.footprint.peak_bytes
    status = Status.OPTIMAL if peak_bytes == bound_bytes else Status.FEASIBLE
    name = f"reschedule(solver={solver!r}, window={window}, largest={largest}, max_windows={max_windows})"
    return Schedule(tuple(known.order.tolist()), peak_bytes, bound_bytes, status, name, {"windows": known.windows})


class _Known(NamedTuple):
    """The best order so far, and what is known of it."""

    order: Ints
    footprint: Footprint
    bound_bytes: int
    windows: int  # ordered on the way here

    @property
    def is_open(self) -> bool:
        """Whether there may be a better order."""
        return self.bound_bytes < self.footprint.peak_bytes


class _Window(NamedTuple):
    """Steps `[first, last)` of an order."""

    line: OrderLine
    first: int
    last: int

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == len(self.line.order)


def _known(problem: OrderProblem, order: Ints, bound_bytes: int = 0, windows: int = 0) -> _Known:
    """An order with the bound of the cut at its peak, if that is the best."""
    footprint = simulate(problem, order)
    if footprint.peak_step < 0:
        return _Known(order, footprint, footprint.peak_bytes, windows)
    if bound_bytes < footprint.peak_bytes:
        bound_bytes = max(bound_bytes, least_need(problem, int(order[footprint.peak_step])).need_bytes)
    return _Known(order, footprint, bound_bytes, windows)


def _is_apart(known: _Known, carried: Carried, old_peak_bytes: int | None, window: int) -> bool:
    """Whether the peak is the old one, out of reach of what changed."""
    step = known.footprint.peak_step
    is_reached = carried.first <= carried.last and carried.first - window // 2 <= step <= carried.last + window // 2
    return known.footprint.peak_bytes == old_peak_bytes and not is_reached


def _improved(problem: OrderProblem, known: _Known, solver: Solver, size: int, largest: int, max_windows: int) -> _Known:
    """What windows around the peak, of `size` to `largest` steps, lead to."""
    smallest = size
    for _ in range(max_windows):
        window = _around_peak(problem, known, size)
        later = _ordered(problem, known, window, solver)
        if later.order is not known.order:  # the peak may be as high as before, at a step elsewhere
            size = smallest
        elif size >= largest or window.is_whole:
            return later
        else:
            size = min(_GROWTH * size, largest)
        known = later
        if not known.is_open:
            break
    return known


def _around_peak(problem: OrderProblem, known: _Known, size: int) -> _Window:
    """About `size` steps around the first at the peak, between waists."""
    line, step, n = OrderLine.of(problem, known.order), known.footprint.peak_step, problem.node_count
    first = max(0, min(step - size // 2, n - size))
    reach = size // _REACH
    return _Window(line, _waist(line.live_bytes, first, -reach), _waist(line.live_bytes, min(n, first + size), reach))


def _waist(live_bytes: Bytes, step: int, reach: int) -> int:
    """The step before which least is live, from `step` to `reach` further, which may be backwards; of equal ones the nearest."""
    last, direction = min(max(step + reach, 0), len(live_bytes) - 1), -1 if reach < 0 else 1
    low, high = min(step, last), max(step, last)
    return step + direction * int(live_bytes[low : high + 1][::direction].argmin())


def _ordered(problem: OrderProblem, known: _Known, window: _Window, solver: Solver) -> _Known:
    """What is known once `solver` has ordered a window; the order is another one only where its steps there are lower."""
    schedule = solver.solve(window.line.interval(window.first, window.last))
    bound_bytes = max(known.bound_bytes, schedule.lower_bound_bytes) if window.is_whole else known.bound_bytes
    if schedule.status is Status.INFEASIBLE or schedule.peak_bytes >= known.footprint.peak_bytes:
        return known._replace(bound_bytes=bound_bytes, windows=known.windows + 1)
    return _known(problem, window.line.replaced(window.line.order, window.first, schedule.order), bound_bytes, known.windows + 1)
