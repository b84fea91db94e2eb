"""The operators that begin chains: convolutions, products, windows, means and norms of rows, each with the stage that does it.

Heads of what both sides of a product differ from call to call: attention as one kernel, batched products, softmax.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

from lowtide.cpu.expressions import name_of
from lowtide.cpu.layout import Buffer, Layout, fresh, in_rows, stepped
from lowtide.cpu.recipes import Norm, Panels, Plain, Taps, Transformed
from lowtide.cpu.regions import ATTENTION
from lowtide.cpu.stages import (
    Attention,
    Batched,
    Convolution,
    Epilogue,
    Geometry,
    KernelStage,
    Operand,
    Pad,
    Product,
    RowReduction,
    Windows,
    Winograd,
)
from lowtide.cpu.staging import Head, Staging
from lowtide.cpu.tiles import Transform, by_panels, tile_of, transform_of
from lowtide.errors import of_kind, there
from lowtide.ir.graph import Arg, Node, Value


def attention(staging: Staging, node: Node) -> Head:
    """Queries, keys, values [B, H, rows, features]; scores are in no buffer. Keys are copied so that they lie side by side."""
    query, key, value = (staging.place(each) for each in node.args[:3] if isinstance(each, Value))
    options, result = dict(node.kwargs), node.results[0]
    causal = options.get("is_causal", node.args[4] if len(node.args) > 4 else False)
    scale, mask = options.get("scale"), options.get("attn_mask")
    keys = staging.copied(key.permuted((0, 1, 3, 2)), in_rows(f"{result.name}_keys", [key.shape[dim] for dim in (0, 1, 3, 2)]))
    values = _side_by_side(staging, value, f"{result.name}_values")
    b, h, q, _ = query.shape
    seen = _mask(staging, mask, (b, h, q, key.shape[2])) if isinstance(mask, Value) else None
    factor = float(scale) if isinstance(scale, (int, float)) else query.shape[3] ** -0.5

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        return Attention(query, keys, values, seen, causal is True, factor, out, nodes)

    return Head(node, result, _heads_together(result.name, (b, h, q, value.shape[3])), make, alone=True)


def _heads_together(name: str, shape: tuple[int, ...]) -> Layout:
    """Where results go: rows of all heads' features, as what reads them usually wants."""
    b, h, q, v = shape
    whole = there(fresh(name, (b * q, h * v)).viewed((b, q, h, v)))
    return whole.permuted((0, 2, 1, 3))


def _mask(staging: Staging, mask: Value, shape: tuple[int, ...]) -> Layout:
    """What is added to scores, by keys side by side, or one number for all keys."""
    whole = there(staging.place(mask).broadcast(shape))
    if whole.shape[3] == 1 or whole.stride[3] in (0, 1):
        return whole
    return staging.copied(whole, in_rows(f"{mask.name}_rows", shape))


def _side_by_side(staging: Staging, layout: Layout, name: str) -> Layout:
    """A matrix, or several, whose columns lie side by side in the arena, where reading behind a row does no harm."""
    lies_so = layout.buffer.is_own and (layout.stride[-1] == 1 or layout.shape[-1] == 1)
    return layout if lies_so else staging.copied(layout, in_rows(name, layout.shape))


def batched(staging: Staging, node: Node) -> Head:
    """Products [B, M, K] by [B, K, N]."""
    a, other = (staging.place(each) for each in node.args[:2] if isinstance(each, Value))
    result = node.results[0]
    columns = _side_by_side(staging, other, f"{result.name}_columns")
    layout = in_rows(result.name, (a.shape[0], a.shape[1], other.shape[2]))

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        return Batched(a, columns, out, epilogue, nodes)

    return Head(node, result, layout, make)


def softmax(staging: Staging, node: Node) -> Head:
    result, given = node.results[0], node.args[0]
    given = of_kind(Value, given)
    read = staging.in_rows(given)
    kind = "safe" if "_safe_" in node.op else "softmax"

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        return RowReduction(kind, read, 1, prod(read.shape[:-1]), out, epilogue, nodes=nodes)

    return Head(node, result, in_rows(result.name, read.shape), make)


_FEW = 4  # input channels up to which an image is padded plane by plane


def head_of(staging: Staging, node: Node) -> Head | None:
    """The head that a node is; None for what is element-wise."""
    maker = {
        "convolution": _convolution, "addmm": _product, "mm": _product, "mean": _mean, "native_layer_norm": _layer_norm,
        "max_pool2d_with_indices": _pool, "avg_pool2d": _pool, "_adaptive_avg_pool2d": _mean,
        "bmm": batched, "_softmax": softmax, "_safe_softmax": softmax, ATTENTION: attention,
    }.get(name_of(node))  # fmt: skip
    return None if maker is None else maker(staging, node)


