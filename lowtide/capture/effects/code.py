"""The code of the user's functions: the names that it reads, and functions made of it that have calls in the places of expressions.

Such calls stand where Python answers in C: texts and conversions of numbers that only the running step knows, and questions for the class
of what stands for a number, a tensor or a container: `f"{loss.item():.3f}"`, `"%.3f" % x`, `"{}".format(x)`, `", ".join(...)`;
`float(loss)`, `int(count)`, `str(x)`, `len(batch)`. What these give is an expression that each step computes again. What has no such
numbers is what it was. So do questions for identity, `id(p)` and `p is q`: a parameter that the program has from elsewhere is that of the
model.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import itertools
import linecache
import operator
import re
import string
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.places import ABSENT, Position
from lowtide.capture.effects.sums import NumberExpression, Term, are_of_step, as_term, earlier_of, is_term, text_of, whole
from lowtide.capture.results import is_number
from lowtide.capture.sizes.symbols import is_size
from lowtide.capture.sources import is_users

_NAMES, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "IMPORT_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
IMPORT = "import "
NAMES = ("float", "int", "str", "len")
_ASKING = ("type", "id")  # functions that are asked for in their places
real_of: ContextVar[Callable[[Any], Any]] = ContextVar("real_of", default=lambda item: item)  # of a tensor's fake, while one captures


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for piece in code.co_consts:
        if isinstance(piece, types.CodeType):
            yield from codes(piece)


def named(code: types.CodeType) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """The globals, free variables and ("import x") modules that code names, each with attributes read of it in a row, and the line."""
    name, chain, line, at = "", [], code.co_firstlineno, code.co_firstlineno
    for each in dis.get_instructions(code):
        at = each.starts_line or at if not isinstance(each.starts_line, bool) else getattr(each, "line_number", at) or at
        if name and each.opname in _ATTRIBUTES:
            chain.append(each.argval)
            continue
        if name:
            yield name, tuple(chain), line
            name, chain = "", []
        if each.opname in _NAMES:
            name, line = f"{IMPORT if each.opname == 'IMPORT_NAME' else ''}{each.argval}", at
    if name:
        yield name, tuple(chain), line


def assigned(code: types.CodeType) -> Iterator[str]:
    """The globals, and the variables of functions around it, that code sets."""
    for piece in codes(code):
        for each in dis.get_instructions(piece):
            if each.opname == "STORE_GLOBAL" or (each.opname == "STORE_DEREF" and each.argval in code.co_freevars):
                yield each.argval


class Positions(MutableMapping[str, Any]):
    """The table of some names of a holder. One is not there while nothing is assigned."""

    def __init__(self, holder: Any, names: Sequence[str]) -> None:
        self._places = {name: Position.of(holder, name) for name in names}

    def __getitem__(self, name: str) -> Any:
        if name not in iter(self):
            raise KeyError(name)
        return self._places[name].now()

    def __setitem__(self, name: str, value: Any) -> None:
        self._places[name].put(value)

    def __delitem__(self, name: str) -> None:
        self._places[name].put(ABSENT)

    def __iter__(self) -> Iterator[str]:
        return (name for name, place in self._places.items() if place.now() is not ABSENT)

    def __len__(self) -> int:
        return sum(1 for _ in self)  # a list of them would ask for it


def is_read(name: str, code: types.CodeType) -> bool:
    """Whether code reads a variable of this name, or asks for all variables."""
    read = {word for each in codes(code) for word, _, _ in named(each)}
    return not read.isdisjoint({name, "globals", "vars", "eval", "exec"})


def converted(kind: Any, *args: Any, **options: Any) -> Any:
    """What such a function makes of a number of the step, or of a size; all else is called as it is."""
    if len(args) != 1 or options or kind not in (float, int, str, len):
        return kind(*args, **options)
    (item,) = args
    if kind is len:  # of a tensor: torch gives a number, which fixes the size
        return item.shape[0] if issubclass(type(item), torch.Tensor) and item.dim() else len(item)
    if kind is str:
        return shown(str, item)
    if isinstance(item, (torch.SymInt, torch.SymFloat)):
        return torch.sym_float(item) if kind is float else torch.sym_int(item)
    number = number_of(item)
    if is_number(number) and (is_term(number) or not isinstance(number, Term)) and number.kind is kind:
        return number
    if not is_term(number):
        return kind(number)
    return NumberExpression(float, (number,), float) if kind is float else whole(int, number)


def number_of(item: Any) -> Any:
    """What `item()` of a tensor gives that the step computes; all else is itself."""
    return item.item() if issubclass(type(item), FakeTensor) else item


def as_formatted(item: Any) -> Any:
    """What `format` writes for it: the number of a tensor that has no dimensions and is no parameter."""
    return item if issubclass(type(item), FakeTensor) and (item.dim() or isinstance(item, nn.Parameter)) else number_of(item)


_AS_SHOWN: dict[int, Callable[[Any], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}
_FORMAT, _PLAIN_FORMAT = format, vars(object)["__format__"]  # Python's own, as another function is there during a capture
_FIELD = re.compile(r"%[#0\- +]*\d*(?:\.\d+)?[hlL]?([a-zA-Z%])")


def formatted(value: Any, conversion: int, spec: Any) -> Any:
    """`f"{value!r:>8}"`."""
    if conversion in _AS_SHOWN:
        value = shown(_AS_SHOWN[conversion], value)
    elif not spec and type(value).__format__ is _PLAIN_FORMAT:
        value = shown(str, value)
    value = as_formatted(value)
    return format(value, spec) if str(spec).endswith("c") else shown(_FORMAT, value, spec)  # `c` fails for some numbers


def shown(function: Callable[..., str], item: Any, *spec: Any) -> Any:
    """What `str`, `repr` or `format` makes of something: what the user's class says, which may be a text of such numbers."""
    return text_of(function, item, *spec) if (text := teller(function.__name__, item)) is None else text(*spec)


