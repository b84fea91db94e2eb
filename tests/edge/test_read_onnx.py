"""Networks read from ONNX models: bytes, views, in-place rules, products, and each mistake in a sentence of its own."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from lowtide.api.edge import plan_edge
from lowtide.edge.graph import EdgeGraph, EdgeNode
from lowtide.edge.onnx import network_of, read_onnx
from lowtide.edge.plan import Space
from lowtide.errors import FormatError
from tests.edge_networks import FLOAT, INT8, UINT8, by_onnxruntime, model, random_inputs, value

X = value("x", [1, 4, 6, 5])
Y = value("y", None)


def node(graph: EdgeGraph, name: str) -> EdgeNode:
    return next(each for each in graph.nodes if each.name == name)


def tensor_named(graph: EdgeGraph, name: str):
    return next(each for each in graph.tensors if each.name == name)


def op(kind: str, inputs: str, outputs: str, **attributes):
    """A node; `-` stands for an input or output that is left out."""
    split = [[name.replace("-", "") for name in names.split()] for names in (inputs, outputs)]
    return helper.make_node(kind, *split, name=outputs.split()[-1], **attributes)


def test_bytes_are_those_of_the_dtype():
    names = {"BOOL": 1, "INT16": 2, "UINT16": 2, "INT64": 8, "DOUBLE": 8, "FLOAT16": 2, "BFLOAT16": 2, "FLOAT8E4M3FN": 1}
    for name, size in names.items():
        shape = [3, 5]
        dtype = getattr(TensorProto, name)
        graph = network_of(model([op("Identity", "x", "y")], [value("x", shape, dtype)], [value("y", shape, dtype)], opset=21))
        assert [tensor.size_bytes for tensor in graph.tensors] == [15 * size] * 2


@pytest.mark.parametrize(("dtype", "expected"), [("INT4", 8), ("UINT4", 8), ("FLOAT4E2M1", 8), ("INT8", 15)])
def test_numbers_of_half_a_byte_are_packed(dtype: str, expected: int):
    kind = getattr(TensorProto, dtype)
    graph = network_of(model([op("Transpose", "x", "y")], [value("x", [3, 5], kind)], [value("y", [5, 3], kind)], opset=23))
    assert [tensor.size_bytes for tensor in graph.tensors] == [expected] * 2
    assert graph.tensors[0].dtype == {"FLOAT4E2M1": "float4_e2m1fn"}.get(dtype, dtype.lower())


def test_weights_are_constants_also_where_they_are_inputs():
    weights = np.ones((8, 4, 3, 3), np.float32)
    network = model([op("Conv", "x w", "y")], [X, value("w", weights.shape)], [Y], {"w": weights, "unused": weights})
    graph = network_of(network)
    assert [graph.tensors[at].name for at in graph.inputs] == ["x"]
    assert [graph.tensors[at].name for at in graph.constants] == ["w"]
    assert tensor_named(graph, "w").constant
    assert graph.nodes[0].macs == 8 * 4 * 3 * 4 * 9


def test_views_and_what_may_be_written_in_place():
    nodes = [
        op("Flatten", "x", "a"),
        op("Relu", "a", "b"),
        op("Cast", "b", "c", to=TensorProto.FLOAT),
        op("Cast", "c", "d", to=TensorProto.INT32),
        op("Cast", "d", "e", to=TensorProto.INT8),
        op("Transpose", "x", "f", perm=[1, 0, 2, 3]),
        op("Transpose", "x", "g", perm=[0, 1, 3, 2]),
        op("Add", "x bias", "h"),
        op("Add", "bias4 f", "i"),
    ]
    outputs = [value(name, None, dtype) for name, dtype in (("e", INT8), ("g", FLOAT), ("h", FLOAT), ("i", FLOAT))]
    graph = network_of(
        model(nodes, [X, value("bias4", [4, 1, 1, 5])], outputs, {"bias": np.ones((1, 4, 6, 5), np.float32)}),
    )
    assert {each.name: each.views for each in graph.nodes if each.views} == dict.fromkeys(("a", "c", "f"), ((0, 0),))
    in_place = {"b": ((0, 0),), "c": ((0, 0),), "d": ((0, 0),), "h": ((0, 0),), "i": ((0, 1),)}  # no constant, and nothing that is repeated
    assert {each.name: each.in_place for each in graph.nodes if each.in_place} == in_place
    without = network_of(
        model(nodes, [X, value("bias4", [4, 1, 1, 5])], outputs, {"bias": np.ones((1, 4, 6, 5), np.float32)}), views="none"
    )
    assert not any(each.views for each in without.nodes)


def test_parts_are_views_where_they_lie_one_behind_the_other():
    nodes = [
        op("Split", "x", "a b", axis=1),
        op("Relu", "a", "c"),
        op("Neg", "b", "g"),
        op("Concat", "c g", "d", axis=1),
        op("Concat", "a g", "h", axis=1),
        op("Concat", "c b", "e", axis=2),
        op("Concat", "c c", "f", axis=1),
    ]
    network = model(nodes, [X], [value(name, None) for name in "defh"], opset=14)
    graph = network_of(network, views="slices")
    assert {each.name: each.views for each in graph.nodes if each.views} == {"b": ((0, 0), (1, 0)), "d": ((0, 0), (0, 1))}
    assert not any(each.views for each in network_of(network).nodes)


def test_whoever_copies_has_the_others_looked_at_anew():
    """`c` cannot be of the caller's x. Made by a copy, it has parts of its own, which then are none of `d`."""
    nodes = [op("Relu", "x", "t"), op("Concat", "t x", "c", axis=1), op("Split", "c", "a b", axis=1), op("Concat", "t b", "d", axis=1)]
    network = model(nodes, [X], [value("d", None)])
    graph = network_of(network, views="slices")
    assert [bool(each.views) for each in graph.nodes] == [False, False, True, False]
    assert plan_edge(graph, [Space("ram")]).arena_bytes == plan_edge(network_of(network, views="none"), [Space("ram")]).arena_bytes


