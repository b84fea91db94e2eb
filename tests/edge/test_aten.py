"""Networks of PyTorch models, by torch.export and through an ONNX file, run in exactly the bytes of a plan."""

import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.edge.aten import exported, read_torch, to_array, to_tensor
from lowtide.edge.interpret import interpret
from lowtide.errors import CaptureError
from tests.edge_networks import by_onnxruntime
from tests.edge_plans import plan_apart, plan_shared


class Small(nn.Module):
    """Convolutions, a norm, pooling, parts that are put together again, a buffer, a constant, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
        )
        self.register_buffer("scale", torch.full((5,), 1.5))
        self.shift = torch.ones(1)

    def forward(self, x):
        z = self.body(x)
        first, second = z.split([2, 3], 1)
        return {"sum": torch.cat([second, first], 1) * self.scale + self.shift, "total": z.sum(), "x": x}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 3, padding=1, groups=4)

    def forward(self, x):
        return F.relu6(x + self.second(F.hardswish(self.first(x)))).mean((2, 3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v)


class Bits(nn.Module):
    """The same bytes read as another dtype, and a network's own trick with them."""

    def forward(self, x):
        return (x.view(torch.int32) >> 1).view(torch.float32) + x


MODELS = [(Bits, (4, 4)), (Small, (1, 3, 8, 8)), (Residual, (1, 4, 6, 5)), (Attention, (1, 7, 16))]


def made(kind: type[nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return kind().eval(), torch.randn(shape)


@pytest.mark.parametrize(("kind", "shape"), MODELS)
def test_a_plan_computes_what_the_exported_program_computes(kind, shape):
    module, x = made(kind, shape)
    graph = read_torch(module, (x,))
    results = exported(module, (x,)).module()(x)
    expected = [*results.values()] if isinstance(results, dict) else [results]
    for plan in (plan_shared(graph), plan_apart(graph)):
        results = interpret(plan, [x.numpy()])
        for array, other in zip(results.values(), expected, strict=True):
            # Products of transposed matrices and of their copies have other bits on some processors.
            np.testing.assert_allclose(array, other.detach().numpy(), rtol=0, atol=1e-6 if kind is Attention else 0)
    assert len(plan_shared(graph).blocks) < len(plan_apart(graph).blocks)


@pytest.mark.parametrize(("kind", "shape"), MODELS[1:])
def test_a_plan_of_its_onnx_file_computes_what_onnxruntime_computes(kind, shape, tmp_path):
    module, x = made(kind, shape)
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own
        torch.onnx.export(module, (x,), path, dynamo=True, verbose=False, dynamic_shapes={"x": {0: "batch"}})
    graph = lowtide.network(path, sizes={"batch": 1})
    written = onnx.load(path)
    inputs = {written.graph.input[0].name: x.numpy()}
    expected = by_onnxruntime(written, inputs)
    for plan in (plan_shared(graph), plan_apart(graph)):
        for name, array in interpret(plan, inputs).items():
            np.testing.assert_array_equal(array, expected[name])
    assert sum(node.macs for node in graph.nodes) == sum(node.macs for node in lowtide.network(module, (x,)).nodes)


def test_bytes_products_views_and_constants():
    module, x = made(Small, (1, 3, 8, 8))
    graph = read_torch(module, (x,))
    nodes = {node.kind: node for node in graph.nodes}
    assert nodes["convolution"].macs == 4 * 64 * 27
    assert nodes["addmm"].macs == 5 * 64
    assert nodes["view"].views == ((0, 0),)
    assert nodes["relu"].in_place == ((0, 0),)
    assert nodes["cat"].in_place == ()
    values, indices = (graph.tensors[at] for at in nodes["max_pool2d_with_indices"].outputs)
    assert (values.size_bytes, indices.dtype, indices.size_bytes) == (256, "", 0)  # nobody reads where the greatest were
    assert "permute" not in nodes, "of weights: done here"
    assert [graph.tensors[at].name for at in graph.inputs] == ["x"]
    assert graph.outputs[2] == graph.inputs[0]
    assert sum(graph.tensors[at].size_bytes for at in graph.constants) > 4 * (4 * 27 + 5 * 64)


def test_constants_are_the_graphs_own():
    module, x = made(Residual, (1, 4, 6, 5))
    plan = plan_shared(read_torch(module, (x,)))
    before = interpret(plan, [x.numpy()])
    with torch.no_grad():
        module.first.weight.zero_()
    np.testing.assert_array_equal(list(interpret(plan, [x.numpy()]).values()), list(before.values()))


def test_bfloat16_keeps_its_bits():
    x = torch.randn(3, 5).to(torch.bfloat16)
    assert torch.equal(to_tensor(to_array(x)), x)
    model = nn.Sequential(nn.Linear(5, 4), nn.GELU()).to(torch.bfloat16).eval()
    graph = read_torch(model, (x,))
    plan = plan_shared(graph)
    assert plan.blocks[0].size_bytes == 30
    (result,) = interpret(plan, [to_array(x)]).values()
    assert torch.equal(to_tensor(result), model(x).detach())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


class Strided(nn.Module):
    def forward(self, x):
        return x.as_strided((2, 2), (1, 2)) + 1


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [(Counting, "expected a result, got BUFFER_MUTATION of calls"), (Strided, "as_strided: expected an operator that reads no strides")],
)
def test_a_model_that_cannot_be_planned_for_is_refused(kind, sentence: str):
    with pytest.raises(CaptureError, match=sentence):
        read_torch(kind(), (torch.randn(2, 2),))


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((3,), {}, "source: expected the path of an ONNX file, or a module and a tuple as its example, got int"),
        ((nn.ReLU(),), {}, "and a tuple as its example, got ReLU"),
        (("a.onnx", (1,)), {}, "example: expected none for an ONNX file"),
        ((nn.ReLU(), (torch.ones(1),)), {"sizes": {"N": 1}}, "sizes, views, stored and groups are of ONNX files"),
    ],
)
def test_other_sources_are_refused(arguments, options, sentence: str):
    with pytest.raises(TypeError, match=sentence):
        lowtide.network(*arguments, **options)


class _Pooled(nn.Module):
    """As pooling to one number names strides."""

    def forward(self, x):
        return x.mean((2, 3), keepdim=True).as_strided((1, 8, 1, 1), (8, 1, 8, 8)) * 2


def test_other_strides_of_axes_of_one_entry_are_a_view():
    x = torch.randn(1, 8, 4, 4)
    graph = read_torch(_Pooled(), (x,))
    (view,) = [node for node in graph.nodes if node.kind == "as_strided"]
    assert view.views == ((0, 0),)
    ((_, result),) = interpret(plan_apart(graph), [x.numpy()]).items()
    np.testing.assert_allclose(result, _Pooled()(x).numpy(), rtol=1e-6)
