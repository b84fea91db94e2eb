"""Programs whose operators give other results than torch's fake kernels say: trained, bit for bit, within what was promised."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import lowtide
import tests.untrusted  # noqa: F401  (defines operators)
from lowtide.api.captures import Captures
from lowtide.capture import real
from tests.training import check as train


def check(make, **options):
    """Train both ways, with operators tried; fail unless they end alike."""
    return train(make, options={"workspaces": True, **options})


LSTMS = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True},
    "dropout": {"num_layers": 2, "dropout": 0.3},
    "projected": {"proj_size": 5},
    "no bias": {"bias": False, "bidirectional": True},
}


def _recurrent(kind, **options):
    def make():
        torch.manual_seed(0)
        model = kind(12, 16, **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return model, (torch.randn(6, 4, 12),), lambda model, x: model(x)[0].square().mean(), optimizer

    return make


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """One for all of this file: made once by whichever test comes first."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path_factory.getbasetemp() / "real results"))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("options", LSTMS.values(), ids=LSTMS)
def test_an_lstm_trains(options):
    check(_recurrent(nn.LSTM, **options))


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_layers_train(kind):
    check(_recurrent(kind, num_layers=2, bidirectional=True, dropout=0.2))


@pytest.mark.parametrize("options", [{"arena": "always"}, {"memory": "90%"}], ids=["arena", "limit"])
def test_an_lstm_trains_in_an_arena_and_under_a_limit(options):
    check(_recurrent(nn.LSTM, num_layers=2), **options)