def teller(name: str, item: Any) -> Callable[..., Any] | None:
    """The function of the user's that Python calls for a text; None where it is another one."""
    method = getattr(type(item), f"__{name}__", None)
    if isinstance(method, types.FunctionType):
        return functools.partial(method, item) if is_users(method) else None
    return teller("repr", item) if name == "str" and method is object.__str__ else None


def joined(*pieces: Any) -> Any:
    return text_of(_filled, "%s" * len(pieces), *pieces)


def modulo(one: Any, two: Any) -> Any:
    """`"%.3f" % x`, and the remainder of numbers."""
    values = two if type(two) is tuple else (two,)
    letters = [each for each in _FIELD.findall(one) if each != "%"] if type(one) is str else []
    if len(letters) != len(values):
        return operator.mod(one, two)
    values = tuple(
        shown(str, each) if letter == "s" and teller("str", each) else each for letter, each in zip(letters, values, strict=True)
    )
    values = tuple(map(as_term, values))
    if not are_of_step(values):
        return operator.mod(one, two)
    values = tuple(each if letter in "sra" else number_of(each) for letter, each in zip(letters, values, strict=True))
    fractions = {letter for letter, each in zip(letters, values, strict=True) if is_term(each) and each.kind is float}
    if fractions - {*"sradiueEfFgG"}:  # fails for some
        return operator.mod(one, two)
    values = tuple(whole(int, each) if letter in "diu" and is_term(each) else each for letter, each in zip(letters, values, strict=True))
    return text_of(_filled, one, *values)


def _filled(template: str, *values: Any) -> str:
    return template % values


def called(item: Any, name: str, /, *args: Any, **named: Any) -> Any:
    """A method of a text, or one of that name of anything else."""
    if type(item) is str and name == "format":
        return _from_template(item, args, named, itertools.count())
    if type(item) is str and len(args) == 1 and not named:
        pieces = [*args[0]]
        args = (pieces,)
        if any(is_term(each) or is_size(each) for each in pieces):
            return joined(*[each for piece in pieces for each in (item, piece)][1:])
    return getattr(item, name)(*args, **named)


def _from_template(template: str, args: Sequence[Any], named: Mapping[str, Any], numbers: Iterator[int]) -> Any:
    formatter, pieces = string.Formatter(), list[Any]()
    for literal, name, spec, conversion in formatter.parse(template):
        pieces.append(literal)
        if name is not None:
            name = f"{next(numbers)}{name}" if name[:1] in ("", ".", "[") else name
            value, _ = formatter.get_field(name, args, named)
            pieces.append(formatted(value, ord(conversion or "\0"), _from_template(spec or "", args, named, numbers)))
    return joined(*pieces)


def rewrite(function: types.FunctionType, undo: Callable[[Callable[[], object]], None], named: set[str] | None = None) -> None:
    """Have a function ask so, where its source is that of its code. `named`: the names in it, where it makes no texts so."""
    code = function.__code__
    if named is not None and named.isdisjoint({*_ASKING, "__class__"}) and not _compares_identities(code):
        return
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    new_code = _rewritten(code.co_filename, text, _ClassRewriter if named is not None else _TextRewriter).get(code, code)
    if new_code != code:
        undo(lambda: setattr(function, "__code__", code))
        function.__code__ = new_code


@functools.lru_cache(maxsize=4096)
def _compares_identities(code: types.CodeType) -> bool:
    """Whether it asks `x is y` of anything but constants."""
    instructions = [each for piece in codes(code) for each in dis.get_instructions(piece)]
    return any(two.opname == "IS_OP" and one.opname != "LOAD_CONST" for one, two in itertools.pairwise(instructions))


