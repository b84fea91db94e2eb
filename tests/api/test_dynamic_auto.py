"""`dynamic="auto"`: the second shape makes a range, which the next ones run in; what cannot be a range is captured shape by shape."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api.ranges.guessed import guessed
from lowtide.ir.shapes.dimension import Dimension


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).cumsum(1).tanh())


def words_loss(model, tokens, labels):
    return nn.functional.cross_entropy(model(tokens).mT, labels)


def batch_of(rows, length):
    return torch.randint(0, 20, (rows, length)), torch.randint(0, 20, (rows, length))


def test_the_second_shape_makes_a_range(monkeypatch):
    model = Words()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    step = lowtide.optimize(model, batch_of(4, 10), loss=words_loss, optimizer=optimizer, dynamic="auto")
    captures = []
    capture = lowtide.api.capturing.capture_training
    monkeypatch.setattr("lowtide.api.capturing.capture_training", lambda *args: captures.append(args) or capture(*args))
    for rows, length, expected in ((4, 10, 0), (4, 12, 1), (4, 20, 1), (4, 7, 1), (4, 10, 1), (3, 9, 2), (4, 24, 2), (2, 5, 2), (4, 50, 3)):
        batch = batch_of(rows, length)
        loss = step(*batch)
        other.zero_grad()
        wanted = words_loss(twin, *batch)
        wanted.backward()
        other.step()
        assert torch.equal(loss, wanted.detach())
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))
        assert len(captures) == expected


class Loop(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return sum(tokens[:, at] * at for at in range(tokens.shape[1]))


def test_what_is_no_range_is_captured_shape_by_shape():
    step = lowtide.optimize(Loop(), batch_of(4, 10)[:1], dynamic="auto", on_new_shape="extend")
    for length in (10, 12, 14):
        tokens = batch_of(4, length)[0]
        if length == 12:
            with pytest.warns(UserWarning, match=r"one by one from here on: dimension argument_0_1: .*takes it to be 24"):
                assert torch.equal(step(tokens), Loop()(tokens))
        else:
            assert torch.equal(step(tokens), Loop()(tokens))


def test_extents_that_were_always_equal_are_tied():
    seen = [[(4, 10), (4, 10, 3), None], [(4, 12), (4, 12, 3), None], [(5, 12), (5, 12, 3), None]]
    found = guessed(seen, ["[1]['x']", "[1]['y']", "[1]['z']"])
    assert found.dimensions == (Dimension("x_0", 1, 10), Dimension("x_1", 1, 24))
    assert [(axis.leaf, axis.dim, axis.name) for axis in found.axes] == [(0, 0, "x_0"), (0, 1, "x_1"), (1, 0, "x_0"), (1, 1, "x_1")]


def test_other_ranks_are_no_range():
    assert guessed([[(4, 10)], [(4, 10, 1)]], ["[0][0]"]) is None
