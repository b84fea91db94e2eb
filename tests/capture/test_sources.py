"""Nodes come from the user's lines: their own files and other packages', torchvision's too, never torch's."""

import importlib.util

import pytest
import torch
from torch.nn import functional

import lowtide
from bench import torchvision_shim


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="it is of torchvision's files")
def test_lines_are_of_the_innermost_file_that_is_not_torchs():
    torchvision_shim.install()
    from torchvision.models import squeezenet1_0

    model = squeezenet1_0()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(1, 3, 64, 64), torch.tensor([1])
    step = lowtide.optimize(
        model,
        batch,
        loss=lambda model, x, y: functional.cross_entropy(model(x), y),
        optimizer=optimizer,
        planning=lowtide.Planning(workspaces=False),
    )
    found = {(node.op, node.source.module): node.source.file for node in step.plan.graph.nodes if node.source is not None}
    assert found["aten.cat.default", "features.3"].endswith("squeezenet.py")
    assert found["aten._log_softmax.default", ""] == __file__


class Noisy(torch.nn.Module):
    """Its mask has no gradient: no node of autograd stands for it."""

    def forward(self, x):
        return x * torch.empty_like(x).bernoulli_(0.5)


def test_a_gradient_is_of_the_module_whose_operator_it_is_of():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LeakyReLU(), Noisy())
    plan = lowtide.optimize(
        model, (torch.randn(2, 4),), loss=lambda model, x: model(x).sum(), optimizer=torch.optim.SGD(model.parameters())
    ).plan
    modules = {node.op: node.source.module for node in plan.graph.nodes if node.op.startswith("aten.leaky_relu")}
    assert modules == {"aten.leaky_relu.default": "1", "aten.leaky_relu_backward.default": "1"}
