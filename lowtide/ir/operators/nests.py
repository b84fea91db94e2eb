"""The loops around an operator, and which of them index what it reads: what weights and the analysis of repeated work are made of.

A convolution is seven loops, a product of matrices three; what is known by its shapes alone has a loop for each dimension of the largest
tensor that it reads or makes, parameters aside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.operators.fusion import is_elementwise
from lowtide.ir.operators.shapes import ints, made_shape, shape_of

Index = tuple[tuple[str, int], ...]  # loops and steps, which are added up: (("h", 2), ("r", 1)) is 2 h + r


@dataclass(frozen=True, slots=True)
class NestLoop:
    """One loop of a nest."""

    name: str  # unique in the nest
    extent: int
    reduces: bool = False  # what it computes is added up: the result has no such dimension


@dataclass(frozen=True, slots=True)
class Access:
    """How one tensor is indexed: for each of its dimensions the loops that run over it."""

    value: Value
    dims: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Nest:
    """The loops of an operator, and what they read. No accesses: which loop reads what is not known."""

    loops: tuple[NestLoop, ...]
    accesses: tuple[Access, ...] = ()

    def access(self, value: Value) -> Access | None:
        """How a tensor is read; None where that is not known."""
        return next((each for each in self.accesses if each.value is value), None)

    def loop(self, name: str) -> NestLoop:
        return next(each for each in self.loops if each.name == name)

    @property
    def steps(self) -> int:
        """How often the innermost statement runs."""
        return prod(each.extent for each in self.loops)


def nest_of(node: Node) -> Nest:
    """The loops around an operator. Raises CheckError where a shape is symbolic."""
    rule = _RULES.get(node.op.rpartition(".")[0])
    found = None if rule is None else rule(node)
    return _by_shape(node) if found is None else found


def _by_shape(node: Node) -> Nest:
    """A loop for each dimension of the largest result or argument."""
    values = [value for value in node.outputs if value is not None] or list(node.inputs)
    shapes = [ints(node, value) for value in (*values, *node.inputs) if value.storage.kind.value not in ("parameter", "buffer")]
    largest = max(shapes, key=prod, default=())
    loops = tuple(NestLoop(f"d{dim}", extent) for dim, extent in enumerate(largest))
    made = node.outputs[0] if node.outputs and node.outputs[0] is not None else None
    if made is None or ints(node, made) != largest or not is_elementwise(node.op):
        return Nest(loops)
    return Nest(loops, tuple(Access(value, _broadcast(ints(node, value), len(largest))) for value in node.inputs))


def _broadcast(shape: tuple[int, ...], rank: int) -> tuple[Index, ...]:
    """Dimensions aligned at the end; what has an extent of 1 is no loop's."""
    return tuple(((f"d{rank - len(shape) + dim}", 1),) if extent != 1 else () for dim, extent in enumerate(shape))


def _convolution(node: Node) -> Nest | None:
    """x[n, in, ..], weight[out, in of a group, ..]; depthwise where a group has one channel."""
    x, weight, groups = node.args[0], node.args[1], node.args[8]
    made = made_shape(node, 0)
    if node.args[6] is not False or not isinstance(x, Value) or not isinstance(weight, Value) or not isinstance(groups, int):
        return None
    kernel, given = shape_of(node, 1), shape_of(node, 0)
    space = len(kernel) - 2
    if len(given) != space + 2:
        return None
    stride, dilation = _pair(node.args[3], space), _pair(node.args[5], space)
    out = (NestLoop("g", groups), NestLoop("o", kernel[0] // groups)) if groups > 1 else (NestLoop("o", kernel[0]),)
    positions = tuple(NestLoop(f"y{dim}", extent) for dim, extent in enumerate(made[2:]))
    window = tuple(NestLoop(f"r{dim}", extent, True) for dim, extent in enumerate(kernel[2:]))
    loops = (NestLoop("n", made[0]), *out, *positions, NestLoop("i", kernel[1], True), *window)
    channel: Index = (("g", kernel[1]), ("i", 1)) if groups > 1 else (("i", 1),)
    moved = tuple(((f"y{dim}", stride[dim]), (f"r{dim}", dilation[dim])) for dim in range(space))
    first: Index = (("g", kernel[0] // groups), ("o", 1)) if groups > 1 else (("o", 1),)
    weights = (first, (("i", 1),), *(((f"r{dim}", 1),) for dim in range(space)))
    return Nest(loops, (Access(x, ((("n", 1),), channel, *moved)), Access(weight, weights)))


def _pair(arg: Arg, count: int) -> tuple[int, ...]:
    """Numbers for each dimension in space; one stands for all."""
    found = tuple(each for each in arg if isinstance(each, int)) if isinstance(arg, tuple) else ()
    return found if len(found) == count else (found or (1,)) * count


def _einsum(text: str) -> Callable[[Node], Nest | None]:
    """A product by its letters, "mk,kn->mn"; "-" for an argument that is added."""
    given, _, made = text.partition("->")
    terms = given.split(",")

    def rule(node: Node) -> Nest | None:
        found = [(node.args[at], term) for at, term in enumerate(terms) if term != "-"]
        extents: dict[str, int] = {}
        accesses = []
        for value, term in found:
            if not isinstance(value, Value) or len(value.shape) != len(term):
                return None
            extents |= dict(zip(term, ints(node, value), strict=True))
            accesses.append(Access(value, tuple(((letter, 1),) for letter in term)))
        return Nest(tuple(NestLoop(name, extent, name not in made) for name, extent in extents.items()), tuple(accesses))

    return rule


def _attention(node: Node) -> Nest | None:
    """query[b, h, q, e], key[b, h, k, e], value[b, h, k, v]: two products, over e and over k."""
    query, key, value = node.args[:3]
    if not (isinstance(query, Value) and isinstance(key, Value) and isinstance(value, Value)) or len(query.shape) != 4:
        return None
    (b, h, q, e), k, v = shape_of(node, 0), shape_of(node, 1)[2], shape_of(node, 2)[3]
    loops = (NestLoop("b", b), NestLoop("h", h), NestLoop("q", q), NestLoop("k", k, True), NestLoop("e", e, True), NestLoop("v", v))
    named = ((query, "bhqe"), (key, "bhke"), (value, "bhkv"))
    return Nest(loops, tuple(Access(each, tuple(((letter, 1),) for letter in letters)) for each, letters in named))


_ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "scaled_dot_product_attention")
_RULES: dict[str, Callable[[Node], Nest | None]] = {
    "aten.convolution": _convolution,
    "aten.mm": _einsum("mk,kn->mn"),
    "aten.bmm": _einsum("bmk,bkn->bmn"),
    "aten.addmm": _einsum("-,mk,kn->mn"),
    "aten.baddbmm": _einsum("-,bmk,bkn->bmn"),
    "aten.mv": _einsum("mk,k->m"),
    "aten.addmv": _einsum("-,mk,k->m"),
    **{f"aten.{name}": _attention for name in _ATTENTION},
}
