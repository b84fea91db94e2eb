"""`step.at`: a step of the same program under another limit, from what was searched already."""

import pytest
import torch

import lowtide
from bench.in_values import in_values
from lowtide.remat.sweep import Sweep
from tests.api.networks import Gpt, adamw, next_token, workload

SEARCH = Sweep(levels=8, max_states=600)
MAKE = workload(Gpt, lambda: (torch.randint(0, 50, (4, 32)),), next_token, adamw)


def _made(**settings):
    torch.manual_seed(0)
    model, batch, loss, optimizer = MAKE()
    step = lowtide.optimize(
        model, batch, loss=loss, optimizer=optimizer, **in_values(progress=False, workspaces=False, search=SEARCH, **settings)
    )
    return step, batch


def _seeded(step, batch):
    torch.manual_seed(1)  # dropout
    return step(*batch)


@pytest.fixture
def searches(monkeypatch):
    """How many searches there were, in a list of one number."""
    count, explore = [0], Sweep.explore

    def counting(*args, **settings):
        count[0] += 1
        return explore(*args, **settings)

    monkeypatch.setattr(Sweep, "explore", counting)
    return count


def test_one_search_answers_every_limit_and_both_programs_of_an_optimizer(searches):
    step, _ = _made(memory="80%")
    plans = [step.at(f"{share}%").plan for share in (90, 80, 70, 65)]
    assert searches == [1]
    assert [plan.peak_bytes <= share * plan.eager_peak_bytes / 100 for plan, share in zip(plans, (90, 80, 70, 65), strict=True)] == [
        True
    ] * 4
    assert plans[1].to_json() == step.plan.to_json()
    assert [plan.cost_report.time_us for plan in plans] == sorted(plan.cost_report.time_us for plan in plans)
    assert step.at(latency=1.0).plan.cost_report.time_us == step.plan.cost_report.order_us
    assert step.at().plan.cost_report is None
    assert searches == [1]


def test_it_trains_as_eager_does_whichever_step_is_called():
    (leaner, batch), (plain, _) = _made(memory="80%"), _made()
    steps = [leaner, leaner.at("70%"), leaner.at(), plain.at("75%")]  # the last one searches: it was planned without a limit
    for step in (steps[0], steps[1], steps[0], steps[2]):
        assert torch.equal(_seeded(step, batch), _seeded(plain, batch))
    assert steps[3].plan.cost_report.recomputed
    assert torch.equal(_seeded(leaner, batch), _seeded(steps[3], batch))


def test_what_does_not_fit_is_refused_and_the_step_stays():
    step, batch = _made(memory="80%")
    with pytest.raises(lowtide.BudgetError):
        step.at("1%")
    with pytest.raises(TypeError, match="expected one limit or none, got both"):
        step.at("50%", latency=1.1)
    step(*batch)
