"""What ATen decides within an operator comes out as in eager: which product it takes, what autocast does to calls from within a kernel."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.training import check, differences


class Held(nn.Module):
    """One parameter."""

    def __init__(self, values):
        super().__init__()
        self.p = nn.Parameter(values)


def trained_alike(loss, values, *batch):
    def make():
        model = Held(values.clone())
        return model, batch, lambda model, *batch: loss(model.p, *batch), torch.optim.SGD(model.parameters(), 0.1)

    return check(make, steps=2)


def ops_of(step):
    return [node.op for node in step.plan.graph.nodes]


MANY, ONE = (6, 31, 17), (1, 17, 23)


@pytest.mark.parametrize(("flipped", "trains_one", "autocast"), [*itertools.product([False, True], repeat=3)])
def test_many_matrices_by_one(flipped, trains_one, autocast):
    """Eager spreads the one over the many where it has no gradient, and folds the many where it has."""
    torch.manual_seed(0)
    many, one = torch.randn(MANY), torch.randn(ONE)
    if flipped:
        many, one = many.mT.contiguous(), one.mT.contiguous()

    def loss(p, x):
        many, one = (x, p) if trains_one else (p, x)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (one @ many if flipped else many @ one).float().square().mean()

    step = trained_alike(loss, one if trains_one else many, many if trains_one else one)
    assert ("aten.mm.default" in ops_of(step)) is trains_one


@pytest.mark.parametrize("autocast", [False, True])
def test_many_matrices_by_a_parameter_without_gradients(autocast):
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.randn(ONE))

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return x @ self.p

    model, x = Product(), torch.randn(MANY)
    with torch.no_grad():
        step = lowtide.optimize(model, (x,), planning=lowtide.Planning(workspaces=False))
        assert not (found := differences(model(x), step(x))), found


def test_a_chain_of_homographies():
    """As a spatial transformer normalises its matrices by constants."""
    torch.manual_seed(0)
    norm = torch.tensor([[[2 / 6.0, 0, -1], [0, 2 / 8.0, -1], [0, 0, 1]]])

    def loss(p, image):
        theta = norm @ (torch.cat([p, torch.tensor([[[0.0, 0.0, 1.0]]]).expand(3, 1, 3)], 1) @ torch.linalg.inv(norm))
        grid = F.affine_grid(torch.linalg.inv(theta)[:, :2], [3, 2, 7, 9], align_corners=True)
        return F.grid_sample(image, grid, align_corners=True).square().mean()

    trained_alike(loss, torch.eye(2, 3) + torch.randn(3, 2, 3) / 9, torch.randn(3, 2, 7, 9))


def test_autocast_within_a_bilinear_layer():
    def make():
        model = nn.Bilinear(7, 5, 6)

        def loss(model, x, y):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x, y).square().mean()

        return model, (torch.randn(9, 7), torch.randn(9, 5)), loss, torch.optim.SGD(model.parameters(), 0.1)

    step = check(make)
    assert "aten.bmm.default" in ops_of(step)
    assert not [op for op in ops_of(step) if op in ("aten.reshape.default", "aten.to.dtype")]


def test_autocast_within_a_grid_of_places():
    torch.manual_seed(0)

    def loss(p, image):
        with torch.autocast("cpu", torch.bfloat16):
            return F.grid_sample(image, F.affine_grid(p, [3, 2, 8, 8], align_corners=False), align_corners=False).square().mean()

    trained_alike(loss, torch.randn(3, 2, 3), torch.randn(3, 2, 8, 8))


def test_what_autocast_lets_be_stays_one_operator():
    torch.manual_seed(0)

    def loss(p, x):
        with torch.autocast("cpu", torch.bfloat16):
            return (F.celu(p) * x).mean() + torch.repeat_interleave(p, 2, 0).mean() + p.repeat(2, 1).square().mean()

    found = ops_of(trained_alike(loss, torch.randn(4, 5), torch.randn(4, 5)))
    assert {"aten.mean.default", "aten.repeat.default"} <= set(found)


@pytest.mark.parametrize("hermitian", [False, True])
def test_autocast_within_a_pseudo_inverse(hermitian):
    class Inverse(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return torch.linalg.pinv(x, hermitian=hermitian)

    torch.manual_seed(0)
    x = torch.randn(7, 7)
    x = x + x.mT
    with torch.no_grad():
        step = lowtide.optimize(Inverse(), (x,), planning=lowtide.Planning(workspaces=False))
        assert not (found := differences(Inverse()(x), step(x))), found
