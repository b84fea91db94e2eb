"""Recurrent networks of cuDNN, and norms that update what the program has made: one operator each, of the user's own weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import lowtide
from bench.device_calls import recorded
from lowtide.capture.corrections import corrected, kernel
from lowtide.ir.result_specs import pieces_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


class Tagger(nn.Module):
    """A recurrent network between two linear layers, of sequences whose places come first, or of packed ones."""

    def __init__(self, recurrent: nn.Module, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.first, self.recurrent, self.dtype = nn.Linear(24, 24), recurrent, dtype
        self.head = nn.LazyLinear(8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        with torch.autocast("cuda", self.dtype, enabled=self.dtype is not None):
            given = self.first(x)
            if lengths is None:
                return self.head(self.recurrent(given)[0])
            packed = nn.utils.rnn.pack_padded_sequence(given, lengths, enforce_sorted=False)
            return self.head(nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0])[0])


def apart(recurrent: nn.Module) -> nn.Module:
    """The same with each weight in memory of its own, as after `weight.data = ...`."""
    recurrent.cuda()
    for parameter in recurrent.parameters():
        parameter.data = parameter.data.clone()
    return recurrent


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(24, 16),
    "GRU": lambda: nn.GRU(24, 16),
    "RNN": lambda: nn.RNN(24, 16),
    "two layers of both directions": lambda: nn.LSTM(24, 16, num_layers=2, bidirectional=True),
    "rows first": lambda: nn.GRU(24, 16, num_layers=2, batch_first=True),
    "without biases": lambda: nn.LSTM(24, 16, bias=False),
    "projections": lambda: nn.LSTM(24, 16, proj_size=4),
    "frozen": lambda: nn.LSTM(24, 16).requires_grad_(False),
    "weights apart": lambda: apart(nn.LSTM(24, 16, num_layers=2)),
    "dropout": lambda: nn.LSTM(24, 16, num_layers=2, dropout=0.5),
}
LENGTHS = torch.tensor([20] * 4 + [7] * 5 + [3] * 7)


def made(name: str, dtype: torch.dtype | None = None) -> tuple[Tagger, torch.Tensor]:
    torch.manual_seed(0)
    recurrent = NETWORKS[name]()
    model = Tagger(recurrent, dtype)
    for layer in (model.first, model.head):  # the weights of the network stay where they are
        layer.cuda()
    model.recurrent = recurrent if name == "weights apart" else recurrent.cuda()
    x = torch.randn(20, 16, 24, device="cuda")
    model(x)
    return model, x


def squares(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    return model(*batch).float().square().mean()


@pytest.mark.filterwarnings("ignore:RNN module weights", "ignore:step.measure trains")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, None) for name in NETWORKS), *((name, torch.float16) for name in ("LSTM", "rows first", "weights apart"))]
)
def test_a_recurrent_network_trains_with_its_own_weights(name: str, dtype: torch.dtype | None) -> None:
    """And what cuDNN keeps for the gradient, and takes while it computes, is promised."""
    model, x = made(name, dtype)
    places = {key: (tensor.data_ptr(), tensor.stride()) for key, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    step = lowtide.optimize(model, x, loss=squares, optimizer=optimizer)
    for _ in range(2):
        step(x)
    assert {key: (tensor.data_ptr(), tensor.stride()) for key, tensor in model.state_dict().items()} == places
    assert step.source.count("cudnn_rnn.default") == step.source.count("cudnn_rnn_backward.default") == 1
    assert step.measure(x).peak_bytes == step.plan.peak_bytes
    kept = [
        value for node in step.plan.graph.nodes if node.op.endswith("cudnn_rnn.default") for value in node.results if value.dtype == "uint8"
    ]
    assert [value.storage.nbytes > 0 for value in kept] == [True]


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_recurrent_network_infers(name: str) -> None:
    model, x = made(name)
    model.eval()
    step = lowtide.optimize(model, x)
    with torch.no_grad():
        expected = recorded(lambda: model(x))
    assert recorded(lambda: step(x)).calls == expected.calls
    assert step.measure(x).peak_bytes == step.plan.peak_bytes


@pytest.mark.filterwarnings("ignore:step.measure trains")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_packed_sequences_are_of_the_lengths_of_each_batch(training: bool) -> None:
    model, x = made("two layers of both directions")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"loss": squares, "optimizer": optimizer} if training else {}
    step = lowtide.optimize(model, (x, LENGTHS), **options)
    for lengths in (LENGTHS, LENGTHS.clamp(max=12) + 8, LENGTHS):
        step(x, lengths)
        sizes = [int((lengths > place).sum()) for place in range(int(lengths.max()))]
        assert f"{sizes}" in step.source
    assert step.measure(x, LENGTHS).peak_bytes == step.plan.peak_bytes


@pytest.mark.filterwarnings("ignore:RNN module weights", "ignore:step.measure trains")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("two layers of both directions", None), ("rows first", torch.float16), ("projections", None), ("weights apart", None)],
)
def test_a_range_of_rows_and_lengths_calls_what_each_shape_alone_does(name: str, dtype: torch.dtype | None) -> None:
    """What cuDNN keeps for the gradient is promised as a bound."""
    dimensions = {0: {0: ("places", 4, 20), 1: ("rows", 2, 16)}}
    steps = []
    for dynamic in (dimensions, None):
        model, x = made(name, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        steps.append(lowtide.optimize(model, x, loss=squares, optimizer=optimizer, shapes=lowtide.Shapes(dynamic, on_new_shape="extend")))
    for given in (x, x[:7, :5].contiguous()):
        for step in (*steps, *steps):  # each looks once more at its program
            step(given)
        ranged, alone = (recorded(partial(step, given)).calls for step in steps)
        assert ranged == alone
        assert steps[0].measure(given).peak_bytes <= steps[0].plan_for(given).peak_bytes
    assert len(steps[0].ranges) == 1


@pytest.mark.parametrize("memory", ["70%", None])
def test_a_network_under_a_limit_calls_its_gradient_once(memory: str | None) -> None:
    """It writes over what the forward pass has kept for it."""
    layers = nn.ModuleList(nn.GRU(32, 32) for _ in range(4)).cuda()
    x = torch.randn(40, 16, 32, device="cuda")

    def loss(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)[0].tanh()
        return x.sum()

    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    step = lowtide.optimize(layers, x, loss=loss, optimizer=optimizer, memory=memory, run=lowtide.Run(swap=False))
    step(x)
    assert step.source.count("aten._cudnn_rnn_backward.default") == 4
    assert (step.source.count("aten._cudnn_rnn.default") > 4) == (memory is not None)


class _States(TorchDispatchMode):
    """Counts the random states that cuDNN is given anew."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.made += func is torch.ops.aten._cudnn_init_dropout_state.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [(), (LENGTHS,)], ids=["padded", "packed"])