def test_parts_are_those_of_the_groups():
    """The group of a Reshape is a view, which its operators alone are not: so that `r` is no part of two wholes."""
    scale, zero, shape = np.float32(0.05), np.int8(0), np.array([1, 24, 5])
    opens, closes = (lambda a, o: op("DequantizeLinear", f"{a} s z", o)), (lambda a, o: op("QuantizeLinear", f"{a} s z", o))
    nodes = [
        *(opens("x", "xf"), op("Relu", "xf", "tf"), closes("tf", "t"), opens("t", "t2"), op("Sigmoid", "t2", "uf"), closes("uf", "u")),
        *(op("Concat", "t u", "c", axis=1), opens("t", "t3"), op("Reshape", "t3 shape", "rf"), closes("rf", "r")),
        *(opens("u", "u3"), op("Tanh", "u3", "vf"), op("Reshape", "vf shape", "wf"), closes("wf", "w"), op("Concat", "r w", "d", axis=1)),
    ]
    network = model(
        nodes, [value("x", [1, 4, 6, 5], INT8)], [value("c", None, INT8), value("d", None, INT8)], {"s": scale, "z": zero, "shape": shape}
    )
    whole, parts = (plan_edge(network_of(network, views=views), [Space("ram")]).arena_bytes for views in ("reshape", "slices"))
    assert parts <= whole


@pytest.mark.parametrize(
    ("nodes", "constants", "macs"),
    [
        ([op("MatMul", "x w", "y")], {"w": np.ones((5, 7), np.float32)}, 4 * 6 * 7 * 5),
        ([op("ConvTranspose", "x w", "y")], {"w": np.ones((4, 3, 2, 2), np.float32)}, 4 * 6 * 5 * 3 * 4),
        ([op("Conv", "x w", "y", group=4)], {"w": np.ones((4, 1, 3, 3), np.float32)}, 4 * 4 * 3 * 9),
        ([op("Relu", "x", "y")], {}, 0),
    ],
)
def test_products_are_counted(nodes, constants, macs: int):
    assert network_of(model(nodes, [X], [Y], constants)).nodes[-1].macs == macs


def test_products_of_a_gemm_and_of_recurrent_layers():
    weights = np.ones((7, 5), np.float32)
    graph = network_of(model([op("Gemm", "x w", "y", transA=1, transB=1)], [value("x", [5, 3])], [Y], {"w": weights}))
    assert graph.nodes[0].macs == 3 * 7 * 5
    constants = {"w": np.ones((1, 24, 5), np.float32), "r": np.ones((1, 24, 6), np.float32)}
    graph = network_of(model([op("LSTM", "x w r", "- y", hidden_size=6)], [value("x", [9, 2, 5])], [Y], constants))
    assert graph.nodes[0].macs == 9 * 2 * 24 * (5 + 6)
    left_out, last = (graph.tensors[at] for at in graph.nodes[0].outputs)
    assert (left_out.dtype, left_out.size_bytes, last.name, last.size_bytes) == ("", 0, "y", 1 * 2 * 6 * 4)


