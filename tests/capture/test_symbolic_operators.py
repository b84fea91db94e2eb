"""Operators that torch asks for numbers: captured over symbolic sizes, they are at each point what is captured there."""

import math
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowtide.capture.program import TrainingProgram, capture_inference, capture_training
from lowtide.capture.sizes.symbols import FixedError
from lowtide.capture.trace import Given
from lowtide.errors import CaptureError
from lowtide.ir.shapes.dimension import Dimension, Varying, VaryingExtent
from lowtide.ir.shapes.points import at
from lowtide.ir.text.graph_text import to_text

_TAKES = re.compile(r"; takes \w+ by [\w.]+")  # what could work in place where two sizes happen to be one is not asked
CPU = torch.device("cpu")
ROWS, LENGTH = Dimension("rows", 2, 64), Dimension("length", 2, 64)
PICTURES = Varying((ROWS, LENGTH), (VaryingExtent(0, 0, "rows"), VaryingExtent(0, 2, "length"), VaryingExtent(0, 3, "length")))


def _varying(*names):
    ranges = {"rows": ROWS, "length": LENGTH}
    return Varying(
        tuple(ranges[name] for name in names if name), tuple(VaryingExtent(0, dim, name) for dim, name in enumerate(names) if name)
    )


def alike(model, make, varying, points, loss=lambda model, given: model(given).square().mean()):
    program = TrainingProgram(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    first, *_ = points
    symbolic = capture_training(program, Given((make(**first),), {}, CPU, varying))[-1]
    assert not symbolic.conditions or all(each.relation.free_symbols for each in symbolic.conditions)
    for point in points:
        captured = capture_training(program, Given((make(**point),), {}, CPU))[-1].graph
        own = {each.name: point[each.name] for each in symbolic.graph.dimensions}
        assert _TAKES.sub("", to_text(at(symbolic.graph, own))) == _TAKES.sub("", to_text(captured))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "huber_loss", "l1_loss", "binary_cross_entropy"])
def test_losses(name, reduction):
    def loss(model, given):
        return getattr(functional, name)(model(given).sigmoid(), given[:, :3].sigmoid(), reduction=reduction).sum()

    alike(nn.Linear(5, 3), lambda rows: torch.randn(rows, 5), _varying("rows"), [{"rows": 4}, {"rows": 9}], loss)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("shapes", [((4, 3), (4, 3)), ((3,), (4, 3)), ((1,), (1,)), ((), ())])
def test_a_loss_keeps_the_storage_of_its_elements(shapes):
    """Tells when torch no longer does, or does so for other losses."""

    class Loss(nn.Module):
        def forward(self, one, two):
            return functional.mse_loss(one, two), functional.smooth_l1_loss(one, two, reduction="sum")

    batch = tuple(torch.rand(shape) for shape in shapes)
    captured = capture_inference(Loss(), Given(batch, {}, CPU)).graph
    assert [value.storage.nbytes for value in captured.outputs] == [each.untyped_storage().nbytes() for each in Loss()(*batch)]


class Resized(nn.Module):
    def __init__(self, mode, **how):
        super().__init__()
        self.conv, self.mode, self.how = nn.Conv2d(3, 2, 3, padding=1), mode, how

    def forward(self, pictures):
        made = self.conv(pictures)
        like = functional.interpolate(functional.max_pool2d(made, 2), size=made.shape[2:], mode="bilinear")
        return functional.interpolate(made * like, mode=self.mode, **self.how)


@pytest.mark.parametrize("how", [{"size": (24, 24)}, {"scale_factor": 2}, {"scale_factor": 1.5}, {"scale_factor": 0.3}])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area", "nearest-exact"])
@pytest.mark.parametrize("varying", [_varying("rows"), PICTURES])
def test_resizing_by_any_factor(varying, mode, how):
    points = [{"rows": 4, "length": 20}, {"rows": 7, "length": 20 if varying is not PICTURES else 46}]
    alike(Resized(mode, **how), lambda rows, length: torch.randn(rows, 3, length, length), varying, points)


class Layer(nn.Module):
    def __init__(self, kind, rows_first=True, **how):
        super().__init__()
        self.layer = kind(4, 6, batch_first=rows_first, **how)

    def forward(self, given):
        out, last = self.layer(given)
        return out.sum() + sum(each[-1].sum() for each in (last if isinstance(last, tuple) else (last,)))


