"""What a program raises under capture is told with its operator and line, and nothing is touched."""

from __future__ import annotations

import collections
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.capture.calls import instead_of
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
            scale = 2.0 if y.max().item() > 0 else 3.0
        except Exception:
            scale = 1.0  # the way that eager never takes
        return y.sum() * scale

    refused(careful, "control flow depends on data")


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection():
    with torch.autograd.detect_anomaly():
        refused(square, "anomaly detection is on, which looks at the values of all gradients")


def raises(loss, kept):
    kept.append(loss.item())
    raise RuntimeError("of my own")


def asserts(loss, kept):
    kept.append(-loss.item())
    assert loss.dim() != 0, "of my own"


def misses(loss, kept):
    kept.append(float(loss) + 1)
    return {}["of my own"]


@pytest.mark.parametrize("fail", [raises, asserts, misses])
def test_what_the_users_code_raises_behind_an_item_is_told_as_that(fail):
    def loss(model, x):
        value = model(x).square().mean()
        fail(value, kept)
        return value

    kept, model = [], nn.Linear(3, 2)
    with pytest.raises(lowtide.CaptureError, match=r"raised \w+: .*of my own.* at .*test_refused_errors.py") as caught:
        lowtide.optimize(model, torch.rand(4, 3), loss=loss, optimizer=torch.optim.SGD(model.parameters()))
    assert "of my own" in str(caught.value.__cause__)
    assert kept == []


def test_the_operator_that_a_refusal_names_is_there():
    """Of all that write in place, also what reshapes."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if name.endswith("_") and not name.startswith("_") and hasattr(packet, "overloads"):
            told = instead_of(getattr(packet, packet.overloads()[0]))
            named = re.findall(r"torch\.(\w+)", told)
            assert all(hasattr(torch, each) and not each.endswith("_") for each in named)
            assert named or "new tensor" in told


@pytest.mark.parametrize(("write", "remedy"), [(lambda y: y.resize_(2, 2), "make a new tensor"), (lambda y: y.t_(), r"torch\.t\(")])
def test_what_has_no_other_form_is_refused_with_what_there_is(write, remedy):
    model = nn.Linear(3, 2)
    model.register_buffer("seen", torch.zeros(2, 3))

    def loss(model, x):
        write(model.seen if "t(" in remedy.replace("\\", "") else x * 2)
        return model(x).square().mean()

    with pytest.raises(lowtide.CaptureError, match=remedy):
        lowtide.optimize(model, torch.rand(4, 3), loss=loss, optimizer=torch.optim.SGD(model.parameters()))


class Sum:
    def __init__(self):
        self.sum = 0.0

    def update(self, number):
        self.sum += number


def test_an_object_that_a_defaultdict_makes_is_refused_with_a_remedy_that_works():
    sums, model = collections.defaultdict(Sum), nn.Linear(3, 2)

    def loss(model, x):
        value = model(x).square().mean()
        sums["loss"].update(value.item())
        return value

    given = {"loss": loss, "optimizer": torch.optim.SGD(model.parameters()), "planning": lowtide.Planning(workspaces=False)}
    with pytest.raises(lowtide.CaptureError, match=r"a defaultdict makes a Sum for the key 'loss'.*make it before the step.*") as caught:
        lowtide.optimize(model, torch.rand(4, 3), **given)
    assert "torch.where" not in str(caught.value)
    assert not sums
    assert sums["loss"].sum == 0  # which makes it
    step = lowtide.optimize(model, torch.rand(4, 3), **given)
    value = step(torch.rand(4, 3)).item()
    assert sums["loss"].sum == value


def test_a_mean_over_what_earlier_steps_leave_is_refused_as_that():
    recent, model = collections.deque(maxlen=3), nn.Linear(3, 2)

    def loss(model, x):
        value = model(x).square().mean()
        recent.append(value.item())
        means.append(sum(recent) / len(recent))
        return value

    means = []
    with pytest.raises(lowtide.CaptureError, match="it reads what other steps leave in a deque that it changes"):
        lowtide.optimize(model, torch.rand(4, 3), loss=loss, optimizer=torch.optim.SGD(model.parameters()))
    assert not recent
    assert means == []
