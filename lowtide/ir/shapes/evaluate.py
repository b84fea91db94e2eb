"""Sizes as compiled Python: all of a graph's at one point in microseconds, in whole numbers of any length.

A size becomes a numerator and a denominator, each a text over the numbers of the dimensions; the denominator must divide the numerator. The
text is made from the expression's own parts, its dimensions renamed: nothing that was read from a file is executed. What stands
within Max, Min and Mod must be whole by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import sympy

from lowtide.errors import FormatError, ShapeError
from lowtide.ir.shapes.dimension import Dimensions, checked_point
from lowtide.ir.sizes import Size
from lowtide.ir.text.sizes import canonical

CompiledSizes: TypeAlias = "Callable[..., tuple[int, ...]]"  # of the dimensions' numbers in their order


def size_at(size: Size, dimensions: Dimensions, point: Mapping[str, int]) -> int:
    """A size at a point. Raises ShapeError for a wrong point, an unknown dimension, or a size that is no whole number there."""
    (number,) = sizes_at((size,), dimensions, point)
    return number


def sizes_at(sizes: Sequence[Size], dimensions: Dimensions, point: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes at a point, in their order. Raises ShapeError as `size_at` does."""
    return compiled(tuple(sizes), dimensions)(*checked_point(dimensions, point).values())


@lru_cache(maxsize=256)
def compiled(sizes: tuple[Size, ...], dimensions: Dimensions) -> CompiledSizes:
    """A function of the numbers of `dimensions`, positional, that gives all sizes; it does not check ranges.

    Raises ShapeError for an unknown dimension, FormatError for what is no size. The function raises ShapeError for what is not whole.
    """
    names = {each.name: f"d{position}" for position, each in enumerate(dimensions)}
    entries = [python_text(size, names) for size in sizes]
    function: CompiledSizes = function_of(tuple(names.values()), f"({''.join(f'{entry}, ' for entry in entries)})")
    return function


def function_of(variables: Sequence[str], text: str) -> Callable[..., Any]:
    """A function of these variables, positional, that gives what `python_text` has written."""
    source = f"lambda {', '.join(variables)}: {text}"
    function: Callable[..., Any] = eval(source, {"__builtins__": {}, "whole": whole, "max": max, "min": min, "divided": divided})
    return function


def python_text(size: Size, names: Mapping[str, str]) -> str:
    """A size as Python source over the variables that `names` gives dimensions; it calls `whole`, `divided`, `max` and `min`.

    Raises ShapeError for a dimension without a variable, FormatError for what is no size.
    """
    if isinstance(size, int):
        return str(int(size))
    if not isinstance(size, sympy.Expr):
        raise FormatError(f"expected a size, an integer or a sympy expression, got a {type(size).__name__}")
    _check_names(size, names)
    return _whole_text(size, names)


def _whole_text(expr: Any, names: Mapping[str, str]) -> str:
    top, bottom = _fraction(expr, names)
    return top if bottom == "1" else f"whole({top}, {bottom}, {str(expr)[:80]!r})"


def _check_names(size: Any, names: Mapping[str, str]) -> None:
    unknown = sorted({str(symbol) for symbol in size.free_symbols} - names.keys())
    if unknown:
        known = ", ".join(names) or "none"
        raise ShapeError(f"size {size}: expected dimensions that have a range ({known}), got {unknown[0]}: give it one")


def _fraction(expr: Any, names: Mapping[str, str]) -> tuple[str, str]:
    """Numerator and denominator, "1" where there is none."""
    top, bottom = sympy.fraction(sympy.together(expr))
    return _text(top, names), _text(bottom, names)


def _text(expr: Any, names: Mapping[str, str]) -> str:
    """A sum of products without quotients, but within functions."""
    if expr.is_Integer:
        return f"({int(expr)})" if expr < 0 else str(int(expr))
    if expr.is_Symbol:
        return names[str(expr)]
    if expr.is_Add:
        return f"({' + '.join(_text(each, names) for each in expr.args)})"
    if expr.is_Mul:
        return "*".join(_text(each, names) for each in expr.args)
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return f"({_text(expr.base, names)})**{int(expr.exp)}"
    return _function(expr, names)


def _function(expr: Any, names: Mapping[str, str]) -> str:
    if isinstance(expr, sympy.floor):
        return "divided({}, {})".format(*_fraction(expr.args[0], names))
    if isinstance(expr, sympy.ceiling):
        return "(-divided(-({}), {}))".format(*_fraction(expr.args[0], names))
    if isinstance(expr, (sympy.Mod, sympy.Max, sympy.Min)):
        texts = [_whole_text(each, names) for each in expr.args]
        if isinstance(expr, sympy.Mod):
            return f"({texts[0]} - {texts[1]}*divided({texts[0]}, {texts[1]}))"
        return f"{'max' if isinstance(expr, sympy.Max) else 'min'}({', '.join(texts)})"
    read = canonical(expr)  # such as torch's own functions, which read back as these
    if type(read) is type(expr):
        raise FormatError(f"expected a size of whole numbers, floor, ceiling, Mod, Max and Min; got {expr}")
    return _text(sympy.sympify(read), names)


def divided(top: int, bottom: int) -> int:
    """The quotient, rounded down. Raises ShapeError for a division by 0."""
    if bottom == 0:
        raise ShapeError("expected sizes that divide by 1 or more, got a division by 0: let the dimension's range begin at 1")
    return top // bottom


def whole(top: int, bottom: int, text: str) -> int:
    """The quotient of what must be divisible. Raises ShapeError where it is not, for the size that reads like `text`."""
    if divided(top, bottom) * bottom != top:
        raise ShapeError(f"size {text}: expected a whole number, got {top}/{bottom}: give dimensions that it divides")
    return top // bottom