def test_the_workspace_of_an_lstm_is_an_activation_that_is_counted():
    model = nn.LSTM(32, 64)
    x = torch.randn(20, 16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lowtide.optimize(model, (x,), loss=lambda model, x: model(x)[0].square().mean(), optimizer=optimizer)
    step(x)
    gc.collect()
    measured = step.measure(x).peak_bytes
    assert step.plan.peak_bytes == pytest.approx(measured, rel=0.01)
    reserves = [
        value
        for node in step.plan.graph.nodes
        for value in node.outputs
        if value is not None and value.dtype == "uint8" and len(value.shape)
    ]
    assert reserves
    assert all(value.storage.kind.value == "activation" and value.storage.nbytes > 0 for value in reserves)


def test_an_lstm_at_inference_keeps_no_workspace():
    model = nn.LSTM(8, 16).eval()
    x = torch.randn(5, 3, 8)
    step = lowtide.optimize(model, (x,))
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(step(x)[0], expected[0])


class _NormOfTurned(nn.Module):
    """As PatchTST does: batch norm over [n, c, l] that lies as [n, l, c]; what follows goes by how it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        normed = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(normed.reshape(-1, 6)) + normed.sum()


class _NormOfPermuted(nn.Module):
    """As CoAtNet does: layer norm, last, of images that lie with their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(3, 4, 1), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.mix(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.ops.lowtide_tests.turned(self.lin(x))
        return y.as_strided((4, 3), y.stride()[::-1]) @ self.lin.weight[:3].t()[:3, :] if y.dim() == 3 else y * self.lin.weight[0]


@pytest.mark.parametrize(
    ("network", "shape"), [(_NormOfTurned, (4, 5, 6)), (_NormOfPermuted, (2, 3, 5, 5)), (_Turned, (3, 4))], ids=["batch", "layer", "custom"]
)
@pytest.mark.parametrize("options", [{}, {"arena": "always"}], ids=["plain", "arena"])
def test_results_lie_as_the_real_operator_lays_them(network, shape, options):
    def make():
        torch.manual_seed(0)
        model = network()
        return model, (torch.randn(shape),), lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)

    step = check(make, **options)
    step(torch.randn(shape))


def test_strides_in_the_graph_are_the_real_ones():
    model = _Turned()
    x = torch.randn(3, 4)
    step = lowtide.optimize(model, (x,))
    (value,) = [node.outputs[0] for node in step.plan.graph.nodes if "turned" in node.op]
    assert value.stride == (1, 3)


@pytest.mark.parametrize(("network", "times"), [(_Turned, 2), (lambda: nn.Linear(4, 4), 1)], ids=["fake is wrong", "fake is right"])
def test_a_program_is_captured_again_where_a_fake_was_believed_wrongly(network, times, monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    captured = []
    once = Captures._captured
    monkeypatch.setattr(Captures, "_captured", lambda *given: captured.append(given) or once(*given))
    model, x = network(), torch.randn(3, 4)
    step = lowtide.optimize(model, (x,))
    assert len(captured) == times
    assert torch.equal(step(x), model(x))
    lowtide.optimize(model, (x,))
    assert len(captured) == times + 1  # all is known


def test_what_is_remembered_serves_where_nothing_is_tried():
    model = _Turned()
    x = torch.randn(3, 4)
    lowtide.optimize(model, (x,))
    step = lowtide.optimize(model, (x,), planning=lowtide.Planning(workspaces=False))
    (value,) = [node.outputs[0] for node in step.plan.graph.nodes if "turned" in node.op]
    assert value.stride == (1, 3)


class _Grouped(nn.Module):
    """Its operator's fake asks for sizes, and with symbols for a dtype, that the CPU's kernel does not ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 8, 4))

    def forward(self, x, ends):
        return torch._grouped_mm(x, self.experts, ends)


def _grouped(tokens):
    return torch.randn(tokens, 8), torch.tensor([3, tokens], dtype=torch.int32)


def _grouped_loss(model, x, ends):
    return model(x, ends).square().mean()


def test_a_fake_that_refuses_what_the_real_operator_takes_is_passed_by():
    def make():
        torch.manual_seed(0)
        model = _Grouped()
        return model, _grouped(7), _grouped_loss, torch.optim.SGD(model.parameters(), lr=0.1)

    check(make)


def test_such_a_fake_is_passed_by_in_a_range_too():
    torch.manual_seed(0)
    model = _Grouped()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, eager)]
    step = lowtide.optimize(
        model, _grouped(7), loss=_grouped_loss, optimizer=optimizers[0], shapes=lowtide.Shapes(dynamic={0: {0: ("tokens", 4, 40)}})
    )
    for tokens in (7, 23, 4, 40):
        batch = _grouped(tokens)
        loss = _grouped_loss(eager, *batch)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(step(*batch), loss)
    assert torch.equal(model.experts, eager.experts)


def test_what_the_real_operator_refuses_too_is_still_told():
    model = nn.Linear(4, 4)
    with pytest.raises(lowtide.CaptureError, match="shapes"):
        lowtide.optimize(model, (torch.randn(3, 5),))


class _Custom(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.lin, self.op = nn.Linear(4, 4), op

    def forward(self, x):
        y = self.op(self.lin(x) * 0 + 7)
        return (y[0] if isinstance(y, tuple) else y) * self.lin.weight.sum()


def _custom(name):
    def make():
        torch.manual_seed(0)
        model = _Custom(getattr(torch.ops.lowtide_tests, name))
        return model, (torch.randn(3, 4),), lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters(), lr=1e-4)

    return make


def test_a_custom_operator_that_made_up_data_crashes_trains():
    """The program gives it 7s, which neither made-up data nor the operator before it on made-up data comes to."""
    with pytest.warns(RuntimeWarning, match=r"cannot measure lowtide_tests\.crash"):
        check(_custom("crash"))


def test_custom_operators_of_which_one_reads_what_the_other_made_train():
    step = check(_custom("pack"))
    (secret,) = [node.outputs[1] for node in step.plan.graph.nodes if "pack" in node.op and "unpack" not in node.op]
    assert secret.storage.nbytes == 4 * (12 + 3)


def test_without_the_trial_the_fake_is_believed(monkeypatch):
    """So that the tests above can fail."""
    monkeypatch.setattr("lowtide.cost.laboratory.Laboratory.results", lambda self, call: None)
    monkeypatch.setattr(real, "corrected", lambda func, args, out: out)
    model = _Turned()
    step = lowtide.optimize(model, (torch.randn(3, 4),))
    (value,) = [node.outputs[0] for node in step.plan.graph.nodes if "turned" in node.op]
    assert value.stride == (4, 1)


class _Resized(nn.Module):
    """A position embedding that is brought to the size of the image: its gradient's layout follows from a stride along an extent of 1."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 64, 8))

    def forward(self, x):
        images = self.positions.reshape(1, 8, 8, -1).permute(0, 3, 1, 2)
        larger = nn.functional.interpolate(images, size=(8, 8), mode="bilinear")
        return x + larger.reshape(1, -1, 64).permute(0, 2, 1)


@pytest.mark.parametrize("known", [True, False], ids=["operators tried", "fakes believed"])
def test_a_gradient_whose_layout_follows_from_a_stride_along_an_extent_of_1(known):
    def make():
        torch.manual_seed(0)
        model = _Resized()
        return (
            model,
            (torch.randn(2, 64, 8),),
            lambda model, x: model(x).square().mean(),
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        )

    check(make, workspaces=known)
