"""Texts made of numbers that only the running step knows: `f"{loss.item():.3f}"`, `"%.3f" % x`, `"{}".format(x)`, `", ".join(...)`.

Python makes such texts in C, of what it has. So functions of the user's that make some run from their own source, with calls in the
places of those expressions. What these give is an expression that each step computes again. A text without such numbers is what it was.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import operator
import re
import string
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from lowtide.capture.effects.conversions import number_of
from lowtide.capture.effects.sums import Term, text_of

_AS_SHOWN: dict[int, Callable[[Any], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}
_FIELD = re.compile(r"%[#0\- +]*\d*(?:\.\d+)?[hlL]?([a-zA-Z%])")


def rewrite(function: types.FunctionType, undo: Callable[[Callable[[], object]], None]) -> None:
    """Have a function make its texts so, where its source is that of its code."""
    code = function.__code__
    made = _rewritten(code.co_filename, "".join(linecache.getlines(code.co_filename, function.__globals__))).get(code, code)
    if made != code:
        undo(lambda: setattr(function, "__code__", code))
        function.__code__ = made


def _formatted(value: Any, conversion: int, spec: Any) -> Any:
    """`f"{value!r:>8}"`."""
    if conversion in _AS_SHOWN:
        value = text_of(_AS_SHOWN[conversion], value)
    elif issubclass(type(value), FakeTensor) and not value.dim():
        value = number_of(value)
    return format(value, spec) if str(spec).endswith("c") else text_of(format, value, spec)  # `c` fails for some numbers


def _joined(*pieces: Any) -> Any:
    return text_of(_concatenation, *pieces)


def _concatenation(*pieces: str) -> str:
    return "".join(pieces)


def _modulo(one: Any, two: Any) -> Any:
    values = two if type(two) is tuple else (two,)
    if type(one) is not str or not any(issubclass(type(each), (Term, FakeTensor)) for each in values):
        return operator.mod(one, two)
    letters = [each for each in _FIELD.findall(one) if each != "%"]
    if len(letters) != len(values):
        return operator.mod(one, two)
    values = tuple(each if letter in "sra" else number_of(each) for letter, each in zip(letters, values, strict=True))
    fractions = {letter for letter, each in zip(letters, values, strict=True) if isinstance(each, Term) and each.kind is float}
    if fractions - {*"sraeEfFgG"}:  # fails for some
        return operator.mod(one, two)
    return text_of(_filled, one, *values)


def _filled(template: str, *values: Any) -> str:
    return template % values


def _called(item: Any, name: str, /, *args: Any, **named: Any) -> Any:
    """A method of a text, or one of that name of anything else."""
    if type(item) is str and name == "format":
        return _from_template(item, args, named, itertools.count())
    if type(item) is str and len(args) == 1 and not named:
        pieces = [*args[0]]
        args = (pieces,)
        if any(isinstance(each, Term) for each in pieces):
            return _joined(*[each for piece in pieces for each in (item, piece)][1:])
    return getattr(item, name)(*args, **named)


def _from_template(template: str, args: Sequence[Any], named: Mapping[str, Any], numbers: Iterator[int]) -> Any:
    formatter, pieces = string.Formatter(), list[Any]()
    for literal, name, spec, conversion in formatter.parse(template):
        pieces.append(literal)
        if name is not None:
            name = f"{next(numbers)}{name}" if name[:1] in ("", ".", "[") else name
            value, _ = formatter.get_field(name, args, named)
            pieces.append(_formatted(value, ord(conversion or "\0"), _from_template(spec or "", args, named, numbers)))
    return _joined(*pieces)


_FUNCTIONS: dict[str, Callable[..., Any]] = {f"\0{each.__name__}": each for each in (_formatted, _joined, _modulo, _called)}


class _TextRewriter(ast.NodeTransformer):
    """Calls in the places of expressions that make texts; their functions are constants of the code."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        return _call(_joined, node, *(self.visit(each) for each in node.values))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        self.generic_visit(node)
        return _call(_formatted, node, node.value, ast.Constant(node.conversion), node.format_spec or ast.Constant(""))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return _call(_modulo, node, node.left, node.right) if isinstance(node.op, ast.Mod) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("format", "join"):
            return node
        return _call(_called, node, node.func.value, ast.Constant(node.func.attr), *node.args, keywords=node.keywords)


def _call(function: Callable[..., Any], of: ast.expr, *args: ast.expr, keywords: Sequence[ast.keyword] = ()) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Constant(f"\0{function.__name__}"), [*args], [*keywords]), of)


@functools.lru_cache(maxsize=64)
def _rewritten(file: str, text: str) -> dict[types.CodeType, types.CodeType]:
    """The codes of a file, and what each becomes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a constant is called
            plain = compile(text, file, "exec", dont_inherit=True)
            made = compile(ast.fix_missing_locations(_TextRewriter().visit(ast.parse(text))), file, "exec", dont_inherit=True)
        return dict(zip(_codes(plain), _codes(_bound(made)), strict=True))
    except (SyntaxError, ValueError, RecursionError):
        return {}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _bound(code: types.CodeType) -> types.CodeType:
    consts = (_bound(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=tuple(_FUNCTIONS.get(each, each) if type(each) is str else each for each in consts))