def test_products_of_integers_whatever_operator_holds_them():
    scale = {"s": np.float32(0.1), "z": np.uint8(3), "zw": np.int8(0)}
    weights = {"w": np.ones((8, 4, 3, 3), np.int8)}
    inputs = [value("x", [1, 4, 6, 5], UINT8)]
    convolution = model([op("QLinearConv", "x s z w s zw s z", "y")], inputs, [value("y", None, UINT8)], {**scale, **weights})
    assert network_of(convolution).nodes[0].macs == 8 * 4 * 3 * 4 * 9
    product = {"b": np.ones((5, 7), np.int8)}
    network = model([op("QLinearMatMul", "x s z b s zw s z", "y")], inputs, [value("y", None, UINT8)], {**scale, **product})
    assert network_of(network).nodes[0].macs == 4 * 6 * 7 * 5
    network = model([op("MatMulInteger", "x b", "y")], inputs, [value("y", None, TensorProto.INT32)], product)
    assert network_of(network).nodes[0].macs == 4 * 6 * 7 * 5


def test_onnxruntimes_own_operators_have_the_shapes_of_onnxs():
    scale = {"s": np.float32(0.1), "z": np.uint8(3)}
    added = helper.make_node("QLinearAdd", ["x", "s", "z", "r", "s", "z", "s", "z"], ["a"], name="a", domain="com.microsoft")
    pooled = helper.make_node("QLinearGlobalAveragePool", ["a", "s", "z", "s", "z"], ["b"], name="b", domain="com.microsoft")
    joined = helper.make_node("QLinearConcat", ["s", "z", "b", "s", "z", "b", "s", "z"], ["y"], name="y", domain="com.microsoft", axis=1)
    inputs = [value("x", [1, 4, 6, 5], UINT8), value("r", [4, 1, 1], UINT8)]
    graph = network_of(model([added, pooled, joined], inputs, [value("y", None, UINT8)], scale, domains=["com.microsoft"]))
    shapes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in graph.tensors if not tensor.constant}
    assert shapes["a"] == ("uint8", (1, 4, 6, 5))
    assert shapes["y"] == ("uint8", (1, 8, 1, 1))
    assert node(graph, "a").in_place == ((0, 0),)
    last = helper.make_node("QLinearGlobalAveragePool", ["x", "s", "z", "s", "z"], ["y"], domain="com.microsoft", channels_last=1)
    with pytest.raises(FormatError, match="expected a dtype and a shape"):
        network_of(model([last], inputs, [value("y", None, UINT8)], scale, domains=["com.microsoft"]))


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize("opset", [18, 22])
def test_a_pooling_rounded_up_has_no_window_in_its_padding_alone(kind: str, opset: int):
    """Onnx's inference counts such windows below version 22."""
    pooling = op(kind, "x", "y", kernel_shape=[2, 1], strides=[2, 2], pads=[0, 0, 1, 0], ceil_mode=1)
    network = model([pooling], [value("x", [1, 2, 4, 4])], [Y], opset=opset)
    (result,) = by_onnxruntime(network, random_inputs(network, 0)).values()
    assert tensor_named(network_of(network), "y").shape == result.shape == (1, 2, 2, 2)


def test_shape_arithmetic_and_views_of_weights_are_computed_here():
    nodes = [
        op("Shape", "x", "shape"),
        op("Gather", "shape zero", "batch"),
        op("Unsqueeze", "batch zeros", "first"),
        op("Concat", "first rest", "target", axis=0),
        op("Reshape", "x target", "flat"),
        op("Reshape", "w form", "wider"),
        op("MatMul", "flat wider", "product"),
        op("Constant", "", "half", value_float=0.5),
        op("Mul", "product half", "y"),
    ]
    constants = {"zero": np.array(0), "zeros": np.array([0]), "rest": np.array([-1]), "form": np.array([120, 2])}
    network = model(nodes, [value("x", ["N", 4, 6, 5])], [Y], {**constants, "w": np.ones((2, 120), np.float32)})
    graph = network_of(network, sizes={"N": 3})
    assert [each.kind for each in graph.nodes] == ["Reshape", "MatMul", "Mul"]
    assert tensor_named(graph, "y").shape == (3, 2)
    assert tensor_named(graph, "wider").constant


