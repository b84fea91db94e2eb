from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.rewrites import Source
from lowtide.cost.memory import simulate
from lowtide.errors import CheckError
from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import ProgramOrder, ReversePostOrder
from lowtide.schedule.exact import Exact
from research.orders.carry import carry_over
from research.orders.incremental import reschedule
from tests.problems import Case, slow_peak, topological_orders, unhurried
from tests.rewrites import RewrittenCase, rewritten_cases, unrelated_cases

DATA = Path(__file__).parents[1] / "data" / "order"
any_rewrite = st.one_of(rewritten_cases(), unrelated_cases(max_nodes=5))


def some_order(draw: st.DataObject, case: Case) -> tuple[int, ...]:
    """A topological order, drawn node by node."""
    order: tuple[int, ...] = ()
    while len(order) < len(case.tasks):
        ready = [node for node in range(len(case.tasks)) if node not in order and case.preds(node) <= set(order)]
        order += (draw.draw(st.sampled_from(ready)),)
    return order


@unhurried
@given(rewritten_cases(), st.data())
def test_old_nodes_stay_in_order_around_what_is_new(rewritten: RewrittenCase, draw: st.DataObject) -> None:
    old, new, moved = rewritten
    order = some_order(draw, old)
    carried = carry_over(new.problem, order, moved)
    assert set(carried.order.tolist()) == set(range(len(new.tasks)))
    simulate(new.problem, carried.order)  # it is topological
    assert [node for node in carried.order.tolist() if node in moved] == [moved[node] for node in order]
    fresh = [step for step, node in enumerate(carried.order.tolist()) if node not in moved]
    assert all(carried.first <= step <= carried.last for step in fresh)
    if not fresh:
        assert carried.last < carried.first


@unhurried
@given(unrelated_cases(), st.data())
def test_an_order_is_mended_where_it_contradicts_the_new_edges(rewritten: RewrittenCase, draw: st.DataObject) -> None:
    old, new, moved = rewritten
    order = some_order(draw, old)
    carried = carry_over(new.problem, order, moved)
    simulate(new.problem, carried.order)
    sequence = [moved[node] for node in order if moved[node] >= 0]
    now = [node for node in carried.order.tolist() if node in moved]
    places = {node: step for step, node in enumerate(carried.order.tolist())}
    astray = {places[node] for pair in zip(sequence, now, strict=True) for node in pair if pair[0] != pair[1]}
    assert all(carried.first <= step <= carried.last for step in astray)


@unhurried
@given(any_rewrite, st.data(), st.integers(2, 5), st.integers(0, 3))
def test_never_worse_than_what_is_carried_over(rewritten: RewrittenCase, draw: st.DataObject, window: int, max_windows: int) -> None:
    old, new, moved = rewritten
    order = some_order(draw, old)
    solver = draw.draw(st.sampled_from([Exact(first=ProgramOrder()), ReversePostOrder("inputs")]))
    arguments: dict[str, Any] = {"solver": solver, "window": window, "largest": 2 * window, "max_windows": max_windows}
    found = reschedule(new.problem, order, moved, **arguments)
    carried = carry_over(new.problem, order, moved).order.tolist()
    peaks = {other: slow_peak(new, other) for other in topological_orders(new)}
    least = min(peaks.values())
    assert peaks[found.order] == found.peak_bytes <= peaks[tuple(carried)]
    assert found.lower_bound_bytes <= least
    assert found.status is (Status.OPTIMAL if found.peak_bytes == found.lower_bound_bytes else Status.FEASIBLE)
    assert found.stats["windows"] <= max_windows
    if max_windows == 0:
        assert found.order == tuple(carried)
    as_mapping = {node: target for node, target in enumerate(moved) if target >= 0}
    assert reschedule(new.problem, np.array(order, np.int32), as_mapping, **arguments) == found


@unhurried
@given(any_rewrite, st.data(), st.booleans())
def test_exact_where_the_window_is_everything(rewritten: RewrittenCase, draw: st.DataObject, in_steps: bool) -> None:
    old, new, moved = rewritten
    found = reschedule(new.problem, some_order(draw, old), moved, window=2 if in_steps else 16, largest=16, max_windows=64)
    least = min(slow_peak(new, order) for order in topological_orders(new))
    assert (found.peak_bytes, found.lower_bound_bytes, found.status) == (least, least, Status.OPTIMAL)


@unhurried
@given(rewritten_cases(), st.data())
def test_the_old_peak_spares_windows_only_where_the_peak_is_the_same(rewritten: RewrittenCase, draw: st.DataObject) -> None:
    old, new, moved = rewritten
    order = some_order(draw, old)
    carried_bytes = simulate(new.problem, carry_over(new.problem, order, moved).order).peak_bytes
    without = reschedule(new.problem, order, moved)
    for old_peak_bytes in (carried_bytes, carried_bytes + 1):
        found = reschedule(new.problem, order, moved, old_peak_bytes=old_peak_bytes)
        if old is new and old_peak_bytes == carried_bytes:
            assert (found.peak_bytes, found.stats["windows"]) == (carried_bytes, 0)
        else:  # all of so small a problem is within reach of what changed
            assert found == without


def test_a_store_runs_at_once_and_a_load_at_the_last_moment() -> None:
    # A chain of 6 whose first tensor the last node reads again.
    tasks = [Task("a", (0,)), *(Task("b", (node,), (node - 1,)) for node in range(1, 5)), Task("c", (5,), (0, 4))]
    swapped = Source((8, 2, 2, 2, 2, 2), tuple(tasks), (5,), 0).swap(0, [5])
    assert swapped is not None
    found = reschedule(swapped.problem, range(6), swapped.moved)
    assert found.order == (0, 6, 1, 2, 3, 4, 7, 5)  # 6 stores, 7 loads
    again = Source((8, 2, 2, 2, 2, 2), tuple(tasks), (5,), 0).recompute(0, [5])
    assert again is not None
    assert reschedule(again.problem, range(6), again.moved).order == (0, 1, 2, 3, 4, 6, 5)


