"""Times are measured once for each distinct call, and what cannot be measured is told."""

import json
import multiprocessing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost import trial
from lowtide.cost.cache import Cache
from lowtide.cost.device import half_flops_of
from lowtide.cost.laboratory import Laboratory
from lowtide.cost.presets import PRESETS, preset
from lowtide.cost.timings import device_here, measure_timings
from lowtide.cost.trials import Trials
from lowtide.cost.workspaces import measure_workspaces
from lowtide.errors import CheckError
from lowtide.ir.graph import Kind, Node, Storage, Value


def rates():
    return PRESETS[0]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    return tmp_path


def _value(name, *shape):
    return Value(name, Storage(name, 4 * shape[0] * shape[1], "cpu", Kind.ACTIVATION), "float32", shape, (shape[1], 1))


def _mm(size):
    return Node("aten.mm.default", (_value("x", size, size), _value("y", size, size)), (_value("z", size, size),))


def test_more_work_takes_longer_and_views_nothing():
    x = _value("x", 8, 8)
    view = Node("aten.t.default", (x,), (Value("v", x.storage, "float32", (8, 8), (1, 8)),))
    times = measure_timings([_mm(16), view, _mm(512)], rates)
    assert not times.unknown
    assert times.us[1] == 0
    assert 0 < times.us[0] < times.us[2]


def test_a_call_is_measured_once_and_remembered(cache):
    first = measure_timings([_mm(16), _mm(16)], rates)
    assert first.us[0] == first.us[1]
    (path,) = cache.glob("timings-*.json")
    document = json.loads(path.read_text())
    (call,) = document["entries"]
    document["entries"][call] = 123_000
    path.write_text(json.dumps(document))
    assert measure_timings([_mm(16)], rates).us == (123.0,)


def _took(monkeypatch, *runs_ms):
    """What is noted of a call that takes so long, run by run, and how often it was run."""
    left = list(runs_ms)
    run = lambda self, calls, *, warm_up: [int(1e6 * left.pop(0)) for _ in calls]  # noqa: E731
    monkeypatch.setattr(Laboratory, "times_ns", run)
    (us,) = measure_timings([_mm(16)], rates).us
    return us / 1e3, len(runs_ms) - len(left)


@pytest.mark.parametrize(
    ("runs_ms", "expected_ms", "expected_runs"),
    [
        ([0.01, 0.01, 1], 0.01, 2),  # as fast as it should be
        ([27, 31, 90, 0.02, 1], 0.02, 4),  # until it is
        ([30, 29, 28, 0.02], 28, 3),  # as slow each time: an operator may be
        ([90, 80, 20, 60, 20, 20, 1], 20, 6),  # what is far longer says nothing
        ([90 / 1.3**power for power in range(12)], 90 / 1.3**8, 9),  # no more often than that
        ([2000, 1500, 0.02], 1500, 2),  # and no longer
    ],
)
def test_what_takes_far_longer_than_its_work_is_run_again(monkeypatch, runs_ms, expected_ms, expected_runs):
    """A made-up clock: what else a machine does lasts for some runs, and what is noted stays."""
    assert _took(monkeypatch, *runs_ms) == (pytest.approx(expected_ms, rel=1e-6), expected_runs)


def test_whoever_listens_hears_which_share_is_done():
    shares = {"workspaces": [], "times": []}
    nodes = [_mm(16), _mm(32), _mm(48)]
    with Laboratory() as laboratory:
        laboratory.listener = shares["workspaces"].append
        measure_workspaces(nodes, laboratory=laboratory)
        laboratory.listener = shares["times"].append
        measure_timings(nodes, rates, laboratory=laboratory)
    for heard in shares.values():
        assert len(heard) >= 2
        assert heard == sorted(set(heard))
        assert heard[0] == 0
        assert heard[-1] < 1


def test_a_file_that_does_not_read_is_measured_anew(cache):
    measure_timings([_mm(16)], rates)
    (path,) = cache.glob("timings-*.json")
    path.write_text('{"format": 1, "entries": {"x": -1}}')
    with pytest.warns(RuntimeWarning, match="does not read"):
        again = measure_timings([_mm(16)], rates)
    assert again.us[0] > 0
    assert json.loads(path.read_text())["entries"]


def test_what_cannot_be_run_has_its_roofline_and_is_listed(monkeypatch):
    monkeypatch.setattr(trial, "free_bytes", lambda device: 4000)
    with pytest.warns(RuntimeWarning, match=r"not enough memory to measure aten\.mm\.default\(.*512, 512.*device's rates"):
        times = measure_timings([_mm(512)], rates)
    assert times.us == (rates().node_us(_mm(512)),)
    (told,) = times.unknown
    assert "may take 1000" in told.reason
    wrong = Node("aten.mm.default", (_value("x", 2, 3), _value("y", 2, 3)), (_value("z", 2, 3),))
    assert "RuntimeError" in measure_timings([wrong], rates).unknown[0].reason


