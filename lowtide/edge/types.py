"""The dtype and shape of each tensor of an ONNX model: by onnx's own inference, by what the file declares, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from lowtide.base.messages import need
from lowtide.edge.graph import BITS, numpy_dtype
from lowtide.edge.operators import SAME_SHAPE_AS
from lowtide.errors import FormatError

onnx = need("onnx", "reading an ONNX model", "edge")

MICROSOFT = "com.microsoft"  # onnxruntime's domain
_MOST_KNOWN = 4096  # entries of a constant that shapes are made of: more of them are weights


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's dtype and shape; None for what is unknown."""

    dtype: str | None
    shape: tuple[int | None, ...] | None

    @property
    def is_known(self) -> bool:
        return self.dtype is not None and self.shape is not None and None not in self.shape

    def __str__(self) -> str:
        extents = "of unknown rank" if self.shape is None else f"[{', '.join('?' if each is None else str(each) for each in self.shape)}]"
        return f"{self.dtype or 'unknown dtype'} {extents}"


@dataclass(frozen=True)
class FixedSizes:
    """What the symbols of a model stand for: extents by the name that the file has, or by "input:axis" where it has none."""

    given: Mapping[str, int]
    symbols: tuple[str, ...]  # that the inputs have

    @classmethod
    def of(cls, inputs: Sequence[Any], given: Mapping[str, int]) -> FixedSizes:
        """Raises FormatError for a name that no input has, or a size that is no number from 1."""
        symbols = tuple(dict.fromkeys(symbol for one in inputs for axis, symbol in _symbols(one)))
        for name, size in given.items():
            if name not in symbols:
                raise FormatError(f"sizes: expected names among {_listed(symbols)}, got {name!r}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise FormatError(f"sizes: expected a whole number from 1 for {name!r}, got {size!r}")
        return cls(given, symbols)

    def declared(self, value: Any) -> TensorType:
        """What a ValueInfoProto says of its tensor. Raises FormatError where it is none."""
        if not value.type.HasField("tensor_type"):
            kind = value.type.WhichOneof("value") or "nothing"
            raise FormatError(f"`{value.name}`: expected a tensor, got {kind}; sequences, optionals and sparse tensors are not read")
        tensor = value.type.tensor_type
        shape = tuple(self._extent(value.name, axis, dim) for axis, dim in enumerate(tensor.shape.dim))
        return TensorType(dtype_name(tensor.elem_type, value.name), shape if tensor.HasField("shape") else None)

    def _extent(self, name: str, axis: int, dim: Any) -> int | None:
        if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
            return int(dim.dim_value)
        return self.given.get(_symbol(name, axis, dim))

    def of_input(self, value: Any) -> TensorType:
        """The same of an input, where all has to be known. Raises FormatError, which says which names there are."""
        declared = self.declared(value)
        if declared.dtype is None or declared.shape is None:
            raise FormatError(f"input `{value.name}`: expected a dtype and a shape, got {declared}")
        for axis, symbol in _symbols(value):
            if symbol not in self.given:
                raise FormatError(
                    f"input `{value.name}`: axis {axis} is `{symbol}`, of no fixed size: pass sizes={{{symbol!r}: 1}}"
                    f" or what it shall be; this file has the sizes {_listed(self.symbols)}"
                )
        return declared


def _symbols(value: Any) -> list[tuple[int, str]]:
    dims = value.type.tensor_type.shape.dim
    return [
        (axis, _symbol(value.name, axis, dim))
        for axis, dim in enumerate(dims)
        if dim.WhichOneof("value") != "dim_value" or dim.dim_value < 0
    ]


def _symbol(name: str, axis: int, dim: Any) -> str:
    return dim.dim_param or f"{name}:{axis}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none at all"


def dtype_name(element: int, tensor: str) -> str | None:
    """NumPy's name of onnx's number for a dtype; None for 0. Raises FormatError for strings and what is newer than the onnx at hand."""
    if not element:
        return None
    try:
        name = str(onnx.helper.tensor_dtype_to_np_dtype(element).name)
    except KeyError:
        name = str(element)
    if name not in BITS:
        raise FormatError(f"`{tensor}`: expected numbers, got onnx's dtype {element} ({name}), which has no size in bytes")
    return name


def inferred(model: Any, node: Any, types: Mapping[str, TensorType], constants: Mapping[str, NDArray[Any]]) -> dict[str, TensorType]:
    """What onnx says of a node's outputs; nothing for operators that it does not know. Raises FormatError where inputs are wrong."""
    known = SAME_SHAPE_AS.get(node.op_type) if node.domain == MICROSOFT else None
    if known is not None:
        return _inferred_as(model, node, types, *known)
    version = next((each.version for each in model.opset_import if (each.domain or "ai.onnx") == (node.domain or "ai.onnx")), 0)
    if not version or not onnx.defs.has(node.op_type, version, node.domain):
        return {}
    counts_padding = any(each.name == "ceil_mode" and each.i for each in node.attribute)  # in inference until 22, at no version when run
    schema = onnx.defs.get_schema(node.op_type, max(version, 22) if counts_padding else version, node.domain)
    protos = {name: _proto(types[name]) for name in node.input if name}
    read = ((name, constants[name]) for name in node.input if name in constants)
    small = {name: onnx.numpy_helper.from_array(array, name) for name, array in read if array.size <= _MOST_KNOWN}
    try:
        answer = onnx.shape_inference.infer_node_outputs(schema, node, protos, small, None, list(model.opset_import), model.ir_version)
    except Exception as error:  # of classes that onnx's C++ makes up
        raise FormatError(f"onnx refuses its inputs: {' '.join(str(error).split())}") from error
    return {name: _type(name, proto) for name, proto in answer.items() if name}


def _inferred_as(model: Any, node: Any, types: Mapping[str, TensorType], kind: str, shaping: slice, dtype_of: int) -> dict[str, TensorType]:
    """As another operator on some of the inputs; channels that lie last are not what that one knows."""
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    source = node.input[dtype_of] if dtype_of < len(node.input) else ""
    if attributes.pop("channels_last", 0) or not source:
        return {}
    names = onnx.defs.get_schema(kind).attributes
    other = onnx.helper.make_node(
        kind,
        [name for name in node.input[shaping] if name],
        [node.output[0]],
        **{name: value for name, value in attributes.items() if name in names},
    )
    floats = {name: TensorType("float32", types[name].shape) for name in other.input}  # as which every operator takes them
    shape = inferred(model, other, floats, {})[node.output[0]].shape
    return {node.output[0]: TensorType(types[source].dtype, shape)}


def _proto(known: TensorType) -> Any:
    return onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(known.dtype or "")), known.shape)


