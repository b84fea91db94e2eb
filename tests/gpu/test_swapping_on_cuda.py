"""Tensors that go to the host and back on a GPU: equal to eager bit for bit, within the promise, and beside the operators."""

from __future__ import annotations

import gc
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from bench.in_values import in_values
from bench.models.char_gpt import VOCABULARY, CharGPT, Shape
from lowtide.cost.profiler import measure_memory
from lowtide.planning import machine
from lowtide.runtime.copies import CudaStreams, StreamedMemory, host_memory
from lowtide.schedule import ProgramOrder
from tests.gpu.conftest import NULL
from tests.swapping import idle_bytes, random_sequence, swapping

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
DEVICE = "cuda"
LARGE_BYTES = 256 * 2**20


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def _convnet():
    torch.manual_seed(0)
    layers = [each for width in (3, 64, 64) for each in (nn.Conv2d(width, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)).to(DEVICE)
    batch = torch.randn(16, 3, 64, 64, device=DEVICE), torch.randint(0, 10, (16,), device=DEVICE)
    return model, batch, lambda model, x, y: F.cross_entropy(model(x), y)


def _gpt():
    torch.manual_seed(0)
    model = CharGPT(Shape(blocks=4, width=256, heads=4, length=128, dropout=0.1)).to(DEVICE)
    batch = torch.randint(0, VOCABULARY, (2, 16, 128), device=DEVICE).unbind(0)
    return model, batch, lambda model, x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def _after_eager_steps(workload, steps):
    model, batch, loss = workload()
    optimizer = _adamw(model)
    for turn in range(steps):
        torch.manual_seed(turn)
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()
    return model.state_dict()


def _assert_trains_like_eager(workload, **options):
    model, batch, loss = workload()
    step = lowtide.optimize(model, batch, loss=loss, optimizer=_adamw(model), **in_values(**options))
    for turn in range(4):
        torch.manual_seed(turn)
        step(*batch)
    for (name, want), got in zip(_after_eager_steps(workload, 4).items(), model.state_dict().values(), strict=True):
        assert NULL or torch.equal(want, got), name
    return step, batch


@pytest.mark.parametrize("workload", [_convnet, _gpt])
@pytest.mark.parametrize("seed", range(4))
def test_random_swaps_change_no_number(workload, seed, monkeypatch):
    written = []
    monkeypatch.setattr(machine, "equal_graphs", swapping(lambda graph: random_sequence(graph, random.Random(seed), 0.05, 0.05), written))
    step, _ = _assert_trains_like_eager(workload, workspaces=False, solver=ProgramOrder())
    assert "host.store(" in step.source
    assert min(len(each.transfers) for each in written) > 20


@pytest.mark.parametrize("workload", [_convnet, _gpt])
@pytest.mark.parametrize("share", ["80%", "60%", "45%"])
def test_a_limit_is_kept_and_changes_no_number(workload, share):
    step, batch = _assert_trains_like_eager(workload, memory=share)
    promised = step.plan.peak_bytes - step.plan.resident_bytes
    measured = measure_memory(lambda: step(*batch), DEVICE).above_bytes
    assert measured <= promised + max(0.01 * promised, 2**20)


@pytest.mark.computes
def test_a_storage_survives_the_way_while_its_memory_is_wanted_by_others():
    """Kernels write to whatever memory becomes free as soon as it does; none of it may be what a copy still reads or fills."""
    memory = host_memory(DEVICE)
    expected, kept = [], []
    with memory.transfers() as transfers:
        for turn in range(40):
            tensor = torch.full((2**20,), float(turn), device=DEVICE)
            copy = transfers.store(tensor)
            transfers.drop(tensor, copy)
            del tensor
            torch.full((2**20,), -1.0, device=DEVICE)  # most likely in the same memory
            kept.append(copy)
            expected.append(float(turn))
        for copy, number in zip(kept, expected, strict=True):
            torch.full((2**20,), -2.0, device=DEVICE)
            back = transfers.load(copy)
            transfers.arrived(back)
            assert back.min().item() == back.max().item() == number
            del back


def test_pinned_memory_is_the_same_in_every_step(monkeypatch):
    monkeypatch.setattr(machine, "equal_graphs", swapping(lambda graph: random_sequence(graph, random.Random(0), 0.0, 0.05), []))
    model, batch, loss = _gpt()
    step = lowtide.optimize(
        model, batch, loss=loss, optimizer=_adamw(model), planning=lowtide.Planning(workspaces=False, solver=ProgramOrder())
    )
    memory = host_memory(f"{DEVICE}:{torch.cuda.current_device()}")
    assert isinstance(memory, StreamedMemory)
    kept = []
    for _ in range(4):
        step(*batch)
        torch.cuda.synchronize()
        kept.append(idle_bytes(memory))
    assert kept[1] == kept[2] == kept[3] > 0


@pytest.mark.computes
def test_copies_run_beside_operators():
    memory = host_memory(DEVICE)
    matrix, moved = torch.randn(2048, 2048, device=DEVICE), torch.empty(LARGE_BYTES, dtype=torch.uint8, device=DEVICE)

    def compute(count):
        for _ in range(count):
            matrix @ matrix

    def copy_beside(count):
        with memory.transfers() as transfers:
            copy = transfers.store(moved)
            back = transfers.load(copy)
            compute(count)
            transfers.drop(moved, copy)
            transfers.arrived(back)

    apart = _median_ms(lambda: copy_beside(0))
    count = max(1, round(10 * apart / _median_ms(lambda: compute(10))))  # operators that take about as long
    alone, together = _median_ms(lambda: compute(count)), _median_ms(lambda: copy_beside(count))
    assert together < 0.8 * (alone + apart)


def _median_ms(call):
    call()  # the first time, memory is pinned
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


@pytest.mark.parametrize("workload", [_convnet, _gpt])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_lent_changes_no_number(workload, seed, monkeypatch):
    sequence = partial(random_sequence, rng=random.Random(seed), again=0.02, away=0.05, swap_state=True)
    monkeypatch.setattr(machine, "equal_graphs", swapping(sequence, []))
    step, _ = _assert_trains_like_eager(workload, workspaces=False, solver=ProgramOrder())
    assert "host.empty(" in step.source


def test_parameters_and_optimizer_state_make_room(monkeypatch):
    step, batch = _assert_trains_like_eager(_gpt, memory="60%", state="swap")
    assert step.measure(*batch).peak_bytes <= 1.01 * step.plan.peak_bytes + 2**21  # an arena takes whole segments


def _rows(**settings):
    model = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(256, 256), nn.GELU())]).to(DEVICE)
    batch = (torch.randn(64, 256, device=DEVICE),)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **settings)
    return model, batch, {"loss": lambda model, x: model(x).square().mean(), "optimizer": optimizer}


