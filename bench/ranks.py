"""Processes that train together over gloo: DistributedDataParallel, FSDP2, and lowtide without shards and with (ZeRO 1, 2 and 3).

    python -m bench.ranks [--models llama gpt_neo] [--sizes 2 4] [--steps 20]

All ways train in the same processes, one step each in turns, from the same weights on the same batches: two micro-batches a step, and
AdamW. Gradients are clipped by their global norm, but in the ways named "unclipped". Ways "to the bound" have as limit what
DistributedDataParallel takes less what is in shards, and may hold what they have gathered up to that; others take the least. All ways of
this file live in one process, so that the C library may give back pages between their turns; ways "in an arena" keep theirs. A step's
time is from one meeting of all ranks to the next. What a rank holds at the most is what it holds before the step and the step's own
peak, both as the allocator counts them: for PyTorch's own ways from the making of the model on, for lowtide by `step.measure`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import lowtide
from bench.in_values import in_values
from bench.results import Results, with_kept
from lowtide.cost.profiler import measure_memory_of_each

COLUMNS = (
    "model", "ranks", "how", "promised_mib", "measured_mib", "measured_to_promised", "bound_mib", "first_step_s", "step_ms",
    "time_to_ddp", "time_to_fsdp2", "losses_equal", "weights_equal", "largest_difference",
)  # fmt: skip
NOTES = (
    "bound_mib: DistributedDataParallel's peak less what is in shards; times: medians over steps in turns, ratios medians over turns, to "
    "DistributedDataParallel as clipped as the row, and to FSDP2 (one shard a block, not clipped, which takes it less time); "
    "largest_difference: of a loss, over the loss. Of two ranks' sums there is one order, of more there are several",
)
MODELS = ("llama", "gpt_neo")
SHARDS = {
    "lowtide": None,
    "ZeRO 1": "optimizer",
    "ZeRO 2": "gradients",
    "ZeRO 2, unclipped": "gradients",
    "ZeRO 3": "parameters",
    "ZeRO 3, unclipped": "parameters",
    "ZeRO 3 to the bound": "parameters",
    "ZeRO 3 to the bound, unclipped": "parameters",
    "ZeRO 3 to the bound in an arena": "parameters",
    "ZeRO 3 to the bound in an arena, unclipped": "parameters",
}  # by way
EAGER = {"DDP": True, "DDP, unclipped": False}  # whether it clips
FSDP = "FSDP2, unclipped"
WAYS = (*EAGER, FSDP, *SHARDS)
_MICRO, _TOKENS, _VOCABULARY, _LIMIT_S = 2, 64, 2048, 120
_MEASURED = 5  # times: a thread of gloo's that is not scheduled for a while holds on to what was waited for
_WARM = 3  # steps of a way before one is measured
Batch = Mapping[str, torch.Tensor]


@dataclass
class Way:
    """One way to train, on this rank."""

    model: nn.Module
    call: Callable[[Batch], torch.Tensor]  # a whole step: its loss
    step: lowtide.Step | None = None
    weights: list[torch.Tensor] = field(default_factory=list)  # after all steps, of lowtide's ways
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    for size in options.sizes:
        for name in options.models:
            found = on_ranks(name, size, options.steps)
            rows = found if options.no_save else with_kept("ranks", found, ("model", "ranks", "how"))
            results = Results("ranks", "Several processes", COLUMNS, rows, NOTES)
            if not options.no_save:
                results.save()
    results.print()


def on_ranks(name: str, size: int, steps: int) -> list[dict[str, Any]]:
    """The rows of one model on so many ranks, as rank 0 has them."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (name, size, steps, folder), size, start_method="spawn")
        rows: list[dict[str, Any]] = torch.load(Path(folder, "rows"), weights_only=False)
    return rows


def _rank(rank: int, name: str, size: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=_LIMIT_S))
    batches = _batches(rank, steps)
    ways: dict[str, Way] = {}
    peaks_bytes = {how: _eager_peak_bytes(how, name, batches) for how in (*EAGER, FSDP)}
    for how in WAYS:
        ways[how] = _way(how, name, batches[0], peaks_bytes)
    _train(ways, batches)
    for way in ways.values():
        if way.step is not None:
            with way.step.gathered():
                way.weights = [each.detach().clone() for each in way.model.parameters()]
    equal = {how: _equal(way, ways[_reference(how)]) for how, way in ways.items() if how in SHARDS}
    rows = [_row(how, ways, peaks_bytes, batches[0]) | equal.get(how, {}) for how in WAYS]
    if rank == 0:
        torch.save([{"model": name, "ranks": size} | row for row in rows], Path(folder, "rows"))
    dist.barrier()
    dist.destroy_process_group()


