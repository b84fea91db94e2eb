import gc
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import ProfilerActivity, profile

from lowtide.cost import profiler
from lowtide.cost.profiler import Measured, Timing, device_name, interleaved_us, measure, measure_memory, measure_memory_of_each, time_us
from lowtide.errors import LowtideError

KIB = 1024


def block(kib: int) -> Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


class Script:
    """Plays a list of allocations (positive) and frees (negative: the block of that number), in KiB."""

    def __init__(self, sizes: list[int], frees: list[int]) -> None:
        self.sizes, self.frees = sizes, frees

    def __call__(self) -> list[Tensor | None]:
        held: list[Tensor | None] = []
        for size, free in zip(self.sizes, self.frees, strict=True):
            held.append(block(size))
            held[free % len(held)] = None
        return held

    def expected(self) -> Measured:
        held: list[int] = []
        peak = 0
        for size, free in zip(self.sizes, self.frees, strict=True):
            held.append(size)
            peak = max(peak, sum(held))
            held[free % len(held)] = 0
        return Measured(peak * KIB, sum(held) * KIB)


scripts = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 9)), max_size=12).map(
    lambda steps: Script(*map(list, zip(*steps, strict=True))) if steps else Script([], [])
)


@settings(max_examples=4, deadline=None)
@given(st.lists(scripts, min_size=1, max_size=4))
def test_each_call_has_its_own_peak(calls: list[Script]):
    assert measure_memory_of_each(iter(calls)) == [call.expected() for call in calls]


def test_the_memory_events_of_the_profiler_are_where_we_look_for_them():
    with autograd_profile(use_cpu=True, profile_memory=True, use_kineto=True) as session:
        block(3)
    blocks = [event.extra_fields for event in profiler._recorded(session) if event.tag == profiler._EventType.Allocation]
    assert [block.alloc_size for block in blocks] == [3 * KIB, -3 * KIB]
    assert len({block.ptr for block in blocks}) == 1


def test_a_result_counts_to_the_end_and_no_longer():
    results = []
    assert measure_memory(lambda: block(5)) == Measured(5 * KIB, 5 * KIB)
    assert measure_memory(lambda: results.append(block(7))) == Measured(7 * KIB, 7 * KIB)


def test_frees_of_blocks_older_than_the_recording_are_not_seen():
    before = [block(100)]
    assert measure_memory(before.clear) == Measured(0, 0)


def test_a_block_recorded_long_ago_does_not_lend_its_size_to_another_at_its_address():
    long_ago: list[Tensor] = []
    measure_memory(lambda: long_ago.append(block(100)))
    address = long_ago.pop().data_ptr()
    before = [block(99)]
    if before[0].data_ptr() != address:
        pytest.skip("the system's allocator gave another address")
    assert measure_memory(before.clear) == Measured(0, 0)


def test_a_run_within_the_recording_makes_its_blocks_known():
    kept = [block(100)]

    def swap() -> None:
        kept.clear()
        kept.append(block(30))

    assert measure_memory(swap) == Measured(30 * KIB, 30 * KIB)
    assert measure_memory(swap, warmup=1) == Measured(0, 0)
    with pytest.raises(ValueError, match="expected warmup >= 0, got -1"):
        measure_memory(swap, warmup=-1)


def test_garbage_of_before_is_collected_before():
    cycle: list[object] = [block(100)]
    cycle.append(cycle)
    del cycle
    assert measure_memory(gc.collect) == Measured(0, 0)


def test_a_backward_pass_is_seen():
    weight = torch.ones(1000, requires_grad=True)

    def step() -> None:
        (weight * weight).sum().backward()
        weight.grad = None

    assert measure_memory(step).above_bytes >= 2 * 4000  # the product and the gradient of one factor at least
    assert measure_memory(step).end_bytes == 0


def test_other_threads_are_not_counted():
    go, stop = threading.Event(), threading.Event()

    def busy() -> None:
        go.wait()
        while not stop.is_set():
            block(1000)

    thread = threading.Thread(target=busy)
    thread.start()

    def call() -> None:
        go.set()
        for _ in range(200):
            block(1)

    try:
        assert measure_memory(call) == Measured(KIB, 0)
    finally:
        stop.set()
        thread.join()


