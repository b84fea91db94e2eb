"""Rules after which a step holds less and computes the same bits.

**Dropout's masks as bits.** On a CPU dropout draws ones and zeros, divides them by the share that is kept, and multiplies by what comes
out, once in the forward pass and once in the backward pass: a float for each element is held in between. One bit says as much. What it is
multiplied by is found again by the same division.

**Rectifiers before max-pooling.** The gradient of a rectifier lets through where its result was above 0. Where that went into max-
pooling, the backward pass spreads gradients over the greatest elements of windows alone, and those are what max-pooling gave. So
gradients are let through or not before they are spread, by the result of the pooling, which is smaller and mostly held for the operator
after it anyway. Where windows overlap, an element gets the sum of what was let through for each, which is all or none.

**Max-pooling's indices.** The pooling's gradient knows elements by int64 indices, and is given the pooling's input for its shape alone.
The place in the window is enough, and needs a byte or two.

**The gradient of a cross entropy's scores**, in one go, where their logarithms of probabilities lay.

    back = nll_loss_backward(g, logs, labels, ..)           grad = cross_entropy_backward(g, logs, labels, ..)
    grad = _log_softmax_backward_data(back, logs, 1)

`back`, as large as the scores, is never whole, and `grad` may take the memory of `logs`.

**Labels and indices in fewer bytes.** torch holds them as int64. What they can be is known from the operator that makes them (the place
of a greatest element is less than the extent that was searched), from a number of fewer bytes that they were converted from, or from an
operator of the forward pass that refuses all others: a lookup refuses indices beyond its table. The smallest type that holds all these
numbers is held in their place.

**Rectifiers' results and masks as bits.** A backward operator asks of them yes or no alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from lowtide.errors import of_kind
from lowtide.ir.graph import Arg, Atom, Kind, Node, Storage, Value, arguments
from lowtide.ir.operators.nodes import CONVERTS, HOLDS, is_view, made_within, refused_beyond
from lowtide.ir.operators.row import Bounds
from lowtide.ir.shapes.polynomial import normal
from lowtide.ir.sizes import ITEM_BYTES
from lowtide.rewrite.base import Match, Uses, bytes_of_bits, count_of, is_backward, is_dense, is_row_by_row, layout, taking


def readers_of_packed(uses: Uses, value: Value) -> list[Node]:
    """The nodes of the backward pass that read a value which the forward pass makes; none where it cannot be held in another form."""
    if not uses.is_forward(value) or not is_dense(value) or value.storage.nbytes != normal(ITEM_BYTES[value.dtype] * count_of(value)):
        return []
    readers = uses.read_by_backward(value.storage)
    seen = {each for node in readers for each in node.inputs if each.storage is value.storage}
    return readers if not any(node.writes for node in readers) and all(_looks(uses, value, each) is not None for each in seen) else []


def held_as(uses: Uses, value: Value, packed: Node | Value, unpacked: Callable[[Value], Node], readers: Sequence[Node]) -> Match:
    """A value that `readers` get from what `packed` makes of it, which is held, or from one that is held anyway.

    `unpacked` gives the node that makes a value like it again, which it is given. What only these looked through is gone.
    """
    instead: dict[Node, tuple[Node, ...]] = dict.fromkeys(_unseen(uses, value, readers), ())
    now: Storage | None = None
    if isinstance(packed, Node):
        maker = uses.makers[value]
        instead[maker], now = (maker, packed), packed.results[0].storage
    for place, node in enumerate(readers):
        again = uses.fresh_like(value, f"{value.name}_again{place}", value.dtype)
        instead[node] = (replace(unpacked(again), source=node.source), *_reading(uses, node, value, again))
    return Match(instead, value.storage, now)


def _reading(uses: Uses, node: Node, value: Value, again: Value) -> Iterator[Node]:
    """A node that reads a value made again, and before it what it looks at that through."""
    swapped: dict[Value, Value] = {}
    for seen in (each for each in node.inputs if each.storage is value.storage):
        before, after = value, again
        for view in _looks(uses, value, seen) or ():
            result = view.results[0]
            new = replace(result, name=uses.name(f"{result.name}_again"), storage=again.storage)
            yield replace(_with(view, {before: after}), outputs=(new,), after=())
            before, after = result, new
        swapped[seen] = after
    yield _with(node, swapped)


def _looks(uses: Uses, value: Value, seen: Value) -> list[Node] | None:
    """The views that lead from a value to another one on its storage; None where they do not begin there."""
    nodes: list[Node] = []
    while seen is not value:
        node = uses.makers.get(seen)
        if node is None or not is_view(node) or len(node.inputs) != 1 or len(node.outputs) != 1:
            return None
        nodes.insert(0, node)
        seen = node.inputs[0]
    return nodes


def _unseen(uses: Uses, value: Value, readers: Collection[Node]) -> list[Node]:
    """The views that nothing but these and one another reads."""
    gone = set(readers)
    for view in reversed(uses.views[value.storage]):
        if all(user in gone for result in view.results for user in uses.users[result]):
            gone.add(view)
    return [view for view in uses.views[value.storage] if view in gone]


def _with(node: Node, swapped: dict[Value, Value]) -> Node:
    """A node that reads other values in the place of some."""
    inplace = tuple((swapped.get(value, value), form) for value, form in node.inplace)
    return replace(node, **arguments(node, lambda value: swapped.get(value, value)), inplace=inplace)


_THRESHOLD = "aten.threshold_backward.default"


def rectified_as_bits(uses: Uses) -> Iterator[Match]:
    """threshold_backward(g, y, 0) -> masked(g, pack_positive(y)), where the backward pass reads y for nothing else."""
    for node in uses.nodes_of(_THRESHOLD):
        gradient, y, result = node.args[0], node.args[1], node.outputs[0]
        if node.args[2] != 0 or not isinstance(y, Value) or not isinstance(gradient, Value) or result is None:
            continue
        if uses.read_by_backward(y.storage) != [node] or not uses.is_forward(y) or not is_dense(y):
            continue
        if layout(gradient) != layout(y) or layout(result) != layout(y):
            continue
        bits = _bits(uses, y)
        packed = Node("lowtide.pack_positive.default", (y,), (bits,), source=uses.makers[y].source)
        late = taking(node, "lowtide.masked.default", (gradient, bits), {gradient: "lowtide.masked.out"})
        yield Match({uses.makers[y]: (uses.makers[y], packed), node: (late,)}, y.storage, bits.storage)


def masks_as_bits(uses: Uses) -> Iterator[Match]:
    """f(g, mask) in the backward pass -> f(g, unpack_bits(pack_bits(mask)))."""
    for mask in [value for value in uses.makers if value.dtype == "bool"]:
        if readers := readers_of_packed(uses, mask):
            bits = _bits(uses, mask)
            packed = Node("lowtide.pack_bits.default", (mask,), (bits,), source=uses.makers[mask].source)
            yield held_as(uses, mask, packed, partial(_unpacked, bits, mask), readers)


def _unpacked(bits: Value, mask: Value, again: Value) -> Node:
    return Node("lowtide.unpack_bits.default", (bits, mask.shape, mask.stride), (again,))


def _bits(uses: Uses, value: Value) -> Value:
    return uses.fresh(value, f"{value.name}_bits", "uint8", (bytes_of_bits(value),))


_INTO = ("uint8", "int8", "int16", "int32")


def indices_in_fewer_bytes(uses: Uses) -> Iterator[Match]:
    """f(g, i) in the backward pass -> f(g, to_int64(to_uint8(i))), where every number of i is one of uint8; so of other types."""
    for value in [each for each in uses.makers if each.dtype == "int64"]:
        readers = readers_of_packed(uses, value)
        match = _index_place(uses, value, readers) if readers else None
        if match is not None:
            yield match


def _index_place(uses: Uses, value: Value, readers: list[Node]) -> Match | None:
    maker = uses.makers[value]
    if maker.op == CONVERTS and (given := _batch(uses, maker)) is not None:
        return held_as(uses, value, given, lambda again: replace(maker, outputs=(again,), after=()), readers)
    bounds = _bounds(uses, value)
    if bounds is None or (dtype := _smallest(bounds)) is None:
        return None
    small = uses.fresh_like(value, f"{value.name}_{dtype}", dtype)
    return held_as(uses, value, _converted(value, small), lambda again: _converted(small, again), readers)


def _batch(uses: Uses, maker: Node) -> Value | None:
    """What a node converts, if it is of the batch, smaller, and nothing writes it."""
    given = maker.args[0]
    if not isinstance(given, Value) or given.storage.kind is not Kind.INPUT or ITEM_BYTES[given.dtype] >= ITEM_BYTES["int64"]:
        return None
    return None if any(before.storage is given.storage for node in uses.graph.nodes for before, _ in node.writes) else given


def _converted(given: Value, result: Value) -> Node:
    return Node(CONVERTS, (given,), (result,), (("dtype", Atom("dtype", result.dtype)),))


def _smallest(bounds: Bounds) -> str | None:
    return next((dtype for dtype in _INTO if HOLDS[dtype][0] <= bounds[0] and bounds[1] <= HOLDS[dtype][1]), None)


def _bounds(uses: Uses, value: Value) -> Bounds | None:
    """Between what every number of a value lies, by the narrowest that is known; None where nothing is."""
    early = [node for node in uses.readers[value.storage] if not is_backward(node)]
    bounds = [made_within(uses.makers[value], value), *(refused_beyond(node, value) for node in early)]
    return min((each for each in bounds if each is not None), key=lambda each: each[1] - each[0], default=None)


_OWN_SCORES = "lowtide.cross_entropy_backward"


def gradients_of_scores(uses: Uses) -> Iterator[Match]:
    """Of losses over rows of scores, [rows, classes]."""
    for node in uses.nodes_of("aten._log_softmax_backward_data.default"):
        back, logs, dim, _ = node.args
        first, result = uses.maker(back, "aten.nll_loss_backward.default"), node.outputs[0]
        if first is None or result is None or not isinstance(back, Value) or not isinstance(logs, Value):
            continue
        alone = uses.users[back] == [node] and back.storage not in uses.kept and first.args[1] is logs
        rows = len(logs.shape) == 2 and dim in (1, -1) and all(is_row_by_row(each) for each in (logs, result))
        if alone and rows and layout(logs) == layout(result) == layout(back) and not uses.written_between(first, node):
            inplace = ((logs, f"{_OWN_SCORES}_.default"),) if logs in uses.makers and logs.storage not in uses.kept else ()
            at_once = Node(f"{_OWN_SCORES}.default", first.args, (result,), after=_after(first, node), inplace=inplace, source=node.source)
            yield Match({first: (), node: (at_once,)}, back.storage)


def _after(first: Node, node: Node) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(other for other in (*first.after, *node.after) if other is not first))


_POOL, _BACKWARD = "aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default"
_OWN = "lowtide.max_pool2d_backward.default"


def threshold_before_pooling(uses: Uses) -> Iterator[Match]:
    """threshold_backward(pool_backward(g, x, i), x, 0) -> pool_backward(threshold_backward(g, pool(x), 0), x, i)."""
    for threshold in uses.nodes_of(_THRESHOLD):
        backward = uses.maker(threshold.args[0], _BACKWARD)
        if backward is None or threshold.args[1] is not backward.args[1]:
            continue
        spread, threshold_result = backward.results[0], threshold.results[0]
        if len(uses.readers[spread.storage]) != 1 or spread in uses.graph.outputs or layout(threshold_result) != layout(spread):
            continue
        pool, gradient, x = uses.maker(backward.args[7], _POOL), backward.args[0], backward.args[1]
        if pool is None or pool.args[0] is not x or _same(pool, backward) is None or not isinstance(gradient, Value):
            continue
        pooled = pool.outputs[0]
        if pooled is None or layout(pooled) != layout(gradient):
            continue
        let_through = uses.fresh(threshold_result, f"{threshold_result.name}_pooled", threshold_result.dtype, pooled.shape)
        if layout(let_through) != layout(gradient):
            continue
        taken = tuple((gradient, form) for value, form in threshold.inplace if value is spread)  # as that of the spread one might have been
        early = replace(threshold, args=(gradient, pooled, *threshold.args[2:]), outputs=(let_through,), inplace=taken)
        late = replace(backward, args=(let_through, *backward.args[1:]), outputs=(threshold_result,))
        shaped = of_kind(Value, x).storage  # it is read for its shape, still
        yield Match({backward: (), threshold: (early, late)}, shaped, shaped)


def places_in_windows(uses: Uses) -> Iterator[Match]:
    """pool_backward(g, x, i) -> lowtide.max_pool2d_backward(g, pool_places(i)), which needs no x."""
    for backward in uses.nodes_of(_BACKWARD):
        gradient, x, indices = backward.args[0], backward.args[1], backward.args[7]
        pool = uses.maker(indices, _POOL)
        window = None if pool is None or pool.args[0] is not x else _same(pool, backward)
        if window is None or not isinstance(indices, Value) or not isinstance(x, Value) or not isinstance(gradient, Value):
            continue
        if len(uses.readers[indices.storage]) != 1 or not uses.is_forward(indices):
            continue
        if not all(map(is_row_by_row, (gradient, x, indices, backward.results[0]))):
            continue
        if (dtype := _dtype(uses, x, window)) is not None:
            places = uses.fresh(indices, f"{indices.name}_places", dtype, indices.shape)
            args = (indices, x.shape[-2:], window[1], window[2], Atom("dtype", dtype))
            packed = Node("lowtide.pool_places.default", args, (places,), source=backward.source)
            again = replace(backward, op=_OWN, args=(gradient, places, x.shape[-2:], *window), inplace=())
            beside = (x.storage,) if uses.is_forward(x) and uses.read_by_backward(x.storage) == [backward] else ()
            instead = {uses.makers[indices]: (uses.makers[indices], packed), backward: (again,)}
            yield Match(instead, indices.storage, places.storage, beside)


def _dtype(uses: Uses, x: Value, window: tuple[Arg, ...]) -> str | None:
    """The smallest that holds every place in a window; None where none of 4 bytes does."""
    kernel, dilation = of_kind(tuple, window[0]), of_kind(tuple, window[3])
    reach = uses.at_most(dilation[0] * (kernel[0] - 1) * x.shape[-1] + dilation[1] * (kernel[1] - 1))
    return _smallest((0, reach))


def _same(pool: Node, backward: Node) -> tuple[Arg, ...] | None:
    """Window, step, padding, dilation and rounding that both mean, with two numbers each; None where they mean others."""
    defaults: tuple[Arg, ...] = (None, (), 0, 1, False)
    mine = (*pool.args[1:], *defaults[len(pool.args) - 1 :])
    forward, given = _written_out(mine), _written_out(backward.args[2:7])
    return given if forward == given else None


def _written_out(window: tuple[Arg, ...]) -> tuple[Arg, ...]:
    kernel, stride, padding, dilation, ceil_mode = window
    return (_two(kernel), _two(stride or kernel), _two(padding), _two(dilation), bool(ceil_mode))


def _two(number: Arg) -> tuple[Arg, ...]:
    numbers = number if isinstance(number, tuple) else (number,)
    return numbers * 2 if len(numbers) == 1 else numbers


_DRAWN, _TIMES = "aten.bernoulli.p", "aten.mul.Tensor"
_DIVIDED = ("aten.div.Scalar", "aten.div.Tensor")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def dropout_as_bits(uses: Uses) -> Iterator[Match]:
    """mul(x, div(bernoulli(p), keep)) -> masked_mul(x, pack_bits(bernoulli(p)), keep), in both passes."""
    for drawn in uses.nodes_of(_DRAWN):
        divided = _only_reader(uses, drawn.outputs[0])
        if divided is not None and divided.op in _DIVIDED and isinstance(divided.args[1], float):
            yield from _place(uses, drawn, divided)


def _place(uses: Uses, drawn: Node, divided: Node) -> Iterator[Match]:
    flags, mask = drawn.results[0], divided.outputs[0]
    if mask is None or not uses.is_forward(mask) or not is_dense(mask) or mask.dtype not in _FLOATS or layout(mask) != layout(flags):
        return
    readers, keep = uses.readers[mask.storage], divided.args[1]
    if not all(_multiplies(node, mask) for node in readers) or not any(map(is_backward, readers)):
        return
    bits = uses.fresh(flags, f"{mask.name}_bits", "uint8", (bytes_of_bits(mask),))
    packed = Node("lowtide.pack_bits.default", (flags,), (bits,), source=divided.source)
    instead: dict[Node, tuple[Node, ...]] = {divided: (packed,)}
    for node in readers:
        x = of_kind(Value, node.args[0] if node.args[1] is mask else node.args[1])
        instead[node] = (taking(node, "lowtide.masked_mul.default", (x, bits, keep), {x: "lowtide.masked_mul.out"}),)
    yield Match(instead, mask.storage, bits.storage)


def _only_reader(uses: Uses, value: Value | None) -> Node | None:
    readers = uses.readers[value.storage] if value is not None and uses.is_forward(value) else []
    return readers[0] if len(readers) == 1 and value in readers[0].inputs else None


def _multiplies(node: Node, mask: Value) -> bool:
    """Whether a node multiplies something else, of the same layout, by the mask, and nothing more."""
    if node.op != _TIMES or node.kwargs or node.writes or mask not in node.args:
        return False
    x, result = node.args[0] if node.args[1] is mask else node.args[1], node.outputs[0]
    if not isinstance(x, Value) or x.storage is mask.storage or result is None:
        return False
    return layout(x) == layout(mask) == layout(result)
