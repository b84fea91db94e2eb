"""A network from a PyTorch model, by torch.export: operators of core ATen, dense and contiguous as a small device holds them."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx.node import map_arg

from lowtide.edge.graph import BITS, EdgeGraph, EdgeNode, EdgeTensor, numpy_dtype, stored_bytes
from lowtide.errors import CaptureError

DOMAIN = "aten"
_VIEWS = frozenset({"_unsafe_view", "alias", "clone", "detach", "squeeze", "unsqueeze", "view"})  # of what is contiguous
_MOST_FOLDED_BYTES = 8192  # of what is made of no input: a larger result stays an operator, which needs no flash
_Shapes = Sequence[tuple[int, ...]]
_MACS: dict[str, Callable[[Any, _Shapes, tuple[int, ...]], int]] = {  # of the arguments, the inputs' shapes and the output's
    "convolution": lambda args, shapes, out: math.prod(shapes[0] if args[6] else out) * math.prod(shapes[1][1:]),
    "mm": lambda args, shapes, out: math.prod(out) * shapes[0][-1],
    "bmm": lambda args, shapes, out: math.prod(out) * shapes[0][-1],
    "addmm": lambda args, shapes, out: math.prod(out) * shapes[1][-1],
    "baddbmm": lambda args, shapes, out: math.prod(out) * shapes[1][-1],
}


@dataclass(frozen=True, slots=True)
class Input:
    """The place of a node's input among its arguments."""

    position: int


def read_torch(model: torch.nn.Module, example: tuple[Any, ...]) -> EdgeGraph:
    """The network that a model computes for the shapes of `example`, the arguments of its forward. Parameters and buffers are constants.

    The model is captured as it is: call `eval()` before. Raises CaptureError for shapes that are not fixed, for models that write their
    buffers, and for operators that read strides; what torch.export cannot capture raises its own errors.
    """
    return _Export(exported(model, example)).graph(type(model).__name__)


def exported(model: torch.nn.Module, example: tuple[Any, ...]) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, at torch's own copies of what it deprecates
        program: torch.export.ExportedProgram = torch.export.export(model, example).run_decompositions()
    return program


