"""What a call takes a device beside the host, and the host: found on a simulated device, remembered as both."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost import timings
from lowtide.cost import trial as launched
from lowtide.cost.device import Device
from lowtide.cost.laboratory import Laboratory
from lowtide.cost.presets import preset
from lowtide.cost.timings import cold_shares, measure_timings
from lowtide.cost.trials import Trials
from lowtide.ir.graph import Kind, Node, Storage, Value

H100 = preset("h100")


class Machine:
    """A host and a device with a clock each, in nanoseconds; the device does in order what the host has issued."""

    def __init__(self, device_ns, host_ns, waits=False):
        self.device_ns, self.host_ns, self.waits = device_ns, host_ns, waits
        self.now = self.free = 0
        self.cold = False

    def run(self, device_ns):
        self.free = max(self.free, self.now) + device_ns

    def call(self):
        self.now += self.host_ns
        self.run(self.device_ns + 700 * self.cold)
        self.cold = False
        if self.waits:
            self.now = self.free

    def synchronize(self, _=None):
        self.now = max(self.now, self.free)

    def evict(self):
        """Reads other memory: the next run is in a cold cache."""
        self.now += 1000
        self.run(50_000)
        self.cold = True

    def event(self, **_):
        machine = self

        class Event:
            def record(self):
                self.at = max(machine.free, machine.now)

            def query(self):
                return self.at <= machine.now

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e6

        return Event()

    def put_in(self, patch):
        patch.setattr(torch.cuda, "Event", self.event)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(torch.cuda, "_sleep", lambda cycles: self.run(cycles // 2))
        patch.setattr(launched, "time", SimpleNamespace(perf_counter_ns=lambda: self.now))
        patch.setattr(launched, "once_ns", self._once_ns)
        patch.setattr(launched, "crowd", lambda _: self.evict)
        patch.setattr(launched, "_pair_ns", lambda _: 0)

    def _once_ns(self, call, _):
        self.synchronize()
        start = self.now
        call()
        self.synchronize()
        return self.now - start


@given(st.integers(500, 10**8), st.integers(1000, 10**6))
def test_neither_clock_is_seen_in_the_other(device_ns, host_ns):
    machine = Machine(device_ns, host_ns)
    with pytest.MonkeyPatch.context() as patch:
        machine.put_in(patch)
        warm_ns, cold_ns, issue_ns = launched._clocks_ns(machine.call, "cuda")
    assert (warm_ns, issue_ns) == (pytest.approx(device_ns, rel=1e-3, abs=2), host_ns)
    assert cold_ns == warm_ns if device_ns + host_ns >= 3 * 10**7 else cold_ns == pytest.approx(device_ns + 700, rel=1e-3, abs=4)


def test_a_call_that_waits_for_the_device_takes_both_as_long_as_it_waits():
    machine = Machine(5000, 1000, waits=True)
    with pytest.MonkeyPatch.context() as patch:
        machine.put_in(patch)
        assert launched._clocks_ns(machine.call, "cuda") == (6000, 6000, 6000)


def value(name, *shape, on=None):
    return Value(name, on or Storage(name, 4 * shape[0] * shape[1], "cuda:0", Kind.ACTIVATION), "float32", shape, (shape[1], 1))


X = value("x", 64, 64)
NODES = [
    Node("aten.sin.default", (X,), (value("y", 64, 64),)),
    Node("aten.view.default", (X, (32, 128)), (value("v", 32, 128, on=X.storage),)),
    Node("aten.mm.default", (X, X), (value("z", 64, 64),)),
]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that seems to have a GPU; which calls were tried on it."""
    tried = []

    def launches(self, recipes, device):
        tried.extend(recipe["steps"][-1]["op"] for recipe in recipes)
        if any("mm" in recipe["steps"][-1]["op"] for recipe in recipes):
            return {"failure": "an illegal memory access"}
        return {"ns": [[2000, 3000, 8000] for _ in recipes]}

    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(Trials, "launches", launches)
    monkeypatch.setattr(timings, "cache_bytes", lambda device: 2**20)
    monkeypatch.setattr(launched, "free_bytes", lambda device: 2**32)
    monkeypatch.setattr(Laboratory, "circumstances", lambda self, device: ("a test", device))
    return tried


def test_both_times_are_remembered_views_have_the_hosts_and_what_cannot_be_run_both_of_the_rates(gpu, tmp_path):
    times = [measure_timings(NODES, lambda: H100) for _ in range(2)]
    assert times[0].us == times[1].us == (3.0, 2.0, H100.node_us(NODES[2]))
    assert times[0].issue_us == times[1].issue_us == (8.0, 8.0, 8.0)
    assert gpu.count("aten.sin.default") == 2  # with the others, and by itself as one of them fails
    assert times[0].unknown[0].call.startswith("aten.mm.default")
    (path,) = tmp_path.glob("clocks-*.json")
    path.write_text(path.read_text().replace("2000 3000 8000", "4000 3000 8000"))
    with pytest.warns(RuntimeWarning, match="does not read"):
        assert measure_timings(NODES[:1], lambda: H100).us == (3.0,)


def test_a_roofline_has_two_clocks_beside_a_host():
    assert [H100.node_issue_us(node) for node in NODES] == [8.0, pytest.approx(2.4), 8.0]
    assert H100.node_us(NODES[1]) == 0
    alone = Device("one", {"float32": 1e12}, 1e12, 1.0, 0, 0)
    assert [alone.node_issue_us(node) for node in NODES] == [0, 0, 0]


def product(columns):
    of = lambda name, rows, width: Value(  # noqa: E731
        name, Storage(name, 2 * rows * width, "cuda:0", Kind.ACTIVATION), "bfloat16", (rows, width), (width, 1)
    )
    return Node("aten.mm.default", (of("a", 8192, 768), of("b", 768, columns)), (of("c", 8192, columns),))


@pytest.mark.parametrize(("columns", "least", "most"), [(50257, 4200, 6700), (3072, 48, 60), (768, 15, 20)])
def test_products_take_what_they_take_on_an_h100(columns, least, most):
    """Measured in a step of gpt2. Rows of 50,257 numbers begin where tensor cores cannot read them."""
    assert least < H100.node_us(product(columns)) < most


@pytest.mark.parametrize(("cache_bytes", "again"), [(2**20, 0.0), (2**14, 0.5), (2**13, 1.0)])
def test_what_was_touched_lately_is_in_the_cache(cache_bytes, again):
    """Each tensor is of 16 KiB: the second product reads what the sine has made and, once more, the input."""
    sine, view, product = NODES
    second = Node("aten.mm.default", (X, sine.outputs[0]), (value("w", 64, 64),))
    shares = cold_shares([sine, view, second, product], cache_bytes)
    assert view not in shares
    assert shares[sine] == 1
    assert shares[second] == again
