"""Under a limit of memory or time: the limit is kept as an allocator measures it, and every number stays the same."""

import pickle

import pytest
import torch
from torch import nn

import lowtide
from bench.in_values import in_values
from lowtide.planning.request import Limit, checked_latency
from tests.api.limits import smallest_peak
from tests.api.networks import Gpt, adamw, convnet, cross_entropy, next_token, sgd, squares, workload
from tests.training import check


class _Dropouts(nn.Module):
    """Linear, sigmoid, dropout, four times: what partitioners that recompute random masks get silently wrong."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Dropout(0.5)) for _ in range(4)])

    def forward(self, x):
        return self.layers(x)


SEARCH = lowtide.Sweep(levels=10, max_states=1200)  # enough here, and ten times faster than the default
LIKE_PLANNED = {"search": SEARCH, "workspaces": True}


MAKES = {
    "gpt": workload(Gpt, lambda: (torch.randint(0, 50, (4, 32)),), next_token),
    "dropouts": workload(_Dropouts, lambda: (torch.randn(256, 64),), squares, sgd),
    "convnet": workload(convnet, lambda: (torch.randn(16, 3, 16, 16), torch.randint(0, 5, (16,))), cross_entropy, adamw),
}


def _planned(make, **limit):
    torch.manual_seed(0)
    model, batch, loss, optimizer = make()
    return lowtide.optimize(
        model, batch, loss=loss, optimizer=optimizer, **in_values(progress=False, search=SEARCH, check="never", **limit)
    )


@pytest.fixture(scope="module", params=MAKES)
def case(request):
    """A workload, its smallest peak and its own."""
    make = MAKES[request.param]
    return make, smallest_peak(lambda limit: _planned(make, memory=limit)), _planned(make).plan.eager_peak_bytes


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6])
def test_numbers_are_eagers_at_every_limit(case, share):
    make, least, most = case
    step = check(make, options={**LIKE_PLANNED, "memory": int(least + share * (most - least))})
    assert step.plan.cost_report.recomputed > 0 or step.plan.algebra or step.plan.peak_bytes == step.plan.cost_report.order_peak_bytes
    if share == 0:
        assert step.plan.cost_report.recomputed > 0


def test_less_memory_never_measures_higher_and_more_is_never_slower(case):
    make, least, most = case
    seen = []
    for limit in range(most, least - 1, -max(1, (most - least) // 4)):
        torch.manual_seed(0)
        model, batch, loss, optimizer = make()
        step = lowtide.optimize(
            model,
            batch,
            loss=loss,
            optimizer=optimizer,
            planning=lowtide.Planning(progress=False, search=SEARCH),
            run=lowtide.Run(check="never"),
            memory=limit,
        )
        step(*batch)
        measured = step.measure(*batch).peak_bytes
        assert measured <= limit
        assert measured <= step.plan.peak_bytes
        assert step.plan.peak_bytes <= 1.01 * measured
        seen.append((step.plan.peak_bytes, step.plan.cost_report.time_us))
    assert seen == sorted(seen, key=lambda pair: (-pair[0], pair[1]))


def test_autocast_stays_right_under_a_limit():
    make = MAKES["gpt"]
    around = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    with around():
        least_bytes = smallest_peak(lambda limit: _planned(make, memory=limit))
    step = check(make, around=around, around_optimize=around, options={**LIKE_PLANNED, "memory": least_bytes})
    assert step.plan.cost_report.recomputed > 0


def test_a_limit_of_time_is_kept_and_gives_the_least_memory_for_it():
    make = MAKES["dropouts"]
    one, more = _planned(make, latency=1), _planned(make, latency=1.15)
    assert one.plan.cost_report.time_us == one.plan.cost_report.order_us
    assert more.plan.cost_report.time_us <= 1.15 * more.plan.cost_report.order_us
    assert more.plan.peak_bytes < one.plan.peak_bytes
    assert (more.plan.peak_bytes, more.plan.cost_report.time_us) in more.frontier
    check(make, options={**LIKE_PLANNED, "latency": 1.15})


def test_the_frontier_answers_every_limit(case):
    make, least, most = case
    frontier = _planned(make, memory=most).frontier
    assert frontier == tuple(sorted(frontier, key=lambda pair: (pair[0], -pair[1])))
    assert frontier[0][0] == least
    peak, time_us = frontier[len(frontier) // 2]
    plan = _planned(make, memory=peak).plan
    assert (plan.peak_bytes, plan.cost_report.time_us) == (peak, time_us)


def test_an_impossible_limit_says_what_would_be_possible_and_changes_nothing():
    make = MAKES["dropouts"]
    torch.manual_seed(0)
    model, batch, loss, optimizer = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(lowtide.BudgetError, match=r"which any plan takes.*nothing was searched\nresident throughout: .*param") as early:
        lowtide.optimize(
            model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(progress=False, search=SEARCH), memory="1%"
        )
    assert not early.value.searched
    with pytest.raises(lowtide.BudgetError, match=r"the smallest peak that was found(.*\n)+peak at step \d+ of \d+") as told:
        _planned(make, memory=early.value.smallest_peak_bytes)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert pickle.loads(pickle.dumps(told.value)).smallest_peak_bytes == told.value.smallest_peak_bytes
    step = lowtide.optimize(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        planning=lowtide.Planning(progress=False, search=SEARCH),
        memory=told.value.smallest_peak_bytes,
    )
    assert step.plan.peak_bytes == told.value.smallest_peak_bytes


def test_a_plan_with_recomputation_is_saved_loaded_and_used_again(tmp_path):
    make = MAKES["convnet"]
    step = _planned(make, latency=2)
    assert step.plan.cost_report.recomputed
    step.plan.save(tmp_path / "plan.json")
    assert lowtide.Plan.load(tmp_path / "plan.json").to_json() == step.plan.to_json()
    again = _planned(make, plan=tmp_path / "plan.json")
    assert again.plan.to_json() == step.plan.to_json()
    check(make, options={"workspaces": True, "plan": tmp_path / "plan.json"})


def test_the_same_limit_gives_the_same_plan():
    make = MAKES["convnet"]
    assert _planned(make, latency=1.3).plan.to_json() == _planned(make, latency=1.3).plan.to_json()


def test_inference_fits_its_limit():
    torch.manual_seed(0)
    model, x = convnet().eval(), torch.randn(16, 3, 16, 16)
    step = lowtide.optimize(model, (x,), planning=lowtide.Planning(progress=False, search=SEARCH), latency=1.5)
    with torch.no_grad():
        assert torch.equal(step(x), model(x))


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [(1000, 1000), ("8GiB", 8 * 2**30), (" 1.5 mb ", 1_500_000), ("12 KiB", 12288), ("7B", 7), ("50%", 500), ("12.5 %", 125)],
)
def test_amounts_of_memory_are_read(given, nbytes):
    assert Limit.of(given).budget(1000).memory_bytes == nbytes


@pytest.mark.parametrize("given", ["", "GiB", "5", "0%", "-3 MB", "3 parsecs", "1e3 MB", 0, -1])
def test_amounts_that_cannot_be_are_refused(given):
    with pytest.raises(ValueError, match="expected bytes as a whole number"):
        Limit.of(given)


@pytest.mark.parametrize("given", [2**63, "9" * 400 + "GiB", f"{2**34} GiB"])
def test_amounts_that_no_plan_can_say_are_refused(given):
    with pytest.raises(ValueError, match="expected at most 9223372036854775807 bytes"):
        Limit.of(given)


def test_a_share_of_any_size_is_an_amount():
    assert Limit.of("9" * 400 + "%").budget(1000).memory_bytes == 2**63 - 1


@pytest.mark.parametrize("given", [1.5, True, []])
def test_amounts_of_another_type_are_refused(given):
    with pytest.raises(TypeError, match="expected bytes as a whole number"):
        Limit.of(given)


def test_limits_of_time_that_cannot_be_are_refused():
    for wrong in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected 1 or more"):
            checked_latency(wrong)
    with pytest.raises(TypeError, match="expected a number such as"):
        checked_latency("10%")
    with pytest.raises(TypeError, match="a saved plan keeps to the limit that it was made for"):
        _planned(MAKES["dropouts"], memory=10**9, plan="plan.json")
    with pytest.raises(TypeError, match="expected one limit or none, got both"):
        _planned(MAKES["dropouts"], memory=10**9, latency=1.1)
