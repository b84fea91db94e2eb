"""Reading the output instead of the input changes no bit, and lets go of what autograd would keep."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import ROWS
from lowtide.rewrite.results import read_results

EDGES = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 6.0, -1.0, 1.0, 1e-45, -1e-45, 5.9999995, 6.0000005])
RULES = {name: row.reads_result for name, row in ROWS.items() if row.reads_result is not None}
PARAMETERS = {"aten.hardtanh.default": [(0.0, 6.0), (-1, 1), (2.0, 2.0)], "aten.leaky_relu.default": [(0.01,), (3,), (1e-30,)]}


def _operator(name):
    _, base, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, base), overload)


@pytest.mark.parametrize(("backward", "rule"), RULES.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_rule_on_real_tensors(backward, rule, dtype):
    x = torch.cat([EDGES, torch.randn(501) * 4]).to(dtype)
    gradient = torch.randn(len(x)).to(dtype)
    for parameters in PARAMETERS[rule.forward]:
        result = _operator(rule.forward)(x, *parameters)
        more = (False,) if "leaky" in backward else ()
        expected, got = (_operator(backward)(gradient, read, *parameters, *more) for read in (x, result))
        assert torch.equal(expected, got)


def _value(name, kind=Kind.ACTIVATION, dtype="float32"):
    return Value(name, Storage(name, 16, "cpu", kind), dtype, (4,), (1,))


_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 0.1, 0.7, -0.7, 1.0, 6.0, 1 / 3, 1e-8, 1e5, 1e39, 65504.0, 65520.0, float("inf"), -float("inf"), 1e-320]),
    st.integers(-300, 300),
    st.floats(-10, 10),
    st.floats(allow_nan=False),
)


def _around(numbers, dtype):
    """Odd values, the numbers as `dtype` rounds them, and the neighbours of those."""
    near = [torch.tensor([number], dtype=torch.float64).to(dtype) for number in numbers]
    ends = [torch.tensor([end], dtype=dtype) for end in (float("inf"), -float("inf"))]
    return torch.cat(
        [EDGES.to(dtype), *near, *(torch.nextafter(each, end) for each in near for end in ends), torch.randn(37).to(dtype) * 4]
    )


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(sorted(RULES)), st.sampled_from(sorted(_DTYPES)), st.lists(_NUMBERS, min_size=2, max_size=2))
@example("aten.hardtanh_backward.default", "bfloat16", [-0.7, 0.7])
@example("aten.hardtanh_backward.default", "float16", [0.1, 6.0])
def test_what_is_rewritten_gives_the_same_bits(backward, name, numbers):
    rule, dtype = RULES[backward], _DTYPES[name]
    parameters = tuple(sorted(numbers)) if rule.bounds else (numbers[0],)
    more = (False,) if "leaky" in backward else ()
    x, gradient, y, dx = (_value(each, Kind.INPUT, name) for each in ("x", "gradient", "y", "dx"))
    forward = Node(rule.forward, (x, *parameters), (y,))
    graph = Graph((x, gradient), (forward, Node(backward, (gradient, x, *parameters, *more), (dx,))), (y, dx))
    if not read_results(graph).forward:
        return
    given_x = _around(parameters, dtype)
    try:
        result = _operator(rule.forward)(given_x, *parameters)
    except RuntimeError:  # a number beyond the dtype: no such program
        return
    upstream = torch.randn(len(given_x)).to(dtype)
    expected, got = (_operator(backward)(upstream, read, *parameters, *more) for read in (given_x, result))
    assert torch.equal(expected.view(torch.uint8), got.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "bound", "is_rewritten"),
    [
        ("float32", 0.7, True), ("float64", 0.7, True), ("bfloat16", 0.7, False), ("float16", 0.1, False), ("bfloat16", 6.0, True),
        ("float16", 0.5, True), ("float16", 1e9, False), ("bfloat16", 1e300, False),
    ],
)  # fmt: skip
def test_a_bound_that_the_dtype_does_not_hold_is_left_alone(name, bound, is_rewritten):
    x, gradient, y, dx = (_value(each, Kind.INPUT, name) for each in ("x", "gradient", "y", "dx"))
    forward = Node("aten.hardtanh.default", (x, -bound, bound), (y,))
    backward = Node("aten.hardtanh_backward.default", (gradient, x, -bound, bound), (dx,))
    assert bool(read_results(Graph((x, gradient), (forward, backward), (y, dx))).forward) == is_rewritten


def _clamp(forward_parameters=(0.0, 6.0), also_kept=False):
    x, gradient, y, kept, dx = _value("x", Kind.INPUT), _value("gradient", Kind.INPUT), _value("y"), _value("kept"), _value("dx")
    nodes = (
        Node("aten.clone.default", (x,), (kept,)),
        Node("aten.hardtanh.default", (x, *forward_parameters), (y,)),
        Node("aten.hardtanh_backward.default", (gradient, kept, 0.0, 6.0), (dx,), inplace=((kept, "aten.hardtanh_backward.grad_input"),)),
    )
    return Graph((x, gradient), nodes, (y, dx, *((kept,) if also_kept else ())))


def test_the_copy_goes_and_the_leave_to_work_in_place_follows():
    graph = _clamp()
    done = read_results(graph)
    forward, backward = done.graph.nodes
    assert backward.args == (graph.inputs[1], forward.outputs[0], 0.0, 6.0)
    assert backward.inplace == ((forward.outputs[0], "aten.hardtanh_backward.grad_input"),)
    assert done.forward == {graph.nodes[0]: (), graph.nodes[2]: (backward,)}
    check_graph(done.graph)


def test_a_copy_that_somebody_reads_stays():
    assert read_results(_clamp(also_kept=True)).graph.nodes[0].op == "aten.clone.default"


@pytest.mark.parametrize("parameters", [(0.0, 5.0), ()])
def test_another_clamp_of_the_same_input_is_not_it(parameters):
    assert not read_results(_clamp(parameters)).forward


@pytest.mark.parametrize(("slope", "is_rewritten"), [(0.1, True), (0.0, False), (-0.5, False)])
def test_a_leaky_relu_has_to_rise(slope, is_rewritten):
    x, gradient, y, dx = _value("x", Kind.INPUT), _value("gradient", Kind.INPUT), _value("y"), _value("dx")
    forward = Node("aten.leaky_relu.default", (x, slope), (y,))
    backward = Node("aten.leaky_relu_backward.default", (gradient, x, slope, False), (dx,))
    assert bool(read_results(Graph((x, gradient), (forward, backward), (y, dx))).forward) == is_rewritten


def test_parameters_that_were_left_out_are_the_defaults():
    x, gradient, y, dx = _value("x", Kind.INPUT), _value("gradient", Kind.INPUT), _value("y"), _value("dx")
    forward = Node("aten.hardtanh.default", (x,), (y,))
    backward = Node("aten.hardtanh_backward.default", (gradient, x, -1.0, 1.0), (dx,))
    assert read_results(Graph((x, gradient), (forward, backward), (y, dx))).forward


def _network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU6(inplace=True), nn.Conv2d(16, 16, 3), nn.LeakyReLU(0.2), nn.Conv2d(16, 4, 3)]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_a_step_without_the_copies_trains_the_same_in_less():
    (model, optimizer), (twin, twins) = _network(), _network()
    x = torch.randn(2, 3, 24, 24) * 5
    step = lowtide.optimize(model, (x,), loss=lambda model, x: model(x).square().mean(), optimizer=optimizer)
    assert not [node for node in step.plan.graph.nodes if node.op == "aten.clone.default"]
    for _ in range(3):
        twins.zero_grad()
        expected = twin(x).square().mean()
        expected.backward()
        twins.step()
        assert torch.equal(step(x), expected.detach())
    for ours, theirs in itertools.chain(
        zip(model.parameters(), twin.parameters(), strict=True), zip(model.buffers(), twin.buffers(), strict=True)
    ):
        assert torch.equal(ours, theirs)
    assert step.plan.peak_bytes < 0.9 * step.plan.eager_peak_bytes
