"""`exact` reaches planning, under every limit, and is the default."""

import pytest
import torch
from torch import nn

import lowtide
from bench.in_values import in_values
from lowtide.planning.planner import Planner


@pytest.mark.parametrize(("given", "asked"), [({}, True), ({"exact": True}, True), ({"exact": False}, False)])
def test_planning_is_asked_for_it(given, asked, monkeypatch):
    seen, plans = [], Planner.plans
    monkeypatch.setattr(Planner, "plans", lambda self, request: (seen.append(request.exact), plans(self, request))[1])
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = lowtide.optimize(model, (torch.ones(4, 3),), loss=lambda model, x: model(x).sum(), optimizer=optimizer, **in_values(**given))
    step.at("100%")
    assert seen == [asked, asked]
