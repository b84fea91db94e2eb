"""Whether a process that is held to its limit lives: networks at shares of what their steps make, and at limits drawn at random.

    python -m bench.on_gpu.survival [--only PART ...] [--jobs 1]
    python -m tests.null_cuda python -m bench.on_gpu.survival      # without a GPU: torch's allocator and its errors are the real ones

Each network is captured once, in a process of its own. `torch.cuda.set_per_process_memory_fraction` then holds that to what the step
promises that PyTorch's allocator will reserve, and to what it has reserved beside that before the first step; `SPARE_BYTES` are left for
blocks of the caller's. Between steps the network is evaluated, and other tensors come and go. Any `OutOfMemoryError` is a row that says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from bench import torchvision_shim
from bench.models import MODELS
from bench.models.char_gpt import VOCABULARY, CharGPT, Shape
from bench.models.workload import Workload
from bench.on_gpu.ground import Ground, Row
from bench.sweep import Sweep, add_options

COLUMNS = (
    "network", "limit", "device", "verdict", "steps", "promised_bytes", "allocated_bytes", "reserved_bytes", "held_to_bytes",
    "recomputed", "served_steps", "why",
)  # fmt: skip
SHARES = (100, 80, 60, 40, 20)  # per cent of what a step makes, beside what the caller holds
STEPS, FEWER_STEPS, RANDOM_LIMITS = 50, 10, 5  # at a share; at a random limit, and how many of those a network has
SPARE_BYTES = 24 * 2**20  # of the caller's own: a segment of 20 MiB, and two of 2


@dataclass(frozen=True)
class Survivor:
    """A network, and how it is made on the device."""

    name: str
    make: Callable[[], Workload]


class Tagger(nn.Module):
    """Recurrent layers between linear ones."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(128, 256), cell(256, 256, num_layers=3, bidirectional=True), nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(self.first(x))[0])
        return scores


def _moved(model: nn.Module, *batch: torch.Tensor, loss: Callable[..., torch.Tensor]) -> Workload:
    return Workload(model.cuda(), tuple(item.cuda() for item in batch), loss)


def _class_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _near(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def _listed(name: str, batch_size: int) -> Survivor:
    return Survivor(name, lambda: MODELS[name].build(batch_size, "cuda"))


def _tagger(cell: type[nn.RNNBase]) -> Workload:
    return _moved(Tagger(cell), torch.randn(64, 32, 128), torch.randint(0, 64, (64, 32)), loss=_class_loss)


def _char_gpt() -> Workload:
    model = CharGPT(Shape(blocks=4, width=256, heads=4, length=128, dropout=0.1))
    return _moved(model, *torch.randint(0, VOCABULARY, (2, 16, 128)).unbind(0), loss=_class_loss)


def _mlp() -> Workload:
    layers = [each for _ in range(8) for each in (nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024))]
    return _moved(nn.Sequential(*layers), torch.randn(4096, 1024), torch.randn(4096, 1024), loss=_near)


def _encoder() -> Workload:
    layers = [nn.TransformerEncoderLayer(256, 4, 512, batch_first=True) for _ in range(4)]
    return _moved(nn.Sequential(*layers), torch.randn(16, 128, 256), torch.randn(16, 128, 256), loss=_near)


def _convnet() -> Workload:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    layers += [each for _ in range(6) for each in (nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return _moved(model, torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,)), loss=_class_loss)


NETWORKS = (
    Survivor("mlp", _mlp), Survivor("convnet", _convnet), Survivor("encoder", _encoder), Survivor("char_gpt", _char_gpt),
    Survivor("lstm", lambda: _tagger(nn.LSTM)), Survivor("gru", lambda: _tagger(nn.GRU)),
    _listed("unet", 4), _listed("unetplusplus", 2), _listed("transformer", 64),
    _listed("alexnet", 128), _listed("vgg11", 32), _listed("vgg16", 16), _listed("resnet18", 64), _listed("resnet50", 32),
    _listed("mobilenet_v2", 32), _listed("mnasnet0_5", 64), _listed("squeezenet1_0", 64), _listed("r3d_18", 4), _listed("vit_b_16", 16),
    _listed("bert-base", 16), _listed("xlm-roberta-base", 4), _listed("gpt2", 4),
)  # fmt: skip


