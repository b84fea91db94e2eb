"""MODeL's program, against brute force; its spans and its pairs by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.placement import Placement
from lowtide.placement.base import placed
from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.problems.placement import PlaceProblem, check_placement
from lowtide.schedule import Exact, ProgramOrder
from research.buffers import order_buffers
from research.joint import model
from research.joint.model import Model, buffer_of, execution_sequence
from research.joint.program import Limits, Plan, Program
from research.joint.spans import Spans
from research.joint.tensors import Tensor, Tensors
from research.joint.two_steps import JointProblem
from tests.placements import least_arena_bytes
from tests.problems import Case, cases, least_peak, topological_orders
from tests.research.least import least_joint_arena
from tests.research.unaided import unaided

DATA = Path(__file__).parents[1] / "data" / "order"
SOLVERS = [
    Model(),
    Model("highs"),
    Model("scip"),
    Model(windows="count"),
    Model(windows="all", prune=False, cut=False),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: f"{solver.solver}-{solver.windows}")
@settings(max_examples=20, deadline=None)
@given(case=cases(max_nodes=4), align_bytes=st.sampled_from([1, 1, 4]))
def test_the_program_finds_the_least_arena_of_all_orders(solver: Model, case: Case, align_bytes: int) -> None:
    assume(case.tasks)
    problem = JointProblem(case.problem, align_bytes)
    best = least_joint_arena(case, problem)
    with alone():
        found = solver.solve(problem)
        assert solver.solve(problem) == found
    assert (found.arena_bytes, found.lower_bound_bytes, found.status) == (best, best, Status.OPTIMAL)


@settings(max_examples=20, deadline=None)
@given(cases(max_nodes=5))
def test_without_addresses_it_finds_the_least_peak(case: Case) -> None:
    assume(case.tasks)
    with alone():
        found = Model(addresses=False).solve(JointProblem(case.problem))
    assert found.schedule.peak_bytes == found.schedule.lower_bound_bytes == least_peak(case)


@settings(max_examples=20, deadline=None)
@given(cases(max_nodes=5))
def test_with_a_given_order_it_finds_the_least_arena_of_that_order(case: Case) -> None:
    assume(case.tasks)
    problem, order = JointProblem(case.problem), next(topological_orders(case))
    buffers = problem.buffers(ProgramOrder().solve(case.problem).order)
    assume(buffers.buffer_count <= 6)
    assert order
    with alone():
        found = Model(order=ProgramOrder()).solve(problem)
    assert found.arena_bytes == least_arena_bytes(buffers)
    assert found.schedule.order == ProgramOrder().solve(case.problem).order
    assert found.lower_bound_bytes <= found.arena_bytes


@settings(max_examples=60, deadline=None)
@given(cases(max_nodes=5))
def test_what_takes_over_has_the_address_of_what_it_takes(case: Case) -> None:
    """The solver's own addresses, before they are put down anew: right as they are, and one for all tensors of a buffer.

    As nothing is to be gained (the least arena is also the most), the solver has no reason of its own to take over.
    """
    assume(case.tasks)
    problem = JointProblem(case.problem, 2)
    order = ProgramOrder().solve(case.problem).order
    most = 10 * (case.problem.tensor_bytes.sum() + case.problem.workspace_bytes.sum()) + 10
    tensors = Tensors.of(case.problem, 2, 0, 1)
    plan = Plan.of(tensors, Spans.of(case.problem, order, "distance"), (int(most), int(most)), addresses=True, prune=True, cut=False)
    answer = Program(plan, addresses=True).solve(Limits("cp-sat", 10.0, 0, 60.0), {node: step for step, node in enumerate(order)}, ())
    buffers = order_buffers(case.problem, execution_sequence(answer.runs), align_bytes=2)
    offsets = [0] * buffers.problem.buffer_count
    for tensor, at in zip(tensors.all, answer.address, strict=True):
        if tensor.units:
            offsets[buffer_of(buffers, tensor)] = round(at * tensors.unit_bytes)
    check_placement(problem.buffers(execution_sequence(answer.runs)), offsets, int(most) * tensors.unit_bytes)
    for tensor, at in zip(tensors.all, answer.address, strict=True):
        assert not tensor.units or offsets[buffer_of(buffers, tensor)] == at * tensors.unit_bytes


@settings(max_examples=40, deadline=None)
@given(case=cases(max_nodes=4), limit=st.integers(1, 12))
def test_rounded_sizes_keep_the_bound_below_the_truth(case: Case, limit: int) -> None:
    assume(case.tasks)
    problem = JointProblem(case.problem, 2)
    best = least_joint_arena(case, problem)
    with alone(_LIMIT_UNITS={"cp-sat": limit}):
        found = Model().solve(problem)
    assert found.lower_bound_bytes <= best <= found.arena_bytes


@settings(max_examples=100, deadline=None)
@given(cases(max_nodes=5))
def test_spans_hold_in_every_order_and_pairs_that_are_left_out_never_meet(case: Case) -> None:
    assume(case.tasks)
    problem = case.problem
    tensors = Tensors.of(problem, 1, 2**20, 2**20).all
    orders = list(topological_orders(case))
    for kind in ("all", "distance", "count"):
        spans = Spans.of(problem, orders[0], kind)  # type: ignore[arg-type]
        for order in orders:
            when = {node: step for step, node in enumerate(order)}
            lives = [live(tensor, when) for tensor in tensors]
            assert all(when[node] in spans.runs(node) for node in when)
            for tensor, life in zip(tensors, lives, strict=True):
                made = {when[tensor.node]} if tensor.node >= 0 else set()
                assert set(life) - made <= set(spans.preserved(tensor))
                assert set(spans.surely_preserved(tensor)) <= set(life) - made
                assert set(life) <= set(spans.alive(tensor))
            for one, first in zip(tensors, lives, strict=True):
                for other, second in zip(tensors, lives, strict=True):
                    assert one is other or not (spans.apart(one, other) and set(first) & set(second))


def live(tensor, when: dict[int, int]) -> range:
    """The steps at which a tensor is in memory."""
    start = when[tensor.node] if tensor.node >= 0 else 0
    last = len(when) - 1 if tensor.kept else max((when[sink] for sink in tensor.sinks), default=start)
    return range(start, last + 1)


def test_spans_of_a_diamond_are_by_distance_or_by_count() -> None:
    # a makes 0; b and c read it, each makes one; d follows b; e reads what c and d make.
    tasks = [
        Task("a", makes=(0,)),
        Task("b", makes=(1,), reads=(0,)),
        Task("c", makes=(2,), reads=(0,)),
        Task("d", makes=(3,), reads=(1,)),
        Task("e", reads=(2, 3)),
    ]
    problem = OrderProblem.of([1, 2, 3, 4], tasks)
    by_distance, by_count = (Spans.of(problem, range(5), kind) for kind in ("distance", "count"))
    assert list(zip(by_distance.asap, by_distance.alap, strict=True)) == [(0, 1), (1, 2), (1, 3), (2, 3), (3, 4)]
    assert list(zip(by_count.asap, by_count.alap, strict=True)) == [(0, 0), (1, 2), (1, 3), (2, 3), (4, 4)]
    tensors = Tensors.of(problem, 1, 10, 100).all
    assert by_distance.preserved(tensors[2]) == range(2, 5)  # MUL without the step at which it may be made
    assert by_distance.surely_preserved(tensors[0]) == range(2, 2)
    assert by_count.surely_preserved(tensors[0]) == range(1, 2)
    assert by_distance.apart(tensors[0], Tensor(9, 5, 4, (), False))  # all that reads 0 comes before e
    assert not by_distance.apart(tensors[0], tensors[3])  # c may run after d
    assert not by_distance.apart(tensors[2], Tensor(9, 5, 4, (), False))  # e reads the one and makes the other


def test_pruning_leaves_fewer_pairs_and_the_same_answer() -> None:
    problem = JointProblem(load_problem(DATA / "train-L15.json"))
    order = ProgramOrder().solve(problem.order).order
    tensors = Tensors.of(problem.order, 1, 2**26, 2**19)
    counts = []
    for kind, prune in (("all", False), ("distance", True), ("count", True)):
        plan = Plan.of(tensors, Spans.of(problem.order, order, kind), (0, 2**19), addresses=True, prune=prune, cut=True)  # type: ignore[arg-type]
        counts.append((len(plan.pairs), plan.size))
    assert sorted(counts, reverse=True) == counts
    assert counts[1][0] < counts[0][0]
    assert counts[1][1] < 0.6 * counts[0][1]


def test_steps_are_decoded_as_function_1_does() -> None:
    assert execution_sequence([(2, 0), (), (1,), (0, 3)]) == [2, 0, 1, 3]


def test_cut_short_it_answers_with_what_it_has() -> None:
    problem = JointProblem(load_problem(DATA / "train-L15.json"))
    found = Model(max_effort=1e-3, windows="count").solve(problem)
    assert found.status is Status.FEASIBLE
    assert found.lower_bound_bytes <= Exact().solve(problem.order).peak_bytes <= found.arena_bytes


def test_a_program_that_is_too_large_is_not_built() -> None:
    problem = JointProblem(load_problem(DATA / "train-L15.json"))
    found = Model(max_size=1000).solve(problem)
    assert "variables" not in found.stats
    assert found.status is Status.FEASIBLE


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"solver": "gurobi"}, "solver: expected one of 'cp-sat', 'highs', 'scip', got 'gurobi'"),
        ({"windows": "other"}, "windows: expected one of"),
        ({"order": ProgramOrder(), "addresses": False}, "expected something to ask for"),
        ({"max_effort": 0}, "above 0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Model(**settings)  # type: ignore[arg-type]


@contextmanager
def alone(**settings: object) -> Iterator[None]:
    """The solver knows no order but the one as written, no addresses but one after the other: M is the sum of sizes, as in the paper."""
    with unaided(model, first_placement=one_after_the_other, **settings):  # type: ignore[arg-type]
        yield


def one_after_the_other(problem: PlaceProblem, capacity_bytes: int | None) -> Placement:
    offsets, at = np.zeros(problem.buffer_count, np.int64), 0
    for buffer, (size, align) in enumerate(zip(problem.size_bytes.tolist(), problem.align_bytes.tolist(), strict=True)):
        offsets[buffer] = -(-at // align) * align
        at = int(offsets[buffer]) + size
    return placed(problem, offsets, Stacked())


class Stacked:
    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        return one_after_the_other(problem, capacity_bytes)
