"""Is a region's body one that kernels may be made of? Each node that they do is known, and has the results that torch's operator has.

    takes   a region of a graph in normal form, as `ir.check` looks at that
    leaves  nothing: a FormatError that names the operator, what was expected and what came

What follows from constants alone is torch's work, and is computed, not told: `runtime` compares what comes of it.

What shapes operators give, for those that kernels are generated for: told by their arguments alone, as torch's own checks tell it.

Kernels are made by the shapes that a graph names, and look at nothing when they run. Of a graph that was captured these are torch's own.
Of one that came from elsewhere each is found anew here: a shape that an operator does not give is refused before a kernel is made by it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import NoReturn, TypeAlias

from lowtide.cpu.expressions import name_of
from lowtide.cpu.regions import ATTENTION, NORMS, following, is_known, is_plain
from lowtide.errors import CheckError, FormatError, of_kind
from lowtide.ir.bodies import Region
from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.result_specs import is_gapless

TensorShape: TypeAlias = tuple[int, ...]

_MOST_ELEMENTS = 2**31  # of a tensor; no index of a kernel comes near what its type holds
_MOST_PLACES = 1024  # of a window along a dimension, whose weights lie on a thread's stack
_KEYWORDS = {"cat": {"dim"}, "clone": {"memory_format"}, "contiguous": {"memory_format"}, "expand": {"implicit"}}


def check_generated(node: Node, fixed: Collection[Value]) -> None:
    """Whether a kernel can be generated for a node, and its results have the shapes that its operator gives.

    Raises FormatError naming the operator, what was expected and what came.
    """
    try:
        known = is_known(node, fixed) and all(is_plain(value) for value in node.inputs)
        expected = shapes_of(node) if known else ()
    except (ValueError, TypeError, IndexError, CheckError) as error:  # arguments of another kind or number
        raise FormatError(f"{node.op}: expected arguments as torch takes them, got others ({error})") from error
    if not known:
        raise FormatError(f"{node.op}: expected an operator that kernels are generated for, got one that they are not, or not so")
    for value, shape in zip(node.outputs, [*expected, *[None] * len(node.outputs)], strict=False):
        if value is not None and value.shape != shape:
            raise FormatError(f"{node.op}: expected a result of shape {shape}, got {value.name} of shape {value.shape}")
        if value is not None and prod(_ints(tuple(value.shape))) >= _MOST_ELEMENTS:
            raise FormatError(f"{node.op}: expected results of less than 2**31 elements, got {value.name} of shape {value.shape}")
        if (
            value is not None
            and not is_gapless(value.shape, value.stride)
            and all(value.storage is not given.storage for given in node.inputs)
        ):
            raise FormatError(f"{node.op}: expected results without gaps, got {value.name} of shape {value.shape}, strides {value.stride}")


def shapes_of(node: Node) -> Sequence[TensorShape]:
    """The shapes of a known operator's results, as far as kernels make them.

    Raises FormatError, ValueError, TypeError, IndexError or CheckError for arguments that torch does not take.
    """
    name = name_of(node)
    if name not in _SHAPES:
        return [_of_elements(node)]
    if name in _NO_KEYWORDS and {key for key, _ in node.kwargs} - _KEYWORDS.get(name, set()):
        _refuse(node, "no such arguments by name")
    return _SHAPES[name](node)


def _refuse(node: Node, expected: str) -> NoReturn:
    got = [(arg.name, *arg.shape) if isinstance(arg, Value) else arg for arg in node.args]
    raise FormatError(f"{node.op}: expected {expected}, got {got}")


def _check(node: Node, right: bool, expected: str) -> None:
    if not right:
        _refuse(node, expected)


def _expect(right: bool, expected: str) -> None:
    if not right:
        raise CheckError(f"expected {expected}")


def _shape(arg: object) -> TensorShape:
    return _ints(of_kind(Value, arg).shape)


def _int(arg: object) -> int:
    return of_kind(int, arg)


def _ints(arg: object) -> TensorShape:
    return tuple(map(_int, of_kind(tuple, arg)))


def _place(dim: object, rank: int) -> int:
    position = _int(dim)
    _expect(-rank <= position < rank, f"a dimension of {rank}")
    return position % rank


def _at(node: Node, position: int, default: Arg) -> Arg:
    arg = node.args[position] if len(node.args) > position else None
    return default if arg is None else arg


def _of_elements(node: Node) -> TensorShape:
    """Element by element: of one tensor, or of two, or of one and a number."""
    one, *rest = node.args
    if name_of(node) not in _TWO:
        _expect(not any(isinstance(arg, Value) for arg in rest), "one tensor")
        return _shape(one)
    both = [arg for arg in node.args[:2] if isinstance(arg, Value)]
    _expect(not any(isinstance(arg, Value) for arg in node.args[2:]), "two tensors")
    return _broadcast(*map(_shape, both))


def _broadcast(*shapes: TensorShape) -> TensorShape:
    rank = max(map(len, shapes))
    wide = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    broadcast = tuple(max(sizes) for sizes in zip(*wide, strict=True))
    _expect(all(size in (1, whole) for shape in wide for size, whole in zip(shape, broadcast, strict=True)), "shapes that broadcast")
    return broadcast


def _same(node: Node) -> list[TensorShape]:
    return [_shape(node.args[0])]


def _view(node: Node) -> list[TensorShape]:
    a, sizes, result = _shape(node.args[0]), _ints(node.args[1]), _shape(node.outputs[0])
    matches = len(sizes) == len(result) and all(size in (-1, its) for size, its in zip(sizes, result, strict=True))
    _check(node, matches and prod(result) == prod(a) and sizes.count(-1) < 2, f"a shape of as many elements, {result}")
    return [result]


def _squeeze(node: Node) -> list[TensorShape]:
    a = _shape(node.args[0])
    wanted = _at(node, 1, tuple(range(len(a))))
    dims = {_place(dim, len(a)) for dim in (wanted if isinstance(wanted, tuple) else (wanted,))}
    return [tuple(size for dim, size in enumerate(a) if size != 1 or dim not in dims)]


def _unsqueeze(node: Node) -> list[TensorShape]:
    a = _shape(node.args[0])
    at = _place(node.args[1], len(a) + 1)
    return [(*a[:at], 1, *a[at:])]


def _permute(node: Node) -> list[TensorShape]:
    a = _shape(node.args[0])
    dims = [_place(dim, len(a)) for dim in _ints(node.args[1])]
    _check(node, sorted(dims) == list(range(len(a))), "each dimension once")
    return [tuple(a[dim] for dim in dims)]


def _transpose(node: Node) -> list[TensorShape]:
    a = list(_shape(node.args[0]))
    one, two = (_place(node.args[at], len(a)) for at in (1, 2))
    a[one], a[two] = a[two], a[one]
    return [tuple(a)]


def _turned(node: Node) -> list[TensorShape]:
    a = _shape(node.args[0])
    _check(node, len(a) <= 2, "a matrix")
    return [a[::-1]]


def _expand(node: Node) -> list[TensorShape]:
    a, sizes = _shape(node.args[0]), _ints(node.args[1])
    own = (1,) * (len(sizes) - len(a)) + a
    shape = tuple(mine if size == -1 else size for size, mine in zip(sizes, own, strict=True))
    _check(node, all(mine in (1, size) and size > 0 for size, mine in zip(shape, own, strict=True)), "a shape to be repeated to")
    return [shape]


def _slice(node: Node) -> list[TensorShape]:
    a = list(_shape(node.args[0]))
    dim, step = _place(_at(node, 1, 0), len(a)), _int(_at(node, 4, 1))
    size = a[dim]
    start, end = (_int(_at(node, at, default)) for at, default in ((2, 0), (3, size)))
    start, end = (min(max(each + size if each < 0 else each, 0), size) for each in (start, end))
    _check(node, step > 0, "a step of 1 or more")
    a[dim] = max(0, -((start - end) // step))
    return [tuple(a)]


def _select(node: Node) -> list[TensorShape]:
    a = _shape(node.args[0])
    dim = _place(node.args[1], len(a))
    _place(node.args[2], a[dim])
    return [(*a[:dim], *a[dim + 1 :])]


def _parts(node: Node) -> list[TensorShape]:
    a, parts = _shape(node.args[0]), node.args[1]
    dim = _place(_at(node, 2, 0), len(a))
    whole = a[dim]
    sizes = _ints(parts) if isinstance(parts, tuple) else [min(_int(parts), whole - at) for at in range(0, whole, _int(parts))]
    _check(node, sum(sizes) == whole and min(sizes) > 0 and len(sizes) == len(node.outputs), "parts of the whole")
    return [(*a[:dim], size, *a[dim + 1 :]) for size in sizes]


def _unbind(node: Node) -> list[TensorShape]:
    a = _shape(node.args[0])
    dim = _place(_at(node, 1, 0), len(a))
    _check(node, a[dim] == len(node.outputs), "a result for each place")
    return [(*a[:dim], *a[dim + 1 :])] * a[dim]


def _cat(node: Node) -> list[TensorShape]:
    parts = of_kind(tuple, node.args[0])
    shapes = [_shape(part) for part in parts]
    dim = _place(_at(node, 1, dict(node.kwargs).get("dim", 0)), len(shapes[0]))
    around = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    _check(node, len(around) == 1 and len({*map(len, shapes)}) == 1, "parts that differ along one dimension")
    return [(*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])]


def _pair(arg: object) -> tuple[int, int]:
    sizes = _ints(arg)
    _expect(len(sizes) in (1, 2), "one number, or two")
    return sizes[0], sizes[-1]


def _convolution(node: Node) -> list[TensorShape]:
    a, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    n, channels, *image = _shape(a)
    columns, inner, *kernel = _shape(weight)
    fits = len(image) == len(kernel) == 2 and transposed is False and _int(groups) > 0 and columns % _int(groups) == 0
    _check(node, fits and channels == inner * _int(groups) and (bias is None or _shape(bias) == (columns,)), "a weight for these channels")
    around = [_pair(stride), _pair(padding), _pair(dilation)]
    _check(node, min(around[0]) > 0 <= min(around[1]) and min(around[2]) > 0, "a window that moves")
    return [(n, columns, *(_windows(each, False) for each in zip(image, kernel, *around, strict=True)))]


def _windows(along: tuple[int, ...], ceil: bool) -> int:
    """Places of a window along a dimension, as torch counts them."""
    size, kernel, stride, pad, dilation = along
    room = size + 2 * pad - dilation * (kernel - 1) - 1
    _expect(room >= 0, "a window within the image")
    _expect(kernel <= _MOST_PLACES, f"a window of up to {_MOST_PLACES} places")
    count = (room + (stride - 1 if ceil else 0)) // stride + 1
    return count - (ceil and (count - 1) * stride >= size + pad)


def _pool(node: Node) -> list[TensorShape]:
    largest = name_of(node) == "max_pool2d_with_indices"
    n, c, *image = _shape(node.args[0])
    kernel = _pair(node.args[1])
    stride = _pair(_at(node, 2, ()) or kernel)
    pad, dilation = _pair(_at(node, 3, ()) or (0, 0)), _pair(_at(node, 4, (1, 1))) if largest else (1, 1)
    ceil, divisor = _at(node, 5 if largest else 4, False), None if largest else _at(node, 6, None)
    _check(node, len(image) == 2 and min(*kernel, *stride, *dilation) > 0 and isinstance(ceil, bool), "a window over images")
    _check(node, all(0 <= 2 * its <= size for its, size in zip(pad, kernel, strict=True)), "padding of half a window at most")
    _check(node, divisor is None or _int(divisor) != 0, "a divisor other than 0")
    around = (image, kernel, stride, pad, dilation)
    return [(n, c, *(_windows(each, ceil is True) for each in zip(*around, strict=True)))]


def _product(node: Node) -> list[TensorShape]:
    bias, a, weight = node.args if name_of(node) == "addmm" else (None, *node.args)
    (rows, k), (inner, columns) = _shape(a), _shape(weight)
    _check(node, k == inner and (bias is None or _shape(bias) == (columns,)), "a weight for these rows")
    return [(rows, columns)]


def _batched(node: Node) -> list[TensorShape]:
    (count, rows, k), (others, inner, columns) = map(_shape, node.args)
    _check(node, count == others and k == inner, "as many matrices that fit")
    return [(count, rows, columns)]


def _mean(node: Node) -> list[TensorShape]:
    a = _shape(node.args[0])
    dims, kept = {_place(dim, len(a)) for dim in _ints(node.args[1])}, _at(node, 2, False)
    _check(node, isinstance(kept, bool) and len(dims) == len(_ints(node.args[1])), "dimensions, each once")
    return [tuple(1 if dim in dims else size for dim, size in enumerate(a) if kept or dim not in dims)]


def _global_pool(node: Node) -> list[TensorShape]:
    n, c, _, _ = _shape(node.args[0])
    _check(node, node.args[1] == (1, 1), "one place")
    return [(n, c, 1, 1)]


def _layer_norm(node: Node) -> list[TensorShape]:
    a, normed, gamma, beta, eps = node.args
    shape = _shape(a)
    vectors = [_shape(each) for each in (gamma, beta) if each is not None]
    _check(node, isinstance(eps, float) and all(each == _ints(normed) == shape[-1:] for each in (_ints(normed), *vectors)), "norms of rows")
    return [shape]


def _norm(node: Node) -> list[TensorShape]:
    shape = _shape(node.args[0])
    vectors = [_shape(each) for each in node.args[1:5] if each is not None]
    _check(node, len(shape) > 1 and all(each == (shape[1],) for each in vectors), "a number for each channel")
    return [shape]


def _softmax(node: Node) -> list[TensorShape]:
    shape = _shape(node.args[0])
    _place(node.args[1], len(shape))
    return [shape]


def _attention(node: Node) -> list[TensorShape]:
    (b, h, queries, d), key, value = (_shape(each) for each in node.args[:3])
    _check(node, key == (b, h, key[2], d) and value == (b, h, key[2], d), "keys and values for these queries")
    mask, scale = (dict(node.kwargs).get(name) for name in ("attn_mask", "scale"))
    whole = (b, h, queries, key[2])
    _check(node, mask is None or _broadcast(_shape(mask), whole) == whole, "a mask for these scores")
    _check(node, scale is None or type(scale) in (int, float), "a scale that is a number")
    return [(b, h, queries, d)]


_TWO = ("add", "sub", "rsub", "mul", "div", "maximum", "minimum")
_SHAPES: dict[str, Callable[[Node], Sequence[TensorShape]]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _view),
    **dict.fromkeys(("alias", "detach", "as_strided", "clone", "contiguous"), _same),
    "permute": _permute, "transpose": _transpose, "t": _turned, "squeeze": _squeeze, "unsqueeze": _unsqueeze, "expand": _expand,
    "slice": _slice, "select": _select, **dict.fromkeys(("split", "unsafe_split", "split_with_sizes"), _parts), "unbind": _unbind,
    "cat": _cat, "convolution": _convolution, "addmm": _product, "mm": _product, "bmm": _batched, "mean": _mean,
    "_adaptive_avg_pool2d": _global_pool,
    "max_pool2d_with_indices": _pool, "avg_pool2d": _pool, "native_layer_norm": _layer_norm, **dict.fromkeys(NORMS, _norm),
    "_softmax": _softmax, "_safe_softmax": _softmax, ATTENTION: _attention,
}  # fmt: skip
_NO_KEYWORDS = set(_SHAPES) - {ATTENTION}  # `is_known` says which that has


def check_region(region: Region) -> None:
    """Raises FormatError for a body that no kernels may be made of."""
    body, constants = region.body, set(region.constants)
    fixed = following(body, constants)
    for value in (*body.inputs, *body.outputs):
        if value not in constants and not _is_plain_block(value):
            raise FormatError(f"{region.name}: expected tensors of float32 on a CPU at the ends of generated kernels, got {value.name}")
    if any(value in fixed for value in body.outputs) or not body.outputs:
        raise FormatError(f"{region.name}: expected results that follow from the batch, got constants")
    for node in body.nodes:
        if node.inplace or node.after or node.writes or node.body is not None:
            raise FormatError(f"{node.op}: expected a node of a region without writes, order or body of its own")
        if not is_constant(node, fixed):
            check_generated(node, fixed)


def is_constant(node: Node, fixed: Collection[Value]) -> bool:
    return all(value in fixed for value in node.inputs)


def _is_plain_block(value: Value) -> bool:
    """A tensor that kernels read, and of which each element lies at a place of its own, or is repeated whole."""
    return is_plain(value) and prod(int(size) for size in value.shape) < _MOST_ELEMENTS and _is_apart(value)


def _is_apart(value: Value) -> bool:
    reach = 1
    for step, size in sorted((int(step), int(size)) for step, size in zip(value.stride, value.shape, strict=True) if size != 1 and step):
        if step < reach:
            return False
        reach += (size - 1) * step
    return reach < _MOST_ELEMENTS
