"""From a body to stages: each operator with the chain behind it becomes one, views become none.

    takes   a body of known operators, the values in it that are constants, a target
    leaves  stages in an order that is right, where every value lies, and what is to be packed

A chain is an operator with the simple ones behind it that its kernel does on the way, before a result is stored (AGO, section III). It goes
on while its result has one reader, and that is element-wise, a norm with given statistics, or sees it in another way. A stage stands
where the last operator of its chain does, as what the chain reads beside it may be made late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from lowtide.cpu import expressions
from lowtide.cpu.expressions import name_of
from lowtide.cpu.layout import VIEWS, Buffer, Layout, fresh, in_rows, seen, stepped
from lowtide.cpu.recipes import Norm, Packed, Plain, Target
from lowtide.cpu.regions import is_given_norm, is_known
from lowtide.cpu.stages import Epilogue, KernelStage, Map, Operand
from lowtide.errors import of_kind, there
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.sizes import contiguous_stride, reach

_MOST = 24  # operators of a chain: more keep too much in registers


@dataclass(frozen=True)
class Link:
    """One operator of a chain: what it is given by the chain, and where that lies as it sees it."""

    node: Node
    value: Value
    layout: Layout


@dataclass(frozen=True)
class OperatorChain:
    """What a kernel does beside its own operator, and the value that it leaves."""

    links: tuple[Link, ...]
    last: Value
    layout: Layout  # of the last value, if the first one lies as was assumed

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(link.node for link in self.links)


@dataclass(frozen=True)
class BodyUses:
    readers: Mapping[Value, Sequence[Node]]
    kept: Collection[Value]  # results of the body
    fixed: Collection[Value]  # constants

    @classmethod
    def of(cls, body: Graph, fixed: Collection[Value]) -> BodyUses:
        readers: dict[Value, list[Node]] = {}
        for node in body.nodes:
            for value in node.inputs:
                readers.setdefault(value, []).append(node)
        return cls(readers, frozenset(body.outputs), fixed)

    def only_reader(self, value: Value) -> Node | None:
        readers = self.readers.get(value, ())
        return readers[0] if len(readers) == 1 and value not in self.kept else None

    def chain(self, value: Value, layout: Layout, taken: Collection[Node] = ()) -> OperatorChain:
        """What can be done to a value on its way to `layout`, by nodes that are not `taken` for another."""
        links: list[Link] = []
        while len(links) < _MOST and (node := self.only_reader(value)) is not None:
            result = next((each for each in node.outputs if each is not None), None)
            if result is None or node in taken or not is_known(node, self.fixed):
                break
            if name_of(node) in VIEWS:
                layouts = seen(node, layout) if sum(each is not None for each in node.outputs) == 1 == len(node.outputs) else None
                if layouts is None or not _is_whole(layouts[0], layout):
                    break
                links.append(Link(node, value, layout))
                value, layout = result, layouts[0]
            elif (is_given_norm(node) or expressions.is_known(node)) and result.shape == value.shape and name_of(node) != "clone":
                links.append(Link(node, value, layout))
                value = result
            else:
                break
        while links and name_of(links[-1].node) in VIEWS:  # a view at the end is one of the result
            value, layout = links[-1].value, links[-1].layout
            links.pop()
        return OperatorChain(tuple(links), value, layout)


def norm_of(node: Node) -> Norm:
    if name_of(node) == "_native_batch_norm_legit_no_training":
        _, gamma, beta, mean, var, _, eps = node.args
    else:
        _, gamma, beta, mean, var, _, _, eps, *_ = node.args
    mean = of_kind(Value, mean)
    var = of_kind(Value, var)
    eps = of_kind(float, eps)
    return Norm(gamma if isinstance(gamma, Value) else None, beta if isinstance(beta, Value) else None, mean, var, eps)


def _is_whole(layout: Layout, before: Layout) -> bool:
    """Whether a view has all elements of what is seen, each once."""
    return _count(layout) == _count(before) and 0 not in [step for size, step in zip(layout.shape, layout.stride, strict=True) if size != 1]


def _count(layout: Layout) -> int:
    count = 1
    for size in layout.shape:
        count *= size
    return count


# Makes the stage of an operator from where its result goes, what becomes of it on the way, the norm that is folded in, and its nodes.
Make: TypeAlias = "Callable[[Layout, Epilogue, Norm | None, tuple[Node, ...]], KernelStage]"


@dataclass(frozen=True)
class Staged:
    stages: tuple[KernelStage, ...]
    results: tuple[Layout, ...]
    arguments: tuple[Value, ...]  # whose tensors a call is given
    constants: tuple[Packed, ...]


@dataclass(frozen=True)
class Head:
    """An operator that begins a chain."""

    node: Node
    value: Value  # its result
    layout: Layout  # where that goes if nothing else is wanted
    make: Make
    folds: bool = False  # whether a norm right behind it is folded into its weight
    alone: bool = False  # whether nothing is done on the way


class Staging:
    """Walks over a body once."""

    def __init__(self, body: Graph, fixed: Collection[Value], target: Target) -> None:
        self.body, self.target = body, target
        self.uses = BodyUses.of(body, frozenset(fixed))
        self.arguments = tuple(value for value in body.inputs if value not in self.uses.fixed)
        self.layouts = {value: _of_argument(value, at) for at, value in enumerate(self.arguments)}
        self.stages: list[KernelStage] = []
        self.packed: list[Packed] = []
        self._pending: dict[Node, Callable[[], None]] = {}
        self._done: set[Node] = set()
        self._wanted: dict[Value, Layout] = {}
        self._joined: dict[Value, Layout] = {}

    def staged(self, heads: Callable[[Staging, Node], Head | None]) -> Staged:
        """All of it; `heads` knows the operators that are more than element-wise."""
        self._want_results()
        for node in self.body.nodes:
            if node not in self._done:
                self._begin(node, heads)
            if node in self._pending:
                self._pending.pop(node)()
        results = tuple(self._wanted[value] for value in self.body.outputs)
        for value, layout in zip(self.body.outputs, results, strict=True):
            if self.layouts[value] != layout:
                self.copy(self.layouts[value], layout)
        return Staged(tuple(self.stages), results, self.arguments, tuple(self.packed))

    def _want_results(self) -> None:
        for at, value in enumerate(self.body.outputs):
            layout = _of_argument(value, len(self.arguments) + at)
            self._wanted[value] = layout
        for node in reversed(self.body.nodes):  # what is joined later wants its parts first
            if name_of(node) == "cat" and node not in self._done:
                self._want_parts(node)

    def _want_parts(self, node: Node) -> None:
        """Have the parts of what is joined made where they belong, where nobody else reads them."""
        result = node.results[0]
        whole = self._wanted.get(result)
        if whole is None or not whole.buffer.is_own:
            whole = self._joined[result] = fresh(result.name, _ints(result.shape))
        for part, layout in _parts_of(node, whole):
            if self.uses.only_reader(part) is node and part not in self.uses.fixed:
                self._wanted.setdefault(part, layout)

    def _begin(self, node: Node, heads: Callable[[Staging, Node], Head | None]) -> None:
        if all(value in self.uses.fixed for value in node.results):
            return
        name = name_of(node)
        if name in VIEWS:
            self._see(node)
        elif name == "cat":
            self._join(node)
        elif (head := heads(self, node)) is not None:
            self._start(head)
        else:
            self._map(node)

    def _see(self, node: Node) -> None:
        value = node.inputs[0]
        layouts = seen(node, self.layouts[value])
        if layouts is None:
            shape = self.layouts[value].shape
            layouts = seen(node, self.copied(self.layouts[value], _contiguous(f"{value.name}_flat", shape)))
        layouts = there(layouts)
        for result, layout in zip(node.outputs, layouts, strict=True):
            if result is not None:
                self.layouts[result] = layout

    def _join(self, node: Node) -> None:
        result = node.results[0]
        whole = self._joined.get(result) or self._wanted[result]
        for part, layout in _parts_of(node, whole):
            if self.place(part) != layout:
                self.copy(self.place(part), layout, (node,))
        self.layouts[result] = whole

    def _start(self, head: Head) -> None:
        """Begin a chain; its stage is made when all that it reads is there."""
        chain = OperatorChain((), head.value, head.layout) if head.alone else self.uses.chain(head.value, head.layout, self._done)
        first = head.value
        norm, links = None, chain.links
        if head.folds and links and is_given_norm(links[0].node):
            norm, links = norm_of(links[0].node), links[1:]
        wanted = self._wanted.get(chain.last)
        out = head.layout
        if (
            wanted is not None
            and wanted.shape == head.layout.shape == _ints(first.shape)
            and wanted.rows() is not None
            and _is_alike(wanted, out)
        ):
            out = wanted
        layout = out if chain.layout == head.layout else chain.layout
        nodes = (head.node, *chain.nodes)
        self._done.update(nodes)

        def finish() -> None:
            epilogue = self._epilogue([replace(link, layout=out if link.layout == head.layout else link.layout) for link in links], out)
            self.stages.append(head.make(out, epilogue, norm, nodes))
            self.layouts[chain.last] = layout

        self._pending[nodes[-1]] = finish

    def _epilogue(self, links: list[Link], out: Layout) -> Epilogue:
        """The links' operators on a vector `v`, whose rows lie as those of `out`."""
        lines: list[str] = []
        operands: list[Operand] = []
        name, step = "v", out.step
        for link in links:
            if name_of(link.node) in VIEWS:
                continue
            text, operands = self._line(link, name, operands, step)
            lines.append(f"vec<N> e{len(lines)} = {text};")
            name = f"e{len(lines) - 1}"
        return Epilogue(tuple(lines), name, tuple(operands))

    def _line(self, link: Link, name: str, operands: list[Operand], step: int) -> tuple[str, list[Operand]]:
        if is_given_norm(link.node):
            norm, channels = norm_of(link.node), _ints(link.value.shape)[1]
            scale, shift = (self.pack(Plain(norm.mean, 1, channels, stepped(channels), norm, part)) for part in ("scale", "shift"))
            at = len(operands)
            return f"{name} * o{at} + o{at + 1}", [*operands, Operand(scale, 0, 1), Operand(shift, 0, 1)]
        names = {link.value: name}
        for value in link.node.inputs:
            if value is not link.value:
                names[value] = f"o{len(operands)}"
                operands = [*operands, self._operand(value, link.layout, step)]
        return expressions.text(link.node, names), operands

    def _operand(self, value: Value, out: Layout, step: int) -> Operand:
        """How an epilogue reads a value, where it stores rows of `out`."""
        if value in self.uses.fixed:
            return self._constant(value, out, step)
        layout = self.layouts[value].broadcast(out.shape)
        steps = layout.against(out, step) if layout is not None and layout.buffer.is_own else None
        if layout is None or steps is None:
            layout = self.copied(self.layouts[value], Layout(Buffer(f"{value.name}_as", _span(out)), out.shape, out.stride))
            steps = (step, 1)
        return Operand(layout, *steps)

    def _constant(self, value: Value, out: Layout, step: int) -> Operand:
        """A constant packed as rows, one or as many as there are."""
        shape = _ints(value.shape)
        lacking, channel = len(out.shape) - len(shape), out.channel
        own = (1,) * lacking + shape
        if prod(own) == own[channel]:
            return Operand(self.pack(Plain(value, 1, own[channel], stepped(own[channel]))), 0, int(own[channel] != 1))
        layout = self.constant_place(value)
        whole = there(layout.broadcast(out.shape))
        return Operand(self.copied(whole, Layout(Buffer(f"{value.name}_as", _span(out)), out.shape, out.stride)), step, 1)

    def constant_place(self, value: Value) -> Layout:
        """A constant of several dimensions, copied where kernels can read it as any other value."""
        shape = _ints(value.shape)
        layout = fresh(value.name, shape)
        flat = self.pack(Plain(value, 1, prod(shape), stepped(prod(shape))))
        self.stages.append(Map((flat,), (contiguous_stride(shape),), (), "x0", layout))
        return layout

    def _map(self, node: Node) -> None:
        result = there(node.outputs[0])
        shape = _ints(result.shape)
        alike = next((self.layouts[value] for value in node.inputs if value in self.layouts and self.layouts[value].shape == shape), None)
        layout = (
            self._for_clone(result)
            if name_of(node) == "clone"
            else fresh(result.name, shape)
            if alike is None
            else _like(result.name, alike)
        )
        names = dict[Value, str]()
        self._done.add(node)
        inputs: list[Layout | Packed] = []
        strides: list[tuple[int, ...]] = []
        for value in node.inputs:
            names[value] = f"x{len(inputs)}"
            place, stride = self._source(value, shape)
            inputs.append(place)
            strides.append(stride)
        text = self._norm_text(node, names, inputs, strides) if is_given_norm(node) else expressions.text(node, names)
        self.stages.append(Map(tuple(inputs), tuple(strides), (f"vec<N> y = {text};",), "y", layout, (node,)))
        self.layouts[result] = layout

    def _norm_text(self, node: Node, names: dict[Value, str], inputs: list[Layout | Packed], strides: list[tuple[int, ...]]) -> str:
        norm, shape = norm_of(node), _ints(node.results[0].shape)
        first = names[node.inputs[0]]
        del inputs[1:], strides[1:]
        for part in ("scale", "shift"):
            inputs.append(self.pack(Plain(norm.mean, 1, shape[1], stepped(shape[1]), norm, part)))
            strides.append(tuple(int(dim == 1) for dim in range(len(shape))))
        return f"{first} * x1 + x2"

    def _source(self, value: Value, shape: tuple[int, ...]) -> tuple[Layout | Packed, tuple[int, ...]]:
        if value not in self.uses.fixed:
            layout = there(self.layouts[value].broadcast(shape))
            return layout, layout.stride
        own = _ints(value.shape)
        flat = self.pack(Plain(value, 1, prod(own), stepped(prod(own))))
        lacking = len(shape) - len(own)
        stride = tuple(0 if size == 1 else step for size, step in zip(own, contiguous_stride(own), strict=True))
        return flat, (0,) * lacking + stride

    def _for_clone(self, result: Value) -> Layout:
        """Where a copy goes: so that the view that is taken of it lies as kernels like it."""
        shape, reader = _ints(result.shape), self.uses.only_reader(result)
        if reader is not None and name_of(reader) in ("view", "_unsafe_view", "reshape") and reader.outputs[0] is not None:
            layout = fresh(result.name, _ints(reader.outputs[0].shape)).viewed(shape)
            if layout is not None:
                return layout
        if len(shape) > 4:
            return _contiguous(result.name, shape)
        return fresh(result.name, shape)

    def in_rows(self, value: Value) -> Layout:
        """Where a value lies in rows of its last dimension: copied there unless it does already."""
        layout = self.place(value)
        lies_so = layout.rows() is not None and layout.channel == len(layout.shape) - 1
        return layout if lies_so else self.copied(layout, in_rows(f"{value.name}_rows", layout.shape))

    def place(self, value: Value) -> Layout:
        """Where a value lies; a constant is copied there."""
        return self.constant_place(value) if value in self.uses.fixed else self.layouts[value]

    def copied(self, layout: Layout, to: Layout) -> Layout:
        self.copy(layout, to)
        return to

    def copy(self, layout: Layout, to: Layout, nodes: tuple[Node, ...] = ()) -> None:
        source = there(layout.broadcast(to.shape))
        self.stages.append(Map((source,), (source.stride,), (), "x0", to, nodes))

    def pack(self, packed: Packed) -> Packed:
        self.packed.append(packed)
        return packed