LACKING = [
    MemoryError("none left"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 bytes"),
]


@pytest.mark.parametrize("raised", LACKING)
def test_a_lack_of_memory_falls_back_to_the_roofline_and_says_so(monkeypatch, cache, raised):
    """Only for the call that meets it: the others are measured, and it is tried again next time."""
    real = Trials.times

    def refuse():
        raise raised

    def lacking(self, steps, device, warm_up):
        return trial.answer(refuse) if "64, 64" in str(steps) else real(self, steps, device, warm_up)

    monkeypatch.setattr(Trials, "times", lacking)
    with pytest.warns(RuntimeWarning, match="not enough memory to measure aten") as told:
        times = measure_timings([_mm(16), _mm(64), _mm(64)], rates)
    assert len(told) == 1
    assert times.us[1] == times.us[2] == rates().node_us(_mm(64)) != times.us[0]
    (unknown,) = times.unknown
    assert unknown.of_memory
    assert "64, 64" in unknown.call
    monkeypatch.setattr(Trials, "times", real)
    assert not measure_timings([_mm(64)], rates).unknown


def test_other_failures_are_listed_without_a_warning():
    wrong = Node("aten.mm.default", (_value("x", 2, 3), _value("y", 2, 3)), (_value("z", 2, 3),))
    (unknown,) = measure_timings([wrong], rates).unknown
    assert not unknown.of_memory


def test_what_was_measured_first_stays(cache):
    """Another process may have measured the same call while this one did: both use what was written first, so that their plans agree."""
    real = Cache.merge

    def late(self, entries):
        if self.kind == "timings":
            real(self, dict.fromkeys(entries, 777_000))
        return real(self, entries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "merge", late)
        assert measure_timings([_mm(16)], rates).us == (777.0,)
    assert measure_timings([_mm(16)], rates).us == (777.0,)


def _times_of(sizes, queue):
    queue.put(dict(zip(sizes, measure_timings([_mm(size) for size in sizes], rates).us, strict=True)))


def test_two_processes_that_share_the_cache_agree(cache):
    """One of them is this one; both measure at once."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    other = context.Process(target=_times_of, args=([24, 32, 40], queue))
    other.start()
    while other.is_alive() and queue.empty():  # until the other has written, at the latest
        ours = dict(zip((16, 24, 32), measure_timings([_mm(size) for size in (16, 24, 32)], rates).us, strict=True))
    theirs = queue.get(timeout=120)
    other.join()
    assert (ours[24], ours[32]) == (theirs[24], theirs[32])
    now = dict(zip((16, 24, 32, 40), measure_timings([_mm(size) for size in (16, 24, 32, 40)], rates).us, strict=True))
    assert now == ours | theirs


@pytest.mark.parametrize("number", [0, -5, 10**30, "soon", None, True, 0.5, float("nan")])
def test_times_that_cannot_have_been_measured_are_not_believed(cache, number):
    measure_timings([_mm(16)], rates)
    (path,) = cache.glob("timings-*.json")
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"entries": dict.fromkeys(document["entries"], number)}))
    with pytest.warns(RuntimeWarning, match="does not read"):
        again = measure_timings([_mm(16)], rates)
    assert 0 < again.us[0] < 1e6
    assert measure_timings([_mm(16)], rates).us == again.us


def test_this_machine_as_a_device(cache):
    here = preset("cpu")
    assert here == device_here("cpu")
    assert not here.can_swap
    assert not here.moves_beside
    with pytest.raises(CheckError, match="none to swap to"):
        here.store_us(1)
    assert here.half_flops > 0
    (path,) = cache.glob("rates-*.json")
    document = json.loads(path.read_text())
    del document["entries"]["launch_ns"]
    path.write_text(json.dumps(document))
    assert device_here("cpu").flops_per_s == here.flops_per_s
    assert device_here("cpu").launch_us > 0
    with pytest.raises(ValueError, match="expected one of cpu, rtx3090, rtx4090, l40s, a100, h100, h200, got 'abacus'"):
        preset("abacus")


def test_the_rtx3090_is_that_of_the_published_evaluation():
    device = preset("rtx3090")
    assert (device.flops_per_s["float32"], device.flops_per_s["bfloat16"]) == (35.6e12, 71e12)
    assert (device.bandwidth_bytes_per_s, device.efficiency, device.launch_us) == (936e9, 0.6, 5.0)
    assert device.store_us(12_000_000) == device.load_us(12_000_000) == 5 + 1000
    assert device.can_swap


@given(st.floats(0, 1e9), st.floats(0.1, 1e6), st.floats(0, 1e5))
def test_the_half_rate_is_found_from_times_that_follow_the_roofline(half, rate, launch_ns):
    sizes = [2 * side**3 for side in (16, 64, 256, 1024)]
    samples = [(flops, launch_ns + (flops + half) / rate) for flops in sizes]
    assert half_flops_of(samples, rate, launch_ns) == pytest.approx(half, rel=1e-3, abs=1e-3 * sizes[-1])
