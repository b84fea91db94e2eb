"""Limits by name, of a GPU's memory and of the host's: promised, kept, monotone in both, refused with the one that is short.

Planned for a machine that is not here; run with that machine's manners, whose buffers are counted as they are pinned.
"""

from __future__ import annotations

import dataclasses
import pickle
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.api import variant
from lowtide.cost.presets import preset
from lowtide.cuda.forecast import expected
from lowtide.errors import BudgetError, FormatError
from lowtide.ir.graph import Kind
from lowtide.ir.operators.nodes import is_transfer
from lowtide.plan.plan import Plan
from lowtide.planning.request import Limit
from lowtide.runtime.copies import StreamedMemory
from tests.api.networks import adamw
from tests.swapping import LateStreams
from tests.training import check

# With links as fast as operators as small as these.
GPU = dataclasses.replace(preset("rtx3090"), launch_us=1e-4, granule_bytes=1, to_host_bytes_per_s=2e11, from_host_bytes_per_s=2e11)
KIB = 2**10
RUN = lowtide.Run()
SAME = 1 + 1e-9  # times this near differ by the rounding of their sums


def _net():
    torch.manual_seed(0)
    layers = [each for _ in range(6) for each in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    return model, (torch.ones(512, 64),), lambda model, x: F.mse_loss(model(x), torch.ones(512, 1)), adamw(model)


def _step(memory, *, make=_net, run=RUN, effort=None, **limits):
    model, batch, loss, optimizer = make()
    search = lowtide.Sweep(max_states=1200) if effort is None else None
    planning = lowtide.Planning(simulate=GPU, search=search, effort=effort, progress=False)
    return lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, memory=memory, planning=planning, run=run, **limits)


@pytest.fixture(scope="module", params=[False, True], ids=["activations", "state too"])
def step(request):
    return _step("60%", run=lowtide.Run(state="swap" if request.param else "device"))


def test_a_plan_promises_what_it_pins_and_says_when(step):
    plan = step.plan
    sizes = [value.storage.nbytes for node in plan.graph.nodes for value in node.results if value.storage.kind is Kind.HOST]
    assert max(sizes, default=0) <= plan.pinned_bytes <= sum(1 << (size - 1).bit_length() for size in sizes)
    assert plan.pinned_bytes > 0
    assert "pinned on the host" in str(plan)
    assert "time within this memory by what is pinned on the host: " in str(plan)


def test_what_the_host_still_fills_is_not_moved_in_an_arena(step):
    """A first run on a GPU moves results to their places; of a load that would copy what is not there yet, in silence."""
    plan = step.plan
    movable = expected(plan)[2]
    nodes = [plan.graph.nodes[index] for index in plan.order]
    copies = {at for at, node in enumerate(nodes) if is_transfer(node)}
    assert any(nodes[at].results for at in copies)
    assert len(movable) > len(nodes) // 4
    assert movable.isdisjoint(copies)


