"""Whether a graph that came from a file may be run: the graph is data, and what runs is generated from it.

takes   a graph that a text said, and the order of its nodes
leaves  nothing: a FormatError where it breaks a rule

1. It is a right graph, in a right order, of numbers and tensors on a CPU, that writes nothing.
2. Torch runs operators of which it is known that they only compute (`ir.operators`), kernels are generated for what they are known for, and
   by shapes that follow from what the region is given (`cpu.checks`).
3. What a region takes for constant are stored tensors.

What torch makes between regions is compared with the graph when the function is loaded (`lower.interpreter`).

Which operators of torch a graph that came from a file may call: those of which it is known that they only compute. Arguments are looked at
by torch itself. What torch takes on trust, as some operators that only torch calls do, is looked at here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod

import sympy
import torch

from lowtide.cost.operators import argument, of_torch, operator
from lowtide.cpu.checks import check_region, is_constant, shapes_of
from lowtide.cpu.expressions import name_of
from lowtide.cpu.regions import ATTENTION, NORMS, following
from lowtide.errors import CheckError, FormatError, of_kind
from lowtide.ir.bodies import Region, is_by_inductor, is_region
from lowtide.ir.check.graph_check import check_graph, check_order
from lowtide.ir.graph import Arg, Atom, Graph, Node, Value
from lowtide.ir.operators.nodes import check_operators, is_view
from lowtide.ir.result_specs import pieces_of, same_strides
from lowtide.ir.sizes import ITEM_BYTES

# Beside torch's core and what is element by element: names that stand for several of these, and what only torch calls but looks at itself.
_ALSO = frozenset({
    "t", "detach", "unbind", "split", "split_with_sizes", "reshape", "contiguous", "stack", "roll", "tril", "triu", "square", "matmul",
    "linear", "baddbmm", "ones_like", "zeros_like", "new_full", "new_zeros", "new_ones", "zeros", "ones", "eye", "linspace", "masked_fill",
    "lift_fresh_copy", "lift_fresh", "unfold", "pixel_shuffle", "channel_shuffle", "bucketize", "logsumexp", "std", "std_mean", "var_mean",
    "aminmax", "glu", "movedim", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "expand_as", "view_as", "type_as",
    "flip", "arange", "hardswish", "index", "native_group_norm", "linalg_vector_norm", "as_strided_scatter", "unsafe_split", "chunk",
    "_unsafe_view", "_reshape_alias", "_to_copy", "_softmax", "_safe_softmax", "_log_softmax", "_adaptive_avg_pool2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", *NORMS, ATTENTION,
})  # fmt: skip
_NOT = ("empty", "new_empty", "sym_", "equal")  # what is no tensor, or holds what lay in memory before
_TRUSTING = (*NORMS, ATTENTION, "native_group_norm")
_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def check_call(node: Node) -> None:
    """Whether a node may be run by torch. Raises FormatError that names its operator.

    What is said of its arguments must be true: who runs it looks at them.
    """
    _check_operator(node)
    for arg in _each((*node.args, *(arg for _, arg in node.kwargs))):
        _check_argument(arg, node.op)
    if name_of(node) in _TRUSTING:
        _check_shape(node)


def _check_operator(node: Node) -> None:
    library, base, *_ = node.op.split(".")
    overload = operator(node.op)
    plain = isinstance(overload, type(torch.ops.aten.add.Tensor)) and library == "aten" and not overload._schema.is_mutable
    tags = {*overload.tags} if plain else set()
    varies = torch.Tag.dynamic_output_shape in tags and not (base == "index" and _selects_places(node))
    if not plain or varies or not _is_known(base, tags):
        raise FormatError(f"{node.op}: expected an operator that only computes, with results of one shape, got one of another kind")


def _is_known(base: str, tags: set[torch.Tag]) -> bool:
    if base.startswith(_NOT) or base.endswith("_backward"):
        return False
    return base in _ALSO or (not base.startswith("_") and bool({torch.Tag.core, torch.Tag.pointwise} & tags))


def _selects_places(node: Node) -> bool:
    """Whether a lookup is by numbers of places, not by which of them are true."""
    return all(value.dtype not in ("bool", "uint8") for value in {*node.inputs} - {node.args[0]})


def _each(args: tuple[Arg, ...]) -> Iterator[Arg]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from _each(arg)
        else:
            yield arg


def _check_argument(arg: Arg, op: str) -> None:
    if isinstance(arg, sympy.Expr):
        raise FormatError(f"{op}: expected sizes that are numbers, got {arg}")
    if not isinstance(arg, Atom):
        return
    right = arg.name == "cpu" if arg.kind == "device" else isinstance(of_torch(arg.name), _KINDS.get(arg.kind, ()))
    if not right or arg.name in ("sparse_coo", "sparse_csr"):
        raise FormatError(f"{op}: expected a CPU, a dtype, a layout or a memory format, got {arg.kind} {arg.name!r}")


def _check_shape(node: Node) -> None:
    """Of operators whose arguments torch looks at before, where they are called from above."""
    try:
        _check_groups(node) if name_of(node) == "native_group_norm" else shapes_of(node)
    except (ValueError, TypeError, IndexError, CheckError) as error:
        raise FormatError(f"{node.op}: expected arguments as torch takes them, got others ({error})") from error


def _check_groups(node: Node) -> None:
    a, gamma, beta, *sizes, groups, _ = node.args
    a = of_kind(Value, a)
    n, channels, *rest = a.shape
    vectors = [each.shape for each in (gamma, beta) if isinstance(each, Value)]
    right = sizes == [n, channels, prod(int(size) for size in rest)] and isinstance(groups, int) and groups > 0 == int(channels) % groups
    if not right or any(each != (channels,) for each in vectors):
        raise FormatError(f"{node.op}: expected norms of groups of an image's channels")


def check_view(node: Node) -> None:
    """Whether what a view's node gives lies as torch says, without any memory. Raises FormatError."""
    known: dict[Value, torch.Tensor] = {value: _without_memory(value) for value in node.inputs}
    called = operator(node.op)
    try:
        view = called(*(argument(arg, known) for arg in node.args), **{key: argument(arg, known) for key, arg in node.kwargs})
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise FormatError(f"{node.op}: expected arguments as torch takes them: {error}") from error
    for value, result in zip(node.outputs, pieces_of(view), strict=False):
        if value is None:
            continue
        lies = result.storage_offset() == value.offset and same_strides(tuple(result.shape), result.stride(), value.stride)
        if tuple(result.shape) != value.shape or not lies:
            there = f"shape {tuple(result.shape)}, strides {result.stride()}, offset {result.storage_offset()}"
            raise FormatError(f"{node.op}: expected {there}, got {value.name} of {value.shape}, {value.stride}, {value.offset}")


