"""What memory costs: lowtide under a budget beside what people use today, all measured.

    python -m bench.budget [--models NAME ...] [--quick] [--peers eager checkpoint aot_eager inductor] [--rounds 7] [--budgets 10]
                           [--no-arena] [--no-parts] [--keep]

One training step with plain SGD. The peers: eager PyTorch, one `torch.utils.checkpoint` for each block, and torch.compile's
`activation_memory_budget`. Beside each of them lowtide, within as many bytes as the peer was measured to take; then lowtide alone at even
budgets from 95 % of eager's peak down to the smallest peak that it finds. Each setting is a process of its own; those of a group live at
once and take turns, a step at a time (`bench.budget_turns`). Peaks are by the allocator's own count, above what the caller holds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

from bench.budget_plans import Planner
from bench.budget_settings import CASES, COMPILED, SHARES, Setting
from bench.budget_turns import Group, Ratio, Turn, Worker, median_ms
from bench.memory import available_bytes, touch_memory
from bench.results import Results, load

COLUMNS = (
    "model", "batch_size", "setting", "limit_bytes", "peak_bytes", "promised_bytes", "kept", "promise_off", "monotone",
    "wall_ms", "cpu_ms", "page_faults", "wall_to_eager", "wall_to_eager_spread", "cpu_to_eager", "cpu_to_eager_spread",
    "wall_to_peer", "wall_to_peer_spread", "cpu_to_peer", "cpu_to_peer_spread", "no_worse", "promised_ms", "promised_ratio", "recomputed",
    "planning_s", "failed",
)  # fmt: skip
NOTES = (
    "peak_bytes: above what the caller holds (parameters, buffers, batch): gradients, activations, temporaries; limit_bytes: likewise",
    "times: each setting is a process, those that are compared take turns; medians, and of ratios the medians over adjacent turns",
    "*_spread: half the distance between the quartiles of those ratios; page_faults: pages mapped in a step",
    "kept: the measured peak is within limit_bytes; promise_off: promised over measured peak, less 1; monotone: against the budget before,"
    " no higher measured peak and no less promised time",
    "no_worse: within 3 % or better than the peer both in bytes and in wall-clock time",
    "promised_ms: by the cost model, operators alone; promised_ratio: over the same without recomputation",
    "planning_s: capture, measuring and the one search that answers all limits of a model",
    "gradients kept: they lie in memory of the caller's, which peak_bytes of that row leaves out and those of other rows count",
    "parts: `exact=False`: sets of operators run part by part, and algebra's rules that round otherwise",
    "arena: addresses are planned and no page is mapped anew; the block, as large as the peak, stays the process's between steps",
    "aot_eager, inductor: with activation_memory_budget, a share of saved activations, not of the peak",
)
_NEAR = 1.03
_SAME = 1.002  # limits so near are one
_MIB = 2**20
_SHARE = 0.8  # of free memory, for the processes of a group
_EAGER = Setting("eager")
_WORKER_BYTES = 450 * _MIB  # a process with PyTorch and a library of models
_KEPT = Setting("checkpoint, gradients kept")  # as where gradients are accumulated: they are there before the step
EXTRA_PEERS = {"block-gpt": (_KEPT,)}
EXTRA_LIMITS = {"block-gpt": ((25 * _MIB, _KEPT.label),)}  # less memory than that peer takes
QUICK = ("block-gpt", "mobilenet_v2")


def main() -> None:
    options = _options()
    touch_memory()
    with TemporaryDirectory() as measured:
        os.environ["LOWTIDE_CACHE"] = measured  # operators are timed anew, in the state that the machine is in now
        rows = _run(options)
    load(options.table).print()
    print("\n".join(verdicts(rows)))
    from bench.budget_plot import plot

    plot(rows, options.table)


def _run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all models; saved after each model."""
    known = load(options.table).rows if options.keep else ()
    rows: list[dict[str, Any]] = [dict(row) for row in known if row["model"] not in options.models]
    notes = (*NOTES, f"{options.threads} thread(s) each, up to {options.rounds} turns")
    for model in options.models:
        for row in _rows_or_why(model, options):
            rows.append(row)
            print({key: value for key, value in row.items() if value is not None}, flush=True)
        Results(options.table, "What memory costs", COLUMNS, tuple(rows), notes).save()
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}, fewer turns and budgets")
    parser.add_argument("--peers", nargs="+", default=["eager", "checkpoint", "aot_eager"], choices=["eager", "checkpoint", *COMPILED])
    parser.add_argument("--rounds", type=int, help="turns of each process; 7 by default")
    parser.add_argument("--seconds", type=float, default=45.0, help="of turns in one group, where three rounds do not take longer")
    parser.add_argument("--budgets", type=int, help="even budgets of lowtide alone; 10 by default")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until a process has to be ready, compiled or planned")
    parser.add_argument("--no-arena", dest="arena", action="store_false", help="leave out lowtide with planned addresses")
    parser.add_argument("--no-parts", dest="parts", action="store_false", help="leave out lowtide with `exact=False`")
    parser.add_argument("--table", default="budget", help="name of the saved table and picture")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other models in the saved table")
    options = parser.parse_args()
    options.models = options.models or list(QUICK if options.quick else CASES)
    options.rounds = options.rounds or (5 if options.quick else 7)
    options.budgets = (4 if options.quick else 10) if options.budgets is None else options.budgets
    return options


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many rows each claim holds of, and which it does not hold of."""
    found = []
    for kind in ("lowtide", "lowtide arena", "lowtide parts"):
        ours = [row for row in rows if row["setting"].split(" at ")[0] == kind]
        for claim in ("kept", "monotone", "no_worse"):
            asked = [row for row in ours if row.get(claim) is not None]
            lacking = [f"{row['model']} {row['setting']}" for row in asked if row[claim] != "yes"]
            if asked:
                found.append(f"{kind}, {claim}: {len(asked) - len(lacking)} of {len(asked)}" + "".join(f"; not {each}" for each in lacking))
    return found


def _rows_or_why(model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of a model, as far as they go: one that fails leaves those of the others."""
    try:
        yield from rows_of(model, options)
    except (TimeoutError, EOFError, OSError) as error:  # of the process that plans
        yield {"model": model, "batch_size": CASES[model][1], "setting": "lowtide", "failed": f"{type(error).__name__}: {error}"[:200]}


