"""Fusion and partition: Figure 9 and Tables IV, V and VI of the ICCAD'23 paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.iccad_paper import ABLATIONS, METHODS, PARTS, ROWS, Ablation, Row
from bench.iccad_tools import exact, kib, timed, warm_up
from bench.networks import PROBLEMS
from bench.results import Cell, Results
from lowtide.problems import Status
from lowtide.problems.order import OrderProblem
from lowtide.schedule import Schedule, Solver
from research.needs import need_ortools
from research.orders.fuse_subgraphs import FuseSubgraphs
from research.orders.ilp import TimeIndexed
from research.orders.partition import Partitioned
from research.orders.reduce import Reducing

_PARTS = 5  # of Tables IV and V, where the paper prints no number
_MAX_VARIABLES = 60_000  # larger programs are counted but not built: there is no hope of a proof
_TITLE_IV = "Table IV: size and seconds of the integer program"
_REBUILT = {row.network: row.rebuilt for row in ROWS}


@dataclass(frozen=True)
class Witnessed:
    """Asks `inner` and keeps what it said, for those who see only what was made of it."""

    inner: Solver
    said: list[Schedule] = field(default_factory=list)

    def solve(self, problem: OrderProblem) -> Schedule:
        """The inner solver's answer."""
        self.said.append(self.inner.solve(problem))
        return self.said[-1]


def fused(inner: Solver) -> Reducing:
    """Fuses subgraphs as far as the least peak stays (Theorems IV.1 and IV.2, Algorithm 1), then asks `inner`."""
    return Reducing((FuseSubgraphs(),), inner)


def figure_9(seconds: float) -> Results:
    """Operators before and after fusion, and whether the optimum is the same."""
    warm_up(fused(exact(math.inf)))
    notes = ("the paper plots, and prints no numbers: a reduction of up to 6 times; same_optimum: of the fused graph, solved exactly",)
    columns = ("network", "operators", "fused", "factor", "fusion_and_proof_s", "same_optimum")
    return Results("iccad_fig9", "Figure 9: graph size", columns, tuple(_sizes(row, seconds) for row in ROWS), notes)


def _sizes(row: Row, seconds: float) -> dict[str, Cell]:
    problem = PROBLEMS[row.rebuilt].problem()
    found = exact(seconds).solve(problem)
    answer, solving_s = timed(fused(exact(seconds)), problem)
    size = answer.stats["nodes"]
    return {
        "network": row.network,
        "operators": problem.node_count,
        "fused": size,
        "factor": problem.node_count / size,
        "fusion_and_proof_s": solving_s,
        "same_optimum": _compared(found, answer),
    }


def _compared(one: Schedule, other: Schedule) -> str:
    """Whether two proven optima are one."""
    if {one.status, other.status} != {Status.OPTIMAL}:
        return "not proven"
    return "yes" if one.peak_bytes == other.peak_bytes else "NO"


def table_iv(seconds: float, networks: Sequence[str] = tuple(ABLATIONS)) -> Results:
    """The time-indexed integer program, its largest part and its seconds, with each means to make it smaller."""
    if (missing := _missing_ortools()) is not None:
        return Results("iccad_IV", _TITLE_IV, ("network",), (), (missing,))
    rows = tuple(
        _ablated(network, method, paper, seconds) for network in networks for method, paper in zip(METHODS, ABLATIONS[network], strict=True)
    )
    notes = (
        f"variables: of the largest program that was needed; {_PARTS} parts, the paper's number is unknown; HiGHS in place of Gurobi",
        f"seconds: of all; proven: programs solved to the end, within {seconds:g} s each; none above {_MAX_VARIABLES:,} variables is built",
        "our programs count every reuse of memory and every control edge too",
    )
    columns = ("network", "method", "paper_variables", "variables", "paper_s", "seconds", "programs", "proven", "peak_kib")
    return Results("iccad_IV", _TITLE_IV, columns, rows, notes)


def _missing_ortools() -> str | None:
    """What to say where the integer program cannot be solved here."""
    try:
        need_ortools(TimeIndexed())
    except ImportError as error:
        return f"not measured: {error}"
    return None