def test_dropout_within_layers_is_of_the_state_that_eager_draws_from(lengths: tuple[torch.Tensor, ...]) -> None:
    """The step makes it when eager would, and of the same number of the generator's; what plans and compares makes none, and moves none."""
    model, x = made("dropout")
    generator = torch.cuda.default_generators[0]

    def eager() -> tuple[int, int]:
        with _States() as states:
            model(x)
        return states.made, generator.get_offset()

    torch.manual_seed(3)
    found, drawn = eager()
    assert found == 1
    assert drawn > 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lowtide.optimize(model, (x, *lengths), loss=squares, optimizer=optimizer, run=lowtide.Run(graph="auto"))
    assert eager() == (0, drawn)
    step(x, *lengths)
    assert eager() == (0, drawn)
    torch.manual_seed(3)
    step.verify(x, *lengths)
    step(x, *lengths)  # draws the number
    assert eager() == (0, drawn)
    assert step.source.count("lowtide.cudnn_rnn.default") == step.source.count("lowtide.cudnn_rnn_backward.default") == 1
    assert lengths or "draws from a state of cuDNN's" in str(step.graph)


def test_layers_that_drop_nothing_hold_no_state_of_those_that_do() -> None:
    """ATen hands them what eager's layers have left."""
    nn.LSTM(8, 8, num_layers=2, dropout=0.5).cuda()(x := torch.randn(4, 3, 8, device="cuda"))
    model = nn.LSTM(8, 8).cuda()
    step = lowtide.optimize(model, x)
    assert step.plan.resident_bytes < 2**16