def test_a_new_node_runs_once_it_frees_as_much_as_it_makes() -> None:
    # Node 3 is new: it makes 4 bytes of 8 that node 1 reads too, and nobody but the last node waits for it.
    tasks = [Task("a", (0,)), Task("b", (1,), (0,)), Task("c", (2,), (1,)), Task("new", (3,), (0,)), Task("d", reads=(2, 3))]
    problem = OrderProblem.of([8, 2, 2, 4], tasks)
    assert carry_over(problem, range(4), (0, 1, 2, 4)).order.tolist() == [0, 1, 3, 2, 4]


@pytest.mark.parametrize(("name", "share"), [("randwire-s0", 3), ("randwire-s1", 3), ("train-L15", 5), ("train-L15-res", 5)])
def test_known_networks_reach_the_optimum(name: str, share: int) -> None:
    problem = load_problem(DATA / f"{name}.json")
    base = Exact(max_states=20_000).solve(problem)
    step_of = np.argsort(base.order)
    source, seen = Source.of(problem), 0
    for tensor in np.flatnonzero(problem.producer >= 0)[:: problem.tensor_count // share].tolist():
        readers = problem.readers.ids[problem.readers.ptr[tensor] : problem.readers.ptr[tensor + 1]].tolist()
        if not readers:
            continue
        late = max(readers, key=lambda reader: step_of[reader])
        for rewritten in (source.recompute(tensor, [late]), source.swap(tensor, [late])):
            if rewritten is None:
                continue
            found = reschedule(rewritten.problem, base.order, rewritten.moved, largest=1024)
            least = Exact(max_states=20_000).solve(rewritten.problem)
            assert least.status is Status.OPTIMAL
            assert found.lower_bound_bytes <= least.peak_bytes == found.peak_bytes
            seen += 1
    assert seen >= share


def test_a_long_order_costs_a_few_windows() -> None:
    # Pairs that make and use one byte, in 60,000 nodes; a pair in the middle is to make four at once, in a bad order.
    count = 30_000
    tasks = [Task("make", (pair,)) for pair in range(count)] + [Task("use", reads=(pair,)) for pair in range(count)]
    old = np.stack([np.arange(count), np.arange(count) + count], 1).ravel()
    added = [Task("make", (count + extra,), after=(count // 2,)) for extra in range(4)]
    added += [Task("use", reads=(count + extra,)) for extra in range(4)]
    problem = OrderProblem.of([1] * (count + 4), [*tasks, *added])
    found = reschedule(problem, old, range(2 * count))
    assert (found.peak_bytes, found.status) == (1, Status.OPTIMAL)
    assert found.stats["windows"] <= 1


def test_windows_are_spared_where_the_peak_lies_apart() -> None:
    problem = load_problem(DATA / "randwire-s0.json")
    base = Exact(max_states=20_000).solve(problem)
    at_peak = simulate(problem, base.order).peak_step
    steps = [step for step in range(problem.node_count) if abs(step - at_peak) > 100]
    tensor = int(problem.outputs_of.ids[problem.outputs_of.ptr[base.order[steps[0]]]])
    readers = problem.readers.ids[problem.readers.ptr[tensor] : problem.readers.ptr[tensor + 1]].tolist()
    swapped = Source.of(problem).swap(tensor, readers)
    assert swapped is not None
    spared = reschedule(swapped.problem, base.order, swapped.moved, old_peak_bytes=base.peak_bytes)
    assert (spared.peak_bytes, spared.stats["windows"]) == (base.peak_bytes, 0)
    assert reschedule(swapped.problem, base.order, swapped.moved).stats["windows"] > 0


def test_nothing_to_order() -> None:
    found = reschedule(OrderProblem.of([7], [], kept=[0]), (), ())
    assert (found.order, found.peak_bytes, found.status) == ((), 7, Status.OPTIMAL)


TWO = OrderProblem.of([1], [Task("a", (0,)), Task("b", reads=(0,))])


@pytest.mark.parametrize(
    ("old_order", "moved", "message"),
    [
        ((0, 1, 2), (0, 1), "entry for each of the 3 nodes of the old order, got 2"),
        ((0, 2), (0, 1), "each of 2 nodes once, got node 2 at step 1"),
        ((1, 1), (0, 1), "each of 2 nodes once, got node 1 at step 1"),
        ((0, -1), (0, 1), "each of 2 nodes once, got node -1 at step 1"),
        ((0, 1), (0, 2), "one of 2 nodes that no other old node became, got node 2 for old node 1"),
        ((0, 1), (1, 1), "got node 1 for old node 1"),
        ((0, 1), (0, -2), "got node -2 for old node 1"),
        ((0, 1), {2: 0}, "old nodes from 0 to 1, as the old order has, got 2"),
    ],
)
def test_maps_and_orders_of_other_problems_are_refused(old_order: tuple[int, ...], moved: Any, message: str) -> None:
    with pytest.raises(CheckError, match=message):
        reschedule(TWO, old_order, moved)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="got window 9, largest 8 and max_windows 1"):
        reschedule(TWO, (0, 1), (0, 1), window=9, largest=8, max_windows=1)
    found = reschedule(TWO, (0, 1), (0, 1), solver=ProgramOrder())
    assert (found.order, found.status) == ((0, 1), Status.OPTIMAL)