def _result(node: Node) -> tuple[Value, Layout]:
    result = there(node.outputs[0])
    return result, fresh(result.name, [int(size) for size in result.shape])


def _pair(arg: Arg) -> tuple[int, int]:
    if isinstance(arg, int):
        return arg, arg
    arg = of_kind(tuple, arg)
    ints = [each for each in arg if isinstance(each, int)]
    return (ints[0], ints[-1]) if ints else (1, 1)


def _value(arg: Arg) -> Value | None:
    return arg if isinstance(arg, Value) else None


def _image(staging: Staging, value: Value) -> Layout:
    """An image as kernels read it: channels side by side, pixels in one run of rows, in the arena."""
    layout = staging.layouts[value]
    step = layout.stride[3] if layout.shape[3] != 1 else stepped(layout.shape[1])
    dense = (
        layout.rows() is not None and layout.channel == 1 and layout.buffer.is_own and step >= layout.shape[1] and _is_lined(layout, step)
    )
    return layout if dense else staging.copied(layout, fresh(f"{value.name}_copied", layout.shape))


def _is_lined(layout: Layout, step: int) -> bool:
    n, _, h, w = layout.shape
    return (h == 1 or layout.stride[2] == w * step) and (n == 1 or layout.stride[0] == h * w * step)


def _convolution(staging: Staging, node: Node) -> Head:
    a, weight, bias, stride, padding, dilation, _, _, groups = node.args
    a = of_kind(Value, a)
    weight = of_kind(Value, weight)
    groups = of_kind(int, groups)
    columns, inner, kh, kw = (int(size) for size in weight.shape)
    geometry = Geometry((kh, kw), _pair(stride), _pair(padding), _pair(dilation))
    result, layout = _result(node)
    if groups == columns == a.shape[1] and inner == 1:
        return _depthwise(staging, node, geometry)
    if groups == 1 and geometry == Geometry((3, 3), (1, 1), geometry.padding, (1, 1)):
        transform = transform_of(layout.shape[0], (layout.shape[2], layout.shape[3]), inner, columns, staging.target)
        if transform is not None:
            return _transformed(staging, node, transform, geometry.padding)
    plain = geometry == Geometry((1, 1), (1, 1), (0, 0), geometry.dilation) and groups == 1
    image = None if plain else _padded(staging, a, geometry.padding)

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        rows = prod(out.shape) // columns
        panels_shared = plain and by_panels(rows, inner, columns, staging.target)
        tile = tile_of(rows if plain else out.shape[3], columns // groups, staging.target, panels_shared, once=plain)
        panels = Panels(weight, _value(bias), norm, groups, columns // groups, kh * kw * inner, tile.vectors, staging.target)
        staging.pack(panels)
        if image is None:
            return Product(_image(staging, a), rows, inner, panels, out, epilogue, nodes)
        return Convolution(image, geometry, panels, out, epilogue, nodes)

    return Head(node, result, layout, make, folds=True)


def _transformed(staging: Staging, node: Node, transform: Transform, padding: tuple[int, int]) -> Head:
    a, weight, bias = of_kind(Value, node.args[0]), of_kind(Value, node.args[1]), node.args[2]
    result, layout = _result(node)
    image = _image(staging, a)

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        columns, inner = int(weight.shape[0]), int(weight.shape[1])
        packed = Transformed(weight, _value(bias), norm, columns, inner, transform.side, transform.tile.vectors, staging.target)
        staging.pack(packed)
        return Winograd(image, padding, packed, transform.block, transform.by_panels, out, epilogue, nodes)

    return Head(node, result, layout, make, folds=True)


def _padded(staging: Staging, value: Value, padding: tuple[int, int]) -> Layout:
    """An image with zeros around it; one of few channels plane by plane."""
    layout = staging.layouts[value]
    n, c, h, w = layout.shape
    if padding == (0, 0):
        return _image(staging, value)
    shape = (n, c, h + 2 * padding[0], w + 2 * padding[1])
    out = fresh(f"{value.name}_padded", shape)
    if c <= _FEW:
        stride = (c * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        out = Layout(Buffer(f"{value.name}_padded", prod(shape)), shape, stride)
    staging.stages.append(Pad(layout, padding, out))
    return out


def _depthwise(staging: Staging, node: Node, geometry: Geometry) -> Head:
    a, weight, bias = of_kind(Value, node.args[0]), of_kind(Value, node.args[1]), node.args[2]
    result, layout = _result(node)
    image = _image(staging, a)

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        taps = Taps(weight, _value(bias), norm, out.shape[1], prod(geometry.kernel), staging.target)
        staging.pack(taps)
        return Windows("Weighted", image, geometry, taps, out, epilogue, nodes)

    return Head(node, result, layout, make, folds=True)


def _pool(staging: Staging, node: Node) -> Head:
    args = [*node.args, *[None] * 7][:7]
    a, kernel, stride, padding = args[:4]
    a = of_kind(Value, a)
    size = _pair(kernel)
    largest = name_of(node) == "max_pool2d_with_indices"
    dilation = _pair(args[4]) if largest and args[4] is not None else (1, 1)
    pads = _pair(padding) if padding not in (None, ()) else (0, 0)
    geometry = Geometry(size, _pair(stride) if stride not in (None, ()) else size, pads, dilation)
    divisor = args[6] if not largest else 0
    counted = len(node.args) < 6 or node.args[5] is not False
    kind = "Largest" if largest else f"Average<{divisor if isinstance(divisor, int) and divisor else prod(size) if counted else 0}>"
    result, layout = _result(node)
    image = _image(staging, a)

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        return Windows(kind, image, geometry, None, out, epilogue, nodes)

    return Head(node, result, layout, make)


def _product(staging: Staging, node: Node) -> Head:
    bias, a, weight = node.args if name_of(node) == "addmm" else (None, *node.args)
    a = of_kind(Value, a)
    weight = of_kind(Value, weight)
    result, layout = _result(node)
    rows, columns = layout.shape
    k = int(weight.shape[0])
    read = (
        staging.layouts[a]
        if staging.layouts[a].rows() is not None
        else staging.copied(staging.layouts[a], fresh(f"{a.name}_rows", (rows, k)))
    )
    if read.channel != 1:  # a column of numbers side by side is one row of channels
        read = staging.copied(read, fresh(f"{a.name}_rows", (rows, k)))

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        tile = tile_of(rows, columns, staging.target, by_panels(rows, k, columns, staging.target), once=True)
        panels = Panels(weight, _value(bias), norm, 1, columns, k, tile.vectors, staging.target)
        staging.pack(panels)
        return Product(read, rows, k, panels, out, epilogue, nodes)

    return Head(node, result, layout, make, folds=False)


def _mean(staging: Staging, node: Node) -> Head:
    a = of_kind(Value, node.args[0])
    result, _ = _result(node)
    image = _as_image(staging.layouts[a], node)
    if image.rows() is None or image.channel != 1 or not _is_lined(image, image.stride[3] if image.shape[3] != 1 else 0):
        image = staging.copied(image, fresh(f"{a.name}_copied", image.shape))
    n, c, h, w = image.shape
    layout = there(fresh(result.name, (n, c)).viewed([int(size) for size in result.shape]))

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        return RowReduction("mean", image, n, h * w, out, epilogue, nodes=nodes)

    return Head(node, result, layout, make)


def _as_image(layout: Layout, node: Node) -> Layout:
    """What a mean is over, as [batch, channels, y, x]."""
    dims = node.args[1] if len(node.args) > 1 else None
    if len(layout.shape) == 3:
        return layout.permuted((0, 2, 1)).with_one(2)
    last = isinstance(dims, tuple) and name_of(node) == "mean" and {dim % 4 for dim in dims if isinstance(dim, int)} == {1, 2}
    return layout.permuted((0, 3, 1, 2)) if last else layout


def _layer_norm(staging: Staging, node: Node) -> Head:
    a, _, gamma, beta, eps = node.args
    a = of_kind(Value, a)
    eps = of_kind(float, eps)
    result, _ = _result(node)
    read = staging.in_rows(a)
    columns, layout = read.shape[-1], in_rows(result.name, read.shape)

    def make(out: Layout, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> KernelStage:
        full = _scaled(staging, epilogue, _value(gamma), _value(beta), columns)
        rows = prod(read.shape[:-1])
        return RowReduction("norm", read, 1, rows, out, full, eps, nodes)

    return Head(node, result, layout, make)


def _scaled(staging: Staging, epilogue: Epilogue, gamma: Value | None, beta: Value | None, columns: int) -> Epilogue:
    """An epilogue that begins with a layer norm's factor and summand."""
    operands, text = list(epilogue.operands), "v"
    for value, sign in ((gamma, "*"), (beta, "+")):
        if value is not None:
            text = f"{text} {sign} o{len(operands)}"
            operands.append(Operand(staging.pack(Plain(value, 1, columns, stepped(columns))), 0, 1))
    renamed = [re.sub(r"\bv\b", "scaled", line) for line in epilogue.lines]
    result = "scaled" if epilogue.result == "v" else epilogue.result
    return replace(epilogue, lines=(f"vec<N> scaled = {text};", *renamed), result=result, operands=tuple(operands))
