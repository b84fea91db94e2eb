"""Planned addresses on a GPU: what is allocated is what was promised, and a process that is held to it survives."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from bench.in_values import in_values
from bench.models.char_gpt import VOCABULARY, CharGPT, Shape
from lowtide.base.files import directory
from lowtide.cuda import native as cuda_native
from lowtide.placement import Portfolio
from lowtide.runtime.arena.allocator import Allocator, ArenaMemory, Recorded
from lowtide.runtime.arena.arena import Arena
from lowtide.runtime.program import Program
from tests.arenas import FirstFit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def _convnet():
    layers = [each for width in (64,) * 6 for each in (nn.LazyConv2d(width, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.LazyLinear(10)).cuda()
    batch = torch.randn(64, 3, 64, 64, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    model(batch[0])
    return model, batch, lambda model, x, y: F.cross_entropy(model(x), y)


def _gpt():
    model = CharGPT(Shape(blocks=3, width=256, heads=4, length=128, dropout=0.1)).cuda()
    batch = torch.randint(0, VOCABULARY, (2, 16, 128), device="cuda").unbind(0)
    return model, batch, lambda model, x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _mlp():
    model = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))]).cuda()
    batch = torch.randn(4096, 512, device="cuda"), torch.randn(4096, 512, device="cuda")
    return model, batch, lambda model, x, y: F.mse_loss(model(x), y)


class _Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x):
        return x + self.inner(x)


def _residual():
    blocks = [_Residual(32) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()
    batch = torch.randn(32, 3, 48, 48, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    return model, batch, lambda model, x, y: F.cross_entropy(model(x), y)


def _encoder():
    model = nn.Sequential(*[nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in range(4)]).cuda()
    batch = torch.randn(16, 64, 128, device="cuda"), torch.randn(16, 64, 128, device="cuda")
    return model, batch, lambda model, x, y: F.mse_loss(model(x), y)


ALL = [_convnet, _gpt, _mlp, _residual, _encoder]


@pytest.fixture(autouse=True)
def _as_before():
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def _limited(workload, share):
    model, batch, loss = workload()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    options = {"loss": loss, "optimizer": optimizer, "swap": False, "effort": "quick", "placer": Portfolio(), "arena": "always"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no arena
        for each in (share, "90%", "100%"):  # not every network can do with every share: workspaces differ from card to card
            try:
                return lowtide.optimize(model, batch, memory=each, **in_values(**options)), batch
            except lowtide.BudgetError:
                continue
        return lowtide.optimize(model, batch, **in_values(**options)), batch


@pytest.mark.parametrize("workload", ALL)
def test_what_is_allocated_is_the_arena_and_what_outlives_a_step(workload):
    step, batch = _limited(workload, "60%")
    held = [step(*batch)]
    before, taken = torch.cuda.memory_allocated(), step.arena.taken_bytes
    torch.cuda.reset_peak_memory_stats()
    held.append(step(*batch))  # is recorded, in an arena that was guessed: its requests come in an order that only kernels know
    beside = torch.cuda.max_memory_allocated() - max(before, before - taken + step.arena.taken_bytes)  # the old arena goes first
    assert beside < 2**21 + 512 + held[-1].untyped_storage().nbytes()  # an arena takes whole segments
    held.append(step(*batch))
    arena = step.arena
    assert (arena.recorded_steps, arena.served_steps, arena.absent) == (2, 1, "")
    assert arena.last.served == arena.last.requests - arena.last.outliving > 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held.append(step(*batch))
    result = -(-arena.last.outliving_bytes // 512) * 512  # of mse_loss a scalar in the storage of its terms
    assert arena.last.outliving == 1
    assert torch.cuda.max_memory_allocated() - before == result
    assert arena.taken_bytes + result == step.plan.peak_bytes - step.plan.resident_bytes
    step.empty_arena()
    rest = before + result - torch.cuda.memory_allocated() - arena.taken_bytes  # of its segment
    assert 0 <= rest < 2**21


@pytest.mark.parametrize("share", ["100%", "80%", "60%", "40%", "20%"])
@pytest.mark.parametrize("workload", ALL)
def test_a_process_that_is_held_to_its_limit_survives(workload, share):
    """From its first step on, with evaluation and other allocations between steps."""
    step, batch = _limited(workload, share)
    gc.collect()
    torch.cuda.empty_cache()
    plans = [step.plan, *step.plan.first_steps]
    makes = max(each.peak_bytes - each.resident_bytes for each in plans)
    reserved, spare = torch.cuda.memory_reserved(), 2**20 * 24 + 2 * 2**20 * 34  # state in segments of 2 and 20 MiB; cuBLAS' workspaces
    limit = reserved + makes + (step.plan.resident_bytes - min(each.resident_bytes for each in plans)) + spare
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    ooms = torch.cuda.memory_stats()["num_ooms"]
    for turn in range(50):
        step(*batch)
        if turn % 10 == 9:
            torch.zeros(2**18, device="cuda")
            with torch.no_grad():
                torch.ones(2**16, device="cuda").sum()
    assert torch.cuda.memory_stats()["num_ooms"] == ooms
    assert torch.cuda.memory_reserved() <= limit


@pytest.mark.parametrize("workload", [_convnet, _residual])
def test_a_batch_norm_is_computed_once_more(workload):
    """Convolutions with norms do with half of what they take, and no copy to the host."""
    model, batch, loss = workload()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, memory="50%", run=lowtide.Run(swap=False))
    # Times measured beside other work say at which limits that is the best choice.
    steps = [step, *(step.at(point.peak_bytes) for point in step.frontier if point.peak_bytes < step.plan.peak_bytes)]
    again = next(each for each in steps if "lowtide.cudnn_batch_norm" in each.source)
    again(*batch)


@pytest.mark.computes
def test_a_batch_norm_once_more_has_the_same_bits():
    x, weight, bias = torch.randn(16, 8, 9, 9, device="cuda"), torch.rand(8, device="cuda"), torch.randn(8, device="cuda")
    for given in (x, x.half(), x.to(memory_format=torch.channels_last), x.half().to(memory_format=torch.channels_last)):
        mean, variance = torch.randn(8, device="cuda"), torch.rand(8, device="cuda")
        first = torch.ops.aten.cudnn_batch_norm(given, weight, bias, mean, variance, True, 0.1, 1e-5)
        again = torch.ops.lowtide.cudnn_batch_norm(given, weight, bias, None, None, True, 0.1, 1e-5)
        assert all(torch.equal(one, two) for one, two in zip(first[:3], again[:3], strict=True))


def test_a_tensor_used_on_another_stream_is_waited_for():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    x = torch.randn(8, 64, device="cuda")
    step = lowtide.optimize(model, x, run=lowtide.Run(arena="always"), planning=lowtide.Planning(placer=Portfolio()))
    side = torch.cuda.Stream()
    for _ in range(3):
        y = step(x)
        y.record_stream(side)
    with torch.cuda.stream(side):  # the arena moves with the caller
        side.wait_stream(torch.cuda.default_stream())
        assert step(x).shape == y.shape
    assert (step.arena.served_steps, step.arena.live_tensors) == (3, 0)
    assert torch.cuda.memory_snapshot() is not None


def test_a_captured_step_takes_its_memory_from_the_graph():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda(), torch.randn(8, 64, device="cuda")
    step = lowtide.optimize(model, x, run=lowtide.Run(arena="always"), planning=lowtide.Planning(placer=Portfolio()))
    for _ in range(3):
        step(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add(1)
        step(x)
    graph.replay()
    assert step.arena.steps_without == {"a CUDA graph was captured": 1}


def test_each_step_under_a_limit_has_an_arena_of_its_own_accord():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda(), torch.randn(4096, 64, device="cuda")
    options = {"loss": lambda model, x: model(x).square().mean(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    step = lowtide.optimize(model, x, **options)
    limited = step.at("100%")
    limited(x)
    assert limited.measure(x).peak_bytes == limited.plan.peak_bytes  # with its arena
    assert [each.arena is None for each in (step, limited, limited.at())] == [True, False, True]


def _wide_within() -> tuple[nn.Module, torch.Tensor, int]:
    """A model whose widest tensor dies before its result of 8 MiB is made; a batch; and the peak of its plan."""
    model = nn.Sequential(nn.Linear(256, 4096), nn.Linear(4096, 256), nn.Linear(256, 1024)).cuda()
    x = torch.randn(2048, 256, device="cuda")
    return model, x, lowtide.optimize(model, x, planning=lowtide.Planning(progress=False)).plan.peak_bytes


def test_a_limit_holds_with_results_which_lie_beside_the_arena():
    model, x, peak_bytes = _wide_within()
    step = lowtide.optimize(model, x, memory=peak_bytes + 2**23, planning=lowtide.Planning(progress=False))
    for _ in range(2):
        step(x)
    assert step.arena.planned_bytes
    assert step.measure(x).peak_bytes <= peak_bytes + 2**23


@pytest.mark.parametrize("beside_bytes", [0, 2**22])
def test_a_limit_that_leaves_no_room_for_results_beside_the_arena_is_refused(beside_bytes: int):
    model, x, peak_bytes = _wide_within()
    with pytest.raises(lowtide.BudgetError, match="with its results, which lie beside an arena") as caught:
        lowtide.optimize(model, x, memory=peak_bytes + beside_bytes, planning=lowtide.Planning(progress=False))
    assert peak_bytes + beside_bytes < caught.value.smallest_peak_bytes <= peak_bytes + 2**23
    lowtide.optimize(model, x, memory=caught.value.smallest_peak_bytes, planning=lowtide.Planning(progress=False))  # which would do


def test_what_the_caller_asks_for_is_the_native_allocators():
    model, x = nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    step = lowtide.optimize(model, x, run=lowtide.Run(arena="always"), planning=lowtide.Planning(placer=Portfolio()))
    for _ in range(2):
        step(x)
    before = torch.cuda.memory_allocated()
    mine = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 2**20
    del mine
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.get_allocator_backend() == "native"


def test_an_evaluation_between_steps_has_the_memory_of_the_idle_arena():
    """In a process that has no memory beside it; the next step takes it again, and what it serves is not taken away."""
    step, batch = _limited(_mlp, "60%")
    held = [step(*batch) for _ in range(3)]
    arena_bytes, before = step.arena.taken_bytes, step.arena.served_steps
    limit = torch.cuda.memory_allocated() + 2**20 * 60  # room for results, of which two have a segment of 20 MiB
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(max(limit, torch.cuda.memory_reserved()) / torch.cuda.get_device_properties(0).total_memory)
    for turn in range(3):
        evaluated = torch.empty(arena_bytes - 2**21, dtype=torch.uint8, device="cuda")
        assert step.arena.taken_bytes == 0
        del evaluated
        held.append(step(*batch))
        assert (step.arena.taken_bytes, step.arena.served_steps) == (arena_bytes, before + turn + 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * arena_bytes, dtype=torch.uint8, device="cuda")


def test_an_evaluation_that_grows_piece_by_piece_does_not_lie_in_what_an_idle_arena_leaves():
    """There a piece that is let go would leave a gap, and keep the whole segment from being another's."""
    allocator, unit = Allocator(cuda_native.load(directory()), on_gpu=True), 32 * 2**20
    before = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((before + 8 * unit + 2**20) / torch.cuda.get_device_properties(0).total_memory)
    arena = ArenaMemory(allocator, 8 * unit)
    pieces = [torch.empty(unit, dtype=torch.uint8, device="cuda") for _ in range(8)]
    assert not arena.is_there
    del pieces[::2]
    assert torch.empty(4 * unit, dtype=torch.uint8, device="cuda").is_cuda


