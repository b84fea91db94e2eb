"""The smallest arena of all orders, by brute force."""

from __future__ import annotations

from hypothesis import assume

from research.joint.two_steps import JointProblem
from tests.placements import least_arena_bytes
from tests.problems import Case, topological_orders


def least_joint_arena(case: Case, problem: JointProblem, max_buffers: int = 6) -> int:
    """Over all topological orders and all placements; gives the example up where there are too many buffers."""
    orders = list(topological_orders(case))
    assume(problem.buffers(orders[0]).buffer_count <= max_buffers)
    lives = {}
    for order in orders:
        buffers = problem.buffers(order)
        lives[tuple(zip(buffers.size_bytes.tolist(), buffers.start.tolist(), buffers.end.tolist(), strict=True))] = buffers
    return min(least_arena_bytes(buffers) for buffers in lives.values())