def _type(name: str, proto: Any) -> TensorType:
    if not proto.HasField("tensor_type"):
        return TensorType(None, None)
    tensor = proto.tensor_type
    shape = tuple(dim.dim_value if dim.WhichOneof("value") == "dim_value" else None for dim in tensor.shape.dim)
    return TensorType(dtype_name(tensor.elem_type, name), shape if tensor.HasField("shape") else None)


def merged(name: str, by_inference: TensorType | None, declared: TensorType | None) -> TensorType:
    """What both say together. Raises FormatError where they differ, or where something is left unknown."""
    says = [each for each in (by_inference, declared) if each is not None]
    dtypes = {each.dtype for each in says if each.dtype is not None}
    shapes = [each.shape for each in says if each.shape is not None]
    together: list[int | None] = list(shapes[0]) if shapes else []
    differ = len(dtypes) > 1 or len({len(shape) for shape in shapes}) > 1
    for shape in shapes[1:] if not differ else []:
        differ = differ or any(a is not None and b is not None and a != b for a, b in zip(together, shape, strict=True))
        together = [b if a is None else a for a, b in zip(together, shape, strict=True)]
    if differ:
        raise FormatError(f"output `{name}`: the file declares {declared}, its operator gives {by_inference}: correct value_info")
    result = TensorType(next(iter(dtypes), None), tuple(together) if shapes else None)
    if not result.is_known:
        raise FormatError(
            f"output `{name}`: expected a dtype and a shape, known is {result}: declare it in the file's value_info, as"
            " onnx's inference does not know this operator or its sizes depend on data"
        )
    return result


def entries(known: TensorType) -> int:
    """How many numbers a tensor has, of a type that is known."""
    return math.prod(extent or 0 for extent in known.shape or ())