def _ablated(network: str, method: str, paper: Ablation, seconds: float) -> dict[str, Cell]:
    problem = PROBLEMS[_REBUILT[network]].problem()
    prune = method in ("partition + pruning", "all")
    programs = Witnessed(TimeIndexed(prune=prune, max_seconds=seconds, max_variables=_MAX_VARIABLES))
    solver: Solver = programs if method == "origin" else Partitioned(parts=_PARTS, inner=programs)
    found, total_s = timed(fused(solver) if method in ("partition + fusion", "all") else solver, problem)
    variables = max(said.stats["variables"] for said in programs.said)
    is_built = variables <= _MAX_VARIABLES
    return {
        "network": network,
        "method": method,
        "paper_variables": paper.variables,
        "variables": variables,
        "paper_s": paper.seconds,
        "seconds": total_s if is_built else None,
        "programs": len(programs.said),
        "proven": sum(said.status is Status.OPTIMAL for said in programs.said),
        "peak_kib": kib(found, problem) if is_built else None,
    }


def table_v(seconds: float) -> Results:
    """Parts cut by topology alone against parts cut where little memory is alive."""
    notes = (f"paper_*: as printed; ours: {_PARTS} parts of the fused graph, those at the peak solved exactly; KiB",)
    columns = ("network", "paper_optimal", "optimal", "paper_naive", "naive", "paper_heuristic", "heuristic")
    rows = tuple(_partitioned(row, seconds) for row in ROWS if row.optimal_kib is not None)
    return Results("iccad_V", "Table V: two ways to partition, KiB", columns, rows, notes)


def _partitioned(row: Row, seconds: float) -> dict[str, Cell]:
    problem, inner = PROBLEMS[row.rebuilt].problem(), exact(seconds)
    naive, heuristic = (fused(Partitioned(parts=_PARTS, inner=inner, naive=naive)).solve(problem) for naive in (True, False))
    return {
        "network": row.network,
        "paper_optimal": row.optimal_kib,
        "optimal": kib(inner.solve(problem), problem),
        "paper_naive": row.naive_kib,
        "naive": kib(naive, problem),
        "paper_heuristic": row.heuristic_kib,
        "heuristic": kib(heuristic, problem),
    }


def table_vi(seconds: float) -> Results:
    """Numbers of parts: peaks and seconds, parts solved by the engine and by the integer program."""
    missing = _missing_ortools()
    warm_up(fused(Partitioned(parts=2, inner=exact(math.inf))))
    notes = (
        "kib, seconds: fused, partitioned, parts at the peak solved exactly; ilp_*: the same by the pruned integer program",
        f"in brackets where a program was not solved within {seconds:g} s or had more than {_MAX_VARIABLES:,} variables",
    )
    columns = ("network", "parts", "paper_kib", "paper_s", "kib", "seconds", "ilp_kib", "ilp_s")
    rows = tuple(
        _by_parts(network, parts, paper_kib, paper_s, seconds, with_ilp=missing is None)
        for network, row in PARTS.items()
        for parts, paper_kib, paper_s in row
    )
    return Results("iccad_VI", "Table VI: number of parts", columns, rows, notes if missing is None else (*notes, missing))


def _by_parts(network: str, parts: int, paper_kib: int, paper_s: float | None, seconds: float, *, with_ilp: bool) -> dict[str, Cell]:
    problem = PROBLEMS[_REBUILT[network]].problem()
    found, engine_s = timed(fused(Partitioned(parts=parts, inner=exact(seconds))), problem)
    row: dict[str, Cell] = {
        "network": network,
        "parts": parts,
        "paper_kib": paper_kib,
        "paper_s": paper_s,
        "kib": kib(found, problem),
        "seconds": engine_s,
    }
    if not with_ilp:
        return row
    programs = Witnessed(TimeIndexed(max_seconds=seconds, max_variables=_MAX_VARIABLES))
    found, ilp_s = timed(fused(Partitioned(parts=parts, inner=programs)), problem)
    proven = all(said.status is Status.OPTIMAL for said in programs.said)
    return row | {"ilp_kib": kib(found, problem), "ilp_s": ilp_s if proven else f"({ilp_s:.3f})"}