def _ints(sizes: tuple[object, ...]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)  # type: ignore[call-overload]


def _of_argument(value: Value, position: int) -> Layout:
    shape, stride = _ints(value.shape), _ints(value.stride)
    return Layout(Buffer(value.name, reach(shape, stride), position), shape, stride)


def _contiguous(name: str, shape: tuple[int, ...]) -> Layout:
    return Layout(Buffer(name, prod(shape)), shape, contiguous_stride(shape))


def _span(layout: Layout) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(layout.shape, layout.stride, strict=True)) + stepped(1)


def _like(name: str, layout: Layout) -> Layout:
    """A new place whose dimensions lie in the same order."""
    order = sorted(range(len(layout.shape)), key=lambda dim: (-layout.stride[dim] if layout.shape[dim] != 1 else 0, dim))
    channel = layout.channel
    if 0 in [layout.stride[dim] for dim in order if layout.shape[dim] != 1] or (
        order and order[-1] != channel and layout.shape[channel] != 1
    ):
        return fresh(name, layout.shape)
    order = [dim for dim in order if dim != channel] + [channel]
    stride, step = [1] * len(order), 1
    for dim in reversed(order):
        stride[dim] = step
        step = stepped(layout.shape[dim]) if dim == channel else step * layout.shape[dim]
    return Layout(Buffer(name, step), layout.shape, tuple(stride))


def _parts_of(node: Node, whole: Layout) -> Iterator[tuple[Value, Layout]]:
    """What is joined, and where in the whole each belongs."""
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else dict(node.kwargs).get("dim", 0)
    parts = of_kind(tuple, parts)
    dim = of_kind(int, dim)
    at = 0
    for part in parts:
        part = of_kind(Value, part)
        size = _ints(part.shape)[dim % len(whole.shape)]
        yield part, whole.narrowed(dim % len(whole.shape), at, size)
        at += size


def _is_alike(wanted: Layout, out: Layout) -> bool:
    """Whether rows of one are rows of the other, in the same order."""
    return wanted.channel == out.channel and out.against(wanted, wanted.rows() or 1) is not None
