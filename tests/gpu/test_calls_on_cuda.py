"""What reaches a GPU is what eager calls there: where ATen, autocast or cuDNN chooses among formulas, a program has eager's choice.

Asked of torch's profiler, of both: no numbers are needed, so that this also holds on a device that computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from bench.device_calls import compared, eagerly, program_of, recorded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
Tensors = tuple[torch.Tensor, ...]


class Called(nn.Module):
    """A call of a layer on tensors that it holds, the first as a parameter where that trains."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any], tensors: Tensors, dtype: torch.dtype | None, training: bool) -> None:
        super().__init__()
        self.layer, self.call, self.dtype, self.count = layer.cuda(), call, dtype, len(tensors)
        for at, tensor in enumerate(tensors):
            trains = training and not at and tensor.is_floating_point()
            (self.register_parameter if trains else self.register_buffer)(
                f"t{at}", nn.Parameter(tensor.cuda()) if trains else tensor.cuda()
            )

    def forward(self) -> Any:
        with torch.autocast("cuda", self.dtype, enabled=self.dtype is not None):
            return self.call(self.layer, *(getattr(self, f"t{at}") for at in range(self.count)))


def made(layer: Callable[[], nn.Module], call: Callable[..., Any], tensors: Tensors, dtype: torch.dtype | None, training: bool) -> Any:
    torch.manual_seed(0)
    model = Called(layer(), call, tensors, dtype, training)
    return model, torch.optim.SGD(model.parameters(), 0.5, foreach=False) if training else None


def plainly(layer: nn.Module, *tensors: torch.Tensor) -> Any:
    return layer(*tensors)


def of(call: Callable[..., Any]) -> tuple[Callable[[], nn.Module], Callable[..., Any]]:
    """A call of tensors alone."""
    return nn.Identity, lambda _, *tensors: call(*tensors)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


