"""Several processes train one model: equal to DistributedDataParallel to the last bit, by one plan, and all of them end where one does."""

from __future__ import annotations

import datetime
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from bench.in_values import in_values
from tests.ranks import on_ranks, raised


class Scale(nn.Module):
    """A parameter of no dimension, as models of pictures and texts have."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    ends = nn.Flatten(), nn.Linear(8 * 36, 50), nn.Linear(50, 10), Scale()
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), *ends
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def entropy(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(pixels), labels)


def clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)


def batches(seed: int, count: int = 20, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pixels = [torch.randn(size, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last) for _ in range(count)]
    return [(each, torch.randint(0, 10, (size,), generator=generator)) for each in pixels]


def plain_loop(model: Any, optimizer: Any, data: Any) -> list[Any]:
    """Two micro-batches a step, the first without a sum over ranks."""
    found = []
    for pixels, labels in data:
        optimizer.zero_grad()
        (first, second), (ones, twos) = pixels.chunk(2), labels.chunk(2)
        with model.no_sync():
            one = entropy(model, first, ones) / 2
            one.backward()
        two = entropy(model, second, twos) / 2
        two.backward()
        norm = clip(model)
        optimizer.step()
        found.append(((one + two).item(), norm.item()))
    return found


def equal_to_the_plain_loop(wrapped: bool, shard: str | None = None) -> tuple[bool, bool]:
    """Whether losses, norms, weights and statistics are DistributedDataParallel's after 20 steps; and another optimizer state's step."""
    rank = dist.get_rank()
    eager, model = DistributedDataParallel(network(rank)), network(rank)
    data = batches(rank + 10)
    given = DistributedDataParallel(model, bucket_cap_mb=0.02) if wrapped else model
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, foreach=False) for each in (eager, model)]
    group = None if wrapped else dist.group.WORLD
    step = lowtide.optimize(
        given,
        data[0],
        loss=entropy,
        optimizer=optimizers[1],
        training=lowtide.Training(after_backward=clip, accumulate=2),
        parallel=lowtide.Parallel(group=group, shard=shard),
        planning=lowtide.Planning(workspaces=wrapped),
    )
    torch.manual_seed(rank)
    expected = plain_loop(eager, optimizers[0], data)
    torch.manual_seed(rank)
    got = [tuple(each.item() for each in step(*batch)) for batch in data]
    lowtide.Plan.from_json(step.plan.to_json())
    with step.gathered():
        pairs = zip(eager.module.state_dict().values(), model.state_dict().values(), strict=True)
        return got == expected, all(torch.equal(one, two) for one, two in pairs)


def in_shards(shard: str, optimizer: Any) -> tuple[bool, bool, float, float]:
    """Whether losses and weights are those without shards; the peak without and with, and what was measured, by what was promised."""
    rank, data, found = dist.get_rank(), batches(dist.get_rank() + 10, 4), []
    for given in (None, shard):
        model = network(0)
        step = lowtide.optimize(
            model,
            data[0],
            loss=entropy,
            optimizer=optimizer(model.parameters()),
            parallel=lowtide.Parallel(group=dist.group.WORLD, shard=given),
            run=lowtide.Run(check="never"),  # `equal_to_the_plain_loop` has it
        )
        torch.manual_seed(rank)
        losses = [step(*batch).item() for batch in data]
        with step.gathered():
            weights = [parameter.detach().clone() for parameter in model.parameters()]
        found.append((losses, weights, step.plan.peak_bytes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A thread of gloo's that is not scheduled for a while holds on to a bucket after it was waited for.
        measured_bytes = min(step.measure(*data[0]).peak_bytes for _ in range(4))
    (losses, weights, peak_bytes), (others, sharded, promised_bytes) = found
    return losses == others, all(map(torch.equal, weights, sharded)), promised_bytes / peak_bytes, measured_bytes / promised_bytes


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def refusals() -> list[str]:
    """What is raised here where one rank is unlike the other."""
    rank = dist.get_rank()

    def optimized(model: nn.Module, batch: Any, loss: Any = entropy, **more: Any) -> lowtide.Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = None if isinstance(model, DistributedDataParallel) else dist.group.WORLD
        return lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, **in_values(process_group=group, workspaces=False, **more))

    def whole(model: nn.Module) -> lowtide.Step:
        optimizer = torch.optim.Adafactor(model.parameters())
        return lowtide.optimize(
            model, batch, loss=entropy, optimizer=optimizer, parallel=lowtide.Parallel(group=dist.group.WORLD, shard="optimizer")
        )

    def fails(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise ValueError("no such label")
        return entropy(model, pixels, labels)

    (batch,), (larger,) = batches(rank, 1), batches(rank, 1, size=6)
    other = network(0)
    if rank == 1:
        other[2] = nn.GELU()
    found = [
        raised(lambda: optimized(network(0), larger if rank else batch)),
        raised(lambda: optimized(other, batch)),
        raised(lambda: optimized(network(0), batch, fails)),
        raised(lambda: optimized(network(0), batch, memory=1000)),
        raised(lambda: optimized(nn.SyncBatchNorm.convert_sync_batchnorm(network(0)), batch)),
    ]
    step = optimized(network(0), batch)
    step(*batch)
    found += [raised(lambda: step(*(larger if rank else batch))), raised(lambda: step("no batch") if rank else step(*batch))]
    found.append(raised(lambda: whole(network(0))))
    found += around_the_step(optimized, batch)
    step(*larger)  # on all ranks: they have a program for that together
    return [*found, raised(lambda: step(*batch)), raised(lambda: step.verify(*batch))]


def around_the_step(optimized: Any, batch: Any) -> list[str]:
    """What is raised where a wrapper is in the middle of what a step would not do, or parameters lie on several devices."""
    model = DistributedDataParallel(network(0))

    def without_sums(model: Any, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with model.no_sync():
            return entropy(model, pixels, labels)

    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    step = optimized(model, batch)
    with model.no_sync():
        unsummed = raised(lambda: step(*batch))
    with model.join():
        uneven = raised(lambda: step(*batch))
    refused = raised(lambda: optimized(model, batch, without_sums))
    return [unsummed, uneven, refused, raised(lambda: optimized(sharded, batch))]


def whole_again() -> list[Any]:
    """A model in shards, with a frozen layer and odd sizes: what is whole when, and what is told where it should not be."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7).requires_grad_(False), nn.Tanh(), nn.Linear(7, 3))
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def optimized(**more: Any) -> lowtide.Step:
        given = {"process_group": dist.group.WORLD, "shard": "parameters", "workspaces": False}
        return lowtide.optimize(model, torch.ones(4, 5), loss=_sum, optimizer=optimizer, **in_values(**{**given, **more}))

    def writes(model: nn.Module) -> None:
        model[0].weight.mul_(2)

    over = raised(lambda: optimized(memory=10))
    written = raised(lambda: optimized(after_backward=writes))
    as_before = [each.shape for each in model.parameters()] == [each.shape for each in before]
    step = optimized()
    parts = [tuple(each.shape) for each in model.parameters()]
    step(torch.ones(4, 5))
    step(torch.ones(3, 5))  # of another shape: captured while parameters are in shards
    other = raised(lambda: optimized(shard="gradients"))
    with step.gathered():
        frozen = all(map(torch.equal, (before[2], before[3]), model[1].parameters()))
        within = raised(lambda: step(torch.ones(4, 5)))
        with torch.no_grad():
            model[3].bias.fill_(rank)
    with step.gathered():
        bias, expected = model[3].bias.tolist(), _sum(model, torch.ones(4, 5)).item()
    equal = optimized()(torch.ones(4, 5)).item() == expected
    apart = raised(lambda: step(torch.ones(4, 5)) if rank else step.gathered())
    return [as_before, parts, frozen, bias, equal, over, written, other, within, apart]