def _captured(step, batch):
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(*batch)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        batch[0].add(1)
        step(*batch)
    return graph


def test_a_captured_step_swaps_by_streams_and_buffers_of_its_own(monkeypatch):
    """It waits for nothing that was begun before, and nobody else's copies go where its replays' do."""
    monkeypatch.setattr(machine, "equal_graphs", swapping(lambda graph: random_sequence(graph, random.Random(0), 0.0, 0.3), []))
    model, batch, options = _rows(capturable=True)
    step = lowtide.optimize(model, batch, **options, planning=lowtide.Planning(workspaces=False, solver=ProgramOrder()))
    memory = host_memory(f"{DEVICE}:{torch.cuda.current_device()}")
    graph = _captured(step, batch)
    kept = idle_bytes(memory)
    graph.replay()
    step(*batch)
    assert "host.store(" in step.source
    assert idle_bytes(memory) == kept > 0


@pytest.mark.parametrize(
    ("capturable", "settings", "why"),
    [
        (False, {}, "on the host.*capturable=True"),
        (True, {"memory": "75%", "state": "swap", "effort": "quick"}, "lies elsewhere afterwards"),
    ],
    ids=["a count on the host", "lent state"],
)
def test_what_replays_would_not_do_is_not_captured(capturable, settings, why):
    model, batch, options = _rows(capturable=capturable)
    step = lowtide.optimize(model, batch, **in_values(**options, **settings))
    assert ("host.empty(" in step.source) == bool(settings)
    with pytest.raises(lowtide.StepError, match=why):
        _captured(step, batch)
    step(*batch)


