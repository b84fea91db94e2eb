"""A step whose masks are bits and whose indices are bytes trains as eager does, with and without a limit, also from a saved plan."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide


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


@pytest.mark.parametrize("limit", [{}, {"memory": "70%"}, {"memory": "70%", "arena": True}])
def test_it_trains_as_eager(limit, tmp_path):
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))
    twin = copy.deepcopy(model)
    optimizer, twins = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin))
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, **limit)
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


class Words(nn.Module):
    """Dropout over a number of rows that varies."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.last(F.dropout(self.first(x).tanh(), 0.2).square()).amax(1)


@pytest.mark.parametrize("arena", [False, True])
def test_a_range_of_shapes_trains_as_eager_within_its_promise(arena):
    torch.manual_seed(0)
    model, rows = Words(), (64, 3, 37)
    twin, batches = copy.deepcopy(model), [torch.randn(count, 8) for count in rows]
    optimizer, twins = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin))

    def mean(model, x):
        return model(x).mean()

    dynamic = {0: {0: ("rows", 2, 64)}}
    step = lowtide.optimize(model, batches[:1], loss=mean, optimizer=optimizer, memory="80%", dynamic=dynamic, arena=arena)
    for turn, x in enumerate(batches * 2):
        torch.manual_seed(turn)
        value = step(x)
        torch.manual_seed(turn)
        twins.zero_grad()
        expected = mean(twin, x)
        expected.backward()
        twins.step()
        assert torch.equal(value, expected.detach())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    plan = step.plan_for(batches[0])
    assert {each.rule for each in plan.algebra} == {"dropout's masks as bits"}
    assert plan.algebra[0].held_bytes == 64 * 64 * 4 - 64 * 64 // 8
    assert arena or step.measure(batches[2]).peak_bytes == step.plan_for(batches[2]).peak_bytes
