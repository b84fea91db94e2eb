from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from lowtide.cost.memory import checked_order, simulate
from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule.beam import Beam
from research.orders.fuse_subgraphs import FuseSubgraphs
from research.orders.reduce import DropZeroBytes, Reducing, Reduction
from tests.problems import Case, cases, slow_peak, topological_orders, unhurried

DATA = Path(__file__).parents[1] / "data" / "order"
EXACT = Beam(width=256)
REDUCTIONS = [
    (DropZeroBytes(),),
    (DropZeroBytes(spare=-9),),
    (FuseSubgraphs(),),
    (FuseSubgraphs(largest=2),),
    (DropZeroBytes(), FuseSubgraphs()),
]


@pytest.mark.parametrize("reductions", REDUCTIONS, ids=repr)
@unhurried
@given(case=cases(max_nodes=7))
def test_the_least_peak_stays_and_comes_back(reductions: tuple[Reduction, ...], case: Case) -> None:
    least = min(slow_peak(case, order) for order in topological_orders(case))
    found = Reducing(reductions, EXACT).solve(case.problem)
    assert (found.peak_bytes, found.lower_bound_bytes, found.status) == (least, least, Status.OPTIMAL)
    assert found.stats["nodes"] <= len(case.tasks)


@pytest.mark.parametrize("reduction", [DropZeroBytes(), FuseSubgraphs()], ids=repr)
@unhurried
@given(case=cases(max_nodes=9))
def test_every_order_of_the_smaller_problem_costs_what_it_expands_to(reduction: Reduction, case: Case) -> None:
    reduced = reduction.apply(case.problem)
    for solver in (Beam(width=1), Beam(width=3)):
        inner = solver.solve(reduced.problem)
        order = reduced.inverse.expand(inner.order)
        checked_order(case.problem, order)
        assert slow_peak(case, tuple(order.tolist())) == inner.peak_bytes


def test_what_nobody_waits_for_is_an_exit_of_its_own() -> None:
    """Node 3 makes much that is gone at once: best after node 5, which a region of nodes 2, 3 and 4 would have to wait for."""
    tasks = [Task("", (0, 1)), Task(""), Task("", (), (0, 1), workspace_bytes=5), Task("", (2,), after=(0,)), Task("", (3, 4), (0, 1))]
    problem = OrderProblem.of([0, 3, 8, 1, 2, 1], [*tasks, Task("", (5,), (3, 4))])
    assert Reducing((FuseSubgraphs(),), EXACT).solve(problem).peak_bytes == 8


@pytest.mark.parametrize(
    ("name", "most", "least_kib"), [("randwire-s0", 174, 3583.1), ("train-L15", 45, 42728.0), ("hrnet_w18_small-256", 73, 6368.0)]
)
def test_known_networks(name: str, most: int, least_kib: float) -> None:
    found = Reducing((FuseSubgraphs(),)).solve(load_problem(DATA / f"{name}.json"))
    assert found.stats["nodes"] <= most
    assert found.status is Status.OPTIMAL
    assert abs(found.peak_bytes / 1024 - least_kib) < 0.06


def test_views_go_and_what_frees_stays() -> None:
    tasks = [Task("x", (0,)), Task("view", reads=(0,)), Task("use", (1,), (0,), after=(1,)), Task("free", reads=(1,), after=(2,))]
    reduced = DropZeroBytes().apply(OrderProblem.of([4, 2], tasks))
    assert reduced.problem.names == ("x", "use", "free")
    assert reduced.inverse.expand((0, 1, 2)).tolist() == [0, 1, 2, 3]


def test_a_residual_block_becomes_one_node_that_needs_less_than_it_makes() -> None:
    block = [Task("a", (1,), (0,)), Task("b", (2,), (1,)), Task("add", (3,), (0, 2), takes=((2, 0),))]
    problem = OrderProblem.of([4, 8, 4, 4], [Task("x", (0,)), *block, Task("end", (), (3,))])
    smaller = FuseSubgraphs().apply(problem).problem
    assert smaller.node_count == 1
    assert simulate(smaller, [0]).peak_bytes == 16
    shrinking = OrderProblem.of([9, 3], [Task("x", (0,)), Task("y", (1,), (0,))], kept=[1])
    assert FuseSubgraphs().apply(shrinking).problem.workspace_bytes.tolist() == [9]


def test_a_valley_off_the_chosen_order_forbids_fusion() -> None:
    # By a, b, c, d memory never falls below both ends; by c first it does, and something dear may run there.
    region = [Task("a", (2,), (0,)), Task("b", (3,), (1,)), Task("join", (4,), (2, 3))]
    tasks = [Task("x", (0, 1)), *region, Task("dear", (5,), (6,)), Task("end", (), (4, 5))]
    problem = OrderProblem.of([1, 9, 5, 1, 9, 1, 20], tasks)
    found = Reducing((FuseSubgraphs(),), EXACT).solve(problem)
    assert found.peak_bytes == EXACT.solve(problem).peak_bytes


def test_long_problems() -> None:
    chain = [Task("c", (node,), (node - 1,) if node else ()) for node in range(20_000)]
    problem = OrderProblem.of(np.random.default_rng(1).integers(1, 9, 20_000).tolist(), chain)
    reduced = FuseSubgraphs().apply(problem)
    assert reduced.problem.node_count < 10_000
    assert simulate(problem, reduced.inverse.expand(np.arange(reduced.problem.node_count))).peak_bytes == 16
