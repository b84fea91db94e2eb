import csv
import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from lowtide.base.kernels import kernel
from lowtide.cost.memory import simulate
from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import Best, ProgramOrder, Schedule, answers, downsets
from lowtide.schedule.downsets import DONE, LIVE, READY, DownsetNet, DownsetWalk, net_of, start
from lowtide.schedule.exact import Exact
from lowtide.schedule.threshold import FOUND, NO, YES, new_stack, new_table, reset, search
from tests.problems import ORDER_FILES, Case, cases, least_peak, slow_peak, topological_orders, unhurried


@kernel
def costs(net: DownsetNet, walk: DownsetWalk, node: int) -> tuple[int, int]:
    """What a ready node needs, and what live memory has grown by once it has run."""
    return downsets.need_bytes(net, walk, node), downsets.added_bytes(walk, node)


@kernel
def run(net: DownsetNet, walk: DownsetWalk, node: int) -> None:
    downsets.run(net, walk, node)


@kernel
def undo(net: DownsetNet, walk: DownsetWalk) -> None:
    downsets.undo(net, walk)


ROWS = list(csv.DictReader((ORDER_FILES / "expected.csv").read_text().splitlines()))


@settings(max_examples=150, deadline=None)
@given(cases(max_nodes=12))
def test_the_least_peak_of_all_orders(case: Case) -> None:
    found = Exact(first=ProgramOrder()).solve(case.problem)
    assert found.status is Status.OPTIMAL
    assert found.peak_bytes == found.lower_bound_bytes == least_peak(case) == slow_peak(case, found.order)
    assert all(case.preds(node) <= set(found.order[:step]) for step, node in enumerate(found.order))


@unhurried
@given(cases(max_nodes=6))
def test_brute_force_itself(case: Case) -> None:
    assert least_peak(case) == min(slow_peak(case, order) for order in topological_orders(case))


@pytest.mark.parametrize("backwards", [False, True])
@settings(max_examples=80, deadline=None)
@given(case=cases(max_nodes=12))
def test_each_direction_of_time_answers_by_itself(backwards: bool, case: Case) -> None:
    problem = case.problem
    least = least_peak(case) - case.resident_bytes
    net, stack, table = net_of(problem, backwards), new_stack(problem.node_count), new_table(16)
    walk = start(net)
    if problem.node_count == 0:
        return
    for bound_bytes, expected in ((least - 1, NO), (least, YES)):
        reset(net, walk, stack)
        assert search(net, walk, stack, table, bound_bytes, 10**6, 10**9, False) == expected
        if expected == NO:
            assert bound_bytes < stack.registers[FOUND] <= least
    order = walk.order[::-1] if backwards else walk.order
    assert slow_peak(case, tuple(order.tolist())) == least_peak(case)


@unhurried
@given(cases(max_nodes=9))
def test_walks_agree_with_the_definition_in_both_directions(case: Case) -> None:
    problem = case.problem
    forth, back = net_of(problem), net_of(problem, backwards=True)
    walk, retreat = start(forth), start(back)
    steps = []
    while walk.registers[READY]:
        node = int(walk.ready[: walk.registers[READY]].max())
        live = int(walk.registers[LIVE])
        need, added = costs(forth, walk, node)
        steps.append((node, live + need, live, live + added))
        run(forth, walk, node)
    footprint = simulate(problem, [node for node, *_ in steps])
    assert [needed + case.resident_bytes for _, needed, _, _ in steps] == footprint.footprint_bytes.tolist()
    for node, needed, before, after in reversed(steps):
        assert retreat.position[node] >= 0
        assert retreat.registers[LIVE] == after
        assert after + costs(back, retreat, node)[0] == needed
        run(back, retreat, node)
        assert retreat.registers[LIVE] == before
    for net, there in ((forth, walk), (back, retreat)):
        while there.registers[DONE]:
            undo(net, there)
        fresh = start(net)
        assert all(
            np.array_equal(getattr(there, field), getattr(fresh, field)) for field in ("ran", "left_sum", "waits", "opens", "closes")
        )
        assert set(there.ready[: there.registers[READY]]) == set(fresh.ready[: fresh.registers[READY]])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_known_networks_to_their_proven_optimum(row: dict[str, str]) -> None:
    found = Exact().solve(load_problem(ORDER_FILES / f"{row['name']}.json"))
    assert found.status is Status.OPTIMAL
    assert round(found.peak_bytes / 1024, 1) == pytest.approx(float(row["optimum_kib"]), abs=0.051)


def test_answers_only_get_better_and_end_with_what_solve_says() -> None:
    problem = load_problem(ORDER_FILES / "randwire-s0.json")
    found = list(answers(problem, Exact(first=ProgramOrder(), max_cuts=0)))
    assert len(found) > 3
    for one, two in itertools.pairwise(found):
        assert two.peak_bytes <= one.peak_bytes
        assert two.lower_bound_bytes >= one.lower_bound_bytes
    assert found[-1] == Exact(first=ProgramOrder(), max_cuts=0).solve(problem)


def test_effort_is_counted_in_states_and_a_stopped_search_keeps_its_best() -> None:
    problem = load_problem(ORDER_FILES / "randwire-s0.json")
    whole = Exact(first=ProgramOrder(), max_cuts=0).solve(problem)
    none, some = (Exact(first=ProgramOrder(), max_cuts=0, max_states=states).solve(problem) for states in (0, 512))
    assert none.peak_bytes == ProgramOrder().solve(problem).peak_bytes
    assert none.stats["states"] == 0
    assert 0 < some.stats["states"] <= 512 + 512 < whole.stats["states"]
    assert none.lower_bound_bytes <= some.lower_bound_bytes <= whole.peak_bytes <= some.peak_bytes <= none.peak_bytes
    assert Exact(first=ProgramOrder(), max_seconds=0).solve(problem).order == none.order


def test_a_table_that_is_full_forgets_and_is_still_right() -> None:
    problem = load_problem(ORDER_FILES / "randwire-s0.json")
    tight, roomy = Exact(max_bytes=0).solve(problem), Exact().solve(problem)
    assert (tight.status, tight.peak_bytes) == (roomy.status, roomy.peak_bytes) == (Status.OPTIMAL, roomy.lower_bound_bytes)


def test_never_worse_than_where_it_starts() -> None:
    fan = [Task("x", makes=(0,)), *(Task("y", makes=(node,), reads=(0,)) for node in (1, 2)), Task("z", reads=(1, 2))]
    problem = OrderProblem.of([1, 1, 1], fan)
    start_at = Best().solve(problem)
    found = Exact().solve(problem)
    assert (found.order, found.status) == (start_at.order, Status.OPTIMAL)
    assert isinstance(found, Schedule)


def test_a_deep_chain_needs_no_recursion() -> None:
    n = 20_000
    chain = [Task("a", makes=(0,)), *(Task("a", makes=(node,), reads=(node - 1,)) for node in range(1, n))]
    assert Exact(first=ProgramOrder()).solve(OrderProblem.of([1] * n, chain)).status is Status.OPTIMAL
