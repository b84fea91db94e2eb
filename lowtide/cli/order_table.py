"""What `lowtide order` prints: what is known of the order, the simple orders beside it, and what stands at its peak."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lowtide.cli.order_search import OrderOutcome
from lowtide.cli.output import exact_bytes, printable, shortened
from lowtide.cost.memory import Footprint, simulate
from lowtide.plan.summary import bytes_text
from lowtide.problems.order import OrderProblem
from lowtide.problems.status import Status
from lowtide.schedule import Schedule

_SHOWN = 8  # tensors at the peak
_NAME_LENGTH = 60  # characters


def show(console: Console, problem: OrderProblem, outcome: OrderOutcome) -> None:
    console.print(_facts(problem, outcome))
    console.print(_comparison(outcome))
    if problem.node_count and outcome.best.status is not Status.INFEASIBLE:
        console.print(_peak(problem, simulate(problem, outcome.best.order), outcome.best))


def _facts(problem: OrderProblem, outcome: OrderOutcome) -> Table:
    best = outcome.best
    peak = "none: no order is low enough" if best.status is Status.INFEASIBLE else exact_bytes(best.peak_bytes)
    rows = {
        "nodes": f"{problem.node_count:,}",
        "peak": peak,
        "lower bound": exact_bytes(best.lower_bound_bytes),
        "gap": _gap(outcome),
        "status": f"{'interrupted; ' * outcome.interrupted}{best.status.name.lower()}: {best.status.value}",
        "solver": best.solver,
        "states": f"{outcome.states:,}",
        "seconds": f"{outcome.seconds:.3f}",
    }
    table = Table(show_header=False)
    for label, value in rows.items():
        table.add_row(label, Text(value))
    return table


def _comparison(outcome: OrderOutcome) -> Table:
    best = outcome.best
    table = Table("order", Column("peak", justify="right"), Column("saved here", justify="right"))
    for label, simple in outcome.simple.items():
        table.add_row(label, bytes_text(simple.peak_bytes), "" if best.status is Status.INFEASIBLE else _saving(simple, best))
    return table


def _peak(problem: OrderProblem, footprint: Footprint, best: Schedule) -> Table:
    """The largest tensors alive at the first step at the peak, and from and to which step they are; the rows add up to the peak."""
    step, (start, end) = footprint.peak_step, footprint.lifetimes
    node = best.order[step]
    alive = np.flatnonzero((start <= step) & (step < end) & (problem.tensor_bytes > 0))
    largest = alive[np.lexsort((start[alive], -problem.tensor_bytes[alive]))]
    title = Text.assemble(f"at the peak, step {step} of {problem.node_count}: ", _name(problem.names[node]))
    table = Table("tensor of", *(Column(label, justify="right") for label in ("bytes", "from step", "to step")), title=title)
    table.title_justify, table.title_style = "left", ""
    for tensor in largest[:_SHOWN].tolist():
        table.add_row(_made_by(problem, tensor), f"{problem.tensor_bytes[tensor]:,}", str(start[tensor]), str(end[tensor] - 1))
    for label, nbytes in (
        (f"{len(largest) - _SHOWN} more tensors", int(problem.tensor_bytes[largest[_SHOWN:]].sum())),
        ("the node's workspace", int(problem.workspace_bytes[node])),
        ("resident throughout", problem.resident_bytes),
    ):
        if nbytes:
            table.add_row(label, f"{nbytes:,}", "", "")
    return table


def _made_by(problem: OrderProblem, tensor: int) -> Text:
    """A tensor by the node that makes it, with its place among several."""
    node = int(problem.producer[tensor])
    if node < 0:
        return Text(f"tensor {tensor}, there from the start")
    made = problem.outputs_of
    position = tensor if made.ptr[node + 1] - made.ptr[node] > 1 else None
    return _name(problem.names[node]) + Text("" if position is None else f", tensor {position}")


def _name(name: str) -> Text:
    return Text(shortened(printable(name), _NAME_LENGTH))


def _saving(simple: Schedule, best: Schedule) -> str:
    return f"{(simple.peak_bytes - best.peak_bytes) / max(simple.peak_bytes, 1):.1%}"


def _gap(outcome: OrderOutcome) -> str:
    gap_bytes = outcome.best.peak_bytes - outcome.best.lower_bound_bytes
    return f"{outcome.gap:.2%}, {bytes_text(gap_bytes)}" if gap_bytes else "0 %"
