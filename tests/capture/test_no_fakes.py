"""Whatever a capture fails for, and wherever: parameters, buffers, attributes, gradients and optimizer state are real afterwards."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import lowtide
from bench.in_values import in_values
from lowtide.capture.care.turns import ModuleViews
from lowtide.errors import CaptureError

X = torch.linspace(-1, 1, 12).view(4, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(4))
        self.shift, self.several = torch.zeros(4), [torch.ones(4)]
        self.last.register_forward_pre_hook(lambda module, args: self.at("hook", args))
        self.failing = None

    def at(self, place, found=None):
        if place == self.failing:
            raise ZeroDivisionError
        return found

    def forward(self, x):
        self.at("forward")
        hidden = self.norm(self.first(x)) * self.scale + self.shift + self.several[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.at("backward", gradient * 1))
        self.at("behind")
        return self.last(hidden)


class Adam(torch.optim.Adam):
    failing = False

    def step(self, closure=None):
        super().step(closure)
        if self.failing:
            raise ZeroDivisionError


def tensors_of(model, optimizer):
    for module in model.modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            for item in table.values():
                yield from (each for each in (item if isinstance(item, list) else [item]) if isinstance(each, torch.Tensor))
    yield from (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    yield from (item for entries in optimizer.state.values() for item in entries.values() if isinstance(item, torch.Tensor))


def is_real(model, optimizer):
    return not any(isinstance(tensor, FakeTensor) for tensor in tensors_of(model, optimizer))


@pytest.mark.parametrize("place", ["forward", "hook", "behind", "loss", "backward", "after_backward", "step"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_failure(place, steps_before):
    model = Net()
    optimizer = Adam(model.parameters())
    for _ in range(steps_before):
        model(X).sum().backward()
        optimizer.step()
    before = [id(tensor) for tensor in tensors_of(model, optimizer)]
    model.failing, optimizer.failing = place, place == "step"

    def loss(model, x):
        return model.at("loss", model(x).sum())

    with pytest.raises(CaptureError, match="ZeroDivisionError"):
        lowtide.optimize(
            model, (X,), loss=loss, optimizer=optimizer, training=lowtide.Training(after_backward=lambda model: model.at("after_backward"))
        )
    assert [id(tensor) for tensor in tensors_of(model, optimizer)] == before
    assert is_real(model, optimizer)


def test_a_failure_of_the_capture_itself(monkeypatch):
    """In the middle of its work, where some modules show fakes already."""
    model, show = Net(), ModuleViews.show

    def shows(views, module, own):
        if module is model.last:
            raise ZeroDivisionError
        show(views, module, own)

    monkeypatch.setattr(ModuleViews, "show", shows)
    optimizer = Adam(model.parameters())
    with pytest.raises(CaptureError, match="ZeroDivisionError"):
        lowtide.optimize(model, (X,), loss=lambda model, x: model(x).sum(), optimizer=optimizer)
    assert is_real(model, optimizer)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), inner

    def forward(self, x):
        return self.inner(self.first(x))


SCRIPTED = {
    "a scripted part": lambda: Outer(torch.jit.script(nn.Linear(3, 2))),
    "a traced part": lambda: Outer(torch.jit.trace(nn.Linear(3, 2), X)),
    "scripted": lambda: torch.jit.script(Outer(nn.Linear(3, 2))),
    "traced": lambda: torch.jit.trace(nn.Linear(3, 2), X),
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("make", SCRIPTED.values(), ids=SCRIPTED)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torch_script(make, trains):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"loss": lambda model, x: model(x).sum(), "optimizer": optimizer} if trains else {}
    with pytest.raises(CaptureError, match="is TorchScript"):
        lowtide.optimize(model, (X,), **in_values(**given))
    assert not any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


class Irrep(tuple):
    """As e3nn has them: made of two arguments, without a length."""

    def __new__(cls, degree, parity):
        return tuple.__new__(cls, (degree, parity))

    def __len__(self):
        raise NotImplementedError


class Equivariant(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.irrep, self.others = nn.Linear(3, 2), Irrep(2, -1), [Irrep(0, 1)]

    def forward(self, x, irrep=None):
        return self.linear(x) * self.irrep[0] * (1 if irrep is None else irrep[0])


@pytest.mark.parametrize("batch", [(X,), (X, Irrep(3, 1))])
def test_a_tuple_without_a_length(batch):
    model = Equivariant()
    assert torch.equal(lowtide.optimize(model, batch)(*batch), model(*batch))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_buffer():
    model = Outer(nn.Linear(3, 2))
    model.register_buffer("adjacency", torch.eye(3).to_sparse_csr())
    with pytest.raises(CaptureError, match=r"^adjacency has layout torch\.sparse_csr"):
        lowtide.optimize(model, (X,))
