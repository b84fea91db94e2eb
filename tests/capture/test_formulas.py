"""Where ATen has another formula as soon as a dispatch mode is active, the graph has eager's: bits tell."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from lowtide.capture.corrections import kernel
from lowtide.capture.formulas import as_eager
from tests.training import check, differences

MASK = torch.tensor([[True, False, True, True], [False, False, True, False], [True, True, False, True]])
OTHER = torch.tensor([[0.3, -1.7, 2.5, 0.9], [-0.2, 1.1, -3.1, 0.7], [1.9, -0.4, 0.6, -2.2]])

GRADIENTS = {
    "prod": lambda p, x: p.prod() * 3,
    "prod along": lambda p, x: (p.prod(1) * x[:, 0]).sum(),
    "prod along, kept": lambda p, x: (torch.prod(p, -2, keepdim=True) * x[:1]).sum(),
    "prod in float64": lambda p, x: p.prod(dtype=torch.float64) * 3,
    "masked prod": lambda p, x: (torch.masked.prod(p, 1, mask=MASK) * x[:, 0]).sum(),
    "cumprod": lambda p, x: (p.cumprod(1) * x).sum(),
    "cumprod in place": lambda p, x: ((p * 1).cumprod_(0) * x).sum(),
    "max": lambda p, x: p.max() * 3,
    "min": lambda p, x: -p.abs().min(),
    "median": lambda p, x: -torch.median(p),
    "nanmedian": lambda p, x: -torch.nanmedian(p.abs()),
    "masked_fill": lambda p, x: (x.masked_fill(MASK, p[0, 0]) * x * p).sum(),
    "masked_fill in place": lambda p, x: ((x * 1).masked_fill_(MASK, p[0, 0]) * x).sum(),
    "masked_fill of more": lambda p, x: (p[:1].masked_fill(MASK, p[0, 0]) * x).sum(),
}
_NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, float("nan"), float("inf"), -float("inf"), 1e-30, -3e30]), st.floats(-3, 3, width=16)
)
_unhurried = settings(deadline=None, max_examples=70, suppress_health_check=[HealthCheck.too_slow])


class Held(nn.Module):
    """One parameter."""

    def __init__(self, values):
        super().__init__()
        self.p = nn.Parameter(values)


def trained_alike(loss, values, x):
    def make():
        model = Held(values.clone())
        return model, (x,), lambda model, x: loss(model.p, x), torch.optim.SGD(model.parameters(), 0.5)

    return check(make, steps=1)


@_unhurried
@given(st.sampled_from(sorted(GRADIENTS)), st.sampled_from([torch.float32, torch.float64]), st.lists(_NUMBERS, min_size=12, max_size=12))
def test_gradients_are_eagers_whatever_the_data(name, dtype, numbers):
    trained_alike(GRADIENTS[name], torch.tensor(numbers, dtype=dtype).reshape(3, 4), OTHER.to(dtype))


@pytest.mark.parametrize("name", sorted(GRADIENTS))
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_with_and_without_zeros(name, zeros):
    torch.manual_seed(0)
    values = torch.randn(3, 4)
    values.view(-1)[5 : 5 + zeros] = 0
    trained_alike(GRADIENTS[name], values, OTHER)


def test_complex_products():
    torch.manual_seed(0)
    trained_alike(lambda p, x: torch.view_as_complex(p).prod(1).abs().sum(), torch.randn(3, 4, 2), OTHER)
    trained_alike(lambda p, x: torch.view_as_complex(p).cumprod(1).abs().sum(), torch.randn(3, 4, 2), OTHER)


@pytest.mark.parametrize("zeros", [[0], [1], [3], [0, 3], [1, 2], [0, 1, 2, 3], [5, 7, 8]])
@pytest.mark.parametrize("dim", [0, 1])
def test_running_products_around_zeros(zeros, dim):
    torch.manual_seed(0)
    values = torch.randn(3, 4)
    values.view(-1)[zeros] = 0
    trained_alike(lambda p, x: (p.cumprod(dim) * x).sum(), values, OTHER)


def test_a_long_sum_of_a_filled_values_gradient():
    torch.manual_seed(0)
    x = torch.randn(301, 77)
    trained_alike(lambda p, x: (x.masked_fill(x > 0.3, p) * x.sin()).sum(), torch.tensor(0.3), x)


@pytest.mark.parametrize("autocast", [False, True])
def test_cross_entropy_with_weights_smoothing_and_ignored_targets(autocast):
    torch.manual_seed(0)
    target, weight = torch.randint(0, 9, (257,)), torch.rand(9)
    target[::3] = -100

    def loss(p, x):
        with torch.autocast("cpu", enabled=autocast):
            return F.cross_entropy(p @ x, target, weight, label_smoothing=0.1)

    trained_alike(loss, torch.randn(257, 9), torch.randn(9, 9))


def test_a_second_derivative_through_a_product():
    torch.manual_seed(0)

    def loss(p, x):
        (slope,) = torch.autograd.grad(p.prod(1).sum() + p.max() + p.cumprod(0).sum(), p, create_graph=True)
        return (slope * x).sum()

    trained_alike(loss, torch.randn(3, 4), OTHER)


VALUES = {
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": torch.linalg.eigvalsh,
    "eigvals": torch.linalg.eigvals,
    "cond": torch.linalg.cond,
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "nuclear norm": lambda x: torch.norm(x, "nuc"),
    "matrix_rank": torch.linalg.matrix_rank,
}


@pytest.mark.parametrize("name", VALUES)
def test_values_alone_are_computed_as_eager_does(name):
    class Asks(nn.Module):
        def forward(self, x):
            return VALUES[name](x)

    torch.manual_seed(0)
    x = torch.randn(11, 11)
    step = lowtide.optimize(Asks(), (x,), planning=lowtide.Planning(workspaces=False))
    with torch.no_grad():
        assert not (told := differences(Asks()(x), step(x))), told


INTO = {
    "rank": lambda x, y: torch.linalg.matrix_rank(x, out=torch.empty((), dtype=torch.int64)),
    "rank by a tolerance": lambda x, y: torch.linalg.matrix_rank(x, 0.5, out=torch.empty((), dtype=torch.int64)),
    "rank by a tensor": lambda x, y: torch.linalg.matrix_rank(x, atol=y[0, 0].abs(), out=torch.empty((), dtype=torch.int64)),
    "solution": lambda x, y: torch.linalg.solve(x, y, out=torch.empty(5, 5)),
    "solution of no size before": lambda x, y: torch.linalg.solve(x, y, out=torch.empty(0)) * 2,
}


@pytest.mark.parametrize("name", INTO)
def test_what_is_written_into_a_tensor_of_the_steps(name):
    """ATen has a way for subclasses here that leaves `out` as it was, and one that sizes tensors of its own within the operator."""

    class Into(nn.Module):
        def forward(self, x, y):
            return INTO[name](x, y)

    torch.manual_seed(0)
    x, y = torch.randn(5, 5), torch.randn(5, 5)
    assert not differences(lowtide.optimize(Into(), (x, y), planning=lowtide.Planning(workspaces=False))(x, y), Into()(x, y))


def test_vectors_are_not_computed_where_nobody_asks_for_them():
    class Norm(nn.Module):
        def forward(self, x):
            return torch.linalg.matrix_norm(x, 2)

    (svd,) = (
        node
        for node in lowtide.optimize(Norm(), (torch.randn(5, 5),), planning=lowtide.Planning(workspaces=False)).plan.graph.nodes
        if "svd" in node.op
    )
    assert svd.args[2] is False


def test_other_threads_compute_as_ever():
    values = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    seen = []

    def elsewhere():
        product = values.prod()
        seen.append(type(product.grad_fn).__name__)

    with as_eager():
        here = type(values.prod().grad_fn).__name__
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert here != "ProdBackward0"
    assert seen == ["ProdBackward0"]
    assert type(values.prod().grad_fn).__name__ == "ProdBackward0"


LAZY = {
    "complex product": lambda p, x: torch.view_as_real(torch.complex(p, x) @ torch.complex(x, p).mT).square().sum(),
    "conjugate": lambda p, x: (torch.complex(p, x).conj() * torch.complex(x, p)).abs().sum(),
    "imaginary part of a conjugate": lambda p, x: (torch.complex(p, x).conj().imag * x).sum(),
    "complex number": lambda p, x: (torch.fft.irfft(torch.fft.rfft(p) * (1 + 2j)) * x).sum(),
    "power of a complex number": lambda p, x: ((0.5 - 1j) ** torch.complex(p, x) / (2j - 1)).abs().sum(),
    "polar": lambda p, x: torch.polar(p, x).sum().abs(),
    "hfft": lambda p, x: torch.fft.hfft(p).square().sum(),
    "ifft": lambda p, x: torch.fft.ifft(p).abs().sum(),
    "ihfft": lambda p, x: torch.fft.ihfft(p).abs().sum(),
    "eigvals": lambda p, x: torch.linalg.eigvals(p.mT @ p + x.mT @ p).abs().sum(),
    "eig": lambda p, x: torch.linalg.eig(p.mT @ x)[0].abs().sum(),
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_conjugates_and_negatives(name):
    torch.manual_seed(0)
    trained_alike(LAZY[name], torch.randn(3, 4), OTHER)


def test_a_lazy_conjugate_is_a_result_as_eager_gives_it():
    class Conjugate(nn.Module):
        def forward(self, x):
            z = torch.complex(x, x)
            lazy = z.conj()
            return lazy, lazy @ z, z

    x = torch.randn(3, 3)
    found, expected = lowtide.optimize(Conjugate(), (x,), planning=lowtide.Planning(workspaces=False))(x), Conjugate()(x)
    assert [each.is_conj() for each in found] == [each.is_conj() for each in expected]
    assert not differences(found, expected)


def test_a_conjugate_taken_before_its_base_is_written_sees_the_write():
    class Writes(nn.Module):
        def forward(self, x):
            z = torch.complex(x, x) * 2
            lazy = z.conj()
            z.add_(1j)
            return lazy.imag + 0, lazy + 0

    x = torch.randn(3, 3)
    assert not differences(lowtide.optimize(Writes(), (x,), planning=lowtide.Planning(workspaces=False))(x), Writes()(x))


class Normalised(nn.Module):
    """A layer after a convolution, so that what it is given is no one's but the step's."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.last = nn.Conv1d(3, 4, 1), layer, nn.Conv1d(4, 2, 1)

    def forward(self, x):
        return self.last(self.layer(self.first(x)))