def test_more_of_either_memory_is_never_slower_nor_less_of_either_leaner(step):
    eager = step.plan.eager_peak_bytes
    rows = []
    for share in (0.6, 0.65, 0.8):
        free = step.at(int(share * eager)).plan
        hosts = [1, *(free.pinned_bytes * part // 4 for part in range(1, 5)), 2**30]
        plans = [step.at({"cuda": int(share * eager), "host": max(1, host)}).plan for host in hosts]
        for host, plan in zip(hosts, plans, strict=True):
            assert plan.pinned_bytes <= max(1, host) == plan.host_bytes
            assert plan.peak_bytes <= share * eager
        times = [plan.cost_report.time_us for plan in plans]
        assert all(SAME * one >= other for one, other in pairwise(times))
        assert times[-1] <= SAME * free.cost_report.time_us
        assert plans[-1].pinned_bytes == free.pinned_bytes
        rows.append(times)
    for less, more in pairwise(rows):
        assert all(SAME * one >= other for one, other in zip(less[:1] + less[-1:], more[:1] + more[-1:], strict=True))
    assert rows[0][0] > rows[0][-1]  # the host's memory buys something


def test_a_limit_of_time_leaves_the_leanest_within_the_host_s(step):
    peaks = [step.at({"host": host}, latency=1.05).plan for host in (1, 8 * KIB, 2**30)]
    assert [plan.peak_bytes for plan in peaks] == sorted((plan.peak_bytes for plan in peaks), reverse=True)
    assert peaks[0].pinned_bytes == 0
    assert all(plan.cost_report.time_us <= 1.05 * plan.cost_report.order_us * SAME for plan in peaks)


def test_without_a_limit_of_the_device_nothing_is_pinned():
    plan = _step({"host": "1GiB"}).plan
    assert (plan.pinned_bytes, plan.cost_report) == (0, None)


@pytest.fixture
def late(monkeypatch):
    streams = LateStreams()
    memory = StreamedMemory(streams)
    monkeypatch.setattr(variant, "host_memory", lambda device: memory)
    return streams, memory


@pytest.mark.parametrize("lend", [False, True])
def test_what_a_step_pins_is_what_was_promised(lend, late):
    streams, memory = late
    free = _step("55%", run=lowtide.Run(state="swap" if lend else "device")).plan
    limit = {"cuda": int(0.55 * free.eager_peak_bytes), "host": free.cost_report.host_frontier[0].pinned_bytes or free.pinned_bytes}
    planned = _step(limit, run=lowtide.Run(state="swap" if lend else "device")).plan
    assert 0 < planned.pinned_bytes <= planned.host_bytes == limit["host"]
    check(_net, options={"plan": Plan.from_json(planned.to_json())})
    assert memory.taken_bytes == planned.pinned_bytes  # by the last step
    most = max(each.pinned_bytes for each in (planned, *planned.first_steps))
    assert most <= memory.pinned_bytes <= limit["host"]  # by all programs of the step together
    assert streams.copied_bytes > 0


def test_a_saved_plan_keeps_its_promise_and_its_limit(step, tmp_path):
    plan = step.at({"cuda": "60%", "host": "1MiB"}).plan
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.pinned_bytes, loaded.host_bytes) == (plan.pinned_bytes, 2**20)
    assert loaded.cost_report.host_frontier == plan.cost_report.host_frontier
    assert str(loaded) == str(plan)
    for name, stated, wanted in (("pinned_bytes", plan.pinned_bytes + 1, "which is what its copies"), ("host_bytes", 1, "or more, got 1")):
        with pytest.raises(FormatError, match=wanted):
            Plan.from_json(dataclasses.replace(plan, **{name: stated}).to_json())


def _stored():
    """What takes long to make again, and is quick to copy."""
    torch.manual_seed(0)
    layers = [each for _ in range(4) for each in (nn.Linear(64, 64), nn.Dropout(0.5))]  # what is drawn is drawn once
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    return model, (torch.ones(512, 64),), lambda model, x: model(x).square().mean(), adamw(model)


def test_the_memory_that_is_short_is_named():
    model_only = _step("100%", make=_stored).plan
    free = _step({"cuda": model_only.eager_peak_bytes, "host": "1GiB"}, make=_stored)
    least = min(point.peak_bytes for point in free.plan.cost_report.frontier)
    with pytest.raises(BudgetError) as short:
        free.at({"cuda": least, "host": 1})
    error = short.value
    assert str(error).startswith(f"host: expected at least {error.smallest_host_bytes} bytes")
    plan = free.at({"cuda": least, "host": error.smallest_host_bytes}).plan  # which it says would do
    assert max(each.pinned_bytes for each in (plan, *plan.first_steps)) == error.smallest_host_bytes
    assert free.at({"cuda": error.smallest_peak_bytes, "host": 1}).plan.pinned_bytes == 0  # so would this
    assert pickle.loads(pickle.dumps(error)).smallest_host_bytes == error.smallest_host_bytes
    with pytest.raises(BudgetError) as device:
        free.at({"cuda": least - 1, "host": "1GiB"})
    assert device.value.smallest_host_bytes is None
    assert str(device.value).startswith("memory: expected at least")


REFUSED = {
    "an unknown name": ({"cuda": "1GiB", "disk": "1GiB"}, "expected limits by name"),
    "none at all": ({}, "expected limits by name"),
    "two devices": ({"cuda": "1GiB", "cpu": "1GiB"}, "expected limits by name"),
    "nothing of the host": ({"host": 0}, r"got 0: to copy nothing there, leave `host` out and say run=lowtide.Run\(swap=False\)"),
    "a share of the host": ({"host": "60%"}, "as it stands it pins nothing on the host"),
    "no amount": ({"host": "much"}, 'expected of the host bytes as a whole number above 0, or a text such as "48GiB"; got'),
    "less than nothing": ({"host": -1}, "above 0"),
    "more than a plan can say": ({"host": 2**70}, "above 0"),
    "a number that is no number": ({"cuda": "9" * 400 + "GiB"}, "expected at most"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_limits_by_name_that_cannot_be_are_refused(case):
    given, why = REFUSED[case]
    with pytest.raises(ValueError, match=why):
        Limit.of(given)


@pytest.mark.parametrize("given", [True, 0.0, 1.5, float("nan"), [1]])
def test_what_is_no_amount_of_the_host_is_told_what_would_be(given):
    with pytest.raises(TypeError, match="expected of the host bytes"):
        Limit.of({"host": given})


def test_no_limit_by_name_is_no_limit():
    assert Limit.of({"cuda": None, "host": None}) == dataclasses.replace(Limit(), device="cuda")


def test_a_plan_that_copies_to_the_host_is_refused_where_nothing_may(step):
    with pytest.raises(ValueError, match=r"plan: it copies .* to the host, got it with Run\(swap=False\)"):
        _step(None, plan=step.plan, run=lowtide.Run(swap=False))


def test_limits_that_no_program_here_can_have_are_refused():
    model, batch, loss, optimizer = _net()
    here = {"loss": loss, "optimizer": optimizer}
    with pytest.raises(ValueError, match="the program runs on the host itself"):
        lowtide.optimize(model, batch, memory={"cpu": "1GiB", "host": "1GiB"}, **here)
    with pytest.raises(ValueError, match="expected a limit of cpu, on which the program runs, got one of cuda"):
        lowtide.optimize(model, batch, memory={"cuda": "1GiB"}, **here)
    with pytest.raises(ValueError, match="the program runs on the host itself"):
        lowtide.explain(model, batch, memory={"host": "1GiB"}, **here)
    with pytest.raises(ValueError, match=r"got it where nothing is \(`Run\(swap=False\)`\)"):
        _step({"host": "1GiB"}, run=lowtide.Run(swap=False))
    with pytest.raises(TypeError, match="memory and latency: expected one limit or none"):
        _step({"cuda": "1GiB"}, latency=1.1)
    with pytest.raises(ValueError, match="a program of one shape; got it with `dynamic`"):
        _step({"host": "1GiB"}, shapes=lowtide.Shapes(dynamic={0: {0: (2, 512)}}))
    with pytest.raises(ValueError, match="expected a limit of the host alone"):
        lowtide.needs(model, batch, memory="1GiB", **here)


def test_a_limit_of_the_cpu_s_memory_by_name_is_one_of_the_device():
    model, batch, loss, optimizer = _net()
    plans = [
        lowtide.optimize(
            model, batch, loss=loss, optimizer=optimizer, memory=memory, planning=lowtide.Planning(effort="quick", workspaces=False)
        ).plan
        for memory in ("80%", {"cpu": "80%"})
    ]
    assert plans[0].peak_bytes == plans[1].peak_bytes
    assert plans[1].host_bytes is None


def test_explain_keeps_to_the_host_and_says_so():
    model, batch, loss, optimizer = _net()
    planning = lowtide.Planning(simulate=GPU, workspaces=False, progress=False)
    asked = {"loss": loss, "optimizer": optimizer, "planning": planning}
    free, held = (lowtide.explain(model, batch, memory=memory, **asked) for memory in ("55%", {"cuda": "55%", "host": 1}))
    assert held.host_bytes == 1
    assert "1 B of the host" in held.verdict
    assert min(point.peak_bytes for point in held.frontier) >= min(point.peak_bytes for point in free.frontier)
    assert all('"host": 1' in each.arguments or "'host': 1" in each.arguments for each in held.remedies if "memory" in each.arguments)
    for remedy in (each for each in held.remedies if each.arguments and "accumulate" not in each.arguments):
        arguments = eval(f"dict({remedy.arguments})", {"lowtide": lowtide})
        plan = lowtide.optimize(
            model, batch, loss=loss, optimizer=optimizer, **arguments, planning=dataclasses.replace(planning, effort="quick")
        ).plan
        assert plan.pinned_bytes == 0
        assert plan.peak_bytes <= remedy.peak_bytes


def test_needs_counts_what_a_plan_pins():
    model, batch, loss, optimizer = _net()
    peak = lowtide.explain(model, batch, loss=loss, optimizer=optimizer).peak_bytes
    room = lambda share: dataclasses.replace(GPU, name=f"{share}", memory_bytes=int((share * peak + 600 * 2**20) / 0.98))  # noqa: E731
    asked = {"loss": loss, "optimizer": optimizer, "cards": [room(0.55), room(2.0)]}
    free = lowtide.needs(model, batch, **asked).cards
    held = lowtide.needs(model, batch, **asked, memory={"host": 1}).cards
    assert free[1].pinned_bytes == held[1].pinned_bytes == held[0].pinned_bytes == 0
    assert free[0].pinned_bytes > 0
    assert f"{free[0].pinned_bytes / 1024:.2f} KiB of the host" in free[0].verdict
    assert held[0].time_us is None or held[0].time_us >= free[0].time_us
