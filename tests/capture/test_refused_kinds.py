"""Programs of kinds that torch runs beyond plain operators: what is natural is captured, the rest is one sentence each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import lowtide
from tests.training import check


class Calls(nn.Module):
    """A function of a layer's result, and of the batch."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), x)


def summed(y: Tensor, x: Tensor) -> Tensor:
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(3), y)[1]


def by_python(y: Tensor, x: Tensor) -> Tensor:
    return y * 2 if x.sum() > 0 else y.sin()


@pytest.mark.parametrize("function", [summed])
@pytest.mark.parametrize("training", [False, True])
def test_what_calls_functions_is_refused(function: Callable[..., Tensor], training: bool) -> None:
    model = Calls(function)
    with pytest.raises(lowtide.CaptureError, match=r"scan at \S+py:\d+.* calls functions.* Python's own `if`"):
        trained(model) if training else lowtide.optimize(model, torch.ones(2, 3), planning=lowtide.Planning(workspaces=False))


def quantised(y: Tensor, x: Tensor) -> Tensor:
    return y * torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


def rounded(y: Tensor, x: Tensor) -> Tensor:
    return y * torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)


def test_quantised_tensors_are_refused_and_the_remedy_is_captured() -> None:
    with pytest.raises(lowtide.CaptureError, match=r"at \S+py:\d+.* makes a quantised tensor.*torch.fake_quantize"):
        trained(Calls(quantised))
    assert trained(Calls(rounded))(torch.ones(2, 3)).isfinite()


def test_the_remedy_is_captured() -> None:
    step = trained(Calls(by_python))
    assert step(-torch.ones(2, 3)).isfinite()


def trained(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lowtide.optimize(
        model, torch.ones(2, 3), loss=lambda model, x: model(x).mean(), optimizer=optimizer, planning=lowtide.Planning(workspaces=False)
    )


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x[None, :, :1].expand(-1, -1, 4), src_key_padding_mask=torch.tensor([[False, True]]))


def test_a_padding_mask_makes_a_nested_tensor_unless_told_otherwise() -> None:
    model, x = Padded(), torch.ones(2, 3)
    with torch.no_grad():
        with pytest.raises(lowtide.CaptureError, match=r"nested tensor.*encoder\.use_nested_tensor = False"):
            lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False))
        model.encoder.use_nested_tensor = False
        assert torch.equal(lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False))(x), model(x))


def compiled() -> Callable[..., Tensor]:
    return torch.jit.CompilationUnit("def gated(x, y):\n    return x * torch.sigmoid(x)\n").gated


@pytest.mark.parametrize("warm", [0, 3])
def test_a_compiled_function_is_refused_where_torch_differentiates_it(warm: int) -> None:
    gated = compiled()
    for _ in range(warm):
        gated(torch.ones(3, requires_grad=True), torch.ones(3)).sum().backward()
    with pytest.raises(lowtide.CaptureError, match=r"compiled by torch.jit.script ran before \S+py:\d+.*PYTORCH_JIT=0"):
        trained(Calls(lambda y, x: gated(y, x)))


def test_a_compiled_function_that_torch_does_not_differentiate_is_captured() -> None:
    mask, x = compiled(), torch.ones(2, 3)
    assert trained(Calls(lambda y, x: y + mask(x, x)))(x).isfinite()
    model = Calls(compiled()).eval()
    with torch.no_grad():
        assert torch.equal(lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False))(x), model(x))


def nested(layout: torch.layout) -> Callable[..., Tensor]:
    return lambda y, x: torch.nested.nested_tensor([y[:1], y], layout=layout).to_padded_tensor(0.0)


class Sparse(nn.Module):
    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Any:
        return torch.sparse.mm(self.matrix, self.layer(x))  # type: ignore[arg-type]


EYE = torch.eye(2)
KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "jagged": (lambda: Calls(nested(torch.jagged)), r"makes a nested tensor.*pad the rows.*\.py:\d+"),
    "strided": (lambda: Calls(nested(torch.strided)), r"\.py:\d+ makes a nested tensor.*pad the rows"),
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3))), "module '0' is TorchScript.*nn.Module that it was made of"),
    "traced": (lambda: torch.jit.trace(nn.Linear(3, 3), torch.ones(2, 3)), "is TorchScript.*nn.Module that it was made of"),
    "sparse buffer": (lambda: Sparse(EYE.to_sparse()), r"matrix has layout torch.sparse_coo.*index_add.*to_dense\(\)"),
    "sparse rows": (lambda: Sparse(EYE.to_sparse_csr()), r"matrix has layout torch.sparse_csr.*index_add.*to_dense\(\)"),
    "sparse within": (lambda: Calls(lambda y, x: torch.sparse.mm(EYE.to_sparse(), y)), r"sparse.*\.py:\d+.*index_put.*index_add"),
    "generator": (
        lambda: Calls(lambda y, x: y + torch.randn(2, 3, generator=torch.Generator())),
        r"aten.randn.generator.*draws from a generator that the program makes anew",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_one_sentence_each(kind: str, training: bool) -> None:
    make, message = KINDS[kind]
    model = make()
    with pytest.raises(lowtide.CaptureError, match=message) as told:
        trained(model) if training else lowtide.optimize(model, torch.ones(2, 3), planning=lowtide.Planning(workspaces=False))
    assert len(str(told.value)) < 500
    assert "DispatchKey" not in str(told.value)
    assert all(type(each) is nn.Parameter or isinstance(model, torch.jit.ScriptModule) for each in model.parameters())


@pytest.mark.parametrize("product", [False, True])
def test_a_sparse_matrix_as_the_refusal_says_to_write_it(product: bool) -> None:
    indices = torch.tensor([[0, 1, 2, 2], [1, 0, 2, 0]])

    class Deltas(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.values = nn.Linear(3, 3), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            if product:
                parts = self.values[:, None] * x.T.index_select(0, indices[1])
                return self.layer(x) + torch.zeros(3, len(x)).index_add(0, indices[0], parts).T
            return x @ (self.layer.weight + torch.zeros(3, 3).index_put(tuple(indices), self.values, accumulate=True)).T

    def make() -> Any:
        model = Deltas()
        return model, (torch.randn(5, 3),), lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1)

    check(make)