def test_calls_are_let_go_one_by_one():
    alive: list[int] = []

    class Call:
        def __init__(self, number: int) -> None:
            self.number = number
            alive.append(number)

        def __call__(self) -> None:
            assert alive == [self.number]

        def __del__(self) -> None:
            alive.remove(self.number)

    measure_memory_of_each(Call(number) for number in range(3))
    assert alive == []


def test_an_error_of_the_call_comes_through_and_leaves_no_profiler_behind():
    with pytest.raises(ZeroDivisionError):
        measure_memory(lambda: 1 // 0)
    assert measure_memory(lambda: block(1)) == Measured(KIB, KIB)


def test_two_profilers_at_once_are_refused():
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(LowtideError, match="found one running"):
        measure_memory(lambda: None)


def test_a_call_that_profiles_is_refused():
    def call() -> None:
        with profile(activities=[ProfilerActivity.CPU]):
            block(1)

    with pytest.raises(LowtideError, match="expected 1 marked calls"):
        measure_memory(call)


def test_nothing_is_said_on_stderr():
    program = "import torch; from lowtide.cost.profiler import measure_memory; measure_memory(lambda: torch.ones(9))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_ties_keep_the_order_of_recording():
    def memory(time_ns: int, ptr: int, nbytes: int, device: str = "cpu") -> SimpleNamespace:
        fields = SimpleNamespace(ptr=ptr, alloc_size=nbytes, device=torch.device(device))
        return SimpleNamespace(name="[memory]", tag=profiler._EventType.Allocation, start_time_ns=time_ns, extra_fields=fields)

    mark = SimpleNamespace(name=profiler._MARK, tag=None, start_time_ns=1, end_time_ns=8)
    ties = [memory(5, 1, 10), memory(5, 1, -10), memory(5, 1, 4), memory(6, 2, 1000, "cuda")]
    outside = [memory(9, 3, 99), memory(0, 4, 50)]
    assert profiler._cut([*outside, *ties, mark], 1) == [Measured(10, 4)]


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_only_allocators_that_tell_are_measured(device: str):
    with pytest.raises(ValueError, match="expected a CPU or CUDA device"):
        measure_memory(lambda: None, device)


def test_turns_are_taken_back_and_forth_after_the_warm_up():
    ran: list[str] = []
    times = interleaved_us({name: lambda name=name: ran.append(name) for name in "bac"}, repeats=3, warmup=1)
    assert "".join(ran) == "bac" + "bac" + "cab" + "bac"
    assert list(times) == ["b", "a", "c"]
    assert all(len(timing.samples_us) == 3 and timing.min_us >= 0 for timing in times.values())


def test_time_is_in_microseconds():
    waited = time_us(lambda: threading.Event().wait(0.02), repeats=3, warmup=0)
    assert 20_000 <= waited.min_us <= waited.median_us < 2_000_000


def test_a_ratio_is_taken_round_by_round():
    slow, base = Timing((2.0, 200.0, 3.0)), Timing((1.0, 100.0, 2.0))
    assert slow.ratio_to(base) == 2.0
    assert base.median_us == 2.0
    assert base.min_us == 1.0


@pytest.mark.parametrize(("repeats", "warmup"), [(0, 1), (1, -1)])
def test_no_time_without_a_run(repeats: int, warmup: int):
    with pytest.raises(ValueError, match="expected repeats >= 1 and warmup >= 0"):
        time_us(lambda: None, repeats, warmup)


def test_measuring_does_both():
    runs: list[int] = []
    found = measure(lambda: (runs.append(1), block(8))[1], repeats=2, warmup=1)
    assert len(runs) == 5
    assert (found.above_bytes, found.end_bytes, found.repeats, found.device) == (8 * KIB, 8 * KIB, 2, "cpu")
    assert "peak 0.01 MiB above the start" in str(found)


def test_a_device_has_a_name():
    assert torch.backends.cpu.get_cpu_capability() in device_name("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_is_measured_by_its_own_allocator():
    def call() -> Tensor:
        torch.empty(2**20, dtype=torch.uint8, device="cuda")
        return torch.empty(2**10, dtype=torch.uint8, device="cuda")

    assert measure_memory(call, "cuda") == Measured(2**20, 2**10)
