"""Quantised networks: what a device computes as one is one node, of integers, and gives onnxruntime's numbers bit for bit."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowtide
from bench.deeploy import FUNCTIONS, read_deeploy
from lowtide.edge.graph import EdgeGraph
from lowtide.edge.interpret import interpret
from lowtide.edge.onnx import network_of, read_onnx
from tests.edge_networks import FLOAT, INT8, UINT8, by_onnxruntime, model, random_inputs, value
from tests.edge_plans import plan_apart, plan_shared

KEYWORDS = Path(__file__).parents[1] / "data" / "onnx" / "mlperf-KeywordSpotting.onnx"
RNG = np.random.default_rng(11)


def kinds(graph: EdgeGraph) -> list[str]:
    return [node.kind for node in graph.nodes]


def activations(graph: EdgeGraph) -> dict[str, int]:
    return {tensor.name: tensor.size_bytes for tensor in graph.tensors if not tensor.constant}


class Samples:
    """What onnxruntime's quantiser looks at to find scales."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.left = [{"x": RNG.standard_normal(shape).astype(np.float32)} for _ in range(4)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.left.pop() if self.left else None


def network() -> onnx.ModelProto:
    constants = {
        "w1": RNG.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "b1": RNG.standard_normal(8).astype(np.float32),
        "w2": RNG.standard_normal((8, 1, 3, 3)).astype(np.float32),
        "w3": RNG.standard_normal((8, 5)).astype(np.float32),
        "shape": np.array([1, 8]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], pads=[1, 1, 1, 1], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], pads=[1, 1, 1, 1], group=8, name="depthwise"),
        helper.make_node("Add", ["b", "c"], ["d"], name="sum"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], name="pool"),
        helper.make_node("Reshape", ["e", "shape"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "w3"], ["y"], name="last"),
    ]
    return model(nodes, [value("x", [1, 3, 6, 7])], [value("y", [1, 5])], constants, opset=13)


def quantized(tmp_path: Path, form: str) -> onnx.ModelProto:
    from onnxruntime import quantization

    onnx.save(network(), tmp_path / "float.onnx")
    quantization.quantize_static(
        str(tmp_path / "float.onnx"),
        str(tmp_path / "int8.onnx"),
        Samples((1, 3, 6, 7)),
        quant_format=quantization.QuantFormat[form],
        per_channel=False,
    )
    return onnx.load(tmp_path / "int8.onnx")


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_what_onnxruntimes_quantiser_writes(form: str, tmp_path: Path):
    int8 = quantized(tmp_path, form)
    graph = network_of(int8)
    inputs = random_inputs(int8, 0)
    expected = by_onnxruntime(int8, inputs)["y"]
    for plan in (plan_shared(graph), plan_apart(graph)):
        np.testing.assert_array_equal(interpret(plan, inputs)["y"], expected)
    floats = {name for name in activations(graph) if next(t for t in graph.tensors if t.name == name).dtype == "float32"}
    assert len(floats) <= 2, "the caller's alone"  # x and y; all between is bytes
    products = 8 * 42 * 27 + 8 * 42 * 9 + 8 * 5
    assert sum(node.macs for node in graph.nodes) == products
    assert sum(node.macs for node in network_of(network()).nodes) == products
    cut = lowtide.plan_edge(graph, [lowtide.Space("ram")], cut=True, inputs_outside=True)
    assert cut.cuts
    assert cut.arena_bytes[0] < lowtide.plan_edge(graph, [lowtide.Space("ram")], inputs_outside=True).arena_bytes[0]
    np.testing.assert_array_equal(interpret(cut, inputs)["y"], expected)


def test_a_group_reads_integers_and_writes_integers():
    scales = {"s": np.float32(0.1), "t": np.float32(0.2), "z": np.uint8(3)}
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "z"], ["a"]),
        helper.make_node("DequantizeLinear", ["r", "s", "z"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("QuantizeLinear", ["d", "t", "z"], ["e"], name="sum"),
        helper.make_node("DequantizeLinear", ["e", "t", "z"], ["f"]),
        helper.make_node("Flatten", ["f"], ["g"]),
        helper.make_node("QuantizeLinear", ["g", "t", "z"], ["y"], name="flat"),
    ]
    written = model(nodes, [value("x", [1, 2, 9], UINT8), value("r", [1, 2, 9], UINT8)], [value("y", None, UINT8)], scales)
    graph = network_of(written)
    assert kinds(graph) == ["Add+Relu+QuantizeLinear", "Flatten+QuantizeLinear"]
    assert activations(graph) == dict.fromkeys(("x", "r", "e", "y"), 18)
    assert [node.in_place for node in graph.nodes] == [((0, 0), (0, 3)), ()]
    assert [node.views for node in graph.nodes] == [(), ((0, 0),)]
    inputs = random_inputs(written, 5)
    plan = plan_shared(graph)
    assert [len(block.tensors) for block in plan.blocks] == [3, 1]
    np.testing.assert_array_equal(interpret(plan, inputs)["y"], by_onnxruntime(written, inputs)["y"])
    assert len(network_of(written, groups=False).nodes) == 8
    nodes[-1] = helper.make_node("QuantizeLinear", ["g", "s", "z"], ["y"])
    other = model(nodes, written.graph.input, [value("y", None, UINT8)], scales)
    assert network_of(other).nodes[-1].views == ()  # other scales, other bytes


@pytest.mark.parametrize("seen", ["a", "c", "d"])
def test_what_somebody_else_reads_stays_in_memory(seen: str):
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "z"], ["a"]),
        helper.make_node("Sigmoid", ["a"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("QuantizeLinear", ["d", "s", "z"], ["y"]),
    ]
    constants = {"s": np.float32(0.1), "z": np.int8(0)}
    written = model(nodes, [value("x", [7], INT8)], [value("y", None, INT8), value(seen, None, FLOAT)], constants)
    graph = network_of(written)
    assert activations(graph)[seen] == 28
    inputs = random_inputs(written, 6)
    expected = by_onnxruntime(written, inputs)
    results = interpret(plan_shared(graph), inputs)
    for name, array in expected.items():
        np.testing.assert_array_equal(results[name], array)


def test_an_operator_that_also_reads_floats_is_no_group():
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "z"], ["a"]),
        helper.make_node("Add", ["a", "r"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["y"]),
    ]
    constants = {"s": np.float32(0.1), "z": np.int8(0)}
    graph = network_of(model(nodes, [value("x", [7], INT8), value("r", [7])], [value("y", None, INT8)], constants))
    assert kinds(graph) == ["DequantizeLinear", "Add", "QuantizeLinear"]