@torch.library.custom_op("lowtide_tests::by_way_of_a_copy", mutates_args=())
def _by_way_of_a_copy(x: torch.Tensor) -> torch.Tensor:
    copy = x.contiguous().clone()
    return copy + 1


_CHAIN = """
from torch import ops
def step(inputs):
    x, = inputs
    a = ops.lowtide_tests.by_way_of_a_copy.default(x)
    b = ops.lowtide_tests.by_way_of_a_copy.default(a)
    del a
    c = ops.lowtide_tests.by_way_of_a_copy.default(b)
    return [b.data_ptr(), c.data_ptr(), c + 1]
"""


def test_results_lie_where_they_were_guessed_to_though_workspaces_of_their_size_come_before_them():
    """Sizes alone say neither which node asks nor what for; and what is recorded is what the next run asks for."""
    allocator = Allocator(cuda_native.load(directory()), on_gpu=True)
    x, nbytes = torch.zeros(2**20, device="cuda"), 4 * 2**20
    sizes = np.full(4, nbytes)
    results = Recorded(sizes, np.arange(4), np.array([2, 3, 3, -1]))
    spaces = Recorded(sizes[:3], np.arange(3), np.arange(1, 4))
    placed = []

    def place_in_turns(problem):
        placed.append(FirstFit.of(problem))
        return placed[-1]

    arena = Arena(allocator, place_in_turns)
    program = Program(_CHAIN, positions=lambda: (-1, -1, -1, -1, 0, 1, 1, 2, 3))
    second, third, _ = arena.run(program, lambda: program([x]), None, lambda: (results, spaces, frozenset(range(4))))
    assert [second - arena._region.base, third - arena._region.base] == list(placed[0].offsets[1:3])
    arena.run(program, lambda: program([x]))
    assert (arena.served_runs, arena.counts.deviates) == (1, False)


def test_a_larger_arena_has_the_place_of_a_smaller_one_whatever_was_made_meanwhile():
    """Of a segment that was taken for an arena nothing is left in which a tensor that stays would keep it."""
    torch.cuda.empty_cache()
    allocator = Allocator(cuda_native.load(directory()), on_gpu=True)
    before = torch.cuda.memory_reserved()
    small = ArenaMemory(allocator, 64 * 2**20 + 2**18)  # leaves 1.75 MiB of a segment
    kept = torch.zeros(2**18 + 2**17, device="cuda")  # 1.5 MiB
    del small
    taken = torch.cuda.memory_reserved() - before - 66 * 2**20  # for what is kept
    torch.cuda.set_per_process_memory_fraction((before + taken + 130 * 2**20) / torch.cuda.get_device_properties(0).total_memory)
    large = ArenaMemory(allocator, 128 * 2**20)
    assert large.is_there
    assert kept.is_cuda