KEEPERS = {
    "InstanceNorm": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    "InstanceNorm with weights": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True, momentum=0.3),
    "RReLU": lambda: nn.RReLU(),
    "RReLU in place": lambda: nn.RReLU(0.2, 0.9, inplace=True),
    "BatchNorm by count": lambda: nn.BatchNorm1d(4, momentum=None),
    "two of them": lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4, momentum=None)),
    "dropout and RReLU": lambda: nn.Sequential(nn.Dropout(0.5), nn.RReLU(), nn.Dropout(0.3)),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_layers_that_write_beside_their_results(name):
    def make():
        model = Normalised(KEEPERS[name]())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return model, (torch.randn(5, 3, 6),), lambda model, x: model(x).square().mean(), optimizer

    check(make, steps=4, steps_before=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_instance_statistics_in_other_dtypes(dtype):
    def make():
        model = Normalised(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)).to(dtype)
        loss = lambda model, x: model(x).square().mean()  # noqa: E731
        return model, (torch.randn(5, 3, 6, dtype=dtype),), loss, torch.optim.SGD(model.parameters(), 0.1)

    check(make, steps=2)


def test_a_count_of_batches_is_read_anew_at_each_step():
    model = Normalised(nn.BatchNorm1d(4, momentum=None))
    x = torch.randn(5, 3, 6)
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    step = lowtide.optimize(
        model, (x,), loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
    )
    graphs = []
    for _ in range(5):
        step(x)
        graphs.append(step.plan.graph)
    assert all(graph is graphs[1] for graph in graphs[1:])
    assert int(model.layer.num_batches_tracked) == 5


