"""Sizes of a capture that are not fixed: torch's symbolic integers on one side, sizes of the graph on the other.

    takes   dimensions, and the example's number for each
    leaves  symbolic integers for fake tensors; sizes in the graph's own form; and the conditions on dimensions under which the program that
            was captured is the program (torch's guards)

Private names of torch are used here alone: `ShapeEnv`, its symbols, guards and the nodes of symbolic integers.
"""

from __future__ import annotations

import random
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias, overload

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions

from lowtide.capture.care.turns import all_replaced
from lowtide.capture.sources import is_asked_by_user, users_code, users_line
from lowtide.errors import CaptureError, FormatError
from lowtide.ir.graph import Node
from lowtide.ir.shapes.conditions import Condition
from lowtide.ir.shapes.dimension import Dimension, Dimensions
from lowtide.ir.shapes.points import Rewriter, size_at
from lowtide.ir.shapes.polynomial import normal
from lowtide.ir.sizes import Size

Extent: TypeAlias = "int | torch.SymInt"

_BINARY = ("add", "sub", "mul", "mod", "int_floordiv", "floordiv", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min")
_LARGEST_QUOTIENT, _MOST_ASKED = 4096, 2**16  # the largest divisor in the place of a fraction, and the largest extent that is tried
_LEAST_SYMBOLIC = 2  # torch captures 0 and 1 apart: a dimension of that size is a number


class Symbols:
    """The dimensions of one capture. Those whose number is 0 or 1 in the example stay numbers."""

    def __init__(self, dimensions: Sequence[Dimension] = (), example: Mapping[str, int] = {}) -> None:
        self.env = _Environment() if dimensions else None
        self._ints: dict[str, Extent] = {}  # by the name of the extent
        self._kept: list[Dimension] = []
        for each in dimensions:
            self._add(each, example[each.name])
        self._numbers = _SizesAtPoint(self.dimensions, {each.name: example[each.name] for each in self._kept})
        self._rewriters = {tuple(self._numbers.point.values()): Rewriter(self._numbers)}

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """Those that are symbolic here, with the part of their range that may be: from 2 on."""
        return tuple(self._kept)

    def extent(self, name: str) -> Extent:
        """An extent of the batch as torch takes it."""
        return self._ints[name]

    def _add(self, dimension: Dimension, number: int) -> None:
        if number < _LEAST_SYMBOLIC or self.env is None:
            self._ints[dimension.extent_name] = dimension.extent(number)
            return
        source = ConstantSource(f"lowtide_{dimension.name}")
        symbol = self.env.create_symbol(number, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        kept = replace(dimension, least=max(dimension.least, _LEAST_SYMBOLIC), most=max(dimension.most, number))
        self.env.constrain_symbol_range(symbol, kept.least, kept.most)
        self.env.names[symbol] = kept.symbol
        self._ints[dimension.extent_name] = dimension.extent(self.env.create_symintnode(symbol, hint=number, source=source))
        self._kept.append(kept)

    def at(self, extent: Extent, point: Mapping[str, int]) -> int:
        """A number of torch's at a point. Raises ShapeError where it is no whole number."""
        return size_at(size_of(extent), self.dimensions, point)

    def points(self, most: int) -> Iterator[dict[str, int]]:
        """Points of the range, the example's first: few of their numbers are equal, and they are always the same."""
        draws = random.Random(0)
        yield dict(self._numbers.point)
        for _ in range(most - 1):
            yield {each.name: draws.randint(each.least, each.most) for each in self.dimensions}

    def number(self, size: Size) -> int:
        return size if type(size) is int else self._numbers[size]

    def node(self, node: Node, point: Mapping[str, int] | None = None) -> Node:
        """A node as it is in the example, or at a point. Raises ShapeError where a size is no whole number there."""
        if self.env is None:
            return node
        at = self._numbers.point if point is None else point
        key = tuple(at[each.name] for each in self.dimensions)
        if key not in self._rewriters:
            self._rewriters[key] = Rewriter(_SizesAtPoint(self.dimensions, at))
        return self._rewriters[key].node(node)

    def nodes(self, nodes: Sequence[Node], point: Mapping[str, int] | None = None) -> Sequence[Node]:
        """The same of several, each made when it is asked for."""
        return _Concrete(nodes, self, point) if self.env is not None else nodes

    def conditions(self) -> tuple[Condition, ...]:
        """What torch has taken for granted of the dimensions."""
        if self.env is None:
            return ()
        env, names = self.env, self.env.names
        relations = ((_without_fractions(env, guard.expr).xreplace(names), str(guard.sloc)) for guard in env.guards)
        return tuple(Condition(_in_our_words(relation), where) for relation, where in relations)


class _SizesAtPoint(dict[Size, int]):
    """Sizes at the example's point, each evaluated when it is first asked for."""

    def __init__(self, dimensions: Dimensions, point: Mapping[str, int]) -> None:
        super().__init__()
        self._dimensions, self.point = dimensions, point

    def __missing__(self, size: Size) -> int:
        self[size] = size_at(size, self._dimensions, self.point)
        return self[size]


class _Concrete(Sequence[Node]):
    """Nodes as they are in the example, or at a point."""

    def __init__(self, nodes: Sequence[Node], symbols: Symbols, point: Mapping[str, int] | None) -> None:
        self._nodes, self._symbols, self._point = nodes, symbols, point

    def __len__(self) -> int:
        return len(self._nodes)

    @overload
    def __getitem__(self, at: int) -> Node: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Node]: ...
    def __getitem__(self, at: int | slice) -> Node | Sequence[Node]:
        if isinstance(at, slice):
            return _Concrete(self._nodes[at], self._symbols, self._point)
        return self._symbols.node(self._nodes[at], self._point)


TAKES_NUMBERS = "torch has this for numbers alone: compute it by operators that take any size, or leave the dimension out of `dynamic`"


class FixedError(CaptureError):
    """The program under capture is one for some numbers of a dimension alone: `equal_to` another dimension, or for one number."""

    def __init__(self, name: str, equal_to: Any, operator: str = "") -> None:
        self.name, self.equal_to, self.operator = name, equal_to, operator
        code, line = users_code(), users_line()
        where = f"{operator} at {line}" if operator else f"{code} at {line}" if code else line
        if not equal_to.is_number:
            remedy = "where both are always equal, tie them by one name in `dynamic`"
        elif operator or not is_asked_by_user():
            remedy = TAKES_NUMBERS
        else:
            remedy = (
                "compute with tensors and sizes there (x.shape[0] for len(x), no range() or list over it), or leave the dimension out of "
                "`dynamic`"
            )
        super().__init__(
            f"dimension {name}: {where} takes it to be {equal_to}, so that the program is another one for other batches: {remedy}"
        )


class _Environment(ShapeEnv):
    """Torch's own, but that a dimension is never given up in silence; and what operations on its integers gave."""

    def __init__(self) -> None:
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}  # the graph's symbols by torch's
        self.sizes: dict[sympy.Expr, Size] = {}  # by torch's expressions
        self.done: dict[Any, SymNode] = {}  # by operation and what it is of
        _environments.add(self)

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        if a in self.names and a != tgt:
            raise FixedError(str(self.names[a]), tgt.xreplace(self.names))
        super()._set_replacement(a, tgt, msg)