def test_large_results_of_constants_stay_operators():
    nodes = [op("ConstantOfShape", "shape", "zeros"), op("Add", "x zeros", "y")]
    graph = network_of(model(nodes, [value("x", [200, 200])], [Y], {"shape": np.array([200, 200])}))
    assert [each.kind for each in graph.nodes] == ["ConstantOfShape", "Add"]
    nodes = [op("DequantizeLinear", "w s", "wide"), op("MatMul", "x wide", "y")]
    constants = {"w": np.ones((5, 2), np.int8), "s": np.float32(1)}
    assert len(network_of(model(nodes, [value("x", [4, 5])], [Y], constants)).nodes) == 2  # weights stay bytes


def test_nodes_are_sorted_and_named_apart_and_unused_ones_left_out():
    nodes = [
        helper.make_node("Relu", ["b"], ["y"], name="same"),
        helper.make_node("Mystery", ["x"], ["nowhere"], domain="my.own"),
        helper.make_node("Abs", ["x"], ["a"], name="same"),
        helper.make_node("Neg", ["a"], ["b"]),
    ]
    graph = network_of(model(nodes, [X, value("unread", [2])], [Y], domains=["my.own"]))
    assert [each.name for each in graph.nodes] == ["same_2", "Neg_3", "same"]
    assert [graph.tensors[at].name for at in graph.inputs] == ["x", "unread"]


def test_results_may_be_inputs_and_constants():
    graph = network_of(model([op("Relu", "x", "y")], [X], [X, value("c", [2]), Y], {"c": np.ones(2, np.float32)}))
    assert [graph.tensors[at].name for at in graph.outputs] == ["x", "c", "y"]
    assert graph.tensors[graph.outputs[1]].constant


def test_inputs_that_are_left_out_keep_their_positions():
    nodes = [op("Clip", "x - high", "y")]
    graph = network_of(model(nodes, [X], [Y], {"high": np.float32(6)}))
    assert graph.nodes[0].inputs == (0, -1, 1)


def test_functions_of_the_file_are_written_out():
    body = helper.make_function("mine", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)])
    network = model([helper.make_node("Twice", ["x"], ["y"], domain="mine")], [X], [Y], domains=["mine"])
    network.functions.append(body)
    assert [each.kind for each in network_of(network).nodes] == ["Add"]


def test_custom_operators_have_the_outputs_that_the_file_declares():
    nodes = [helper.make_node("Mystery", ["x"], ["a"], name="what", domain="my.own"), op("Relu", "a", "y")]
    graph = network_of(model(nodes, [X], [Y], declared=[value("a", [2, 9])], domains=["my.own"]))
    assert tensor_named(graph, "y").shape == (2, 9)
    assert (graph.nodes[0].kind, graph.nodes[0].domain, graph.nodes[0].macs) == ("Mystery", "my.own", 0)


def test_whole_numbers_in_floats_may_be_stored_as_what_they_are():
    graph = network_of(model([op("Relu", "x", "y")], [X], [Y]), stored={"x": "int8", "y": "float32"})
    assert [(tensor.dtype, tensor.stored_dtype, tensor.size_bytes) for tensor in graph.tensors] == [
        ("float32", "int8", 120),
        ("float32", "", 480),
    ]
    assert graph.nodes[0].in_place == ()


