"""Small ONNX models, what onnxruntime makes of them without optimizations, and networks at random."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT8, UINT8, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64


def value(name: str, shape: Sequence[int | str] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    declared: Sequence[onnx.ValueInfoProto] = (),
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    arrays = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "net", inputs, outputs, arrays, value_info=declared)
    versions = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=versions, ir_version=helper.find_min_ir_version_for(versions, True))


def by_onnxruntime(network: onnx.ModelProto, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A model's outputs by name, computed as it is written."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(network.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def random_inputs(network: onnx.ModelProto, seed: int) -> dict[str, Any]:
    """Numbers for a model's inputs, whose shapes are fixed."""
    rng = np.random.default_rng(seed)
    constants = {one.name for one in network.graph.initializer}
    arrays = {}
    for one in network.graph.input:
        tensor = one.type.tensor_type
        shape = [dim.dim_value for dim in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if one.name not in constants:
            arrays[one.name] = (
                (rng.standard_normal(shape) * 5).astype(dtype) if dtype.kind == "f" else rng.integers(0, 99, shape).astype(dtype)
            )
    return arrays


_ONE = ("Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Identity", "HardSwish", "Softmax")
_TWO = ("Add", "Mul", "Sub", "Max")


def random_model(seed: int) -> onnx.ModelProto:
    """A network of up to 14 operators with branches, views, parts and in-place candidates, on maps of numbers in float32."""
    rng = np.random.default_rng(seed)
    shape = (1, 4, int(rng.integers(3, 7)), int(rng.integers(3, 7)))
    alike, nodes, constants = ["x"], [], {}
    flat = shape[1] * shape[2] * shape[3]
    for number in range(int(rng.integers(3, 15))):
        name, first, second = f"t{number}", str(rng.choice(alike[-4:])), str(rng.choice(alike))
        match rng.integers(0, 7):
            case 0 | 1:
                nodes.append(helper.make_node(str(rng.choice(_ONE)), [first], [name]))
            case 2:
                nodes.append(helper.make_node(str(rng.choice(_TWO)), [first, second], [name]))
            case 3:
                groups = int(rng.choice([1, 4]))
                constants[f"w{number}"] = rng.standard_normal((4, 4 // groups, 3, 3)).astype(np.float32) / 3
                nodes.append(helper.make_node("Conv", [first, f"w{number}"], [name], pads=[1, 1, 1, 1], group=groups))
            case 4:
                constants |= {f"a{number}": np.array([1, flat]), f"b{number}": np.array(shape)}
                nodes.append(helper.make_node("Reshape", [first, f"a{number}"], [f"{name}f"]))
                nodes.append(helper.make_node(str(rng.choice(_ONE[:5])), [f"{name}f"], [f"{name}g"]))
                nodes.append(helper.make_node("Reshape", [f"{name}g", f"b{number}"], [name]))
            case 5:
                nodes.append(helper.make_node("Split", [first], [f"{name}l", f"{name}r"], axis=1))
                nodes.append(helper.make_node("Neg", [f"{name}l"], [f"{name}n"]))
                nodes.append(helper.make_node("Concat", [f"{name}r", f"{name}n"], [name], axis=1))
            case _:
                nodes.append(helper.make_node("QuantizeLinear", [first, "scale", "zero"], [f"{name}q"]))
                nodes.append(helper.make_node("DequantizeLinear", [f"{name}q", "scale", "zero"], [name]))
                constants |= {"scale": np.float32(0.05), "zero": np.int8(3)}
        alike.append(name)
    results = [alike[-1], *{str(rng.choice(alike[1:]))} - {alike[-1]}]
    return model(nodes, [value("x", shape)], [value(name, None) for name in results], constants, opset=14 if seed % 2 else 17)