def _id(function: Callable[[Any], Any], item: Any) -> Any:
    """What a function of that name gives; Python's own, of the tensor that the caller has."""
    return function(real_of.get()(item) if function is builtins.id else item)


def _is(one: Any, two: Any) -> bool:
    """Each step looks again whether it is one number that lies in two places."""
    if (earlier := earlier_of(one) or earlier_of(two)) is not None:
        answer: bool = earlier.decides(NumberExpression(operator.is_, (one, two), bool))
        return answer
    return real_of.get()(one) is real_of.get()(two)


def _type(*given: Any) -> Any:
    """What a function of that name is called with behind it; alone, what Python's own is called with."""
    *function, item = given
    return _class(item) if function in ([], [builtins.type]) else function[0](item)


def _class(item: Any) -> Any:
    """`x.__class__`, which numbers and containers of a capture say themselves."""
    if type(item) is not FakeTensor:
        return item.__class__
    return nn.Parameter if isinstance(item, nn.Parameter) else torch.Tensor


def _asking(item: Any) -> Any:
    """What asks in the place of Python's own `type` or `id`; not of a variable of that name."""
    return _type if item is builtins.type else functools.partial(_id, item) if item is builtins.id else item


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"\0{each.__name__}": each
    for each in (_type, _class, _id, _is, _asking, converted, functools.partial, formatted, joined, modulo, called)
}


_CALLING = {"map", "filter", "filterfalse", "starmap", "sorted", "sort", "min", "max", "groupby", "reduce", "partial"}


class _ClassRewriter(ast.NodeTransformer):
    """Calls in the places of questions for a class or an identity; their functions are constants of the code."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return _call(_class, node, node.value) if node.attr == "__class__" and isinstance(node.ctx, ast.Load) else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], (ast.Is, ast.IsNot)) or isinstance(node.comparators[0], ast.Constant):
            return node
        same = _call(_is, node, node.left, *node.comparators)
        return same if isinstance(node.ops[0], ast.Is) else ast.copy_location(ast.UnaryOp(ast.Not(), same), node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = _handed_on(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in _CALLING:
            node.args[:] = map(_handed_on, node.args)
            for keyword in node.keywords:
                keyword.value = _handed_on(keyword.value)
        if not isinstance(node.func, ast.Name) or node.func.id not in _ASKING or len(node.args) != 1 or node.keywords:
            return node
        asks = _type if node.func.id == "type" else _id
        return node if isinstance(node.args[0], ast.Starred) else _call(asks, node, node.func, *node.args)


class _TextRewriter(_ClassRewriter):
    """And in the places of expressions that make texts, and of conversions."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        return _call(joined, node, *(self.visit(each) for each in node.values))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        self.generic_visit(node)
        return _call(formatted, node, node.value, ast.Constant(node.conversion), node.format_spec or ast.Constant(""))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return _call(modulo, node, node.left, node.right) if isinstance(node.op, ast.Mod) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        visited = super().visit_Call(node)
        if _is_conversion(node.func):
            return _call(converted, node, node.func, *node.args, keywords=node.keywords)
        if isinstance(node.func, ast.Name) and node.func.id == "map" and _is_conversion(node.args[0] if node.args else node):
            node.args[0] = _call(functools.partial, node, ast.Constant("\0converted"), node.args[0])
        if visited is not node or not isinstance(node.func, ast.Attribute) or node.func.attr not in ("format", "join"):
            return visited
        return _call(called, node, node.func.value, ast.Constant(node.func.attr), *node.args, keywords=node.keywords)


def _handed_on(node: ast.expr) -> ast.expr:
    """`T = type`, `map(id, items)`, `sorted(items, key=type)`."""
    return _call(_asking, node, node) if isinstance(node, ast.Name) and node.id in _ASKING else node


def _is_conversion(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in NAMES


def _call(function: Callable[..., Any], of: ast.expr, *args: ast.expr, keywords: Sequence[ast.keyword] = ()) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Constant(f"\0{function.__name__}"), [*args], [*keywords]), of)


@functools.lru_cache(maxsize=64)
def _rewritten(file: str, text: str, rewriter: type[ast.NodeTransformer]) -> dict[types.CodeType, types.CodeType]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a constant is called
            plain = compile(text, file, "exec", dont_inherit=True)
            new_code = compile(ast.fix_missing_locations(rewriter().visit(ast.parse(text))), file, "exec", dont_inherit=True)
        return dict(zip(codes(plain), codes(_bound(new_code)), strict=True))
    except (SyntaxError, ValueError, RecursionError):
        return {}


def _bound(code: types.CodeType) -> types.CodeType:
    consts = (_bound(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=tuple(_FUNCTIONS.get(each, each) if type(each) is str else each for each in consts))
