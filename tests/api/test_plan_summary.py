"""What a plan says of itself on real programs: the peak's tensors add up to the promise, the evictions to what was paid."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import bench.models
import lowtide
from bench.in_values import in_values
from bench.models.char_gpt import CharGPT, Shape
from lowtide.cost.presets import preset
from lowtide.ir.graph import Kind
from lowtide.ir.text.graph_text import to_text
from tests.api.networks import adamw, convnet, cross_entropy, next_character

SEARCH = lowtide.Sweep(levels=6, max_states=300)


def _char_gpt(**options):
    torch.manual_seed(0)
    model = CharGPT(Shape(blocks=2, width=32, heads=2, length=32))
    batch = (torch.randint(0, 128, (8, 33)),)
    return lowtide.optimize(model, batch, loss=next_character, optimizer=adamw(model), **in_values(**options))


def _convnet(**options):
    torch.manual_seed(0)
    model = convnet()
    batch = torch.randn(16, 3, 16, 16), torch.randint(0, 5, (16,))
    return lowtide.optimize(model, batch, loss=cross_entropy, optimizer=adamw(model), **in_values(**options))


def _resnet(machine="rtx3090", **options):
    work = bench.models.get("resnet18").build(32, "meta")
    optimizer = torch.optim.SGD(work.model.parameters(), 0.1)
    return lowtide.optimize(work.model, work.batch, loss=work.loss, optimizer=optimizer, **in_values(simulate=machine, **options))


def _inference(**options):
    torch.manual_seed(0)
    return lowtide.optimize(convnet().eval(), (torch.randn(16, 3, 16, 16),), **in_values(**options))


MAKES = {
    "char_gpt": _char_gpt,
    "char_gpt, accumulated": lambda **options: _char_gpt(accumulate=2, solver=lowtide.schedule.Best(), **options),
    "convnet": _convnet,
    "resnet18": _resnet,
    "inference": _inference,
}


@pytest.fixture(scope="module", params=MAKES)
def plan(request):
    return MAKES[request.param](latency=1.3, progress=False, workspaces=False, search=SEARCH).plan


def test_the_peaks_tensors_add_up_to_the_promise(plan):
    assert plan.peak.footprint_bytes == plan.peak_bytes
    assert sum(tensor.nbytes for tensor in plan.peak.tensors) + plan.peak.workspace_bytes == plan.peak_bytes
    names = {value.storage.name for node in plan.graph.nodes for value in node.results} | {each.storage.name for each in plan.graph.inputs}
    assert {tensor.name for tensor in plan.peak.tensors} <= names
    assert plan.peak.op == plan.graph.nodes[plan.order[plan.peak.step]].op


def test_what_the_evictions_cost_is_no_more_than_what_the_plan_takes_more(plan):
    """The rest are waits for copies, and what its graph takes longer than the fastest one."""
    report = plan.cost_report
    assert sum(eviction.runs for eviction in report.evictions) == report.recomputed
    assert sum(eviction.run_us for eviction in report.evictions) <= (report.time_us - report.order_us) * (1 + 1e-9) + 1e-6
    assert all(eviction.away for eviction in report.evictions)


def test_what_was_bought_is_no_less_than_what_was_saved(plan):
    """Of the peak of the same order without recomputation, which is no lower than the least that was found."""
    report = plan.cost_report
    bought_bytes = sum(eviction.tensor.nbytes for eviction in report.evictions if eviction.at_peak)
    if plan.algebra:  # what its rules buy lies at the step that would be their own graph's peak
        bought_bytes += sum(rule.held_bytes for rule in plan.algebra)
    assert bought_bytes >= report.order_peak_bytes - plan.peak_bytes


def test_it_is_saved_with_the_plan(plan):
    again = lowtide.Plan.from_json(plan.to_json())
    assert again.peak == plan.peak
    assert again.cost_report == plan.cost_report
    assert to_text(again.graph) == to_text(plan.graph)
    assert str(again) == str(plan)


def test_it_prints_in_few_lines(plan):
    text = str(plan)
    assert len(text.splitlines()) <= (30 if plan.pinned_bytes else 28)
    assert f"peak at step {plan.peak.step} of {len(plan.order)}" in text
    assert ("run again" in text) == bool(plan.cost_report.evictions)
    assert ("no host to swap to" in text) == plan.provenance.device.startswith("cpu")


def test_where_the_graph_is_the_same_costs_are_equal_to_the_last_digits():
    plan = _char_gpt(latency=1.3, progress=False, workspaces=False, search=SEARCH).plan
    report = plan.cost_report
    assert report.recomputed > 0
    taken_us = sum(eviction.run_us for eviction in report.evictions) + sum(rule.cost_us for rule in plan.algebra)
    assert taken_us == pytest.approx(report.time_us - report.order_us)


def test_a_plan_without_a_limit_tells_of_its_peak_and_of_no_cost_report():
    plan = _convnet(progress=False, workspaces=False).plan
    assert plan.peak.footprint_bytes == plan.peak_bytes
    assert plan.cost_report is None
    assert "peak at step" in str(plan)
    assert "run again" not in str(plan)


def test_a_saved_plan_still_tells(tmp_path):
    plan = _convnet(latency=1.3, progress=False, workspaces=False, search=SEARCH).plan
    plan.save(tmp_path / "plan.json")
    again = _convnet(plan=tmp_path / "plan.json", progress=False, workspaces=False, search=SEARCH).plan
    assert (again.peak, again.cost_report) == (plan.peak, plan.cost_report)


def test_what_was_swapped_tells_of_its_links_and_no_swapping_of_none():
    near = dataclasses.replace(preset("rtx3090"), name="near", to_host_bytes_per_s=1e11, from_host_bytes_per_s=1e11)
    swapped, kept = (_resnet(near, latency=1.05, swap=swap, progress=False, search=SEARCH).plan for swap in (True, False))
    moved = [eviction for eviction in swapped.cost_report.evictions if eviction.load_us]
    assert moved
    assert all(eviction.store_us > 0 and eviction.how.endswith("stored and loaded") for eviction in moved)
    assert f"{len(moved)} swapped" in str(swapped)
    assert "to the host" in str(swapped)
    assert not any(eviction.load_us or eviction.store_us for eviction in kept.cost_report.evictions)
    again = lowtide.Plan.from_json(swapped.to_json())
    assert again.cost_report == swapped.cost_report


def test_what_was_lent_is_told_of_like_everything_that_was_moved():
    with torch.device("meta"):
        model, batch = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))), torch.empty(4096, 1024)
    near = dataclasses.replace(preset("rtx3090"), name="near", to_host_bytes_per_s=2.5e10, from_host_bytes_per_s=2.5e10)
    settings = {"loss": lambda model, x: model(x).square().mean(), "optimizer": adamw(model), "latency": 1.2}
    plans = [
        lowtide.optimize(
            model,
            batch,
            **in_values(
                simulate=near, state="swap" if lend else "device", progress=False, search=lowtide.Sweep(max_states=1000), **settings
            ),
        ).plan
        for lend in (False, True)
    ]
    kinds = [{eviction.tensor.kind for eviction in plan.cost_report.evictions} for plan in plans]
    assert not kinds[0] & {Kind.PARAMETER, Kind.STATE}
    assert kinds[1] & {Kind.PARAMETER, Kind.STATE}
    assert plans[1].peak_bytes < plans[0].peak_bytes
    assert plans[1].resident_bytes == plans[0].resident_bytes < plans[1].peak_bytes
    moved = next(eviction for eviction in plans[1].cost_report.evictions if eviction.tensor.kind in (Kind.PARAMETER, Kind.STATE))
    assert moved.how.endswith("stored and loaded")


def test_where_nothing_can_be_sent_away_that_is_said():
    with pytest.warns(UserWarning, match='state="swap" does nothing on a CPU'):
        lowtide.optimize(nn.Linear(4, 4), torch.ones(2, 4), run=lowtide.Run(state="swap"), planning=lowtide.Planning(workspaces=False))


def test_what_cannot_be_lent_is_refused_and_nothing_is_changed():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match='state: expected "device" where nothing is swapped'):
        lowtide.optimize(model, torch.ones(2, 4), memory="90%", run=lowtide.Run(swap=False, state="swap"))
    model.weight = nn.Parameter(torch.from_numpy(np.ones((4, 4), np.float32)))
    with pytest.raises(ValueError, match='state="swap": weight lies in memory that cannot be let go of'):
        lowtide.explain(model, torch.ones(2, 4), planning=lowtide.Planning(simulate="h200"), run=lowtide.Run(state="swap"))
    assert model.weight.shape == (4, 4)
