"""Order and addresses together, by two steps."""

from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings

from lowtide.errors import CheckError
from lowtide.problems import Status
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import ProgramOrder, Schedule, Solver
from research.joint.two_steps import Joint, JointProblem, JointSolver, TwoStep, joint
from tests.problems import Case, cases
from tests.research.least import least_joint_arena


@settings(max_examples=50, deadline=None)
@given(cases(max_nodes=4))
def test_two_steps_are_never_below_the_best_of_all_orders_and_say_when_they_meet_it(case: Case) -> None:
    assume(case.tasks)
    problem = JointProblem(case.problem)
    best = least_joint_arena(case, problem)
    found = joint(problem)
    assert found.lower_bound_bytes <= best <= found.arena_bytes
    if found.status is Status.OPTIMAL:
        assert found.arena_bytes == best
    if found.arena_bytes == found.schedule.lower_bound_bytes - case.resident_bytes:
        assert found.status is Status.OPTIMAL


def test_the_order_that_is_asked_for_is_taken_and_its_arena_may_be_larger() -> None:
    # Four bytes that only the second node needs; in program order they are there while eight are made and used.
    tasks = [Task("early", makes=(0,)), Task("make", makes=(1,)), Task("use", reads=(1,)), Task("late", reads=(0,))]
    problem = JointProblem(OrderProblem.of([4, 8], tasks, resident_bytes=100))
    best, written = joint(problem), joint(problem, TwoStep(order=ProgramOrder()))
    assert (best.arena_bytes, best.lower_bound_bytes, best.status) == (8, 8, Status.OPTIMAL)
    assert (written.arena_bytes, written.status, written.schedule.order) == (12, Status.FEASIBLE, (0, 1, 2, 3))
    assert written.solver == "TwoStep(order=ProgramOrder())"


def test_addresses_are_multiples_of_the_alignment() -> None:
    problem = JointProblem(OrderProblem.of([3, 3], [Task("a", makes=(0,)), Task("b", makes=(1,), reads=(0,))]), align_bytes=8)
    found = joint(problem)
    assert sorted(found.placement.offsets) == [0, 8]
    assert (found.arena_bytes, found.status) == (11, Status.FEASIBLE)  # the bound knows nothing of alignments


def test_solvers_of_joint_problems_are_values() -> None:
    assert isinstance(TwoStep(), JointSolver)
    assert TwoStep() == TwoStep()


def test_an_order_that_is_none_is_refused() -> None:
    @dataclass(frozen=True)
    class Backwards:
        def solve(self, problem: OrderProblem) -> Schedule:
            return Schedule((1, 0), 0, 0, ProgramOrder().solve(problem).status, "")

    solver: Solver = Backwards()
    problem = JointProblem(OrderProblem.of([1], [Task("a", makes=(0,)), Task("b", reads=(0,))]))
    with pytest.raises(CheckError, match="expected at step 0"):
        joint(problem, TwoStep(order=solver))


def test_a_problem_without_nodes_has_an_arena_of_what_is_there() -> None:
    found: Joint = joint(JointProblem(OrderProblem.of([5], [])))
    assert (found.schedule.order, found.arena_bytes, found.status) == ((), 5, Status.OPTIMAL)