@pytest.mark.parametrize("lend", [False, True])
def test_what_is_pinned_is_what_was_promised(lend, monkeypatch):
    """By the buffers of the step, and by PyTorch's own allocator of pinned memory."""
    sequence = partial(random_sequence, rng=random.Random(7), again=0.0, away=0.05, swap_state=lend)
    monkeypatch.setattr(machine, "equal_graphs", swapping(sequence, []))
    gc.collect()  # what other steps have pinned goes with them
    torch.accelerator.empty_host_cache()
    allocated = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    step, batch = _assert_trains_like_eager(_gpt, workspaces=False, solver=ProgramOrder())
    assert step.measure(*batch).pinned_bytes == step.plan.pinned_bytes == step.plan.measured_pinned_bytes > 0
    memory = host_memory(f"{DEVICE}:{torch.cuda.current_device()}")
    assert isinstance(memory, StreamedMemory)
    assert memory.pinned_bytes >= step.plan.pinned_bytes  # the first step has a plan of its own
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - allocated == memory.pinned_bytes


def test_buffers_that_others_have_left_go_where_a_limit_has_no_room_for_them():
    memory = StreamedMemory(CudaStreams(torch.device(DEVICE)))
    torch.accelerator.empty_host_cache()
    allocated = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    for mib, most_mib in ((8, None), (4, None), (2, 8), (1, 3), (4, None)):
        with memory.transfers(None if most_mib is None else most_mib * 2**20) as transfers:
            tensor = torch.empty(mib * 2**20, dtype=torch.uint8, device=DEVICE)
            transfers.drop(tensor, transfers.store(tensor))
        assert memory.taken_bytes == mib * 2**20
        assert most_mib is None or memory.pinned_bytes <= most_mib * 2**20
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - allocated == memory.pinned_bytes


BETWEEN = lowtide.Run(state="host")


@pytest.mark.parametrize("limit", [None, "45%"])
def test_state_lies_pinned_on_the_host_between_steps_as_promised(limit):
    gc.collect()
    torch.accelerator.empty_host_cache()
    allocated = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    model, batch, loss = _gpt()
    optimizer = _adamw(model)
    memory = None if limit is None else {"cuda": limit, "host": "64MiB"}
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, memory=memory, run=BETWEEN)
    for _ in range(2):
        step(*batch)
    large = [item for entries in optimizer.state.values() for item in entries.values() if item.nbytes >= 2**16]
    assert len(large) > 10
    assert all(item.is_pinned() for item in large)
    measured = step.measure(*batch)
    assert measured.pinned_bytes == step.plan.pinned_bytes >= sum(item.nbytes for item in large)
    assert measured.peak_bytes <= 1.01 * step.plan.peak_bytes + 2**21
    if limit is None:  # else the first step's plan has buffers, too
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - allocated == step.plan.pinned_bytes
    resident = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert step.plan.resident_bytes < 1.2 * resident  # where AdamW's would be three times that


def test_state_between_steps_comes_to_the_device_and_goes_home_again():
    model, batch, loss = _gpt()
    optimizer = _adamw(model)
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, run=BETWEEN)
    step(*batch)
    state = next(entries for entries in optimizer.state.values() if entries["exp_avg"].nbytes >= 2**16)
    assert state["exp_avg"].is_cpu
    with pytest.raises(lowtide.StepError, match=r"step\.fetch_state\(\)"):
        optimizer.step()
    for verb in (lowtide.optimize, lowtide.explain):
        with pytest.raises(ValueError, match='state: expected "host", as another step keeps the state of this AdamW there'):
            verb(model, batch, loss=loss, optimizer=optimizer)
    step.fetch_state()
    assert state["exp_avg"].is_cuda
    optimizer.zero_grad()
    loss(model, *batch).backward()
    optimizer.step()  # eager
    step(*batch)
    assert state["exp_avg"].is_pinned()
    optimizer.load_state_dict(optimizer.state_dict())  # which torch puts where the parameters are
    step(*batch)
    assert all(item.is_pinned() for entries in optimizer.state.values() for item in entries.values() if item.nbytes >= 2**16)
    assert len(step._lookup.families) == 1
