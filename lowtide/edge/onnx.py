"""A network from an ONNX file: operators, tensors with their bytes, what may be a view or written in place.

All sizes are fixed: symbols by an argument, the rest by onnx's inference and by what the file declares. Shape arithmetic and views of
weights are computed here, once; operators whose results nobody needs are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowtide.base.files import read_bytes
from lowtide.base.messages import need
from lowtide.edge.graph import BITS, EdgeGraph, EdgeNode, EdgeTensor, stored_bytes, with_views_that_fit
from lowtide.edge.operators import VIEWS, Arguments, grouped, in_place, macs, views
from lowtide.edge.types import FixedSizes, TensorType, dtype_name, entries, inferred, merged
from lowtide.errors import FormatError

onnx = need("onnx", "reading an ONNX model", "edge")
external_data = need("onnx.external_data_helper", "reading an ONNX model", "edge")
inliner = need("onnx.inliner", "reading an ONNX model", "edge")
reference = need("onnx.reference", "reading an ONNX model", "edge")

Views = Literal["none", "reshape", "slices"]
_VIEWS = ("none", "reshape", "slices")

# What sizes are computed by in the networks that exporters write; all exact, so that it does not matter who computes it.
_SHAPE_ARITHMETIC = frozenset(
    (
        "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Floor", "Gather", "Greater", "Identity",
        "Less", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range", "ReduceProd", "Reshape", "ScatterND", "Slice", "Split",
        "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
    )
)  # fmt: skip
_MOST_FOLDED = 1024  # numbers: a larger result stays an operator, which needs no flash


def read_onnx(
    path: str | os.PathLike[str],
    *,
    sizes: Mapping[str, int] | None = None,
    views: Views = "reshape",
    stored: Mapping[str, str] | None = None,
    groups: bool = True,
) -> EdgeGraph:
    """The network of an ONNX file, with the weights that lie beside it.

    sizes: extents that the file names by symbols, `{"batch": 1}`; an axis without a name is "input:axis".
    views: which results are taken to be their input's bytes. "reshape" for Reshape and its like, "none" for none,
        "slices" also for Concat and Split along the outermost axis that is no 1: parts are written where they will lie in the whole.
        One whose parts are constants or the caller's, or lie in another whole, copies.
    stored: dtypes of tensors by name that memory holds as another: `{"conv1": "int8"}` where a file has whole numbers as float32.
    groups: whether an operator and what makes integers of its results are one (`lowtide.edge.operators`), as devices have them.

    Raises OSError where a file cannot be read. Raises FormatError, which names node and tensor, for what is no ONNX model,
    for control flow, cycles, tensors that nobody or two nodes make, and shapes or dtypes that stay unknown.
    """
    where = os.fspath(path)
    with _in_file(where):
        model = _parsed(read_bytes(path))
        _load_external_data(model, os.path.dirname(where))
        return network_of(model, sizes=sizes, views=views, stored=stored, groups=groups)


def network_of(
    model: Any,
    *,
    sizes: Mapping[str, int] | None = None,
    views: Views = "reshape",
    stored: Mapping[str, str] | None = None,
    groups: bool = True,
) -> EdgeGraph:
    """The network of an `onnx.ModelProto` whose weights are loaded. As `read_onnx`."""
    if views not in _VIEWS:
        raise FormatError(f"views: expected one of {', '.join(_VIEWS)}, got {views!r}")
    if model.functions:
        model = inliner.inline_local_functions(model)
    graph = _Network(model, sizes or {}).graph(views, stored or {})
    return with_views_that_fit(grouped(graph) if groups else graph)


@contextmanager
def _in_file(where: str) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error


def _parsed(content: bytes) -> Any:
    """A model from a file's bytes. Anything may parse as a message: a model has a version, operators' versions and results."""
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's own classes, which differ between its versions
        raise FormatError(f"expected an ONNX model, got {len(content)} bytes that are none: {error}") from error
    if not model.ir_version or not model.opset_import or not model.graph.output:
        raise FormatError("expected an ONNX model with a version, opset_import and outputs, got a message without them")
    return model


def _load_external_data(model: Any, folder: str) -> None:
    try:
        external_data.load_external_data_for_model(model, folder)
    except OSError:
        raise
    except Exception as error:  # onnx's ValidationError for a path that leads out of the folder, or a file that is too short
        raise FormatError(f"its external data cannot be read: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class _Operator:
    """A node of the file under a name of its own."""

    name: str
    proto: Any

    def __str__(self) -> str:
        return f"node `{self.name}` ({self.proto.op_type})"


class _Network:
    """A model on its way to a network: types and constants by name, as far as the operators were gone through."""

    def __init__(self, model: Any, sizes: Mapping[str, int]) -> None:
        self.model = model
        self.opsets = {"" if each.domain == "ai.onnx" else each.domain: each.version for each in model.opset_import}
        _refuse_sparse(model.graph)
        self.constants: dict[str, NDArray[Any]] = {each.name: _array(each) for each in model.graph.initializer}
        inputs = [one for one in model.graph.input if one.name not in self.constants]
        self.sizes = FixedSizes.of(inputs, sizes)
        self.inputs = [one.name for one in inputs]
        self.types = {name: TensorType(_array_dtype(name, array), array.shape) for name, array in self.constants.items()}
        self.types |= {one.name: self.sizes.of_input(one) for one in inputs}
        self.declared = {one.name: one for one in (*model.graph.value_info, *model.graph.output)}
        self.operators: list[_Operator] = []  # those that run on the device
        in_order = _sorted(_named(model.graph.node), (*self.constants, *self.inputs))
        for operator in _needed(in_order, [one.name for one in model.graph.output]):
            self._add(operator)

    def _add(self, operator: _Operator) -> None:
        node = operator.proto
        try:
            _refuse_subgraphs(node)
            folded = self._folded(node)
            if folded is None:
                self._infer(node)
        except FormatError as error:
            raise FormatError(f"{operator}: {error}") from error
        if folded is None:
            self.operators.append(operator)
        for name, array in zip(node.output, folded or (), strict=False):
            if name:
                self.constants[name] = array
                self.types[name] = TensorType(_array_dtype(name, array), array.shape)

    def _infer(self, node: Any) -> None:
        known = inferred(self.model, node, self.types, self.constants)
        for name in node.output:
            if name:
                declared = self.declared.get(name)
                self.types[name] = merged(name, known.get(name), None if declared is None else self.sizes.declared(declared))

    def _folded(self, node: Any) -> Sequence[NDArray[Any]] | None:
        """The results of what needs no device: constants, sizes, arithmetic on sizes, and views of weights."""
        if node.domain not in ("", "ai.onnx"):
            return None
        attributes = _attributes(node)
        if node.op_type == "Constant":
            return (_constant(attributes),)
        names = [name for name in node.input if name]
        if node.op_type in ("Shape", "Size") and names:
            shape = np.array(self.types[names[0]].shape, np.int64)
            sliced = shape[attributes.get("start", 0) : attributes.get("end")]
            return (sliced if node.op_type == "Shape" else np.array(shape.prod(), np.int64),)
        if not names or any(name not in self.constants for name in names) or node.op_type not in _SHAPE_ARITHMETIC | VIEWS:
            return None
        if node.op_type not in VIEWS or node.op_type == "Cast":
            known = inferred(self.model, node, self.types, self.constants)
            if any(not known[name].is_known or entries(known[name]) > _MOST_FOLDED for name in node.output if name):
                return None
        try:
            evaluator = reference.ReferenceEvaluator(node, opsets=self.opsets)
            results: list[NDArray[Any]] = evaluator.run(None, {name: self.constants[name] for name in names})
        except Exception as error:  # whatever NumPy has against the arguments
            raise FormatError(f"it cannot be computed from its constants: {error}") from error
        return [np.asarray(one) for one in results]

    def graph(self, which: Views, stored: Mapping[str, str]) -> EdgeGraph:
        """The network, without operators that lead to no result."""
        results = [one.name for one in self.model.graph.output]
        for name in results:
            if name not in self.types:
                raise FormatError(f"output `{name}`: expected a tensor that a node makes, got a name that nobody makes")
        operators = _needed(self.operators, results)
        tensors = _Tensors(self.types, self.constants, stored)
        inputs = tuple(tensors.position(name) for name in self.inputs)
        nodes = tuple(_node(operator, tensors, which) for operator in operators)
        outputs = tuple(tensors.position(name) for name in results)
        tensors.check_stored()
        return EdgeGraph(
            name=self.model.graph.name,
            tensors=tuple(tensors.rows),
            nodes=nodes,
            inputs=inputs,
            outputs=outputs,
            constants={tensors.known[name]: array for name, array in self.constants.items() if name in tensors.known},
            opsets=self.opsets,
        )


class _Tensors:
    """Tensors by position, each given one when it is first asked for."""

    def __init__(self, types: Mapping[str, TensorType], constants: Mapping[str, Any], stored: Mapping[str, str]) -> None:
        self.types, self.constants, self.stored = types, constants, stored
        self.rows: list[EdgeTensor] = []
        self.known: dict[str, int] = {}

    def position(self, name: str) -> int:
        if name not in self.known:
            known, other = self.types[name], self.stored.get(name, "")
            shape = tuple(extent or 0 for extent in known.shape or ())
            dtype = known.dtype or ""
            if other and other not in BITS:
                raise FormatError(f"stored: expected a dtype for `{name}`, one of {', '.join(BITS)}, got {other!r}")
            self.known[name] = len(self.rows)
            size_bytes = stored_bytes(shape, other or dtype)
            self.rows.append(EdgeTensor(name, shape, dtype, size_bytes, name in self.constants, "" if other == dtype else other))
        return self.known[name]

    def left_out(self, name: str) -> int:
        """An output that the file leaves out: no bytes, no dtype."""
        self.rows.append(EdgeTensor(name, (0,), "", 0))
        return len(self.rows) - 1

    def check_stored(self) -> None:
        """Raises FormatError for a dtype of a tensor that is not there."""
        for name in self.stored:
            if name not in self.known:
                raise FormatError(f"stored: expected names of tensors of the network, got {name!r}")


def _node(operator: _Operator, tensors: _Tensors, which: Views) -> EdgeNode:
    proto = operator.proto
    inputs = tuple(tensors.position(name) if name else -1 for name in proto.input)
    outputs = tuple(
        tensors.position(name) if name else tensors.left_out(f"{operator.name}:{at} left out") for at, name in enumerate(proto.output)
    )
    call = Arguments([None if at < 0 else tensors.rows[at] for at in inputs], [tensors.rows[at] for at in outputs], _attributes(proto))
    found_views = () if which == "none" else views(proto.op_type, call, slices=which == "slices")
    return EdgeNode(
        name=operator.name,
        kind=proto.op_type,
        domain="" if proto.domain == "ai.onnx" else proto.domain,
        inputs=inputs,
        outputs=outputs,
        attributes=call.attributes,
        macs=macs(proto.op_type, call),
        views=found_views,
        in_place=in_place(proto.op_type, call),
    )


def _array(tensor: Any) -> NDArray[Any]:
    dtype_name(tensor.data_type, tensor.name)
    try:
        array: NDArray[Any] = onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # of NumPy and onnx, where bytes and shape disagree
        raise FormatError(f"initializer `{tensor.name}`: its bytes cannot be read: {error}") from error
    return array


def _array_dtype(name: str, array: NDArray[Any]) -> str:
    if array.dtype.name not in BITS:
        raise FormatError(f"`{name}`: expected numbers, got {array.dtype.name}, which has no size in bytes")
    return array.dtype.name


def _constant(attributes: Mapping[str, Any]) -> NDArray[Any]:
    """What a Constant node holds, in one of its ways to say so."""
    ways: dict[str, Callable[[Any], NDArray[Any]]] = {
        "value": np.asarray,
        "value_float": lambda one: np.array(one, np.float32),
        "value_floats": lambda one: np.array(one, np.float32),
        "value_int": lambda one: np.array(one, np.int64),
        "value_ints": lambda one: np.array(one, np.int64),
    }
    ((name, value),) = attributes.items() if len(attributes) == 1 else (("nothing", None),)
    if name not in ways:
        raise FormatError(f"expected a constant of numbers, got {', '.join(attributes) or name}")
    return ways[name](value)


def _attributes(node: Any) -> dict[str, Any]:
    """A node's attributes as Python's values; tensors as arrays."""
    values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return {name: _array(value) if isinstance(value, onnx.TensorProto) else value for name, value in values.items()}


def _refuse_subgraphs(node: Any) -> None:
    kinds = onnx.AttributeProto
    for each in node.attribute:
        if each.type in (kinds.GRAPH, kinds.GRAPHS):
            raise FormatError(f"its attribute `{each.name}` is a graph: control flow (If, Loop, Scan) is not read, export without it")
        if each.type in (kinds.SPARSE_TENSOR, kinds.SPARSE_TENSORS, kinds.TYPE_PROTO, kinds.TYPE_PROTOS):
            raise FormatError(f"its attribute `{each.name}` is {kinds.AttributeType.Name(each.type)}, which is not read")


def _refuse_sparse(graph: Any) -> None:
    for each in graph.sparse_initializer:
        raise FormatError(f"initializer `{each.values.name}`: expected a dense tensor, got a sparse one")


def _named(nodes: Sequence[Any]) -> list[_Operator]:
    """Nodes under names of their own, as names are optional and may be said twice."""
    taken: set[str] = set()
    operators = []
    for position, node in enumerate(nodes):
        name = node.name or f"{node.op_type}_{position}"
        if name in taken:
            name = next(longer for count in range(2, len(nodes) + 3) if (longer := f"{name}_{count}") not in taken)
        taken.add(name)
        operators.append(_Operator(name, node))
    return operators


def _sorted(operators: Sequence[_Operator], given: Sequence[str]) -> list[_Operator]:
    """Each after those that it reads, else in the file's order. Raises FormatError for a circle, and tensors of nobody or of two."""
    maker: dict[str, int] = dict.fromkeys(given, -1)
    for position, operator in enumerate(operators):
        for name in operator.proto.output:
            if name in maker:
                other = f"{operators[maker[name]]} makes it as well" if maker[name] >= 0 else "an input or a constant is called so"
                raise FormatError(f"{operator}: output `{name}`: expected a name of its own, {other}")
            if name:
                maker[name] = position
    waits: list[set[int]] = []
    for operator in operators:
        for name in operator.proto.input:
            if name and name not in maker:
                raise FormatError(f"{operator}: input `{name}`: expected a tensor that is given or made, got a name that nobody makes")
        waits.append({maker[name] for name in operator.proto.input if name} - {-1})
    done: dict[int, None] = {}
    waiting = list(range(len(operators)))
    while waiting:
        ready = [position for position in waiting if _passes(waits[position], done, position)]
        if not ready:
            raise FormatError(f"expected operators in an order, got a cycle: {_cycle(waits, waiting, operators)}")
        waiting = [position for position in waiting if position not in done]
    return [operators[position] for position in done]


def _passes(waits: set[int], done: dict[int, None], position: int) -> bool:
    if waits <= done.keys():
        done[position] = None
        return True
    return False


def _cycle(waits: Sequence[set[int]], waiting: Sequence[int], operators: Sequence[_Operator]) -> str:
    """Each of the waiting nodes waits for another: whoever follows comes round."""
    path = [waiting[0]]
    while path[-1] not in path[:-1]:
        path.append(min(waits[path[-1]].intersection(waiting)))
    return " <- ".join(f"`{operators[position].name}`" for position in path[path.index(path[-1]) :])


def _needed(operators: Sequence[_Operator], results: Sequence[str]) -> list[_Operator]:
    wanted, kept = set(results), []
    for operator in reversed(operators):
        if not wanted.isdisjoint(name for name in operator.proto.output if name):
            wanted.update(name for name in operator.proto.input if name)
            kept.append(operator)
    return kept[::-1]