PICTURE, ROWS, HEADS = drawn(2, 8, 9, 9), drawn(4, 5, 16), drawn(2, 2, 64, 32)
attention = F.scaled_dot_product_attention
CHOICES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Tensors]] = {
    "a linear layer of rows": (lambda: nn.Linear(16, 8), plainly, (ROWS,)),
    "a linear layer of a transposed input": (lambda: nn.Linear(16, 8), lambda layer, x: layer(x.transpose(0, 1)), (ROWS,)),
    "a bilinear layer": (lambda: nn.Bilinear(8, 8, 4), plainly, (drawn(4, 8), drawn(4, 8))),
    "many matrices by one": (*of(torch.matmul), (ROWS, drawn(16, 8))),
    "one of many matrices by many": (*of(torch.matmul), (drawn(1, 5, 16), drawn(4, 16, 8))),
    "many by many": (*of(torch.matmul), (drawn(2, 4, 5, 16), drawn(2, 4, 16, 8))),
    "matrices by a vector": (*of(torch.matmul), (ROWS, drawn(16))),
    "a convolution": (lambda: nn.Conv2d(8, 16, 3), plainly, (PICTURE,)),
    "a convolution, channels last": (lambda: nn.Conv2d(8, 16, 3), plainly, (PICTURE.to(memory_format=torch.channels_last),)),
    "a convolution by channels": (lambda: nn.Conv2d(8, 8, 3, groups=8), plainly, (PICTURE,)),
    "a transposed convolution": (lambda: nn.ConvTranspose2d(8, 16, 3), plainly, (PICTURE,)),
    "a batch norm": (lambda: nn.BatchNorm2d(8), plainly, (PICTURE,)),
    "a batch norm of rows": (lambda: nn.BatchNorm1d(8), plainly, (drawn(4, 8),)),
    "a batch norm that has learnt": (lambda: nn.BatchNorm2d(8).eval(), plainly, (PICTURE,)),
    "an instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), plainly, (PICTURE,)),
    "a layer norm": (lambda: nn.LayerNorm(16), plainly, (ROWS,)),
    "a group norm": (lambda: nn.GroupNorm(2, 8), plainly, (PICTURE,)),
    "a norm by the mean square": (lambda: nn.RMSNorm(16), plainly, (ROWS,)),
    "a weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), plainly, (ROWS,)),
    "a cell of an LSTM": (lambda: nn.LSTMCell(8, 8), lambda layer, x: layer(x)[0], (drawn(4, 8),)),
    "attention of several heads": (lambda: nn.MultiheadAttention(16, 2), lambda layer, x: layer(x, x, x, need_weights=False)[0], (ROWS,)),
    "the same, learnt": (lambda: nn.MultiheadAttention(16, 2).eval(), lambda layer, x: layer(x, x, x, need_weights=False)[0], (ROWS,)),
    "a layer of an encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32), plainly, (ROWS,)),
    "the same encoder, learnt": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), plainly, (ROWS,)),
    "attention": (*of(lambda x: attention(x, x, x)), (HEADS,)),
    "attention with dropout": (*of(lambda x: attention(x, x, x, dropout_p=0.1)), (HEADS,)),
    "causal attention": (*of(lambda x: attention(x, x, x, is_causal=True)), (HEADS,)),
    "attention with a mask": (*of(lambda x, mask: attention(x, x, x, attn_mask=mask)), (HEADS, drawn(64, 64))),
    "attention with a trained mask": (*of(lambda mask, x: attention(x, x, x, attn_mask=mask)), (drawn(64, 64), HEADS)),
    "attention of odd sizes": (*of(lambda x: attention(x, x, x)), (drawn(2, 2, 63, 31),)),
    "an embedding": (lambda: nn.Embedding(9, 8), plainly, (torch.arange(9).reshape(3, 3),)),
    "a bag of embeddings": (lambda: nn.EmbeddingBag(9, 8), plainly, (torch.arange(9).reshape(3, 3),)),
    "distances of many": (*of(torch.cdist), (drawn(30, 8), drawn(31, 8))),
    "distances of few": (*of(torch.cdist), (drawn(3, 8), drawn(4, 8))),
    "a grid": (*of(lambda x, grid: F.grid_sample(x, grid, align_corners=False)), (PICTURE, drawn(2, 5, 5, 2))),
    "a picture made larger": (*of(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")), (PICTURE,)),
    "a softmax of what may be masked": (*of(lambda x: torch._safe_softmax((x @ x).detach(), 1) + x), (drawn(6, 6),)),
    "a trace": (*of(lambda x: (x @ x).detach().trace() + x.sum()), (drawn(6, 6),)),
    "a log-gamma of several dimensions": (*of(lambda x: torch.mvlgamma((x @ x).abs() + 3, 2)), (drawn(6, 6),)),
    "the same, into memory that is there": (
        *of(lambda x: torch.mvlgamma((x @ x).detach().abs() + 3, 2, out=torch.empty_like(x)) + x.sum()),
        (drawn(6, 6),),
    ),
    "sums in half precision": (
        *of(lambda x: (x @ x).sum(0) + (x @ x).cumsum(0)[0] + (x @ x).softmax(0)[0] + (x @ x).norm()),
        (drawn(6, 6),),
    ),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHOICES)
def test_a_program_calls_what_eager_calls(name: str, dtype: torch.dtype | None, training: bool) -> None:
    what, why = compared(lambda: made(*CHOICES[name], dtype, training))
    assert what in ("same", "fewer"), why


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("product", [lambda x: (x @ x).prod(1), lambda x: (x @ x).cumprod(1)], ids=["prod", "cumprod"])
def test_a_product_in_half_precision_and_its_gradient_are_of_the_dtypes_that_autocast_takes(
    product: Callable[..., Any], dtype: torch.dtype
) -> None:
    """Which branch of a gradient eager takes is a matter of data: a program has all."""
    case = *of(product), (drawn(6, 6),), dtype, True
    expected, found = recorded(lambda: eagerly(*made(*case))), recorded(program_of(*made(*case)))
    kinds = [{call for call in each.calls if call.startswith(("prod", "cumprod", "div"))} for each in (expected, found)]
    assert kinds[0] - kinds[1] == set()
    assert any(str(dtype).removeprefix("torch.") in call for call in kinds[1])


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in ("polar",) if hasattr(torch.linalg, name)])
def test_a_kernel_whose_products_autocast_casts_unseen_is_refused(name: str, dtype: torch.dtype | None) -> None:
    what, why = compared(lambda: made(*of(getattr(torch.linalg, name)), (drawn(6, 6),), dtype, False))
    if what == "not in eager":  # which looks at numbers, and here they are whatever the tests before have left in memory
        pytest.skip(why)
    assert what == ("same" if dtype is None else "refused")
    assert (dtype is None) is not ("call it with autocast disabled" in why)