def in_standard_operators(path: Path) -> onnx.ModelProto:
    """Each RequantShift written out in float64, which holds all its whole numbers."""
    written = onnx.load(path)
    nodes: list[onnx.NodeProto] = []
    for node in written.graph.node:
        if node.op_type != "RequantShift":
            nodes.append(node)
            continue
        div, count, signed = (
            float(np.ravel(numpy_helper.to_array(each.t))[0]) for each in sorted(node.attribute, key=lambda each: each.name)
        )
        name, low = node.output[0], -count / 2 if signed else 0.0
        for part, number in (("half", div / 2), ("div", div), ("low", low), ("high", low + count - 1)):
            written.graph.initializer.append(numpy_helper.from_array(np.array(number), f"{name}.{part}"))
        wide = [f"{name}.{position}" for position in range(3)]
        nodes += [helper.make_node("Cast", [one], [other], to=onnx.TensorProto.DOUBLE) for one, other in zip(node.input, wide, strict=True)]
        steps = [("Mul", wide[1]), ("Add", wide[2]), ("Add", f"{name}.half"), ("Div", f"{name}.div"), ("Floor", ""), ("Max", f"{name}.low")]
        last = wide[0]
        for position, (kind, other) in enumerate([*steps, ("Min", f"{name}.high")]):
            nodes.append(helper.make_node(kind, [last, other] if other else [last], [f"{name}.step{position}"]))
            last = f"{name}.step{position}"
        nodes.append(helper.make_node("Cast", [last], [name], to=FLOAT))
    del written.graph.node[:]
    written.graph.node.extend(nodes)
    return written


def test_a_network_of_mlperf_tiny_in_its_bytes():
    """Keyword spotting: each layer reads and writes 64 maps of 20 by 5, a byte a number."""
    graph = read_deeploy(KEYWORDS)
    assert [node.kind for node in graph.nodes] == [*["Conv+RequantShift"] * 9, "MaxPool", "Reshape", "Gemm+RequantShift"]
    assert sum(node.macs for node in graph.nodes) == 2_125_568
    plan = plan_shared(graph)
    assert max(block.offset_bytes + block.size_bytes for block in plan.blocks) == 2 * 64 * 20 * 5
    written = in_standard_operators(KEYWORDS)
    x = RNG.integers(-128, 128, (1, 1, 49, 13)).astype(np.float32)
    result = interpret(plan, [x], functions=FUNCTIONS)["output"]
    np.testing.assert_array_equal(result, by_onnxruntime(written, {"input": x})["output"])
    assert len(set(result.ravel())) > 3


def test_the_same_file_as_it_is_written_holds_floats():
    graph = read_onnx(KEYWORDS, groups=False)
    assert (len(graph.nodes), graph.nodes[1].kind, graph.nodes[1].in_place) == (22, "RequantShift", ((0, 0),))
    assert activations(graph)["input"] == 49 * 13 * 4


@pytest.mark.parametrize("has_zero", [True, False])
def test_a_reshape_between_other_integers_is_no_view(has_zero):
    """Numbers beyond int8 end at 127: the bytes of uint8 are others."""
    constants = {"s": np.array(0.5, np.float32), "z": np.array(0, np.uint8), "shape": np.array([3, 4])}
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "z"] if has_zero else ["x", "s"], ["a"]),
        helper.make_node("Reshape", ["a", "shape"], ["b"]),
        helper.make_node("QuantizeLinear", ["b", "s", "t"] if has_zero else ["b", "s"], ["y"]),
    ]
    taken, given, other = ("x", UINT8, INT8) if has_zero else ("x", INT8, UINT8)
    constants |= {"t": np.array(0, np.int8)} if has_zero else {}
    proto = model(nodes, [value(taken, [2, 6], given)], [value("y", [3, 4], other)], constants, opset=13)
    x = np.arange(-6, 6).astype(np.int8).reshape(2, 6) if given == INT8 else (np.arange(12) * 20).astype(np.uint8).reshape(2, 6)
    graph = network_of(proto)
    (expected,) = by_onnxruntime(proto, {"x": x}).values()
    for plan in (plan_apart(graph), plan_shared(graph)):
        assert np.array_equal(interpret(plan, {"x": x})["y"], expected)