def test_a_complex_division_rounds_as_eagers_does_in_place_and_out_of_place():
    class Divides(nn.Module):
        def forward(self, a, b):
            return (a * 1).div_(b), a / b + 0, (a * 1) / (b * 1)

    torch.manual_seed(0)
    a, b = torch.randn(13, dtype=torch.complex64), torch.randn(13, dtype=torch.complex64)
    assert not differences(lowtide.optimize(Divides(), (a, b), planning=lowtide.Planning(workspaces=False))(a, b), Divides()(a, b))


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelss", "gelsd", None])
@pytest.mark.parametrize("shape", [(9, 4, 3), (4, 9, 3), (2, 3, 5, 5, 2), (2, 6, 4, 2), (7, 3)])
def test_least_squares_has_the_layout_of_the_real_operator(driver, shape):
    *batch, rows, columns, given = shape if len(shape) > 2 else (*shape, 0)
    a, b = torch.randn(*batch, rows, columns), torch.randn(*batch, rows, given) if given else torch.randn(rows)
    real = kernel(torch.ops.aten.linalg_lstsq.default, (a, b), {"driver": driver})
    if real is torch.ops.aten.linalg_lstsq.default:
        assert driver in ("gelss", "gelsd")
        assert rows > columns
        return
    for ours, theirs in zip(real(a, b, driver=driver), torch.ops.aten.linalg_lstsq(a, b, driver=driver), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.numel() == 0 or ours.stride() == theirs.stride()
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()


SHAPED = {
    "cov": lambda p, x: torch.cov(p).square().sum(),
    "corrcoef": lambda p, x: torch.corrcoef(p).square().sum(),
    "combinations": lambda p, x: torch.combinations(p[0], 3).prod(1).sum(),
    "least squares": lambda p, x: torch.linalg.lstsq(x[:, :2], p, driver="gels").solution.square().sum(),
}


@pytest.mark.parametrize("name", SHAPED)
def test_what_follows_from_shapes_alone(name):
    torch.manual_seed(0)
    trained_alike(SHAPED[name], torch.randn(3, 4), OTHER)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, at its first derivative
def test_a_derivative_taken_forwards():
    """ATen adds tensors on the meta device on the way: nothing of theirs can be measured, and nothing of them is in the program."""

    def slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out, along = torch.func.jvp(lambda given: model(given), (x,), (torch.ones_like(x),))
        return out.square().mean() + along.square().mean()

    def make():
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        return model, torch.randn(5, 4), slope, torch.optim.SGD(model.parameters(), 0.1)

    check(make)


FORWARDS = {
    "hessian": lambda f: torch.vmap(torch.func.hessian(f)),
    "of a gradient": lambda f: torch.vmap(torch.func.jacfwd(lambda row: torch.func.grad(f)(row).view(2, 2))),
    "strided": lambda f: lambda x: f(x) + torch._efficientzerotensor((4,)).as_strided((2, 2), (1, 1)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_zeros_without_memory_have_none_to_take_over():
    """As in networks that learn an equation: `add` would leave its result in such zeros, where they die."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        bends = torch.vmap(torch.func.hessian(lambda row: model(row).squeeze(-1)))(x)
        return bends.square().mean() + model(x).square().mean()

    def make():
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        return model, torch.randn(5, 4), loss, torch.optim.SGD(model.parameters(), 0.1)

    check(make)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", FORWARDS)
def test_views_of_zeros_without_memory(name):
    """Forward derivatives have such zeros; ATen makes views of them beneath a capture, which saw tensors of the meta device."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return FORWARDS[name](lambda row: model(row).square().sum())(x).square().sum()

    def make():
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        return model, torch.randn(5, 4), loss, torch.optim.SGD(model.parameters(), 0.1)

    check(make)
