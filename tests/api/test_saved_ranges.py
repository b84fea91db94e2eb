"""Plans of a range, saved and used again: nothing is searched or measured anew, and what is of something else is refused."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from bench.in_values import in_values
from lowtide.errors import FormatError
from lowtide.ranges.save import checksum, read_range

DYNAMIC = {0: {0: ("rows", 2, 8), 1: ("length", 8, 64)}, 1: {0: "rows", 1: "length"}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 50)
    )


def loss(model, tokens, labels):
    return functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def batch_of(rows, length):
    return torch.randint(0, 50, (rows, length)), torch.randint(0, 50, (rows, length))


def step_of(model, **settings):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"dynamic": DYNAMIC, "effort": "quick"} | settings
    return lowtide.optimize(model, batch_of(4, 32), loss=loss, optimizer=optimizer, **in_values(**given))


@pytest.fixture(scope="module", params=["65%", None])
def saved(request, tmp_path_factory):
    """A step, and the file that it wrote."""
    step, path = step_of(net(), memory=request.param), tmp_path_factory.mktemp("saved") / "plans.json"
    step.save(path)
    return step, path


def nothing_new(*args, **kwargs):
    raise AssertionError("nothing is to be searched or measured")


@pytest.fixture
def again(saved, monkeypatch):
    """The step that the file gives, without any search."""
    for name in ("ranges.planner.schedule_all", "remat.sweep.Sweep.explore", "ranges.candidate.measure_workspaces"):
        monkeypatch.setattr(f"lowtide.{name}", nothing_new)
    monkeypatch.setattr("lowtide.ranges.candidate.measure_timings", nothing_new)
    return step_of(net(), plan=saved[1])


def test_what_it_promises_is_the_same(saved, again, tmp_path):
    for shape in ((8, 64), (2, 8), (5, 33)):
        batch = batch_of(*shape)
        one, other = saved[0].plan_for(*batch), again.plan_for(*batch)
        assert (one.peak_bytes, one.order, one.reuses, one.node_us) == (other.peak_bytes, other.order, other.reuses, other.node_us)
    assert again.ranges == saved[0].ranges
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == saved[1].read_text()


def test_it_trains_as_the_loop_does(saved):
    model = net()
    twin = copy.deepcopy(model)
    step, other = step_of(model, plan=saved[1]), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for seed, shape in enumerate([(4, 32), (8, 64), (3, 9)]):
        batch = batch_of(*shape)
        torch.manual_seed(seed)
        found = step(*batch)
        torch.manual_seed(seed)
        other.zero_grad()
        expected = loss(twin, *batch)
        expected.backward()
        other.step()
        assert torch.equal(found, expected)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))


only_limited = pytest.mark.parametrize("saved", ["65%"], indirect=True)


@only_limited
def test_another_limit_is_planned_from_it(saved):
    step = step_of(net(), plan=saved[1])
    wide = step.at("90%")
    assert wide.plan_for(*batch_of(8, 64)).peak_bytes <= 0.9 * wide.plan_for(*batch_of(8, 64)).eager_peak_bytes


@only_limited
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamic": DYNAMIC | {0: {0: ("rows", 2, 16), 1: ("length", 8, 64)}}}, "another range: for rows a number from 2 to 8"),
        ({"dynamic": None}, r"expected with dynamic=None .* of rows from 2 to 8, length from 8 to 64"),
        ({"dynamic": "auto"}, "expected with dynamic='auto'"),
    ],
)
def test_another_range_is_refused(saved, settings, message):
    with pytest.raises(FormatError, match=message.replace("a number from", "from")):
        step_of(net(), plan=saved[1], **settings)


@only_limited
def test_another_program_is_refused(saved, tmp_path):
    with pytest.raises(FormatError, match="of another program"):
        step_of(nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50)), plan=saved[1])
    lowtide.optimize(net(), batch_of(4, 32)[:1]).save(tmp_path / "one.json")
    with pytest.raises(FormatError, match="got a plan of one shape: leave `dynamic` out"):
        step_of(net(), plan=tmp_path / "one.json")
    with pytest.raises(TypeError, match=r"step.save\(path\)"):
        step_of(net(), plan=lowtide.Plan.load(tmp_path / "one.json"))


def _resealed(data):
    return json.dumps(data | {"checksum": checksum({name: item for name, item in data.items() if name != "checksum"})})


def _changed(data, change):
    change(data["parts"][0]["programs"][-1])
    return data


@only_limited
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one["members"][0].update(order=one["members"][0]["order"][:-1], sequence=None), "were changed: .*order"),
        (lambda one: one["members"][0].update(sequence=[10**6, 3]), "were changed: a sequence"),
        (lambda one: one["members"][0].update(candidate=99), "expected one of . candidates, got 99"),
        (lambda one: one["candidates"][0].update(graph="0" * 64), "the captured graph is not the first"),
        (lambda one: one["candidates"][0]["points"].pop(), "were changed"),
        (lambda one: one["candidates"][0]["workspace_bytes"][0].append(1), "were changed"),
        (lambda one: one["candidates"][0]["workspace_bytes"].__setitem__(0, [-1]), "expected 'workspace_bytes' to be from 0 to below"),
        (lambda one: one.update(more=1), "got 'more'"),
    ],
)
def test_a_file_that_is_no_right_plan_is_refused(saved, tmp_path, change, message):
    path = tmp_path / "changed.json"
    data = _changed(json.loads(saved[1].read_text()), change)
    with pytest.raises(FormatError, match="checksum"):
        read_range(json.dumps(data))
    path.write_text(_resealed(data))
    with pytest.raises(FormatError, match=message):
        step_of(net(), plan=path)


@only_limited
def test_a_file_that_was_cut_off_is_refused(saved):
    with pytest.raises(FormatError, match="expected a whole JSON text"):
        read_range(saved[1].read_text()[:-40])