def test_weights_beside_the_file_are_read(tmp_path):
    weights = np.arange(288, dtype=np.float32).reshape(8, 4, 3, 3)
    path = tmp_path / "net.onnx"
    network = model([op("Conv", "x w", "y")], [X], [Y], {"w": weights})
    onnx.save(network, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    graph = read_onnx(path)
    np.testing.assert_array_equal(next(iter(graph.constants.values())), weights)
    (tmp_path / "weights.bin").write_bytes(b"short")
    with pytest.raises(FormatError, match=r"net\.onnx: its external data cannot be read"):
        read_onnx(path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises((FormatError, OSError), match=r"weights\.bin"):
        read_onnx(path)


def test_int4_weights_are_arrays_of_int4():
    weights = np.array([[-8, 7, 1]], ml_dtypes.int4)
    nodes = [op("DequantizeLinear", "w s", "a"), op("Add", "x a", "y")]
    graph = network_of(model(nodes, [value("x", [1, 3])], [Y], {"w": weights, "s": np.float32(0.5)}, opset=21))
    assert tensor_named(graph, "w").size_bytes == 2


def tampered() -> onnx.ModelProto:
    network = model([op("Add", "x w", "y")], [X], [Y], {"w": np.ones(5, np.float32)})
    network.graph.initializer[0].raw_data = b"123"
    return network


def of_type(kind: str) -> onnx.ModelProto:
    """A model with an input that is no tensor."""
    return model([op("Identity", "x", "y")], [helper.make_tensor_sequence_value_info("x", FLOAT, [3])], [Y])


def branch() -> onnx.ModelProto:
    body = helper.make_graph([op("Relu", "x", "z")], "body", [], [value("z", None)])
    return model([op("If", "c", "y", then_branch=body, else_branch=body)], [X, value("c", [], TensorProto.BOOL)], [Y])


MISTAKES = [
    (branch(), r"node `y` \(If\): its attribute `(then|else)_branch` is a graph: control flow"),
    (model([op("Relu", "b", "a"), op("Neg", "a", "b"), op("Add", "b x", "y")], [X], [Y]), r"got a cycle: `a` <- `b` <- `a`"),
    (model([op("Relu", "x", "y"), helper.make_node("Neg", ["x"], ["y"], name="again")], [X], [Y]), "again.*`y`.*node `y` .* as well"),
    (model([op("Relu", "x", "x")], [X], [value("x", None)]), "`x`: expected a name of its own, an input or a constant is called so"),
    (model([op("Relu", "nobody", "y")], [X], [Y]), "input `nobody`: expected a tensor that is given or made"),
    (model([op("Relu", "x", "z")], [X], [Y]), "output `y`: expected a tensor that a node makes"),
    (
        model([helper.make_node("Odd", ["x"], ["y"], name="n", domain="o")], [X], [Y], domains=["o"]),
        r"node `n` \(Odd\): output `y`: expected a",
    ),
    (model([op("NonZero", "x", "y")], [X], [value("y", None, TensorProto.INT64)]), r"\(NonZero\): output `y`.*int64 \[4, \?\]"),
    (model([op("Relu", "x", "y")], [value("x", None)], [Y]), "input `x`: expected a dtype and a shape, got float32 of unknown rank"),
    (model([op("Relu", "x", "y")], [value("x", ["N", None])], [Y]), r"input `x`: axis 0 is `N`.*sizes=\{'N': 1\}.*'N', 'x:1'"),
    (
        model([op("Relu", "x", "y")], [X], [value("y", [1, 4, 6, 6])]),
        r"declares float32 \[1, 4, 6, 6\], its operator gives float32 \[1, 4, 6, 5\]",
    ),
    (model([op("Add", "x w", "y")], [X], [Y], {"w": np.ones(7, np.float32)}), r"node `y` \(Add\): onnx refuses its inputs: .*ncompatible"),
    (model([op("Identity", "x", "y")], [value("x", [2], TensorProto.STRING)], [Y]), "`x`: expected numbers, got onnx's dtype 8"),
    (of_type("sequence"), "`x`: expected a tensor, got sequence_type"),
    (tampered(), "initializer `w`: its bytes cannot be read"),
    (
        model([op("Constant", "", "c", value_string="a"), op("Add", "x c", "y")], [X], [Y]),
        "expected a constant of numbers, got value_string",
    ),
]


@pytest.mark.parametrize(("network", "sentence"), MISTAKES)
def test_a_mistake_is_refused_in_a_sentence(network: onnx.ModelProto, sentence: str, tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(network.SerializeToString())
    with pytest.raises(FormatError, match=f"net\\.onnx: .*{sentence}"):
        read_onnx(path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sizes": {"M": 1}}, "sizes: expected names among 'N', got 'M'"),
        ({"sizes": {"N": 0}}, "sizes: expected a whole number from 1 for 'N', got 0"),
        ({"sizes": {"N": True}}, "sizes: expected a whole number from 1"),
        ({"sizes": {"N": 1}, "views": "all"}, "views: expected one of none, reshape, slices, got 'all'"),
        ({"sizes": {"N": 1}, "stored": {"q": "int8"}}, "stored: expected names of tensors of the network, got 'q'"),
        ({"sizes": {"N": 1}, "stored": {"x": "int7"}}, "stored: expected a dtype for `x`, one of .*, got 'int7'"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(options, sentence: str):
    with pytest.raises(FormatError, match=sentence):
        network_of(model([op("Relu", "x", "y")], [value("x", ["N", 3])], [Y]), **options)


@pytest.mark.parametrize("content", [b"", b"no ONNX at all", b"\x08\x01", bytes(range(256))])
def test_a_file_that_is_no_onnx_is_refused(content: bytes, tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"net\.onnx: expected an ONNX model"):
        read_onnx(path)
    with pytest.raises(OSError, match="nowhere"):
        read_onnx(tmp_path / "nowhere.onnx")