def test_nobody_hears_of_addresses_of_fakes() -> None:
    model, x = nn.LSTM(8, 8).cuda().eval(), torch.randn(4, 3, 8, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.optimize(model, x)(x)


@pytest.mark.parametrize(
    ("affine", "form"), [(True, "lowtide.cudnn_batch_norm_functional"), (False, "_native_batch_norm_legit_functional")]
)
def test_an_instance_norm_updates_its_statistics(affine: bool, form: str) -> None:
    """By way of copies for each example, which the kernel of a batch norm writes: cuDNN's where there are weights."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=affine, track_running_stats=True)).cuda()
    x = torch.ones(2, 3, 9, 9, device="cuda")
    step = lowtide.optimize(model, x, loss=squares, optimizer=torch.optim.SGD(model.parameters(), 0.5))
    for _ in range(2):
        step(x)
    assert step.source.count(form) == 1
    assert all(f"{name}.copy_(" in step.source for name in ("running_mean", "running_var"))


LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "rows first": (nn.LSTM, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
    "rows first, a GRU": (nn.GRU, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
}


@pytest.mark.parametrize("has_buffer", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_fakes_look_as_what_cudnn_gives(name: str, has_buffer: bool) -> None:
    """But for what it keeps for the gradient, whose bytes only it knows."""
    (cell, options), mode = LAYERS[name], 2 if LAYERS[name][0] is nn.LSTM else 3
    layer = cell(8, 16, **options).cuda()
    weights, x = [each.detach() for each in layer.parameters()], torch.randn(5, 3, 8, device="cuda")
    hidden = torch.randn(4 if options else 1, 5 if options else 3, 16, device="cuda")
    state = hidden, (hidden.clone() if mode == 2 else None)
    buffer = torch.empty(0, device="cuda").set_(weights[0].untyped_storage()) if has_buffer else None
    settings = mode, 16, 0, layer.num_layers, layer.batch_first, 0.0, True, layer.bidirectional, [], None
    forward, backward = torch.ops.aten._cudnn_rnn.default, torch.ops.aten._cudnn_rnn_backward.default
    given = (x, weights, 4, buffer, *state, *settings)
    results = forward(*given)
    wanted = [True, True, mode == 2, True]
    given_back = (x, weights, 4, results[4], *state, results[0], torch.ones_like(results[0]), None, None, *settings, results[3], wanted)
    gradients = backward(*given_back)
    with FakeTensorMode() as fakes:
        fake, fake_back = (tree_map_only(torch.Tensor, fakes.from_tensor, each) for each in (given, given_back))
        thought = corrected(forward, fake, kernel(forward, fake, {})(*fake))
        thought_back = kernel(backward, fake_back, {})(*fake_back)
    looks = [[look(each) for at, each in enumerate(pieces_of(out)) if at != 3] for out in (results, thought)]
    assert looks[0] == looks[1]
    assert [look(each) for each in pieces_of(thought_back)] == [look(each) for each in pieces_of(gradients)]
    assert [len({each.untyped_storage()._cdata for each in out[3]}) for out in (gradients, thought_back)] == [1, 1]


def look(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.computes
@pytest.mark.parametrize("name", NETWORKS)
def test_a_recurrent_network_trains_as_in_eager(name: str) -> None:
    """One after the other: where layers drop, both draw from one state."""
    (model, x), (eager, _) = made(name), made(name)
    eager.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.1) for net in (model, eager)]
    step = lowtide.optimize(model, x, loss=squares, optimizer=optimizers[0])

    def trained() -> torch.Tensor:
        loss = squares(eager, x)
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        return loss.detach()

    torch.manual_seed(1)
    got = [step(x) for _ in range(3)]
    torch.manual_seed(1)
    assert all(torch.equal(one, trained()) for one in got)
    assert all(torch.equal(one, two) for one, two in zip(model.state_dict().values(), eager.state_dict().values(), strict=True))


@pytest.mark.computes
def test_the_form_that_returns_statistics_has_the_same_bits() -> None:
    x, weight, bias = torch.randn(16, 8, 9, 9, device="cuda"), torch.rand(8, device="cuda"), torch.randn(8, device="cuda")
    mean, variance = torch.randn(8, device="cuda"), torch.rand(8, device="cuda")
    got = torch.ops.lowtide.cudnn_batch_norm_functional(x, weight, bias, mean, variance, True, 0.1, 1e-5)
    expected = torch.ops.aten.cudnn_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)
    assert all(torch.equal(one, two) for one, two in zip(got, (*expected, mean, variance), strict=True))
