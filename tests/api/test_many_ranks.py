"""Four processes: what may differ from DistributedDataParallel is the order in which the four terms of a sum are added."""

from __future__ import annotations

from itertools import permutations

import torch
import torch.distributed as dist
from torch import nn

import lowtide
from tests.ranks import on_ranks


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def summed() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """A rank's own gradients, their means by a step, and the weights after five steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 7))
    torch.manual_seed(dist.get_rank())
    pixels = torch.randn(5, 40)
    model(pixels).square().sum().backward()
    own = [gradient / dist.get_world_size() for gradient in gradients_of(model)]
    step = lowtide.optimize(
        model,
        pixels,
        loss=lambda model, x: model(x).square().sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        training=lowtide.Training(after_backward=gradients_of),
        parallel=lowtide.Parallel(group=dist.group.WORLD),
        planning=lowtide.Planning(workspaces=False),
    )
    _, means = step(pixels)
    for _ in range(4):
        step(pixels)
    return own, means, [parameter.detach() for parameter in model.parameters()]


def summed_in_parts() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Weights before a step whose gradients are in parts, a rank's own gradients, and the weights after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 7))
    torch.manual_seed(dist.get_rank())
    pixels, before = torch.randn(5, 40), [each.detach().clone() for each in model.parameters()]
    model(pixels).square().sum().backward()
    own = [gradient / dist.get_world_size() for gradient in gradients_of(model)]
    model.zero_grad()
    step = lowtide.optimize(
        model,
        pixels,
        loss=lambda model, x: model(x).square().sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        parallel=lowtide.Parallel(group=dist.group.WORLD, shard="gradients"),
        planning=lowtide.Planning(workspaces=False),
    )
    step(pixels)
    return before, own, [each.detach() for each in model.parameters()]


def orders_of(terms: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of four terms in every order, one by one and in two pairs."""
    found = [((one + two) + three) + four for one, two, three, four in permutations(terms)]
    return [*found, *((one + two) + (three + four) for one, two, three, four in permutations(terms))]


def test_means_of_four_are_sums_in_some_order():
    ranks, in_parts = on_ranks(summed, summed_in_parts, size=4)
    for each in range(4):
        means = [means[each] for _, means, _ in ranks]
        assert all(torch.equal(mean, means[0]) for mean in means)
        sums = orders_of([own[each] for own, _, _ in ranks])
        assert torch.stack([means[0] == total for total in sums]).any(0).all(), "each element is one of them"
        assert all(torch.equal(weights[each], ranks[0][2][each]) for _, _, weights in ranks)
        one, two, three, four = (own[each] for _, own, _ in in_parts)
        after = in_parts[0][0][each].add(((one + two) + three) + four, alpha=-0.5)
        assert all(torch.equal(weights[each], after) for _, _, weights in in_parts), "in parts, the order of ranks"