FIRST = tuple(each for each in NETWORKS if each.name in ("char_gpt", "resnet50", "vit_b_16", "lstm"))  # of what `make gpu` has time for


def part_rows(network: Survivor, ground: Ground) -> Iterator[Row]:
    """The same as a part of `make gpu` tells them, fewer."""
    if not ground.on_gpu:
        yield {"verdict": "left out", "why": "PyTorch's allocator for a CPU has no limit"}
        return
    for row in rows(network, ground, draws=1):
        yield {
            "setting": row["limit"],
            "verdict": row["verdict"],
            "promised_bytes": row.get("promised_bytes"),
            "measured_bytes": row.get("allocated_bytes"),
            "reserved_bytes": row.get("reserved_bytes"),
            "recomputed": row.get("recomputed"),
            "why": row.get("why", f"{row.get('steps')} steps held to {row.get('held_to_bytes')} bytes"),
        }


def rows(
    network: Survivor, ground: Ground, shares: Sequence[int] = SHARES, draws: int = RANDOM_LIMITS, steps: int = STEPS
) -> Iterator[Row]:
    """Those of one network, in this process, which has run nothing yet."""
    work = network.make()
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4, foreach=False)
    planning = lowtide.Planning(progress=False, effort="quick")
    step = lowtide.optimize(work.model, work.batch, loss=work.loss, optimizer=optimizer, memory="100%", planning=planning)
    first = step.plan
    made, least = first.eager_peak_bytes - first.resident_bytes, step.frontier[0].peak_bytes
    drawn = random.Random(network.name)
    limits = [(f"{share}%", first.resident_bytes + share * made // 100) for share in shares]
    limits += [("random", drawn.randint(least, first.eager_peak_bytes)) for _ in range(draws)]
    for limit, limit_bytes in limits:
        optimizer.zero_grad()
        known = {"network": network.name, "limit": limit, "device": ground.name}
        try:
            limited = step.at(limit_bytes)
        except lowtide.BudgetError as error:
            asked, *more = str(error).splitlines()
            yield known | {"verdict": "does not fit", "why": "; ".join([asked, *(line for line in more if line.startswith("beside it"))])}
            continue
        gc.collect()
        yield known | _survived(limited, work, optimizer, steps if limit != "random" else FEWER_STEPS)
        limited.empty_arena()


def _survived(step: Any, work: Workload, optimizer: torch.optim.Optimizer, steps: int) -> Row:
    """What becomes of a process that is held to a step's promise."""
    plan, total = step.plan, torch.cuda.get_device_properties(0).total_memory
    assert plan.reserved_bytes is not None, "the native allocator has its own settings"
    _multiply()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    state = [item for entry in optimizer.state.values() for item in entry.values() if isinstance(item, torch.Tensor) and item.is_cuda]
    kept = sum(each.numel() * each.element_size() for each in (*work.model.parameters(), *work.model.buffers(), *work.batch, *state))
    beside = max(0, torch.cuda.memory_reserved() - kept)  # cuBLAS' workspaces, and what is left of blocks
    held_to = min(total, plan.reserved_bytes + beside + SPARE_BYTES)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(held_to / total)
    known: Row = {"promised_bytes": plan.peak_bytes, "held_to_bytes": held_to, "verdict": "lives", "steps": 0}
    try:
        for turn in range(steps):
            step(*work.batch)
            known["steps"] = turn + 1
            if turn % 10 == 9 and not _fits_between_steps(work, step):
                known |= {"verdict": "evaluation does not fit", "why": f"after step {turn + 1}, nor without lowtide"}
                break
    except (RuntimeError, lowtide.StepError) as error:  # the latter after the loss
        # cuDNN says in other words that a workspace did not fit.
        is_of_memory = isinstance(error, (torch.OutOfMemoryError, lowtide.StepError)) or "cuDNN algorithm" in str(error)
        known |= {"verdict": "out of memory" if is_of_memory else "failed", "why": f"in step {known['steps'] + 1}: {str(error)[-500:]}"}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    report, arena = plan.cost_report, step.arena
    return known | {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "recomputed": 0 if report is None else report.recomputed,
        "served_steps": 0 if arena is None else arena.served_steps,
    }


def _multiply() -> None:
    """Products of both kinds, so that cuBLAS has the workspaces that it keeps."""
    row = torch.zeros(16, 16, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        torch.addmm(row[0], row, row)
        torch.mm(row.float(), row.float())


def _fits_between_steps(work: Workload, step: Any) -> bool:
    """False where it does not fit with nothing of the step's there either. Raises OutOfMemoryError where it does then."""
    try:
        _between_steps(work)
    except RuntimeError as error:
        first = error.with_traceback(None)
    else:
        return True
    step.empty_arena()
    torch.cuda.empty_cache()
    try:
        _between_steps(work)
    except RuntimeError:
        return False
    raise first


def _between_steps(work: Workload) -> None:
    """An evaluation, and what a loop keeps and lets go beside it."""
    work.model.eval()
    with torch.no_grad():
        value = work.loss(work.model, *work.batch)
        kept = [torch.zeros(2**18, device=value.device), value.float().square(), *(item.clone() for item in work.batch)]
    work.model.train()
    del kept


def attempt(name: str, limit_seconds: float) -> list[Row]:
    """One network in a process of its own."""
    command = [sys.executable, "-m", "bench.on_gpu.survival", "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
        said, why = done.stdout, f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:300]}"
        ended = done.returncode == 0
    except subprocess.TimeoutExpired as error:
        said, why, ended = str(error.stdout or b"", "utf-8"), f"no answer in {limit_seconds:.0f} s", False
    found: list[Row] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return found if ended else [*found, {"network": name, "limit": "", "verdict": "dead", "why": why}]


def summary(found: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What the rows come to."""
    notes = []
    for what, chosen in (("shares", lambda row: row["limit"] != "random"), ("random limits", lambda row: row["limit"] == "random")):
        verdicts = Counter(row["verdict"] for row in found if chosen(row))
        notes.append(f"{what}: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.most_common())}")
    first = {row["network"]: row["limit"] for row in reversed(found) if row["verdict"] == "does not fit"}
    if first:
        which = ", ".join(f"{network} from {limit} down" for network, limit in reversed(first.items()))
        notes.append(
            f"less than any plan takes: {which}; mostly one operator takes it at once, as all layers of an LSTM are one of cuDNN's"
        )
    return (*notes, f"{len({row['network'] for row in found})} networks; a process is held to what is promised to be reserved")


SWEEP = Sweep("survival", "Processes held to their limits on a GPU", COLUMNS, [each.name for each in NETWORKS], summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="networks whose name has one of these parts")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    add_options(parser, limit_seconds=1800.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("expected a GPU, or `python -m tests.null_cuda` before this")
    if options.one:
        warnings.simplefilter("ignore")
        torchvision_shim.install()
        for row in rows(next(each for each in NETWORKS if each.name == options.one), Ground.here()):
            print(json.dumps(row), flush=True)
        return
    names = SWEEP.selected(options, lambda name: any(part in name for part in options.only))
    with ThreadPoolExecutor(options.jobs) as pool:
        found = (row for of_one in pool.map(lambda name: attempt(name, options.limit_seconds), names) for row in of_one)
        SWEEP.run(found, save=not options.no_save).print()


if __name__ == "__main__":
    main()
