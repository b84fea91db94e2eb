"""One operator at a time, computed by onnxruntime where that is installed, else by onnx's own reference evaluator.

Kernels are those that onnxruntime takes for a whole model without optimizations: the same bits. Numbers that it does not hand to NumPy
(int4, bfloat16 ...) are carried through the model's edges as wider ones, from which nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowtide.base.messages import need
from lowtide.edge.graph import BITS, EdgeGraph, EdgeNode, EdgeTensor, numpy_dtype
from lowtide.edge.windows import is_weight
from lowtide.errors import StepError

Array = NDArray[Any]
Kernel = Callable[[Sequence[Array | None]], Sequence[Array]]  # inputs and outputs by position; None for an input that is left out
Function = Callable[..., Any]  # f(attributes, *inputs), an array or several
Engine = Literal["onnxruntime", "reference"]

_CARRIED = {
    dtype: "float32" if "float" in dtype else "int8" if dtype[0] == "i" else "uint8"
    for dtype in BITS
    if BITS[dtype] < 8 or (dtype.startswith(("bfloat", "float8")))
}


def engine_at_hand() -> Engine:
    return "onnxruntime" if find_spec("onnxruntime") is not None else "reference"


def kernel_of(graph: EdgeGraph, node: EdgeNode, functions: Mapping[str, Function], engine: Engine) -> Kernel:
    """What computes a node: the caller's function for its kind, else an engine. Raises StepError, which names it, where nobody can."""
    if node.kind in functions:
        return _called(node, functions[node.kind])
    if node.views == ((0, 0),) and graph.tensors[node.inputs[0]].size_bytes == graph.tensors[node.outputs[0]].size_bytes:
        return _viewed(graph.tensors[node.inputs[0]], graph.tensors[node.outputs[0]])
    if node.domain == "aten":
        from lowtide.edge.aten import kernel

        return kernel(node)
    if "body" in node.attributes:
        given = [position for position, at in enumerate(node.inputs) if not is_weight(graph, at)]
        compose = _composed(node.attributes["body"], functions, engine)
        return lambda inputs: compose([inputs[position] for position in given])
    model = _model(graph, node)
    try:
        run = _loaded(model, engine)
    except Exception as error:  # the engines' own classes, which say that they do not know an operator
        raise StepError(
            f"node `{node.name}`: {engine} does not compute {_kind(node)}: pass functions={{{node.kind!r}: f}},"
            f" where f(attributes, *inputs) gives its outputs ({' '.join(str(error).split())[:200]})"
        ) from error
    fed = [at for at in dict.fromkeys(node.inputs) if at >= 0 and at not in graph.constants]
    first = {at: node.inputs.index(at) for at in fed}

    def compute(inputs: Sequence[Array | None]) -> Sequence[Array]:
        feeds = {_edge(at, graph.tensors[at]): _carried(inputs[first[at]], graph.tensors[at]) for at in fed}
        results = iter(run(feeds))
        return [
            np.asarray(next(results)).astype(numpy_dtype(graph.tensors[at].dtype), copy=False) if graph.tensors[at].dtype else np.zeros(0)
            for at in node.outputs
        ]

    return compute


def _kind(node: EdgeNode) -> str:
    return f"`{node.kind}`" + (f" of the domain {node.domain}" if node.domain else "")


def _composed(body: EdgeGraph, functions: Mapping[str, Function], engine: Engine) -> Kernel:
    """A group's members one after the other; only the results of the last leave it."""
    kernels = [kernel_of(body, member, functions, engine) for member in body.nodes]

    def compute(inputs: Sequence[Array | None]) -> Sequence[Array]:
        values: dict[int, Array | None] = {-1: None, **body.constants, **dict(zip(body.inputs, inputs, strict=True))}
        for member, kernel in zip(body.nodes, kernels, strict=True):
            values |= zip(member.outputs, kernel([values[at] for at in member.inputs]), strict=True)
        return [np.asarray(values[at]) for at in body.outputs]

    return compute


def _viewed(source: EdgeTensor, output: EdgeTensor) -> Kernel:
    """The same bytes under another shape or dtype, as a device has them: a view that is none gives other results."""
    dtype, as_stored = numpy_dtype(output.dtype), bool(source.stored_dtype or output.stored_dtype)

    def compute(inputs: Sequence[Array | None]) -> Sequence[Array]:
        array = np.ascontiguousarray(inputs[0]).reshape(-1)  # where memory holds them as others, numbers are what stays
        return [(array.astype(dtype, copy=False) if as_stored else array.view(dtype)).reshape(output.shape)]

    return compute