@pytest.mark.parametrize(
    ("kind", "rows_first", "how"),
    [
        (nn.LSTM, True, {}),
        (nn.LSTM, False, {"bidirectional": True, "num_layers": 2, "bias": False}),
        (nn.LSTM, True, {"dropout": 0.2, "num_layers": 2}),
        (nn.GRU, True, {}),
        (nn.GRU, False, {"bidirectional": True, "bias": False}),
        (nn.RNN, True, {"nonlinearity": "relu"}),
    ],
)
def test_recurrent_layers_over_rows(kind, rows_first, how):
    names = ("rows",) if rows_first else (None, "rows")
    make = lambda rows: torch.randn(rows, 2, 4) if rows_first else torch.randn(2, rows, 4)  # noqa: E731
    alike(Layer(kind, rows_first, **how), make, _varying(*names), [{"rows": 4}, {"rows": 9}])


def test_an_lstm_over_rows_and_lengths():
    alike(
        Layer(nn.LSTM),
        lambda rows, length: torch.randn(rows, length, 4),
        _varying("rows", "length"),
        [{"rows": 4, "length": 5}, {"rows": 9, "length": 3}],
    )


def test_an_lstm_that_onednn_does_not_compute():
    model = Layer(nn.LSTM).double()
    alike(model, lambda rows: torch.randn(rows, 3, 4, dtype=torch.float64), _varying("rows"), [{"rows": 4}, {"rows": 9}])
    with pytest.raises(CaptureError, match=r"dimension length: lstm at .*test_symbolic_operators.py:\d+.* takes a step of its own"):
        capture_inference(model, Given((torch.randn(4, 5, 4, dtype=torch.float64),), {}, CPU, _varying(None, "length")))


@pytest.mark.parametrize(("kind", "name"), [(nn.GRU, "gru"), (nn.RNN, "rnn_tanh")])
def test_a_length_that_is_taken_step_by_step_is_refused(kind, name):
    with pytest.raises(CaptureError, match=rf"dimension length: {name} at .*test_symbolic_operators.py:\d+.* takes a step of its own"):
        capture_inference(Layer(kind), Given((torch.randn(4, 5, 4),), {}, CPU, _varying("rows", "length")))


def test_an_lstm_that_projects_is_refused():
    with pytest.raises(CaptureError, match=r"lstm at .*test_symbolic_operators.py:\d+.* projects what its layers hand on \(proj_size\)"):
        capture_inference(Layer(nn.LSTM, proj_size=3), Given((torch.randn(4, 5, 4),), {}, CPU, _varying("rows")))


def _weighed(made):
    side = made.shape[-1]
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, side), torch.logspace(0, 1, steps=side, base=2.0), indexing="ij"))
    return made * grid.sum(0)


@pytest.mark.parametrize(
    "of",
    [
        _weighed,
        lambda made: functional.fold(functional.unfold(made, 3, padding=1), made.shape[2:], 3, padding=1),
        lambda made: torch.fft.irfft2(torch.fft.rfft2(made) * 2, s=made.shape[-2:]),
        lambda made: made[..., : math.floor(made.shape[-1] * 0.3), : math.ceil(made.shape[-1] / 3)],
    ],
    ids=["numbers of sizes", "folding", "Fourier transforms", "parts"],
)
def test_what_follows_from_sides(of):
    points = [{"rows": 4, "length": 20}, {"rows": 7, "length": 46}]
    make = lambda rows, length: torch.randn(rows, 3, length, length)  # noqa: E731
    alike(nn.Conv2d(3, 2, 3, padding=1), make, PICTURES, points, lambda model, given: of(model(given)).square().mean())


def words(expression: str) -> str:
    """As a message shows it; Python 3.10 knows lines alone."""
    return f"`{re.escape(expression)}` at " if sys.version_info >= (3, 11) else ""


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (
            lambda x: x * sum(range(x.shape[1])),
            words("range(x.shape[1])") + r".*:\d+ takes it to be 8.*x\.shape\[0\] for len\(x\)",
        ),
        (lambda x: x * torch.hann_window(x.shape[1]), words("torch.hann_window(x.shape[1])") + r".*:\d+ takes it to be 8"),
        (lambda x: sum(x.unbind(1)), r"aten\.unbind\.int at .*:\d+ takes it to be 8.*torch has this for numbers alone"),
    ],
)
def test_what_takes_a_number_is_told(of, message):
    class Model(nn.Module):
        def forward(self, given):
            return of(given)

    with pytest.raises(FixedError, match=message):
        capture_inference(Model(), Given((torch.randn(3, 8),), {}, CPU, _varying("rows", "length")))


def test_functions_are_again_what_they_were():
    before = torch.tensor, torch.linspace, torch.logspace, math.sqrt
    alike(nn.Linear(5, 3), lambda rows: torch.randn(rows, 5), _varying("rows"), [{"rows": 4}])
    assert (torch.tensor, torch.linspace, torch.logspace, math.sqrt) == before
