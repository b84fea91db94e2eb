"""MODeL's own program on its own networks, as far as it gets: order and addresses at once, the order alone, addresses alone.

    python -m bench.model_paper_joint [--networks AlexNet VGG ResNet] [--batch-sizes 1 32] [--effort 30] [--solver cp-sat]

Beside each answer stands that of two steps (order, then addresses), which is what lowtide does by default; status says what is proven of
each. Addresses alone are those of the program's own order, as in section 5.4.
"""

from __future__ import annotations

import argparse
import time

from bench.model_paper_networks import NETWORKS, network
from bench.model_paper_step import GRANULE_BYTES, captured_step
from bench.results import Cell, Results
from lowtide.cost.memory import order_problem
from lowtide.schedule import ProgramOrder
from research.joint.model import Model
from research.joint.two_steps import Joint, JointProblem, TwoStep

COLUMNS = (
    "network", "batch_size", "operators", "question", "variables", "constraints", "pairs", "found_bytes", "bound_bytes", "status", "cpu_s",
    "two_step_bytes", "two_step_cpu_s", "two_step_status",
)  # fmt: skip
QUESTIONS = ("order and addresses", "order", "addresses")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["AlexNet", "VGG", "ResNet"], choices=list(NETWORKS), metavar="NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--solver", default="cp-sat")
    parser.add_argument("--effort", type=float, default=30.0, help="CP-SAT's deterministic time for each question")
    parser.add_argument("--name", default="model_paper_joint", help="of the result file")
    options = parser.parse_args()
    rows: list[dict[str, Cell]] = []
    for name in options.networks:
        for batch_size in options.batch_sizes:
            problem = joint_problem(name, batch_size)
            for steps in (TwoStep(), TwoStep(order=ProgramOrder())):
                steps.solve(problem)  # loads compiled kernels
            for question in QUESTIONS:
                rows.append({"network": name, "batch_size": batch_size} | row(problem, question, options.solver, options.effort))
                print({key: rows[-1].get(key) for key in ("network", "batch_size", "question", "status", "cpu_s")}, flush=True)
                results = Results(options.name, f"MODeL's program in {options.solver}", COLUMNS, tuple(rows), NOTES)
                results.save()  # at each row: an interrupted run leaves what it has
    results.print()


NOTES = (
    "found_bytes: the arena, or for the order alone what is alive at its peak, beside what is resident; bound_bytes: of all orders; for "
    "addresses alone of the given one",
    "cpu_s: of the processor, with building the program; programs of more than 500,000 variables and constraints are not built",
    "windows by count of ancestors and descendants; sizes rounded up to 512 bytes, inputs as in MODeL's published program",
)


def joint_problem(name: str, batch_size: int) -> JointProblem:
    """A network's training step."""
    graph = captured_step(network(name, "paper"), batch_size).graph
    return JointProblem(order_problem(graph, round_to=GRANULE_BYTES), GRANULE_BYTES)


def row(problem: JointProblem, question: str, solver: str, effort: float) -> dict[str, Cell]:
    """One question about one step."""
    given = ProgramOrder() if question == "addresses" else None
    model = Model(solver, order=given, addresses=question != "order", windows="count", max_effort=effort)
    start = time.process_time()
    found = model.solve(problem)
    cpu_s = time.process_time() - start
    start = time.process_time()
    two = (TwoStep() if given is None else TwoStep(order=given)).solve(problem)
    two_cpu_s = time.process_time() - start
    resident = problem.order.resident_bytes
    (nbytes, bound, status), (two_bytes, _, two_status) = (_judged(each, question, resident) for each in (found, two))
    return {
        "operators": problem.order.node_count,
        "question": question,
        "variables": found.stats.get("variables"),
        "constraints": found.stats.get("constraints"),
        "pairs": found.stats["pairs"],
        "found_bytes": nbytes,
        "bound_bytes": bound,
        "status": status,
        "cpu_s": cpu_s,
        "two_step_bytes": two_bytes,
        "two_step_cpu_s": two_cpu_s,
        "two_step_status": two_status,
    }


def _judged(found: Joint, question: str, resident_bytes: int) -> tuple[int, int, str]:
    """Bytes found, bytes that are proven to be needed, and what that says, of what was asked for."""
    if question == "order":
        schedule = found.schedule
        return schedule.peak_bytes - resident_bytes, schedule.lower_bound_bytes - resident_bytes, schedule.status.name.lower()
    if question == "addresses":
        return found.arena_bytes, found.placement.lower_bound_bytes, found.placement.status.name.lower()
    return found.arena_bytes, found.lower_bound_bytes, found.status.name.lower()


if __name__ == "__main__":
    main()
