"""One step for a range of shapes, of operators that torch asks for numbers: bit-equal to eager at each, and within its promise."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from bench.in_values import in_values

ROWS = {0: {0: ("rows", 2, 8)}}
SIDES = {0: {0: ("rows", 2, 8), 2: ("side", 8, 40), 3: "side"}}


def trained(model, loss, make, dynamic, shapes):
    """The step, after it has trained on batches of these shapes as eager does."""
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    settings = {"loss": loss, "optimizer": optimizer, "dynamic": dynamic, "effort": "quick", "on_new_shape": "error"}
    step = lowtide.optimize(model, make(*shapes[0]), **in_values(**settings))
    for seed, shape in enumerate(shapes):
        batch = make(*shape)
        torch.manual_seed(seed)
        found = step(*batch)
        torch.manual_seed(seed)
        other.zero_grad()
        expected = loss(twin, *batch)
        expected.backward()
        other.step()
        assert torch.equal(found, expected.detach())
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    return step


def assert_promised(step, *batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = step.measure(*batch)
    plan = step.plan_for(*batch)
    assert abs(measured.peak_bytes - plan.peak_bytes) <= max(2**18, plan.peak_bytes // 100)


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"])
def test_losses(name):
    def loss(model, given, labels):
        return getattr(functional, name)(model(given).sigmoid(), labels)

    make = lambda rows: (torch.randn(rows, 5), torch.rand(rows, 300))  # noqa: E731
    step = trained(nn.Linear(5, 300), loss, make, {**ROWS, 1: {0: "rows"}}, [(4,), (2,), (7,)])
    assert_promised(step, *make(8))


class Tagger(nn.Module):
    def __init__(self, kind, **how):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 8), kind(8, 16, batch_first=True, **how)
        self.head = nn.LazyLinear(5)
        self.head(self.layer(self.embedding(torch.zeros(2, 2, dtype=torch.int64)))[0])

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens))[0])


def _tags(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), (tokens % 5).flatten())


def _tokens(rows, length):
    return (torch.randint(0, 20, (rows, length)),)


def test_an_lstm_over_rows_and_lengths():
    dynamic = {0: {0: ("rows", 2, 8), 1: ("length", 2, 24)}}
    model = Tagger(nn.LSTM, bidirectional=True)
    step = trained(model, _tags, _tokens, dynamic, [(4, 9), (2, 24), (7, 2)])
    for shape in ((8, 24), (3, 13)):
        assert_promised(step, *_tokens(*shape))


def test_a_gru_over_rows():
    trained(Tagger(nn.GRU), _tags, lambda rows: _tokens(rows, 3), ROWS, [(4,), (2,), (7,)])


class Decoder(nn.Module):
    """Down, and up to the size it was, by resizing."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, pictures):
        above = self.first(pictures).relu()
        below = functional.interpolate(functional.max_pool2d(above, 2), scale_factor=1.5, mode="bicubic")
        whole = functional.interpolate(below, size=above.shape[2:], mode="bilinear", align_corners=False)
        return self.last(torch.cat([whole, above], 1))


@pytest.mark.parametrize("dynamic", [ROWS, SIDES])
def test_resizing(dynamic):
    shapes = [(4, 16), (2, 16), (7, 16)] if dynamic is ROWS else [(4, 16), (2, 9), (7, 40)]
    make = lambda rows, side: (torch.randn(rows, 1, side, side),)  # noqa: E731
    trained(Decoder(), lambda model, given: functional.mse_loss(model(given), given), make, dynamic, shapes)


def test_numbers_of_sizes_folding_and_spectra():
    def loss(model, given):
        made, side = model(given), given.shape[-1]
        spectrum = torch.fft.rfft2(made)
        made = made * torch.linspace(0, 1, side) / math.sqrt(side) + torch.fft.irfft2(spectrum, s=made.shape[-2:])
        made = functional.fold(functional.unfold(made, 3, padding=1), (side, side), 3, padding=1)
        return made.square().sum() / torch.tensor([side, 2 * side]).sum() + made[..., : math.ceil(side / 3)].mean()

    make = lambda rows, side: (torch.randn(rows, 1, side, side),)  # noqa: E731
    trained(nn.Conv2d(1, 2, 3, padding=1), loss, make, SIDES, [(4, 16), (2, 9), (7, 40)])
