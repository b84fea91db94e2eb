"""A step whose masks are bits and whose indices are bytes trains as eager does, with and without a limit, also from a saved plan."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from bench.in_values import in_values


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.last = nn.Linear(32 * 8 * 8, 10)

    def forward(self, x):
        x = F.dropout(F.max_pool2d(F.relu(self.first(x)), 2), 0.2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.last(F.dropout(x.flatten(1), 0.5))


def loss(model, x, y):
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("limit", [{}, {"memory": "70%"}, {"memory": "70%", "arena": "always"}])
def test_it_trains_as_eager(limit, tmp_path):
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))
    twin = copy.deepcopy(model)
    optimizer, twins = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin))
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, **in_values(**limit))
    assert not limit or step.plan.algebra
    step.plan.save(tmp_path / "plan.json")
    again = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, plan=tmp_path / "plan.json")
    assert again.plan.algebra == step.plan.algebra
    for turn in range(4):
        torch.manual_seed(turn)
        value = (again if turn % 2 else step)(*batch)
        torch.manual_seed(turn)
        twins.zero_grad()
        expected = loss(twin, *batch)
        expected.backward()
        twins.step()
        assert torch.equal(value, expected.detach())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
