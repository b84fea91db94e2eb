"""Ranges of shapes that cannot be meant, and programs that are for no range: each refused with what came and what to do."""

import pytest
import torch
from torch import nn

import lowtide
from bench.in_values import in_values
from lowtide.errors import CaptureError, ShapeError
from tests.api.ranged import DYNAMIC, Tokens, batch_of, halving, token_loss


@pytest.mark.parametrize(
    ("dynamic", "error", "message"),
    [
        ({"tokens": {1: (2, 8)}}, ShapeError, r"expected an argument of the batch \(its tensors are \[0\], \[1\]\), got 'tokens'"),
        ({0: {5: (2, 8)}}, ShapeError, r"expected a dimension of batch \[0\], which has 2 \(shape \(4, 32\)\), got 5"),
        ({0: {1: (64, 8)}}, ShapeError, "expected a range of numbers"),
        ({0: {1: (2, 8)}}, ShapeError, "expected a number from 2 to 8, got 32"),
        ({0: {1: "length"}}, ShapeError, "length has no range"),
        ({0: {1: ("n", 2, 64)}, 1: {1: ("n", 2, 65)}}, ShapeError, "expected one range for n, got n in 2..64 and n in 2..65"),
        ({0: {0: ("n", 2, 64), 1: "n"}}, ShapeError, "expected equal extents, got 4 in dimension 0"),
        ({0: {1: 64}}, TypeError, r"expected a range \(16, 2048\)"),
        ({0: [1]}, TypeError, "expected {dimension: range} for 0"),
        ("all", TypeError, "expected a mapping"),
    ],
)
def test_what_cannot_be_meant_is_refused(dynamic, error, message):
    model = Tokens()
    with pytest.raises(error, match=message):
        lowtide.optimize(
            model,
            batch_of(4, 32),
            loss=token_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            shapes=lowtide.Shapes(dynamic=dynamic),
        )


def test_an_extent_that_varies_with_another_but_is_not_named_is_told():
    model = Tokens()
    settings = {"loss": token_loss, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "dynamic": {0: {1: ("length", 8, 64)}}}
    tied = r"in the example dimension 1 of batch \[1\] is 32, as length is: \{1: \"length\"\} ties them"
    with pytest.raises(CaptureError, match=f"Note: what `dynamic` does not name is fixed; {tied}"):
        lowtide.optimize(model, batch_of(4, 32), **in_values(**settings))


def test_a_range_of_batches_that_no_machine_holds_is_refused():
    with pytest.raises(ShapeError, match=r"a batch of length = 1\d+ cannot be made .*: let the ranges end lower"):
        lowtide.optimize(Tokens().eval(), batch_of(4, 32)[:1], shapes=lowtide.Shapes(dynamic={0: {1: ("length", 8, 10**17)}}))


def test_a_program_that_fixes_a_dimension_is_refused():
    class Loop(nn.Module):
        def forward(self, tokens):
            return sum(tokens[:, at] * at for at in range(tokens.shape[1]))

    with pytest.raises(CaptureError, match=r"dimension length: .*test_refused_ranges.py:\d+ takes it to be"):
        lowtide.optimize(Loop(), batch_of(4, 32)[:1], shapes=lowtide.Shapes(dynamic={0: {1: ("length", 8, 64)}}))


def test_a_dimension_that_is_cut_into_micro_batches_is_refused():
    model = Tokens()
    settings = {"loss": token_loss, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "accumulate": 2}
    with pytest.raises(ShapeError, match=r"rows is the dimension of batch \[0\] that accumulate=2 cuts into equal parts"):
        lowtide.optimize(model, batch_of(4, 32), **in_values(dynamic=DYNAMIC, **settings))


class Rounded(nn.Module):
    def forward(self, tokens):
        return tokens * 2 if round(tokens.shape[0] * tokens.shape[1] / 3) > 5 else tokens * 3


def test_a_condition_that_cannot_be_checked_is_told_with_its_line():
    with pytest.raises(
        CaptureError, match=r"rests on a relation of rows, length at .*test_refused_ranges.py.* cannot be checked for each batch"
    ):
        lowtide.optimize(Rounded(), batch_of(4, 32)[:1], shapes=lowtide.Shapes(dynamic={0: DYNAMIC[0]}))


@pytest.mark.parametrize(
    ("extent", "error", "message"),
    [
        (("side", 16, 64, 5), ShapeError, "dimension side: expected a number from 16 to 61 in steps of 5, got 24"),
        (
            ("side", 16, 64, 0),
            ShapeError,
            "dimension side: expected a range of numbers from 0 on, the least first, and a step of 1 or more",
        ),
        (("side", 16, 64, "4"), TypeError, 'one with a step \\("side", 64, 256, 8\\)'),
    ],
)
def test_a_step_that_cannot_be_meant_is_refused(extent, error, message):
    with pytest.raises(error, match=message):
        halving({0: {2: extent, 3: "side"}})


def positions_loss(model, tokens, labels):
    where = torch.nonzero(labels.flatten() > 25).squeeze(1)
    return model(tokens).flatten(0, 1)[where].square().mean()


def experts_loss(model, tokens, labels):
    found = model(tokens).flatten(0, 1)
    return found[torch.where(found.argmax(-1) == 3)[0]].square().mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            positions_loss,
            r"how much aten\.nonzero\.default at .*test_refused_ranges\.py:\d+ finds follows from what a batch .*torch\.where",
        ),
        (experts_loss, r"aten\.nonzero\.default at .*test_refused_ranges\.py:\d+ has no fixed shape, .* activations are known only when"),
    ],
)
def test_a_size_that_depends_on_data_is_refused_with_its_line(loss, message):
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match=message):
        lowtide.optimize(model, batch_of(4, 32), loss=loss, optimizer=optimizer, shapes=lowtide.Shapes(dynamic=DYNAMIC))


def test_a_shape_that_is_right_for_the_example_alone_is_told_in_the_users_words(capsys):
    def loss(model, tokens, labels):
        return model(tokens.reshape(2, 2, 32)).mean()

    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match=r"'\[2, 2, 32\]' is invalid for input of size \S*rows\S*; with `dynamic` .* every batch"):
        lowtide.optimize(model, batch_of(4, 32), loss=loss, optimizer=optimizer, shapes=lowtide.Shapes(dynamic={0: {0: ("rows", 2, 8)}}))
    assert "evaluate_expr" not in capsys.readouterr().err
