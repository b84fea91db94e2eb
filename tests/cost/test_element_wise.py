"""What element-wise operators take of many elements is what trials on few say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.capture.program import capture_inference
from lowtide.capture.trace import Given
from lowtide.cost import trial
from lowtide.cost.element_wise import told_by_few
from lowtide.cost.laboratory import Call, Laboratory
from lowtide.cost.trials import recipe
from lowtide.ir.graph import Graph, Node

SHAPES = [(300, 400), (7, 11, 13, 97), (100_001,), (3, 40_000)]


def run(node: Node) -> dict[str, Any]:
    return trial.answer(lambda: trial.take_level(recipe(node), "cpu", False))


def nodes_of(function: Any, *tensors: torch.Tensor) -> list[Node]:
    class Called(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            return function(*given)

    graph: Graph = capture_inference(Called(), Given(tensors, {}, torch.device("cpu"))).graph
    return list(graph.nodes)


UNARY = ["neg", "exp", "log", "sqrt", "sin", "tanh", "sigmoid", "abs", "sign", "isnan", "relu", "erf", "clone", "zeros_like", "ones_like"]
BINARY = ["add", "sub", "mul", "div", "maximum", "atan2", "pow", "eq", "lt", "logical_and"]
LAYERS = ["gelu", "silu", "softplus", "leaky_relu", "hardtanh", "elu", "mish"]
CALLS: dict[str, Any] = {
    **{name: lambda x, y, name=name: getattr(torch, name)(x) for name in UNARY},
    **{name: lambda x, y, name=name: getattr(torch, name)(x, y) for name in BINARY},
    **{name: lambda x, y, name=name: getattr(torch.nn.functional, name)(x) for name in LAYERS},
    "by a number": lambda x, y: x / 3.5 + 1,
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "in place": lambda x, y: x.clone().mul_(y).add_(1e-8),
    "where": lambda x, y: torch.where(x > y, x, y),
    "a number in a tensor": lambda x, y: x * x.sum().double(),
    "full_like": lambda x, y: torch.full_like(x, 2),
}


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.int64, torch.float32)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_few_elements_tell_of_many(name, dtypes):
    shape = SHAPES[list(CALLS).index(name) % len(SHAPES)]
    tensors = [torch.ones(shape, dtype=dtype) for dtype in dtypes]
    try:
        nodes = nodes_of(CALLS[name], *tensors)
    except Exception as error:  # not every operator takes every dtype
        pytest.skip(str(error)[:80])
    told = {node.op: (told_by_few(node, run), run(node)) for node in nodes}
    for told_reply, reply in told.values():
        if told_reply is not None:
            assert told_reply == {key: item for key, item in reply.items() if key != "ns"}
    same = dtypes[0] == dtypes[1]
    assert not same or any(few is not None for few, _ in told.values()), "this is told"


def test_what_is_not_element_wise_or_not_dense_is_tried_whole():
    x, y = torch.ones(300, 400), torch.ones(400, 300)
    for function in (lambda x, y: x + y.t(), lambda x, y: x.sum(), lambda x, y: x + y[:1, :1], torch.mm, lambda x, y: torch.rand_like(x)):
        for node in nodes_of(function, x, y):
            if node.op != "aten.t.default":
                assert told_by_few(node, run) is None, node.op


def test_few_elements_are_tried_themselves():
    asked: list[Node] = []

    def counted(node: Node) -> dict[str, Any]:
        asked.append(node)
        return run(node)

    (node,) = nodes_of(torch.neg, torch.ones(10, 10))
    assert told_by_few(node, counted) is None
    assert not asked
    (node,) = nodes_of(torch.neg, torch.ones(1000, 1000))
    assert told_by_few(node, counted) is not None
    (few,) = asked
    assert few.inputs[0].shape == (65, 1000)


def test_a_failure_tells_nothing():
    (node,) = nodes_of(torch.neg, torch.ones(1000, 1000))
    assert told_by_few(node, lambda node: {"failure": "no"}) is None


def test_times_are_those_of_all_elements():
    """The call takes what it takes, which few elements do not tell."""
    (node,) = nodes_of(torch.exp, torch.ones(3000, 3000))
    asked: list[Any] = []
    with Laboratory(remember=False) as laboratory:
        run_recipes = laboratory._trials.times
        laboratory._trials.times = lambda recipes, *rest, **more: asked.append(recipes) or run_recipes(recipes, *rest, **more)
        assert laboratory.level_bytes(Call(node)) == 4 * 3000 * 3000
        assert not laboratory.rough_ns, "which counts as a time that was measured"
        assert laboratory.times_ns([Call(node)], warm_up=True) != [None]
    ((one,),) = asked
    assert one["values"][0]["made"][1] == [3000, 3000]