class Losses(nn.Module):
    """Of sequences without places."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, target_lengths: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(logits.log_softmax(2), targets, lengths, target_lengths)


def sequences(length: int, most: int, dtype: torch.dtype, where: str) -> Tensors:
    lengths, target_lengths = torch.full((3,), length, dtype=dtype), torch.full((3,), most, dtype=dtype)
    return drawn(20, 3, 7).cuda(), torch.ones(3 * most, dtype=dtype).cuda(), lengths.to(where), target_lengths.to(where)


def losses_called(run: Callable[[], Any]) -> set[str]:
    return {call.partition("(")[0] for call in recorded(run).calls} & {"_ctc_loss", "_cudnn_ctc_loss"}


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_lengths_lie_where_they_lie(where: str) -> None:
    batch = sequences(20, 5, torch.int64, where)
    step = lowtide.optimize(Losses(), batch, planning=lowtide.Planning(workspaces=False))
    assert losses_called(lambda: step(*batch)) == losses_called(lambda: Losses()(*batch)) == {"_ctc_loss"}


@pytest.mark.parametrize("first", [0, 1])
def test_whether_cudnn_computes_a_loss_is_asked_of_each_batch(first: int) -> None:
    """It does where no target is longer than its sequence."""
    batches = sequences(20, 5, torch.int32, "cuda"), sequences(4, 5, torch.int32, "cuda")
    step = lowtide.optimize(Losses(), batches[first], planning=lowtide.Planning(workspaces=False))
    for batch in (*batches, *batches):
        assert losses_called(partial(step, *batch)) == losses_called(partial(Losses(), *batch)) != set()


class Halved(nn.Linear):
    """Attention among every other place, [rows, places, 32]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = super().forward(F.max_pool2d(x, (2, 1))).unflatten(2, (2, 16)).transpose(1, 2)
        return attention(heads, heads, heads)


@pytest.mark.filterwarnings("ignore:step.measure trains")
def test_a_range_of_attention_calls_what_each_length_alone_does() -> None:
    """Half the places, rounded down; and of those the logarithms that are kept for the gradient, rounded up to 32."""
    x, steps = drawn(4, 90, 32).cuda(), []
    for dynamic in ({0: {1: ("places", 8, 90)}}, None):
        model = Halved(32, 32).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        shapes = lowtide.Shapes(dynamic, on_new_shape="extend")
        steps.append(lowtide.optimize(model, x, loss=lambda model, x: model(x).square().mean(), optimizer=optimizer, shapes=shapes))
    for places in (90, 33, 64):
        given = x[:, :places].contiguous()
        for step in (*steps, *steps):  # each looks once more at its program
            step(given)
        ranged, alone = (recorded(partial(step, given)).calls for step in steps)
        assert ranged == alone
        assert any("efficient_attention" in call for call in ranged)
    assert steps[0].measure(x).peak_bytes <= steps[0].plan.peak_bytes
    assert len(steps[0].ranges) == 1
