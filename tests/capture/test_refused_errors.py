"""What a program raises under capture is told with its operator and line, and nothing is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.refusals import WHERE, refused, square


def test_whatever_the_program_raises_is_told_with_operator_and_line():
    def failing(model, x):
        return model(x)[:, :3] @ x

    refused(failing, rf"loss\(model, \.\.\.\) failed in operator aten\.mm\.default at {WHERE}, which raised RuntimeError: .*reduction dim")

    def raising(model, x):
        model(x)
        raise KeyError("mine")

    refused(raising, rf"loss\(model, \.\.\.\) raised KeyError: 'mine', at {WHERE}; where plain PyTorch raises this too")
    refused(lambda model, x: functional.linear(model(x), x.numpy()), rf"raised \w+: .*, at {WHERE}")


def test_a_loss_that_does_not_take_the_batch():
    refused(lambda model, x, y: model(x), r"raised TypeError: .*missing 1 required positional argument: 'y'")


def test_an_error_in_a_librarys_line_names_the_users_too():
    def failing(model, x):
        raise_within_numpy = np.zeros((2, 2)).reshape
        return model(x).sum() * raise_within_numpy(3, x=4)

    refused(failing, rf"raised TypeError: .*, at {WHERE}")


def test_errors_in_the_backward_pass_and_in_the_hook_on_gradients():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError("in backward")

    refused(lambda model, x: Fails.apply(model(x)).sum(), rf"the backward pass raised ZeroDivisionError: in backward, at {WHERE}")

    def hook(model: nn.Module) -> None:
        raise LookupError("in the hook")

    refused(square, rf"after_backward\(model\) raised LookupError: in the hook, at {WHERE}", after_backward=hook)


def test_a_refusal_that_the_program_catches_is_one_all_the_same():
    def careful(model, x):
        y = model(x)
        try:
            scale = x.max().item() * y.max().item()
        except Exception:
            scale = 1.0  # the way that eager never takes
        return y.sum() * scale

    refused(careful, "control flow depends on data")


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection():
    with torch.autograd.detect_anomaly():
        refused(square, "anomaly detection is on, which looks at the values of all gradients")