def rows_of(model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The peers of one model with lowtide beside each, then lowtide at even budgets."""
    with ExitStack() as stack:
        planner = stack.enter_context(Planner(model, options.threads, options.patience))
        planners = dict.fromkeys(("lowtide", "lowtide arena") if options.arena else ("lowtide",), planner)
        if options.parts:
            planners["lowtide parts"] = stack.enter_context(Planner(model, options.threads, options.patience, exact=False))
        ends = planner.ends
        room = max(4, int(_SHARE * available_bytes() / (_WORKER_BYTES + ends.resident_bytes + ends.eager_bytes)))
        peers = _peers(model, options.peers)
        each = max(1, (room - 1) // (1 + len(planners)))
        for start in range(0, len(peers), each):
            for row in _peer_group(model, options, peers[start : start + each], planners):
                planned = planners.get(row["setting"].split(" at ")[0])
                yield row | ({} if planned is None else {"planning_s": planned.ends.planning_s})
        most, least = int(0.95 * ends.eager_bytes - 0.05 * ends.resident_bytes), ends.least_bytes
        limits = [most - (most - least) * step // max(1, options.budgets - 1) for step in range(options.budgets)]
        yield from _budget_rows(model, options, limits, room - 1, planner)


def _peers(model: str, wanted: Sequence[str]) -> list[Setting]:
    found = [Setting(kind, share) for kind in wanted for share in (SHARES if kind in COMPILED else (1.0,))]
    return found + list(EXTRA_PEERS.get(model, ()) if "checkpoint" in wanted else ())


def _peer_group(
    model: str, options: argparse.Namespace, peers: Sequence[Setting], planners: Mapping[str, Planner]
) -> Iterator[dict[str, Any]]:
    """Eager, some peers, and lowtide at each one's bytes, all at once."""
    with Group(model, options.threads, options.patience) as group:
        eager, *others = group.start([_EAGER, *(peer for peer in peers if peer != _EAGER)])
        asked = ([eager] if _EAGER in peers else []) + others
        there = [worker for worker in asked if not worker.failed]
        wishes = [(f"at {worker.setting.label}", worker.told["peak_bytes"], worker) for worker in there]
        for limit, label in EXTRA_LIMITS.get(model, ()):
            wishes += [(f"at {limit / _MIB:g} MiB", limit, worker) for worker in there if worker.setting.label == label]
        ours = {kind: _at_limits(group, kind, [limit for _, limit, _ in wishes], planner) for kind, planner in planners.items()}
        beside = [worker for _, limit, peer in wishes for worker in (peer, *(found[limit] for found in ours.values()))]
        group.workers = list(dict.fromkeys([eager, *beside, *group.workers]))  # what is compared has adjacent turns
        group.take_turns(options.rounds, options.seconds)
        for worker in asked:
            yield _row(model, worker.setting.label, worker, eager)
        for where, limit, peer in wishes:
            for kind, found in ours.items():
                yield _row(model, f"{kind} {where}", found[limit], eager, peer)


def _at_limits(group: Group, kind: str, limits: Sequence[int], planner: Planner) -> dict[int, Worker]:
    """A worker for each limit; limits that are as good as the same share the one of the smallest."""
    shared: dict[int, int] = {}
    low = 0
    for limit in sorted(set(limits)):
        low = low if low and limit <= _SAME * low else limit
        shared[limit] = low
    plans = planner.plans(sorted(set(shared.values()), reverse=True))
    workers = group.start([Setting(kind, limit_bytes=limit, plan=plan) for limit, plan in plans.items()])
    by_limit = dict(zip(plans, workers, strict=True))
    return {limit: by_limit[low] for limit, low in shared.items()}


def _budget_rows(model: str, options: argparse.Namespace, limits: Sequence[int], room: int, planner: Planner) -> Iterator[dict[str, Any]]:
    """Lowtide at falling limits, beside eager."""
    rows: list[dict[str, Any]] = []
    plans = planner.plans(limits)
    for start in range(0, len(limits), room):
        part = limits[start : start + room]
        with Group(model, options.threads, options.patience) as group:
            eager, *ours = group.start([_EAGER, *(Setting("lowtide", limit_bytes=limit, plan=plans[limit]) for limit in part)])
            group.take_turns(max(3, options.rounds // 2), options.seconds)
            rows += [_row(model, "lowtide", worker, eager) | {"limit_bytes": limit} for limit, worker in zip(part, ours, strict=True)]
    for before, after in pairwise(rows):
        if "failed" not in before and "failed" not in after:
            after["monotone"] = _yes(after["peak_bytes"] <= before["peak_bytes"] and after["promised_ms"] >= before["promised_ms"])
    yield from rows


def _row(model: str, label: str, worker: Worker, eager: Worker, peer: Worker | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "batch_size": CASES[model][1], "setting": label}
    if worker.failed or not worker.turns:
        return row | {"failed": worker.failed or "no turn"}
    row |= {name: value for name, value in worker.told.items() if name in COLUMNS}
    row |= {
        "wall_ms": median_ms(worker.turns, lambda turn: turn.wall_s),
        "cpu_ms": median_ms(worker.turns, lambda turn: turn.cpu_s),
        "page_faults": _middle_faults(worker.turns),
    }
    if worker is not eager:
        row |= _ratios(worker, eager, "eager")
    if peer is not None:
        row |= _ratios(worker, peer, "peer")
        row["no_worse"] = _yes(row["peak_bytes"] <= _NEAR * peer.told["peak_bytes"] and row.get("wall_to_peer", 9) <= _NEAR)
    if "promised_bytes" in row:
        row["promise_off"] = row["promised_bytes"] / row["peak_bytes"] - 1
        row["kept"] = _yes(row["peak_bytes"] <= row["limit_bytes"])
    return row


def _ratios(worker: Worker, base: Worker, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    if min(len(worker.turns), len(base.turns)) < 2:
        return found
    for clock in ("wall", "cpu"):
        ratio = Ratio.of(worker.turns, base.turns, "wall_s" if clock == "wall" else "cpu_s")
        found |= {f"{clock}_to_{name}": ratio.median, f"{clock}_to_{name}_spread": ratio.spread}
    return found


def _middle_faults(turns: Sequence[Turn]) -> int:
    return sorted(turn.faults for turn in turns)[len(turns) // 2]


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


if __name__ == "__main__":
    main()
