"""What running in parts buys, measured: steps within a limit with `exact=True` and with `exact=False`, beside eager, taking turns.

    python -m bench.in_parts [--models NAME ...] [--rounds 7] [--keep]

One training step with plain SGD, one thread. Each setting is a process of its own; those of a model live at once and take turns. Times are
over those of lowtide without a limit. Peaks are by the allocator's count, above what the caller holds. "chunked loss" is what people
write by hand: logits and loss of an eighth of the tokens at a time, made again in the backward pass. "auto chunker" is inductor with
its own chunker on, model and loss in one graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from bench.budget_plans import Planner
from bench.budget_settings import Setting
from bench.budget_turns import Group, Ratio, Worker, median_ms
from bench.memory import touch_memory
from bench.results import Results, load

COLUMNS = (
    "model", "setting", "limit_mib", "peak_mib", "promised_mib", "kept", "wall_ms", "cpu_ms", "cpu_to_unlimited", "cpu_to_eager",
    "wall_to_unlimited", "promised_ratio", "planning_s", "failed",
)  # fmt: skip
NOTES = (
    "peak_mib: above what the caller holds, measured; kept: it is within limit_mib; ratios: medians over adjacent turns",
    "unlimited: lowtide without a limit, `exact=True`; promised_ratio: by measured operators, over what it promises",
    "lowtide parts: `exact=False`: sets of operators part by part, and algebra's rules that round otherwise",
)
_MIB = 2**20
_EAGER, _CHUNKED = Setting("eager"), (Setting("chunked loss"), Setting("auto chunker"))


def limits_of(model: str, eager_bytes: int) -> tuple[tuple[str, int], ...]:
    """(kind of lowtide, bytes above what the caller holds) that a model is measured within."""
    if model == "gpt2":
        return ("lowtide", 404 * _MIB), ("lowtide parts", 404 * _MIB), ("lowtide parts", 220 * _MIB)
    if model == "llama-128k":
        return ("lowtide", eager_bytes // 2), ("lowtide parts", eager_bytes // 2), ("lowtide parts", eager_bytes // 4)
    share = 4 * eager_bytes // 10
    return ("lowtide", share), ("lowtide parts", share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("gpt2", "llama-128k", "vit_b_16", "bert-base", "vit_b_16 x 16")
    parser.add_argument("--models", nargs="+", default=list(names), choices=names, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--patience", type=float, default=600.0)
    parser.add_argument("--keep", action="store_true", help="keep the rows of other models in the saved table")
    options = parser.parse_args()
    touch_memory()
    known = [dict(row) for row in load("in_parts").rows] if options.keep else []
    rows: list[dict[str, Any]] = [row for row in known if row["model"] not in options.models]
    for model in options.models:
        for row in _rows(model, options):
            print(row, flush=True)
            rows.append(row)
        Results("in_parts", "Within a limit, whole and in parts", COLUMNS, tuple(rows), NOTES).save()
    load("in_parts").print()


def _rows(model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with (
        Planner(model, 1, options.patience) as whole,
        Planner(model, 1, options.patience, exact=False) as parts,
        Group(model, 1, options.patience) as group,
    ):
        planners: Mapping[str, Planner] = {"lowtide": whole, "lowtide parts": parts}
        wanted = [("lowtide", 0), *limits_of(model, whole.ends.eager_bytes)]
        settings = [Setting(kind, limit_bytes=limit, plan=planners[kind].plans([limit])[limit]) for kind, limit in wanted]
        eager, unlimited, *others = group.start([_EAGER, *settings, *(_CHUNKED if model == "llama-128k" else ())])
        group.take_turns(options.rounds, options.seconds)
        for worker in (eager, unlimited, *others):
            row = _row(model, worker, eager, unlimited)
            planner = planners.get(worker.setting.kind)
            yield row | ({} if planner is None else {"planning_s": planner.ends.planning_s})


def _row(model: str, worker: Worker, eager: Worker, unlimited: Worker) -> dict[str, Any]:
    limit = worker.setting.limit_bytes
    row: dict[str, Any] = {"model": model, "setting": worker.setting.label, "limit_mib": limit / _MIB if limit else None}
    if worker.failed or len(worker.turns) < 2:
        return row | {"failed": worker.failed or "no turn"}
    peak, promised = worker.told["peak_bytes"], worker.told.get("promised_bytes")
    row |= {"peak_mib": peak / _MIB, "wall_ms": median_ms(worker.turns, lambda turn: turn.wall_s)}
    row["cpu_ms"] = median_ms(worker.turns, lambda turn: turn.cpu_s)
    if promised is not None:
        row["promised_mib"] = promised / _MIB
    if limit:
        row["kept"] = "yes" if peak <= limit else "no"
    if promised is not None and not unlimited.failed:
        row["promised_ratio"] = worker.told["promised_ms"] / unlimited.told["promised_ms"]
    if not unlimited.failed:
        row["cpu_to_unlimited"] = Ratio.of(worker.turns, unlimited.turns, "cpu_s").median
        row["wall_to_unlimited"] = Ratio.of(worker.turns, unlimited.turns, "wall_s").median
    if not eager.failed:
        row["cpu_to_eager"] = Ratio.of(worker.turns, eager.turns, "cpu_s").median
    return row


if __name__ == "__main__":
    main()
