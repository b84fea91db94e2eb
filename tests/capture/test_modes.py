"""Modes of torch's dispatch around a capture and a call: they see the program as it runs, once, and nothing of how it was found."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lowtide


class Seen(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def _program():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters(), 0.1, foreach=False), torch.randn(4, 8)


def _loss(model, x):
    return model(x).sum()


def _eager_flops() -> int:
    model, optimizer, x = _program()
    with FlopCounterMode(display=False) as counter:
        _loss(model, x).backward()
        optimizer.step()
    return counter.get_total_flops()


@pytest.mark.parametrize("captured_within", [True, False])
def test_a_step_is_counted_as_eager_is(captured_within):
    model, optimizer, x = _program()
    step = None if captured_within else lowtide.optimize(model, (x,), loss=_loss, optimizer=optimizer)
    with FlopCounterMode(display=False) as counter:
        step = step or lowtide.optimize(model, (x,), loss=_loss, optimizer=optimizer)
        step(x)
    assert counter.get_total_flops() == _eager_flops()


def test_what_counts_goes_on_counting_behind_a_capture():
    model, optimizer, x = _program()
    with FlopCounterMode(display=False) as counter:
        lowtide.optimize(model, (x,), loss=_loss, optimizer=optimizer)
        model(x)
    assert counter.get_flop_counts()["Sequential.0"]


def test_a_mode_sees_no_capture():
    model, _, x = _program()
    with Seen() as seen:
        step = lowtide.optimize(model, (x,))
        assert seen.products == 0
        step(x)
    assert seen.products == 2


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_learnt_encoder_computes_by_the_kernel_that_eager_has(norm_first):
    """Numbers of the step are followed by a mode, which torch's layers would see, and leave their fused kernel."""
    torch.manual_seed(0)
    teacher = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first).eval().requires_grad_(False)
    models, x, losses = [nn.Linear(16, 16) for _ in range(2)], torch.randn(3, 7, 16), []
    models[1].load_state_dict(models[0].state_dict())

    def loss(model, x):
        with torch.no_grad():
            target = teacher(x)
        value = (model(x) - target).square().mean()
        losses.append(value.item())
        return value

    optimizer = torch.optim.SGD(models[0].parameters(), 0.1)
    step = lowtide.optimize(models[0], (x,), loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    assert "_transformer_encoder_layer_fwd" in step.source
    assert torch.equal(step(x), loss(models[1], x))
    assert losses[0] == losses[1]
