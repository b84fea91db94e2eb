"""Attention, batched products and softmax by generated kernels: near eager in double precision, NaN and infinity where eager has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import lowtide
from lowtide.ir.bodies import is_region

TOLERANCE = 1e-5  # of the largest value, against double precision


class Attends(nn.Module):
    """Attention in several forms: by one operator, with masks of several shapes, causal, by products and a softmax."""

    def __init__(self, heads: int, features: int) -> None:
        super().__init__()
        width = heads * features
        self.heads, self.project = heads, nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norm = nn.LayerNorm(width)

    def split(self, x: torch.Tensor, at: int) -> torch.Tensor:
        b, t, _ = x.shape
        return self.project[at](x).view(b, t, self.heads, -1).transpose(1, 2)

    def together(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def forward(self, x: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(x, at) for at in range(3))
        x = x + self.together(scaled_dot_product_attention(q, k, v, attn_mask=wide))
        x = x + self.together(scaled_dot_product_attention(q, k, v, attn_mask=narrow, scale=0.3))
        x = x + self.together(scaled_dot_product_attention(self.split(x, 3), k, v, is_causal=True))
        scores = torch.softmax(q @ self.split(x, 4).transpose(2, 3) * 0.25 + wide, dim=-1)
        return nn.functional.gelu(self.norm(x + self.project[5](self.together(scores @ v))))


def example(batch: int, tokens: int, heads: int, features: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(tokens)
    model = Attends(heads, features).eval()
    wide = torch.randn(batch, heads, tokens, tokens)
    narrow = torch.where(torch.rand(batch, 1, 1, tokens) < 0.3, -torch.inf, 0.0)
    return model, (torch.randn(batch, tokens, heads * features), wide, narrow)


@pytest.mark.parametrize("sizes", [(1, 16, 2, 16), (2, 13, 3, 5), (1, 37, 1, 36)])
def test_attention_is_eagers_up_to_rounding(sizes: tuple[int, ...]) -> None:
    model, args = example(*sizes)
    step = lowtide.optimize(model, args, exact=False)
    with torch.no_grad():
        for _ in range(2):
            found = step(*args)
            wanted = model.double()(*(each.double() for each in args))
            assert (found.double() - wanted).abs().max() < TOLERANCE * wanted.abs().max()
            model.float()
            args = (torch.randn_like(args[0]), *args[1:])


def test_all_of_it_is_generated() -> None:
    model, args = example(1, 16, 2, 16)
    graph = lowtide.optimize(model, args, exact=False).plan.graph
    assert sum(map(is_region, graph.nodes)) == 1
    bodies = [node.body for node in graph.nodes if node.body is not None]
    assert sum("attention" in node.op for body in bodies for node in body.nodes) == 3
    assert any("bmm" in node.op for body in bodies for node in body.nodes)


class Alone(nn.Module):
    """Nothing but attention, behind a product that makes it worth a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(self.product(q), k, v, attn_mask=mask)


def test_nan_infinity_and_rows_that_are_masked_whole_are_as_in_eager() -> None:
    torch.manual_seed(0)
    model, (q, k, v) = Alone().eval(), (torch.randn(1, 2, 19, 8) for _ in range(3))
    mask = torch.zeros(1, 1, 19, 19)
    step = lowtide.optimize(model, (q, k, v, mask), exact=False)
    mask[..., 3, :], mask[..., 7, 5] = -torch.inf, -torch.inf
    q[0, 0, 2, 1], q[0, 1, 4, 1], v[0, 0, 5, 1] = torch.nan, torch.inf, torch.inf
    with torch.no_grad():
        assert torch.allclose(step(q, k, v, mask), model(q, k, v, mask), rtol=1e-5, atol=1e-6, equal_nan=True)