def _called(node: EdgeNode, function: Function) -> Kernel:
    def compute(inputs: Sequence[Array | None]) -> Sequence[Array]:
        results = function(node.attributes, *inputs)
        results = results if isinstance(results, tuple | list) else (results,)
        if len(results) != len(node.outputs):
            raise StepError(f"node `{node.name}`: functions[{node.kind!r}]: expected {len(node.outputs)} outputs, got {len(results)}")
        return [np.asarray(one) for one in results]

    return compute


def _carried(array: Array | None, tensor: EdgeTensor) -> Array:
    return np.asarray(array).astype(numpy_dtype(_carrier(tensor)), copy=False)


def _loaded(model: Any, engine: Engine) -> Callable[[Mapping[str, Array]], Sequence[Array]]:
    if engine == "reference":
        evaluator = need("onnx.reference", "running a plan", "edge").ReferenceEvaluator(model)
        return lambda feeds: list(evaluator.run(None, dict(feeds)))
    runtime = need("onnxruntime", "running a plan with it", "edge")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda feeds: list(session.run(None, dict(feeds)))


def _model(graph: EdgeGraph, node: EdgeNode) -> Any:
    """A model of this node alone, its constants within, and a cast at each edge where numbers are carried as others."""
    onnx = need("onnx", "running a plan", "edge")
    helper = onnx.helper
    inputs, outputs, constants, before, after = [], [], [], [], []
    for at in dict.fromkeys(at for at in node.inputs if at >= 0):
        tensor = graph.tensors[at]
        if at in graph.constants:
            constants.append(onnx.numpy_helper.from_array(np.asarray(graph.constants[at], numpy_dtype(tensor.dtype)), f"t{at}"))
            continue
        inputs.append(helper.make_tensor_value_info(_edge(at, tensor), _element(helper, _carrier(tensor)), tensor.shape))
        if tensor.dtype in _CARRIED:
            before.append(helper.make_node("Cast", [_edge(at, tensor)], [f"t{at}"], to=_element(helper, tensor.dtype)))
    for at in node.outputs:
        tensor = graph.tensors[at]
        if tensor.dtype:
            outputs.append(helper.make_tensor_value_info(_edge(at, tensor), _element(helper, _carrier(tensor)), tensor.shape))
        if tensor.dtype in _CARRIED:
            after.append(helper.make_node("Cast", [f"t{at}"], [_edge(at, tensor)], to=_element(helper, _carrier(tensor))))
    proto = helper.make_node(
        node.kind,
        [f"t{at}" if at >= 0 else "" for at in node.inputs],
        [f"t{at}" if graph.tensors[at].dtype else "" for at in node.outputs],
        name=node.name,
        domain=node.domain,
    )
    proto.attribute.extend(_attribute(onnx, graph, node, name, value) for name, value in node.attributes.items())
    body = helper.make_graph([*before, proto, *after], node.name, inputs, outputs, constants)
    versions = [helper.make_opsetid(domain, version) for domain, version in graph.opsets.items() if domain in ("", node.domain)]
    return helper.make_model(body, opset_imports=versions, ir_version=helper.find_min_ir_version_for(versions, True))


def _edge(at: int, tensor: EdgeTensor) -> str:
    return f"carried{at}" if tensor.dtype in _CARRIED else f"t{at}"


def _carrier(tensor: EdgeTensor) -> str:
    return _CARRIED.get(tensor.dtype, tensor.dtype)


def _element(helper: Any, dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype)))


def _attribute(onnx: Any, graph: EdgeGraph, node: EdgeNode, name: str, value: Any) -> Any:
    """An attribute from Python's value; an empty list does not say what it is a list of."""
    if isinstance(value, np.ndarray):
        return onnx.helper.make_attribute(name, onnx.numpy_helper.from_array(value))
    if isinstance(value, list | tuple) and not value:
        schema = onnx.defs.get_schema(node.kind, graph.opsets[node.domain], node.domain)
        return onnx.helper.make_attribute(name, value, attr_type=int(schema.attributes[name].type.value))
    return onnx.helper.make_attribute(name, value)
