"""Element-wise operators as C++ on vectors of N lanes, with torch's names and arguments. NaN comes out where eager's does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isinf, isnan

from lowtide.errors import CheckError
from lowtide.ir.graph import Arg, Atom, Node, Value
from lowtide.ir.operators.table import functional_base

Names = Mapping[Value, str]


def number(x: float) -> str:
    if isnan(x):
        return "NAN"
    if isinf(x):
        return "INFINITY" if x > 0 else "(-INFINITY)"
    return f"({float(x)!r}f)"


def _clamp(x: str, low: float | None, high: float | None) -> str:
    expression = x if low is None else f"at_least<N>({x}, {number(low)})"
    return expression if high is None else f"at_most<N>({expression}, {number(high)})"


def _hardsigmoid(x: str) -> str:
    return f"{_clamp(f'({x} + 3.f)', 0.0, 6.0)} * (1.f / 6.f)"


def _gelu(x: str, approximate: str) -> str:
    if approximate == "tanh":
        inner = f"(0.7978845608f * ({x} + 0.044715f * {x} * {x} * {x}))"
        return f"(0.5f * {x}) * (1.f + hyperbolic<N>({inner}))"
    return f"(0.5f * {x}) * (1.f + erf_of<N>({x} * 0.70710678118654752f))"


# By name: how many tensors it takes first, and the text from these, then the other arguments.
_UNARY: dict[str, Callable[..., str]] = {
    "relu": lambda x: _clamp(x, 0.0, None),
    "relu6": lambda x: _clamp(x, 0.0, 6.0),
    "hardtanh": lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    "clamp": lambda x, low=None, high=None: _clamp(x, low, high),
    "clamp_min": lambda x, low: _clamp(x, low, None),
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x: f"{x} * ({_hardsigmoid(x)})",
    "sigmoid": lambda x: f"logistic<N>({x})",
    "silu": lambda x: f"{x} * logistic<N>({x})",
    "gelu": lambda x, approximate="none": _gelu(x, approximate),
    "tanh": lambda x: f"hyperbolic<N>({x})",
    "exp": lambda x: f"exponential<N>({x})",
    "erf": lambda x: f"erf_of<N>({x})",
    "neg": lambda x: f"-{x}",
    "abs": lambda x: f"magnitude<N>({x})",
    "sqrt": lambda x: f"root<N>({x})",
    "rsqrt": lambda x: f"1.f / root<N>({x})",
    "reciprocal": lambda x: f"1.f / {x}",
    "square": lambda x: f"{x} * {x}",
    "leaky_relu": lambda x, slope=0.01: f"({x} < 0.f ? {x} * {number(slope)} : {x})",
    "clone": lambda x: x,
    "contiguous": lambda x: x,
}  # fmt: skip

_BINARY: dict[str, Callable[..., str]] = {
    "add": lambda x, y, alpha=1: f"{x} + {y}" if alpha == 1 else f"{x} + {number(alpha)} * {y}",
    "sub": lambda x, y, alpha=1: f"{x} - {y}" if alpha == 1 else f"{x} - {number(alpha)} * {y}",
    "rsub": lambda x, y, alpha=1: f"{y} - {x}" if alpha == 1 else f"{y} - {number(alpha)} * {x}",
    "mul": lambda x, y: f"{x} * {y}",
    "div": lambda x, y: f"{x} / {y}",
    "maximum": lambda x, y: f"larger<N>({x}, {y})",
    "minimum": lambda x, y: f"smaller<N>({x}, {y})",
}


def is_known(node: Node) -> bool:
    """Whether an operator has a text: by name, and by its arguments."""
    name = name_of(node)
    arity = 1 if name in _UNARY else 2 if name in _BINARY else 0
    tensors = [arg for arg in node.args if isinstance(arg, Value)]
    keywords = {key for key, _ in node.kwargs}
    if not arity or not tensors or not keywords <= {"alpha", "approximate", "memory_format"} or len(tensors) > arity:
        return False
    others = [arg for arg in node.args if not isinstance(arg, Value)] + [arg for _, arg in node.kwargs]
    return all(arg is None or isinstance(arg, (bool, int, float, str, Atom)) for arg in others)


def text(node: Node, names: Names) -> str:
    """The operator's result from variables of its tensors."""
    name = name_of(node)
    given = {key: arg for key, arg in node.kwargs if key != "memory_format"}
    first = 1 if name in _UNARY else 2
    operands = [_operand(arg, names) for arg in node.args[:first]]
    return (_UNARY.get(name) or _BINARY[name])(*operands, *node.args[first:], **given)


def _operand(arg: Arg, names: Names) -> str:
    if isinstance(arg, Value):
        return names[arg]
    if not isinstance(arg, (bool, int, float)):
        raise CheckError(f"expected a number, got {arg!r}")
    return f"all<N>({number(float(arg))})"


def name_of(node: Node) -> str:
    """An aten operator's name without overload and namespace; "" of others."""
    base = functional_base(node.op)
    return base.removeprefix("aten.") if base.startswith("aten.") else ""
