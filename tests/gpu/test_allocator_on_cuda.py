"""What PyTorch lets a program see and do with its CUDA allocator, with the planned one before it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

import lowtide
from lowtide.api import step_memory
from lowtide.base.files import directory
from lowtide.cuda import native as cuda_native
from lowtide.runtime.arena.allocator import OUTLIVES, Allocator, ArenaMemory, Script
from lowtide.runtime.libraries import once

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
MIB = 2**20
_SIZES, _OFFSETS = np.array([2 * MIB, MIB, 4 * MIB]), np.array([0, 2 * MIB, OUTLIVES])


class _Steps:
    """An arena of 24 MiB, and steps that ask for two blocks of it and for one that outlives them."""

    def __init__(self) -> None:
        self.allocator = Allocator(cuda_native.load(directory()), on_gpu=True)
        self.script = Script(self.allocator, _SIZES, _OFFSETS)
        self.arena = ArenaMemory(self.allocator, 24 * MIB)

    def run(self, meanwhile: Callable[[list[torch.Tensor]], object]) -> None:
        def step() -> None:
            meanwhile([_bytes(int(size)) for size in _SIZES])

        counts = self.allocator.serve(self.arena, self.script, step)[1]
        assert (counts.served, counts.outliving) == (2, 1)


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cuda")


@pytest.fixture
def steps() -> Iterator[_Steps]:
    gc.collect()
    torch.cuda.empty_cache()
    yield _Steps()
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.set_per_process_memory_fraction(1.0)


def _hold_to(nbytes: int) -> None:
    """The process has so many bytes beside what it has reserved."""
    limit = torch.cuda.memory_reserved() + nbytes
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)


def test_a_tensor_is_shared_by_its_segment_and_its_place_in_it(steps):
    """Another process opens the whole segment that the device gave, and looks for the tensor at an offset."""
    before, kept = _bytes(MIB), []
    steps.run(kept.extend)
    segments = torch.cuda.memory_snapshot()
    assert steps.arena.holds(kept[1].data_ptr())
    for tensor in (before, *kept, _bytes(MIB)):
        address = tensor.data_ptr()
        (base,) = [each["address"] for each in segments if each["address"] <= address < each["address"] + each["total_size"]]
        _, (*_, offset, _needs_grad, _counter, _counter_at, _event, _waits) = reduce_tensor(tensor)
        assert base + offset == address
    del kept[:], tensor
    assert steps.arena.live == 2  # the other process may still read them


def test_a_snapshot_within_a_step_has_the_arena_as_one_block(steps):
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1000)
    seen = []
    steps.run(lambda tensors: seen.append((torch.cuda.memory._snapshot(), [each.data_ptr() for each in tensors])))
    (snapshot, (first, second, outlives)) = seen[0]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"]
    (whole,) = [each for each in blocks if each["address"] <= first < each["address"] + each["size"]]
    assert whole["address"] <= second < whole["address"] + whole["size"]
    assert whole["size"] == 24 * MIB
    made = {each["addr"] for each in snapshot["device_traces"][0] if each["action"] == "alloc"}
    assert made == {outlives}


def test_an_observer_hears_that_memory_ran_out_within_a_step_and_nothing_where_an_idle_arena_made_room(steps):
    heard: list[int] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda device, asked, *rest: heard.append(asked))
    _hold_to(24 * MIB)

    def ask_for_too_much(tensors: list[torch.Tensor]) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            _bytes(96 * MIB)

    steps.run(ask_for_too_much)
    assert heard == [96 * MIB]
    assert _bytes(40 * MIB).is_cuda
    assert not steps.arena.is_there
    assert heard == [96 * MIB]


def test_a_tensor_that_another_stream_uses_is_kept_until_it_is_done(steps):
    side, kept = torch.cuda.Stream(), []
    for make in (lambda: steps.run(kept.extend), lambda: kept.append(_bytes(MIB))):
        make()
        last, active = kept.pop(), torch.cuda.memory_stats()["active_bytes.all.current"]
        last.record_stream(side)
        del last
        assert torch.cuda.memory_stats()["active_bytes.all.current"] == active


def test_an_emptied_cache_leaves_an_arena_where_it_is(steps):
    kept: list[torch.Tensor] = []
    steps.run(lambda tensors: (torch.cuda.empty_cache(), kept.append(tensors[0])))
    torch.cuda.empty_cache()
    assert steps.arena.is_there
    assert steps.arena.holds(kept.pop().data_ptr())
    steps.run(lambda tensors: torch.cuda.empty_cache())
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    del steps.arena
    torch.cuda.empty_cache()
    assert reserved - torch.cuda.memory_reserved() == 24 * MIB


def test_statistics_count_an_arena_once(steps):
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    steps.run(lambda tensors: None)
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"] == 4 * MIB  # what outlives a step
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] == 1
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert (after["num_alloc_retries"], after["num_ooms"]) == (before["num_alloc_retries"], before["num_ooms"])


def test_memory_of_both_is_let_go_by_one_deleter(steps):
    """Of a tensor of another deleter the graphs of torch.compile believe that it lies in no pool of theirs, and leave it there."""
    kept = [_bytes(MIB)]
    steps.run(kept.extend)
    assert {torch._C._has_Standard_Deleter(each.untyped_storage()._cdata) for each in kept} == {True}


@pytest.mark.parametrize(
    ("compiler", "head", "why"),
    [
        ("no-compiler", "class CUDAAllocator : public", "no-compiler.* does not run"),
        ("", "class OfAnotherTorch : public", "torch's headers are not as expected .*OfAnotherTorch"),
    ],
)
def test_where_it_cannot_be_built_it_is_said_and_steps_run_in_pytorchs_memory(compiler, head, why, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(cuda_native, "_CLASSES", (("c10/cuda/CUDACachingAllocator.h", head),))
    monkeypatch.setattr(cuda_native, "load", once(cuda_native.load.__wrapped__))  # as in a process that has loaded none
    monkeypatch.setattr(step_memory, "directory", lambda: tmp_path)
    step_memory._warn.cache_clear()
    model, x = torch.nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    with pytest.warns(UserWarning, match=f"lowtide runs without an arena: .*{why}"):
        step = lowtide.optimize(model, x, run=lowtide.Run(arena="always"))
    assert [step(x).shape for _ in range(3)] == [x.shape] * 3
    assert step.arena.served_steps == 0
    step_memory._warn.cache_clear()
