"""What a program writes in place is computed there, to the last bit as eager does, with nothing copied."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim

import lowtide
from lowtide.ir.graph import Kind, Node, Value
from lowtide.ir.operators.row import SCATTER
from lowtide.lower import python as written
from lowtide.lower.python import lower
from tests.lower.bare_plans import plan, tensor


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 15)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        one, two, three = (made[:, start : start + 5] for start in (0, 5, 10))
        two.mul_(0.3).add_(x, alpha=0.7)
        made[:, ::2].sub_(three.detach()[:, :1].clone())
        made.t()[3].div_(3.0)
        one.add_(x).sigmoid_()
        return made


def loss(model: nn.Module, *batch: Tensor) -> Tensor:
    made = model(*batch)
    return (made[0] if isinstance(made, tuple) else made).square().mean()


@pytest.mark.parametrize("model", [Gates(), nn.GRU(5, 7), nn.GRU(5, 3, bidirectional=True, num_layers=2)], ids=["gates", "gru", "deep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_eagers_for_rows_of_odd_lengths(model, dtype):
    model = copy.deepcopy(model).to(dtype)
    batch = torch.randn(4, 5, dtype=dtype) if isinstance(model, Gates) else torch.randn(6, 3, 5, dtype=dtype)
    twin = copy.deepcopy(model)
    step = lowtide.optimize(
        model, batch, loss=loss, optimizer=optim.SGD(model.parameters(), lr=0.1), planning=lowtide.Planning(workspaces=False)
    )
    eager = optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        eager.zero_grad()
        expected = loss(twin, batch)
        expected.backward()
        eager.step()
        assert torch.equal(step(batch), expected)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert ".sigmoid_()" in step.source
    assert isinstance(model, Gates) or ".copy_(" not in step.source


def bare(first: tuple[int, ...], other: tuple[int, ...]) -> str:
    """The program of `c = scatter(b, add(v, w))`, where v and w are views of b = exp(x): shape, stride and offset of each."""
    x, base, scattered = tensor("x", Kind.INPUT, shape=(6, 4)), tensor("b", shape=(6, 4)), tensor("c", shape=(6, 4))
    views = [Value(name, base.storage, "float32", (2, 2), each[:2], each[2]) for name, each in (("v", first), ("w", other))]
    sum_ = tensor("s", shape=(2, 2))
    nodes = [Node("aten.exp.default", (x,), (base,))]
    nodes += [Node("aten.as_strided.default", (base, view.shape, view.stride, view.offset), (view,)) for view in views]
    nodes += [Node("aten.add.Tensor", tuple(views), (sum_,), (("alpha", 2),))]
    nodes += [
        Node(SCATTER, (base, sum_, *map(tuple, (views[0].shape, views[0].stride)), first[2]), (scattered,), inplace=((base, SCATTER),))
    ]
    return lower(plan(*nodes, inputs=(x,), outputs=(scattered,), in_place=True))


def test_it_writes_in_place_beside_what_it_reads_and_not_across_it():
    assert "v.add_(w, alpha=2)" in bare((4, 1, 0), (4, 1, 2))
    assert "v.add_(w, alpha=2)" in bare((4, 1, 0), (4, 1, 0))
    assert "s = v.add(w, alpha=2)" in bare((4, 1, 0), (4, 1, 1))
    assert "s = v.add(w, alpha=2)" in bare((4, 1, 0), (1, 4, 0))


def elements(view: Value) -> set[int]:
    places = itertools.product(*map(range, view.shape))
    return {view.offset + sum(map(int.__mul__, index, view.stride)) for index in places}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_views_that_are_told_apart_share_no_element(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    base = tensor("b", shape=shape)
    views = []
    for name in "vw":
        count = data.draw(st.integers(0, 3))
        sizes = tuple(data.draw(st.integers(1, 3)) for _ in range(count))
        strides = tuple(data.draw(st.sampled_from([1, 2, 3, 4, *base.stride])) for _ in range(count))
        views.append(Value(name, base.storage, "float32", sizes, strides, data.draw(st.integers(0, 12))))
    if written._is_apart(*views, base):
        assert not elements(views[0]) & elements(views[1])