def _without_memory(value: Value) -> torch.Tensor:
    whole = torch.empty(value.storage.nbytes // ITEM_BYTES[value.dtype], dtype=of_torch(value.dtype), device="meta")
    return whole.as_strided(value.shape, value.stride, value.offset)


def check_value(value: Value) -> None:
    """Whether a tensor of such a look can be. Raises FormatError."""
    sizes = (*value.shape, *value.stride, value.offset, value.storage.nbytes)
    if value.dtype == "scalar" or value.storage.device != "cpu" or not all(type(size) is int for size in sizes):
        raise FormatError(f"{value.name}: expected a tensor on a CPU with sizes that are numbers")


def check(graph: Graph, order: Sequence[int], stored: Collection[Value]) -> None:
    """Raises FormatError. `stored` are the inputs whose tensors the file has."""
    check_operators(graph)
    try:
        check_graph(graph)
        check_order(graph, order)
        regions = [Region.of(node) for node in graph.nodes if is_region(node)]
    except CheckError as error:
        raise FormatError(f"expected a right graph: {error}") from error
    if graph.dimensions or any(not value.storage.kind.caller_owned for value in graph.inputs):
        raise FormatError("expected a graph of tensors of one shape each that the caller gives or the file has")
    for node in graph.nodes:
        _check_node(node, stored)
    for region in regions:
        _check_constants(region)


def _check_node(node: Node, stored: Collection[Value]) -> None:
    if node.writes:
        raise FormatError(f"{node.op}: expected a node that writes nothing")
    for value in (*node.inputs, *node.results):
        check_value(value)
    if not is_region(node):
        if node.body is not None:
            raise FormatError(f"{node.op}: expected a node without a body")
        check_call(node)
        return
    region = Region.of(node)
    if is_by_inductor(node) or any(node.args[at] not in stored for at in region.fixed):
        raise FormatError(f"{region.name}: expected a region of generated kernels, whose constants are stored tensors")
    for inner in region.body.nodes:
        for value in (*inner.inputs, *inner.results):
            check_value(value)
    check_region(region)
    for inner in region.body.nodes:
        if is_view(inner):
            check_view(inner)


def _check_constants(region: Region) -> None:
    """What prepares constants is run by torch, too."""
    fixed = following(region.body, region.constants)
    for node in region.body.nodes:
        if is_constant(node, fixed):
            check_call(node)