def _train(ways: Mapping[str, Way], batches: Sequence[Batch]) -> None:
    """All steps, in turns: every other turn runs backwards."""
    for turn, batch in enumerate(batches):
        for way in list(ways.values())[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            loss = way.call(batch)
            dist.barrier()
            way.times_s.append(time.perf_counter() - begun)
            way.losses.append(loss.item())


def _reference(how: str) -> str:
    """The DistributedDataParallel that a way is compared with."""
    return "DDP, unclipped" if how.endswith("unclipped") else "DDP"


def _equal(way: Way, reference: Way) -> dict[str, Any]:
    pairs = list(zip(way.losses, reference.losses, strict=True))
    wrapped = reference.model.module
    weights = zip(way.weights, wrapped.parameters(), strict=True)  # type: ignore[union-attr, arg-type]
    return {
        "losses_equal": str(all(one == two for one, two in pairs)),
        "weights_equal": str(all(torch.equal(one, two) for one, two in weights)),
        "largest_difference": max(abs(one - two) / abs(two) for one, two in pairs),
    }


def _row(how: str, ways: Mapping[str, Way], peaks_bytes: Mapping[str, int], batch: Batch) -> dict[str, Any]:
    way = ways[how]
    row: dict[str, Any] = {"how": how, "first_step_s": way.times_s[0], "step_ms": 1e3 * statistics.median(way.times_s[_WARM:])}
    row |= {"time_to_ddp": _ratio(way, ways[_reference(how)]), "time_to_fsdp2": _ratio(way, ways[FSDP])}
    if way.step is None:
        return row | {"measured_mib": peaks_bytes[how] / 2**20}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it trains
        measured_bytes = statistics.median(way.step.measure(**batch).peak_bytes for _ in range(_MEASURED))
    promised_bytes, bound_bytes = way.step.plan.peak_bytes, _bound_bytes(how, peaks_bytes, way.weights)
    return row | {
        "promised_mib": promised_bytes / 2**20,
        "measured_mib": measured_bytes / 2**20,
        "measured_to_promised": measured_bytes / promised_bytes,
        "bound_mib": bound_bytes / 2**20,
    }


def _ratio(way: Way, base: Way) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(way.times_s[_WARM:], base.times_s[_WARM:], strict=True))


def _bound_bytes(how: str, peaks_bytes: Mapping[str, int], weights: Iterable[torch.Tensor]) -> float:
    """DistributedDataParallel's peak less what other ranks hold for this one: of AdamW two states a parameter, its gradient, itself."""
    size = dist.get_world_size()
    kinds = {None: 0, "optimizer": 2, "gradients": 3, "parameters": 4}[SHARDS[how]]
    return peaks_bytes[_reference(how)] - kinds * sum(each.nbytes for each in weights) * (1 - 1 / size)


def _eager_peak_bytes(how: str, name: str, batches: Sequence[Batch]) -> int:
    """The most that a way holds in a later step, with all that it has held since its model was made."""
    kept: list[Way] = []
    calls = [lambda: kept.append(_way(how, name, batches[0], {})), *[lambda: kept[0].call(batches[0])] * (_WARM + _MEASURED)]
    taken = measure_memory_of_each(calls)
    kept.clear()
    gc.collect()
    above_bytes = statistics.median(each.above_bytes for each in taken[-_MEASURED:])
    return sum(each.end_bytes for each in taken[:-_MEASURED]) + above_bytes + sum(each.nbytes for each in batches[0].values())


def _way(how: str, name: str, batch: Batch, peaks_bytes: Mapping[str, int]) -> Way:
    model = _model(name)
    if how in SHARDS:
        limit_bytes = int(_bound_bytes(how, peaks_bytes, model.parameters())) if "to the bound" in how else None
        return _lowtide(model, how, batch, limit_bytes)
    if how == FSDP:
        return _fully_sharded(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3, foreach=False)
    return Way(wrapped, lambda batch: _eager(wrapped, optimizer, batch, _syncs_by_context, clips=EAGER[how]))


def _lowtide(model: nn.Module, how: str, batch: Batch, limit_bytes: int | None) -> Way:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    given: dict[str, Any] = {
        "process_group": dist.group.WORLD,
        "shard": SHARDS[how],
        "memory": limit_bytes,
        "arena": "in an arena" in how,
        "accumulate": _MICRO,
        "progress": False,
    }
    after = None if how.endswith("unclipped") else _clip
    step = lowtide.optimize(model, batch, loss=_loss, optimizer=optimizer, **in_values(after_backward=after, **given))

    def call(batch: Batch) -> torch.Tensor:
        found = step(**batch)
        loss: torch.Tensor = found if after is None else found[0]
        return loss

    return Way(model, call, step)


def _fully_sharded(model: nn.Module) -> Way:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return Way(model, lambda batch: _eager(model, optimizer, batch, _syncs_by_setting, clips=False))


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, syncs: Any, *, clips: bool) -> torch.Tensor:
    """Two micro-batches, of which the first waits for the other's sums."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for number in range(_MICRO):
        part = {key: each.chunk(_MICRO)[number] for key, each in batch.items()}
        with syncs(model, number == _MICRO - 1):
            loss = _loss(model, **part) / _MICRO
            loss.backward()
        total = loss.detach() + total if number else loss.detach()
    if clips:
        _clip(model)
    optimizer.step()
    return total


def _syncs_by_setting(model: Any, syncs: bool) -> Any:
    model.set_requires_gradient_sync(syncs)
    return nullcontext()


def _syncs_by_context(model: Any, syncs: bool) -> Any:
    return nullcontext() if syncs else model.no_sync()


def _loss(model: Any, **batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)


def _model(name: str) -> nn.Module:
    from bench import torchvision_shim

    torchvision_shim.install()
    from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": _VOCABULARY, "hidden_size": 256, "intermediate_size": 688, "use_cache": False}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, num_attention_heads=4, **sizes)).train()
    kinds = [[["global", "local"], 2]]
    config = GPTNeoConfig(num_layers=4, num_heads=4, attention_types=kinds, max_position_embeddings=_TOKENS, window_size=32, **sizes)
    config.bos_token_id = config.eos_token_id = None  # the vocabulary has none
    config.resid_dropout = config.embed_dropout = config.attention_dropout = 0.0
    return GPTNeoForCausalLM(config).train()


def _blocks(model: Any) -> Any:
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def _batches(rank: int, steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank + 1)
    drawn = [torch.randint(_VOCABULARY, (2 * _MICRO, _TOKENS), generator=generator) for _ in range(steps)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


if __name__ == "__main__":
    main()
