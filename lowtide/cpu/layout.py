"""Where values lie: strided views of buffers, in elements. Views are arithmetic on strides, and tell where that does not do.

Images [N, C, H, W] lie with channels side by side, matrices [.., C] row by row; the step from pixel to pixel, or from row to row, is the
number of channels rounded up to a vector, so that kernels may store whole vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from lowtide.errors import of_kind, there
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import functional_base

LANES = 16  # of the widest vector that code is generated for: steps are multiples of it
SLACK = 64  # elements behind a buffer that may be read, not used


@dataclass(frozen=True, eq=False, slots=True)
class Buffer:
    """Memory of one value or of several: of the arena, or an argument or result, which is then exactly as long as it says."""

    name: str
    elements: int
    position: int | None = None  # among the arguments and results; None in the arena

    @property
    def is_own(self) -> bool:
        """Whether it lies in the arena, so that reading behind it does no harm."""
        return self.position is None


@dataclass(frozen=True, slots=True)
class Layout:
    """A value's place: shape and strides over a buffer."""

    buffer: Buffer
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def viewed(self, shape: Sequence[int]) -> Layout | None:
        """The same elements in the same order by another shape; None where they do not lie so."""
        old = [(size, step) for size, step in zip(self.shape, self.stride, strict=True) if size != 1]
        if 0 in self.shape or prod(shape) != prod(self.shape):
            return None
        stride: list[int] = []
        for size in reversed(shape):
            if size == 1:
                stride.append(old[-1][1] * old[-1][0] if old else 1)
                continue
            taken = 1
            step = old[-1][1]
            while taken < size:  # merge as many as it takes, then split what is too much
                have, its = old.pop()
                if its != step * taken:
                    return None
                need = size // taken
                if have <= need:
                    if need % have or size % (taken * have):
                        return None
                    taken *= have
                else:
                    if have % need or size % taken:
                        return None
                    old.append((have // need, its * need))
                    taken = size
            stride.append(step)
        return replace(self, shape=tuple(shape), stride=tuple(reversed(stride)))

    def permuted(self, dims: Sequence[int]) -> Layout:
        return replace(self, shape=tuple(self.shape[dim] for dim in dims), stride=tuple(self.stride[dim] for dim in dims))

    def narrowed(self, dim: int, start: int, length: int, step: int = 1) -> Layout:
        shape, stride = list(self.shape), list(self.stride)
        shape[dim], offset = length, self.offset + start * stride[dim]
        stride[dim] *= step
        return replace(self, shape=tuple(shape), stride=tuple(stride), offset=offset)

    def without(self, dim: int, at: int = 0) -> Layout:
        """One place along a dimension, which is gone then."""
        shape, stride = list(self.shape), list(self.stride)
        del shape[dim]
        return replace(self, shape=tuple(shape), stride=(*stride[:dim], *stride[dim + 1 :]), offset=self.offset + at * self.stride[dim])

    def with_one(self, dim: int) -> Layout:
        shape, stride = list(self.shape), list(self.stride)
        shape.insert(dim, 1)
        stride.insert(dim, 0)
        return replace(self, shape=tuple(shape), stride=tuple(stride))

    def broadcast(self, shape: Sequence[int]) -> Layout | None:
        """Repeated along dimensions of extent 1, as torch broadcasts; None where it cannot be."""
        lacking = len(shape) - len(self.shape)
        if lacking < 0:
            return None
        own, steps = (1,) * lacking + self.shape, (0,) * lacking + self.stride
        if any(mine not in (1, wanted) for mine, wanted in zip(own, shape, strict=True)):
            return None
        stride = tuple(0 if mine == 1 else step for mine, step in zip(own, steps, strict=True))
        return replace(self, shape=tuple(shape), stride=stride)

    @property
    def channel(self) -> int:
        """The dimension that lies side by side."""
        usual = channel_of(self.shape) if self.shape else 0
        dims = [dim for dim, step in enumerate(self.stride) if step == 1 and self.shape[dim] != 1]
        return usual if usual in dims or not dims else dims[-1]

    def rows(self) -> int | None:
        """The step from row to row where all dimensions but the channels are one run of rows and channels lie side by side; else None."""
        channel = self.channel
        if self.shape[channel] != 1 and self.stride[channel] != 1:
            return None
        dims = [dim for dim in range(len(self.shape)) if dim != channel and self.shape[dim] != 1]
        if any(self.stride[one] != self.stride[two] * self.shape[two] for one, two in itertools.pairwise(dims)):
            return None
        return self.stride[dims[-1]] if dims else stepped(self.shape[channel])

    @property
    def step(self) -> int:
        """That, or what it would be in a buffer of the arena."""
        return self.rows() or stepped(self.shape[self.channel])

    def against(self, out: Layout, step: int) -> tuple[int, int] | None:
        """(step from row to row, from channel to channel) of these elements, where those of `out` are rows `step` apart; else None."""
        along, across = set[int](), set[int]()
        for size, mine, its in zip(self.shape, self.stride, out.stride, strict=True):
            if size == 1:
                continue
            if its < step:
                if its != 1:
                    return None
                across.add(mine)
            elif its % step or mine % (its // step):
                return None
            else:
                along.add(mine // (its // step))
        if len(along) > 1 or len(across) > 1 or not across <= {0, 1}:
            return None
        return next(iter(along), 0), next(iter(across), 0)

    @property
    def has_room(self) -> bool:
        """Whether whole vectors may be stored: rows of an own buffer are all that it has, and each has room behind its channels."""
        step, channel = stepped(self.shape[self.channel]), self.channel
        dims = [dim for dim in range(len(self.shape)) if dim != channel and self.shape[dim] != 1]
        alone = self.buffer.is_own and self.offset == 0 and prod(self.shape[dim] for dim in dims) * step == self.buffer.elements
        return alone and all(self.stride[dim] % step == 0 and self.stride[dim] for dim in dims)


def channel_of(shape: Sequence[int]) -> int:
    """The dimension that lies side by side: that of images is 1, that of matrices the last."""
    return 1 if len(shape) == 4 else len(shape) - 1


def stepped(channels: int) -> int:
    return -(-channels // LANES) * LANES


def fresh(name: str, shape: Sequence[int]) -> Layout:
    """A new buffer of the arena, laid out as kernels like it."""
    channel = channel_of(shape) if shape else 0
    order = [*(dim for dim in range(len(shape)) if dim != channel), *([channel] if shape else [])]
    stride, step = [1] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step = stepped(shape[dim]) if dim == channel else step * shape[dim]
    rows = prod(shape[dim] for dim in order[:-1]) if shape else 1
    elements = rows * stepped(shape[channel]) if shape else LANES
    return Layout(Buffer(name, elements), tuple(shape), tuple(stride))


def in_rows(name: str, shape: Sequence[int]) -> Layout:
    """A new buffer whose last dimension lies side by side, all others as one run of rows."""
    rows = there(fresh(name, (prod(shape[:-1]), shape[-1])).viewed(shape))
    return rows


Seen = list[Layout] | None  # a place for each result; None where it does not lie so


def seen(node: Node, layout: Layout) -> Seen:
    """Where a view's results lie, given where its argument does."""
    return VIEWS[functional_base(node.op).removeprefix("aten.")](node, layout)


def _ints(arg: object) -> list[int]:
    return [int(each) for each in arg if isinstance(each, int)] if isinstance(arg, tuple) else []


def _number(node: Node, position: int, default: int) -> int:
    arg = node.args[position] if len(node.args) > position else None
    return default if arg is None else int(arg)  # type: ignore[arg-type]


def _shape(node: Node) -> tuple[int, ...]:
    result = of_kind(Value, node.outputs[0])
    return tuple(int(size) for size in result.shape)


def _view(node: Node, layout: Layout) -> Seen:
    seen = layout.viewed(_shape(node))
    return None if seen is None else [seen]


def _permute(node: Node, layout: Layout) -> Seen:
    return [layout.permuted([dim % len(layout.shape) for dim in _ints(node.args[1])])]


def _transpose(node: Node, layout: Layout) -> Seen:
    dims = list(range(len(layout.shape)))
    one, two = _number(node, 1, 0) % len(dims), _number(node, 2, 1) % len(dims)
    dims[one], dims[two] = dims[two], dims[one]
    return [layout.permuted(dims)]


def _same(node: Node, layout: Layout) -> Seen:
    return [layout]


def _unsqueeze(node: Node, layout: Layout) -> Seen:
    return [layout.with_one(_number(node, 1, 0) % (len(layout.shape) + 1))]


def _expand(node: Node, layout: Layout) -> Seen:
    seen = layout.broadcast(_shape(node))
    return None if seen is None else [seen]


def _slice(node: Node, layout: Layout) -> Seen:
    dim = _number(node, 1, 0) % len(layout.shape)
    start, step = _number(node, 2, 0), _number(node, 4, 1)
    size = layout.shape[dim]
    start = max(0, start + size if start < 0 else start)
    return [layout.narrowed(dim, min(start, size), _shape(node)[dim], step)]


def _select(node: Node, layout: Layout) -> Seen:
    dim, at = _number(node, 1, 0) % len(layout.shape), _number(node, 2, 0)
    return [layout.without(dim, at % layout.shape[dim])]


def _parts(node: Node, layout: Layout) -> Seen:
    """Of split: the sizes as they lie one behind the other."""
    dim, given = _number(node, 2, 0) % len(layout.shape), node.args[1]
    size = layout.shape[dim]
    sizes = _ints(given) if isinstance(given, tuple) else [min(int(given), size - at) for at in range(0, size, int(given))]  # type: ignore[arg-type]
    parts, at = [], 0
    for each in sizes:
        parts.append(layout.narrowed(dim, at, each))
        at += each
    return parts


def _unbind(node: Node, layout: Layout) -> Seen:
    dim = _number(node, 1, 0) % len(layout.shape)
    return [layout.without(dim, at) for at in range(layout.shape[dim])]


VIEWS: dict[str, Callable[[Node, Layout], Seen]] = {
    "view": _view, "_unsafe_view": _view, "reshape": _view, "_reshape_alias": _view, "permute": _permute, "transpose": _transpose,
    "t": lambda _, layout: [layout.permuted(range(len(layout.shape))[::-1])],
    "alias": _same, "detach": _same, "unsqueeze": _unsqueeze, "squeeze": _view, "expand": _expand, "slice": _slice, "select": _select,
    "split": _parts, "unsafe_split": _parts, "split_with_sizes": _parts, "unbind": _unbind,
    "as_strided": _same,  # only of what already lies so
}  # fmt: skip