def trained_together() -> Any:
    sharded = [in_shards(shard, adam) for shard in ("optimizer", "gradients", "parameters")]
    equal = [equal_to_the_plain_loop(True), equal_to_the_plain_loop(True, "gradients"), equal_to_the_plain_loop(False, "parameters")]
    return equal, sharded, refusals()


def checkpointed(path: str) -> list[Any]:
    """What four steps give, saved after two with parameters in shards, and loaded for the last two in four ways."""
    rank = dist.get_rank()
    data = batches(rank + 10, 4)

    def made(shard: str | None) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        model = network(0)
        optimizer = adam(model.parameters())
        given = {"process_group": dist.group.WORLD, "shard": shard, "workspaces": False}
        return lowtide.optimize(model, data[0], loss=entropy, optimizer=optimizer, **in_values(**given)), model, optimizer

    def last_two(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
        torch.manual_seed(rank)
        losses = [step(*batch).item() for batch in data[2:]]
        with step.gathered():
            weights = [parameter.detach().clone() for parameter in model.parameters()]
        return losses, *weights, model[1].running_mean, optimizer.param_groups[0]["lr"]

    first = made("parameters")
    for batch in data[:2]:
        first[0](*batch)
    first[2].param_groups[0]["lr"] = 0.003
    first[0].save_checkpoint(path)
    found = [last_two(*first)]
    for shard in ("gradients", "parameters", None):
        again = made(shard)
        again[0].load_checkpoint(path)
        found.append(last_two(*again))
    return found


class Words(nn.Module):
    """Reads whether there is padding, as transformers does, and fails of a word that is not among its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = self.words(tokens)
        return found.square().mean() if mask.all() else (found * mask[..., None]).square().mean()


def of_other_data() -> list[str]:
    """What is raised where ranks read otherwise from their data, and where the data of one make it fail within a step."""
    rank = dist.get_rank()
    tokens, full, padded = torch.arange(6).view(2, 3), torch.ones(2, 3), torch.ones(2, 3).tril()
    short = dist.new_group(timeout=datetime.timedelta(seconds=4))

    def optimized(mask: torch.Tensor, group: Any = dist.group.WORLD) -> lowtide.Step:
        optimizer, given = torch.optim.SGD(model.parameters(), lr=0.1), {"process_group": group, "workspaces": False}
        return lowtide.optimize(model, (tokens, mask), loss=lambda model, *batch: model(*batch), optimizer=optimizer, **in_values(**given))

    model = Words()
    found = [raised(lambda: optimized(full if rank else padded))]
    step = optimized(padded)
    found.append(raised(lambda: step(tokens, full if rank else padded)))
    for mask in (padded, full, padded):  # there is a program for each, on all ranks
        step(tokens, mask)
    found.append(raised(lambda: step(tokens, full if rank else padded)))
    step = optimized(padded, short)
    found.append(raised(lambda: step(tokens + 5 * rank, padded)))
    found.append(raised(lambda: step(tokens, padded)))
    own = [dist.new_group([each]) for each in (0, 1)][rank]
    linear = nn.Linear(3, 2)
    expected, optimizer = _sum(linear, full).item(), torch.optim.SGD(linear.parameters(), lr=0.1)
    given = {"process_group": own, "shard": "parameters", "workspaces": False}
    alone = lowtide.optimize(linear, full, loss=_sum, optimizer=optimizer, **in_values(**given))(full).item() == expected
    assert alone, "a group of one holds all parts"
    weight = nn.Linear(2, 2, dtype=torch.complex64)
    found.append(
        raised(
            lambda: lowtide.optimize(
                weight,
                torch.ones(2, 2, dtype=torch.complex64),
                loss=lambda model, x: model(x).abs().sum(),
                optimizer=torch.optim.SGD(weight.parameters(), lr=0.1),
                parallel=lowtide.Parallel(group=dist.group.WORLD, shard="gradients"),
                planning=lowtide.Planning(workspaces=False),
            )
        )
    )
    words = nn.Embedding(8, 4, max_norm=1.0)
    found.append(
        raised(
            lambda: lowtide.optimize(
                words,
                tokens,
                loss=_sum,
                optimizer=torch.optim.SGD(words.parameters(), lr=0.1),
                parallel=lowtide.Parallel(group=dist.group.WORLD, shard="optimizer"),
                planning=lowtide.Planning(workspaces=False),
            )
        )
    )
    model.register_buffer("short", torch.zeros(3, dtype=torch.int16))
    return [*found, raised(lambda: optimized(padded))]


def left_alone() -> str:
    """What a rank is told whose peer dies."""
    batch = batches(0, 1)[0]
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lowtide.optimize(model, batch, loss=entropy, optimizer=optimizer, parallel=lowtide.Parallel(group=dist.group.WORLD))
    step(*batch)
    if dist.get_rank() == 1:
        os._exit(0)
    return raised(lambda: step(*batch))


def test_two_processes(tmp_path: Path):
    programs = trained_together, whole_again, partial(checkpointed, str(tmp_path / "saved")), of_other_data, left_alone
    trained, whole, checkpoints, unlike, alone = on_ranks(*programs)
    for rank, (captured, called, known, failed, refused, of_complex, written, short) in enumerate(unlike):
        for text in (captured, called, known):
            assert "test_ranks.py" in text, "the line that reads"
            assert "pad all batches, or none" in text
        assert "on rank 0 aten._local_scalar_dense" in captured
        assert "rank 1 a new program for a batch of [2, 3], [2, 3] (aten" in called
        assert "rank 0 is about to run program 0.0" in known
        assert "rank 1 program 1.0" in known
        assert failed.startswith("IndexError" if rank else "StepError: another rank does not answer")
        assert short.startswith("CaptureError: a buffer of torch.int16 cannot be sent by gloo")
        assert "the forward pass writes weight (as an embedding with max_norm does)" in written
        assert "gradients of complex numbers cannot be exchanged" in of_complex
        assert ("this rank failed within an earlier step" if rank else "another rank does not answer") in refused
    for as_before, parts, frozen, bias, equal, over, written, other, within, apart in whole:
        assert as_before, "a failure leaves parameters whole"
        assert parts == [(18,), (4,), (25,), (4,), (11,), (2,)]
        assert (frozen, bias, equal) == (True, [0, 0, 1], True), "each rank keeps its own part of what it has written"
        assert over.startswith("BudgetError")
        assert "writes a tensor of which each rank holds a part" in written
        assert '0.weight is in shards of a step with shard="parameters"' in other
        assert "0.weight is whole, and the step is for parameters in shards: call it outside" in within
        assert "rank 0 is about to run step.gathered(), rank 1 program" in apart
    assert alone[0].startswith("StepError: another rank does not answer"), "it died"
    for rank, (equal, sharded, refused) in enumerate(trained):
        assert equal == 3 * [(True, True)]
        for equal_losses, equal_weights, less, exact in sharded:
            assert (equal_losses, equal_weights) == (True, True)
            assert less < 0.95
            assert exact == pytest.approx(1, abs=0.02)
        shape, operator, failure, limit, layers, reshaped, malformed, whole, *around, goes_on, verified = refused
        unsummed, uneven, unsummed_within, spread = around
        assert unsummed.startswith("StepError: within `no_sync` ranks would update by gradients of their own")
        assert unsummed_within.startswith("CaptureError: within `no_sync`")
        assert uneven.startswith("StepError: within `join`")
        assert spread.startswith("CaptureError: weight is a DTensor")
        assert "give the plain module, before it is sharded, with lowtide.Parallel(group=..., shard=...)" in spread
        assert "Adafactor computes with whole parameters" in whole
        assert shape.startswith("CaptureError: the program is not the same on all ranks: rank 0 has 'batch_0,  # float32[4, 3, 8, 8]")
        assert "rank 0 has 'relu = aten.relu.default" in operator
        assert "where rank 1 has 'gelu = aten.gelu.default" in operator
        assert failure.startswith("StepError: rank 1 failed" if rank == 0 else "CaptureError")
        assert "no such label" in failure
        assert limit.startswith("BudgetError")
        assert "SyncBatchNorm" in layers
        assert "rank 0 is about to run program 0.0 for a batch of [4, 3, 8, 8], [4], rank 1 a new program for a batch of [6" in reshaped
        assert malformed.startswith("StepError: rank 1 failed" if rank == 0 else "BatchError")
        assert goes_on == "nothing"
        assert verified.startswith("StepError: verify")

    for found in checkpoints:
        for losses, *tensors, rate in found[1:]:
            assert (losses, rate) == (found[0][0], 0.003)
            assert all(map(torch.equal, tensors, found[0][1:-1]))
    alone_again(tmp_path / "saved")


def alone_again(path: Path) -> None:
    """One process loads what two have saved, in shards of its state."""
    model = network(0)
    optimizer = adam(model.parameters())
    step = lowtide.optimize(model, batches(0, 1)[0], loss=entropy, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    step.load_checkpoint(path)
    assert optimizer.state[model[5].weight]["exp_avg"].shape == model[5].weight.shape
    assert optimizer.state[model[5].weight]["step"].item() == 2
    step.save_checkpoint(path.parent / "again")
    other = nn.Linear(2, 2)
    step = lowtide.optimize(
        other, torch.ones(2, 2), loss=_sum, optimizer=adam(other.parameters()), planning=lowtide.Planning(workspaces=False)
    )
    with pytest.raises(lowtide.FormatError, match=r"expected a checkpoint of this model and optimizer; it has no model\.bias"):
        step.load_checkpoint(path.parent / "again")


def _sum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def test_what_several_processes_cannot_do_is_refused_before_they_meet():
    plain = network(0)
    for given, sentence in (
        ({"dynamic": "auto"}, "dynamic: several"),
        ({"on_new_shape": "eager"}, "on one process"),
        ({"shard": "weights"}, "shard: expected one of 'optimizer', 'gradients', 'parameters' or None"),
        ({"shard": "parameters", "process_group": None}, "shard: expected several processes"),
        ({"shard": "optimizer", "process_group": None}, "shard: expected several processes"),
        ({"loss": None, "optimizer": None}, "each process runs by itself"),
        ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "group: expected a group .* that this process is in, got -100"),
    ):
        arguments = {"loss": entropy, "optimizer": torch.optim.SGD(plain.parameters()), "process_group": _Group()} | given
        with pytest.raises((lowtide.CaptureError, ValueError), match=sentence):
            lowtide.optimize(plain, batches(0, 1)[0], **in_values(**arguments))


class _Group:
    """As much of a process group as is looked at before anything is sent."""

    group_name = "none"

    def size(self) -> int:
        return 2
