"""Ten limits, from just under a step's own peak to the least that it can do with: each is kept as measured, and no number changes."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import lowtide
from bench.budget_plans import Once
from bench.in_values import in_values
from lowtide.schedule import Best
from tests.api.limits import smallest_peak
from tests.api.networks import sgd, squares, workload
from tests.training import check

BUDGETS = 10


SEARCH = Once(levels=10, max_states=600)  # one for all limits of a case
QUICKLY = {"search": SEARCH, "solver": Best(), "progress": False}


class _Tied(nn.Module):
    """Attention and perceptrons with dropout, beside shortcuts; the embedding is the last layer's weight too."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.embed.weight)


class _Normed(nn.Module):
    """Convolutions with batch normalisation, whose statistics move once a step whatever is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for c in (3, 8, 8, 8)]
        )

    def forward(self, x):
        return self.layers(x)


def _dropouts():
    """What partitioners that draw masks anew get silently wrong."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Sigmoid(), nn.Dropout(0.5)) for _ in range(4)])


def _next_token(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _plain_sgd(model):
    """Without state: one program, not two."""
    return optim.SGD(model.parameters(), lr=0.1)


def _plain():
    return nullcontext()


def _half():
    return torch.autocast("cpu", dtype=torch.bfloat16)


# What is trained, how many micro-batches there are in a step, and what is around it.
CASES = {
    "dropouts": (workload(_dropouts, lambda: (torch.randn(128, 48),), squares, sgd), 1, _plain),
    "micro-batches": (workload(_Tied, lambda: (torch.randint(0, 40, (8, 24)),), _next_token, _plain_sgd), 2, _plain),
    "autocast": (workload(_Tied, lambda: (torch.randint(0, 40, (4, 24)),), _next_token, _plain_sgd), 1, _half),
    "statistics": (workload(_Normed, lambda: (torch.randn(6, 3, 12, 12),), squares, sgd), 2, _plain),
    "statistics under autocast": (workload(_Normed, lambda: (torch.randn(6, 3, 12, 12),), squares, sgd), 1, _half),
}


def _optimized(case, **limit):
    make, accumulate, around = case
    torch.manual_seed(0)
    model, batch, loss, optimizer = make()
    with around():
        step = lowtide.optimize(
            model, batch, loss=loss, optimizer=optimizer, **in_values(accumulate=accumulate, check="never", **QUICKLY, **limit)
        )
    return step, batch


def _measured_bytes(case, limit):
    """The plan within a limit, and what it was measured to take."""
    step, batch = _optimized(case, memory=limit)
    with case[2]():
        step(*batch)  # an optimizer's first step makes its state
        return step.plan, step.measure(*batch).peak_bytes


@pytest.fixture(scope="module", params=CASES)
def ends(request):
    """A case, its peak as it stands, and the smallest that is found."""
    case = CASES[request.param]
    plan = _optimized(case, latency=1)[0].plan
    return case, plan.eager_peak_bytes, smallest_peak(lambda limit: _optimized(case, memory=limit))


def test_ten_limits_are_kept(ends):
    case, eager_bytes, least_bytes = ends
    most_bytes = eager_bytes * 95 // 100
    assert least_bytes < most_bytes
    limits = [most_bytes - (most_bytes - least_bytes) * step // (BUDGETS - 1) for step in range(BUDGETS)]
    found = [_measured_bytes(case, limit) for limit in limits]
    for limit, (plan, measured_bytes) in zip(limits, found, strict=True):
        assert measured_bytes <= plan.peak_bytes <= limit
        assert plan.peak_bytes <= 1.01 * measured_bytes
    for (richer, more_bytes), (leaner, fewer_bytes) in pairwise(found):
        assert fewer_bytes <= more_bytes
        assert leaner.cost_report.time_us >= richer.cost_report.time_us
    assert found[-1][0].cost_report.recomputed > found[0][0].cost_report.recomputed


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_three_steps_are_eagers(ends, share):
    (make, accumulate, around), eager_bytes, least_bytes = ends
    limit = int(least_bytes + share * (eager_bytes - least_bytes))
    options = {**QUICKLY, "workspaces": True, "memory": limit}
    step = check(make, accumulate=accumulate, around=around, around_optimize=around, options=options)
    assert share or step.plan.cost_report.recomputed > 0