_environments: weakref.WeakSet[_Environment] = weakref.WeakSet()


def nothing_twice() -> AbstractContextManager[None]:
    """Within, what an operation on symbolic integers gave is looked up, as a capture asks the same again and again."""
    wrapping = SymNode, "wrap_int", lambda plain: lambda node, number: _once(node, number, plain, number)
    return all_replaced((*((SymNode, name, partial(_remembering, name)) for name in _BINARY), wrapping))


def _remembering(name: str, plain: Callable[[Any, Any], SymNode]) -> Callable[[Any, Any], SymNode]:
    def operation(node: Any, other: Any) -> SymNode:
        if float in (node.pytype, other.pytype):  # of one expression there are several, which round otherwise
            return plain(node, other)
        return _once(node, (name, node._expr, node.pytype, other._expr, other.pytype), plain, other)

    return operation


def _once(node: Any, key: Any, plain: Callable[[Any, Any], SymNode], other: Any) -> SymNode:
    if type(node.shape_env) is not _Environment:  # of another thread, which compiles meanwhile
        return plain(node, other)
    done: dict[Any, SymNode] = node.shape_env.done
    symbol = done.get(key)
    if symbol is None:
        symbol = done[key] = plain(node, other)
    return symbol


def with_names(text: str) -> str:
    """A text of torch's with the names of dimensions in the places of its own symbols."""
    for env in list(_environments):
        for theirs, ours in env.names.items():
            text = re.sub(rf"\b{re.escape(str(theirs))}\b", str(ours), text)
    return text