class _Export:
    """An exported program on its way to a network: tensors by the nodes of torch.fx that make them."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.tensors: list[EdgeTensor] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.nodes: list[EdgeNode] = []
        self.known: dict[Any, int] = {}  # torch.fx nodes, and (node, position) for those of several results

    def graph(self, name: str) -> EdgeGraph:
        weights = {**self.program.state_dict, **self.program.constants}
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        for spec in self.program.graph_signature.output_specs:
            if spec.kind.name != "USER_OUTPUT":
                raise CaptureError(f"output {spec.arg.name}: expected a result, got {spec.kind.name} of {spec.target}: the model writes it")
        inputs, outputs = [], []
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                target = specs[node.name].target
                self.known[node] = self._tensor(node.name, node.meta["val"], weights[target].detach() if target in weights else None)
                inputs += [self.known[node]] if target not in weights else []
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                outputs = [self.known[one] for one in node.args[0] if isinstance(one, torch.fx.Node) and one in self.known]
        arrays = {at: to_array(one) for at, one in self.constants.items()}
        return EdgeGraph(name, tuple(self.tensors), tuple(self.nodes), tuple(inputs), tuple(outputs), arrays)

    def _tensor(self, name: str, value: torch.Tensor, constant: torch.Tensor | None = None) -> int:
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in BITS or not all(isinstance(extent, int) for extent in value.shape):
            raise CaptureError(f"{name}: expected fixed sizes and a dtype of {', '.join(BITS)}, got {dtype} {tuple(value.shape)}")
        shape = tuple(value.shape)
        self.tensors.append(EdgeTensor(name, shape, dtype, stored_bytes(shape, dtype), constant is not None))
        if constant is not None:
            self.constants[len(self.tensors) - 1] = constant.clone()  # the model goes on training, perhaps
        return len(self.tensors) - 1

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            self.known[node] = self.known[node.args]
            return
        if not hasattr(node.target, "tags") or (_kind(node) == "as_strided" and not _keeps_all(node)):
            raise CaptureError(f"{node.name}: expected an operator that reads no strides, got {node.target}")
        read = tuple(dict.fromkeys(node.all_input_nodes))
        inputs = tuple(self.known[one] for one in read)
        values = node.meta["val"]

        def argument(one: torch.fx.Node) -> Any:
            return Input(read.index(one))

        several = isinstance(values, tuple | list)
        call = {"args": map_arg(node.args, argument), "kwargs": map_arg(node.kwargs, argument)}
        attributes = {"target": str(node.target), **call}
        if self._is_folded(inputs, values):
            result = _run(attributes, [self.constants[at] for at in inputs])
            self.known[node] = self._tensor(node.name, values, result)
            return
        users = {user.args[1] for user in node.users} if several else {0}
        outputs = []
        for position, value in enumerate(values if several else (values,)):
            wanted = position in users and isinstance(value, torch.Tensor)
            outputs.append(
                self._tensor(f"{node.name}_{position}" if several else node.name, value) if wanted else self._left_out(node, position)
            )
            self.known[(node, position) if several else node] = outputs[-1]
        self.nodes.append(self._node(node, inputs, tuple(outputs), attributes))

    def _left_out(self, node: torch.fx.Node, position: int) -> int:
        self.tensors.append(EdgeTensor(f"{node.name}:{position} left out", (0,), "", 0))
        return len(self.tensors) - 1

    def _is_folded(self, inputs: Sequence[int], values: Any) -> bool:
        """Whether a result is made of constants alone, and takes no more bytes than they do."""
        if not isinstance(values, torch.Tensor) or any(at not in self.constants for at in inputs):
            return False
        return values.nbytes <= max([_MOST_FOLDED_BYTES, *(self.tensors[at].size_bytes for at in inputs)])

    def _node(self, node: Any, inputs: tuple[int, ...], outputs: tuple[int, ...], attributes: dict[str, Any]) -> EdgeNode:
        kind = _kind(node)
        rows, result = [self.tensors[at] for at in inputs], self.tensors[outputs[0]]
        is_view = kind in (*_VIEWS, "as_strided") and rows and rows[0].size_bytes == result.size_bytes
        alike = [at for at, row in enumerate(rows) if not row.constant and (row.shape, row.size_bytes) == (result.shape, result.size_bytes)]
        return EdgeNode(
            name=node.name,
            kind=kind,
            domain=DOMAIN,
            inputs=inputs,
            outputs=outputs,
            attributes=attributes,
            macs=_MACS[kind](node.args, [row.shape for row in rows], result.shape) if kind in _MACS else 0,
            views=((0, 0),) if is_view else (),
            in_place=tuple((0, at) for at in alike) if torch.Tag.pointwise in node.target.tags else (),
        )


def _kind(node: Any) -> str:
    """An operator's name, "add" of "aten::add.Tensor"."""
    return str(node.target.name().partition("::")[2].partition(".")[0])


def _keeps_all(node: Any) -> bool:
    """Whether as_strided only names other strides for axes of one entry, as pooling to one number does."""
    source, size, strides, *offset = node.args
    value, count = source.meta["val"], 1
    for extent, stride in reversed(list(zip(size, strides, strict=True))):
        if extent != 1 and stride != count:
            return False
        count *= extent
    return not any(offset) and count == value.numel() and (value.is_contiguous() or sum(extent != 1 for extent in value.shape) < 2)


def kernel(node: EdgeNode) -> Callable[[Sequence[NDArray[Any] | None]], Sequence[NDArray[Any]]]:
    """What computes a node of this domain: torch's own operator."""

    def compute(inputs: Sequence[NDArray[Any] | None]) -> Sequence[NDArray[Any]]:
        with torch.no_grad():
            results = _run(node.attributes, [to_tensor(one) for one in inputs if one is not None])
        return [to_array(one) for one in (results if isinstance(results, tuple | list) else (results,))]

    return compute


def _run(attributes: Any, inputs: Sequence[torch.Tensor]) -> Any:
    namespace, name, overload = attributes["target"].split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return function(*_filled(attributes["args"], inputs), **_filled(attributes["kwargs"], inputs))


def _filled(argument: Any, inputs: Sequence[torch.Tensor]) -> Any:
    if isinstance(argument, Input):
        return inputs[argument.position]
    if isinstance(argument, dict):
        return {name: _filled(one, inputs) for name, one in argument.items()}
    return type(argument)([_filled(one, inputs) for one in argument]) if isinstance(argument, tuple | list) else argument


def to_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor of an array's numbers, strides as they are; bfloat16 and its like by their bytes."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(np.require(array, requirements="W"))
    raw = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
    return raw.view(getattr(torch, array.dtype.name)).reshape(array.shape)


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    dtype = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    if dtype.isbuiltin == 1:
        return np.asarray(tensor.detach().cpu().numpy())
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(dtype).reshape(tuple(tensor.shape))
