"""`dynamic="auto"`: the second shape makes a range, which the next ones run in; what cannot be a range is captured shape by shape."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from bench.in_values import in_values
from lowtide.api.notation import guessed
from lowtide.errors import ShapeError
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
    step = lowtide.optimize(model, batch_of(4, 10), loss=words_loss, optimizer=optimizer, shapes=lowtide.Shapes(dynamic="auto"))
    captures = []
    capture = lowtide.api.captures.capture_training

    def counting(*args, put_back=False, **more):
        if not put_back:  # as a look does, at whether the program is still the same
            captures.append(args)
        return capture(*args, put_back=put_back, **more)

    monkeypatch.setattr("lowtide.api.captures.capture_training", counting)
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


def test_further_examples_make_the_range_before_the_first_call(monkeypatch):
    model = Words().eval()
    step = lowtide.optimize(
        model, batch_of(4, 10)[:1], shapes=lowtide.Shapes(dynamic="auto", batches=[batch_of(4, 12)[:1], batch_of(3, 20)[:1]])
    )
    assert [text.splitlines()[0] for text in step.ranges] == ["1 program for argument_0_0 from 2 to 8, argument_0_1 from 2 to 40"]
    monkeypatch.setattr("lowtide.api.captures.capture_inference", None)
    for shape in ((4, 10), (8, 40), (2, 3)):
        tokens = batch_of(*shape)[0]
        assert torch.equal(step(tokens), model(tokens))


@pytest.mark.parametrize(
    ("dynamic", "batches", "error", "message"),
    [
        (None, [batch_of(4, 12)], TypeError, 'expected them with dynamic="auto" alone'),
        ("auto", [batch_of(4, 12)[:1]], ShapeError, r"batches\[0\]: expected a batch of \[0\], \[1\] as `batch` is, got \[0\]"),
        ("auto", [batch_of(4, 12), (batch_of(4, 12)[0], None)], ShapeError, r"batches\[1\]: expected \[1\] with as many dimensions"),
    ],
)
def test_further_examples_of_another_kind_are_refused(dynamic, batches, error, message):
    model = Words()
    settings = {"loss": words_loss, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(error, match=message):
        lowtide.optimize(model, batch_of(4, 10), **in_values(dynamic=dynamic, batches=batches, **settings))


class Loop(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return sum(tokens[:, at] * at for at in range(tokens.shape[1]))


def test_what_is_no_range_is_captured_shape_by_shape():
    step = lowtide.optimize(Loop(), batch_of(4, 10)[:1], shapes=lowtide.Shapes(dynamic="auto", on_new_shape="extend"))
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