def expression_of(item: torch.SymFloat) -> Any:
    return item.node.expr.xreplace(item.node.shape_env.names)


def is_symbolic(item: Any) -> bool:
    """Whether a number is one of torch's symbolic integers."""
    return isinstance(item, torch.SymInt)


def is_size(item: Any) -> bool:
    """Whether it is a size that differs from batch to batch, or a number that follows from one."""
    return type(item) in (torch.SymInt, torch.SymFloat)


def size_of(item: Extent) -> Size:
    """A number of torch's as a size of the graph, in normal form: what is equal at every point is equal, but for rounding within."""
    if not isinstance(item, torch.SymInt):
        return int(item)
    node = item.node
    if (number := node.maybe_as_int()) is not None:
        return int(number)
    env, expression = node.shape_env, node.expr
    sizes: dict[sympy.Expr, Size] = env.sizes
    if expression not in sizes:
        sizes[expression] = _size(_without_fractions(env, expression).xreplace(env.names))
    return sizes[expression]


def sizes_of(items: Sequence[Extent]) -> tuple[Size, ...]:
    return tuple(item if type(item) is int else size_of(item) for item in items)


def multiplied(extent: Extent, factor: float) -> Extent:
    """An extent times a fraction, rounded down, as C and Python compute it. Raises FixedError where no size is that."""
    if not isinstance(extent, torch.SymInt):
        return int(extent * factor)
    quotient = _quotient(extent.node.shape_env, extent.node.expr, factor)
    return int(int(extent) * factor) if quotient is None else extent * quotient.numerator // quotient.denominator


def _quotient(env: ShapeEnv, expression: Any, factor: float) -> Fraction | None:
    """The quotient of whole numbers by which all that an expression may be gives, rounded down, what the factor does; None for none."""
    quotient, most = Fraction(factor).limit_denominator(_LARGEST_QUOTIENT), env.bound_sympy(expression).upper
    if not most.is_Integer or most > _MOST_ASKED:
        return None
    extents = range(int(most) + 1)
    return quotient if all(each * quotient.numerator // quotient.denominator == int(each * factor) for each in extents) else None


def _without_fractions(env: ShapeEnv, expression: Any) -> Any:
    """`math.floor(x.shape[1] * 0.5)` and `math.ceil(x.shape[1] / 3)` as quotients of whole numbers, where those are the same."""

    def quotient(rounded: Any) -> Any:
        (fraction,) = rounded.args
        factor, part = fraction.as_coeff_Mul()
        if not part.args or not part.args[0].is_nonnegative:
            return rounded
        up = isinstance(rounded, functions.CeilToInt)
        if isinstance(fraction, functions.IntTrueDiv) and fraction.args[1].is_Integer:  # rounded once, and to no other whole number
            return (sympy.ceiling if up else sympy.floor)(fraction.args[0] / fraction.args[1])
        if not isinstance(part, functions.ToFloat) or not factor.is_Float or up:
            return rounded
        exact = _quotient(env, part.args[0], float(factor))
        return rounded if exact is None else sympy.floor(part.args[0] * sympy.Rational(exact.numerator, exact.denominator))

    return expression.replace(lambda each: isinstance(each, (functions.TruncToInt, functions.FloorToInt, functions.CeilToInt)), quotient)


def _in_our_words(expression: Any) -> Any:
    """Torch's remainder, of Python's sign, as sympy's, which has the same; its other functions read back from text as they are."""
    return expression.replace(functions.PythonMod, sympy.Mod)


def _size(expression: Any) -> Size:
    try:
        return normal(_in_our_words(expression))
    except FormatError as error:
        raise CaptureError(f"a size at {users_line()} cannot follow the batch's dimensions: {error}") from error


def hint(size: Extent) -> int:
    return size if type(size) is int else int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
