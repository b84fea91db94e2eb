"""Element-wise operators as C++ on vectors of N lanes, with torch's names and arguments, and the loops of stages that are made of them.

NaN comes out where eager's does. Of a loop, dimensions that lie in one run are one, the last is that along which results lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isinf, isnan, prod

from lowtide.cpu.layout import Layout
from lowtide.cpu.recipes import Packed
from lowtide.cpu.stages import Map
from lowtide.errors import CheckError
from lowtide.ir.graph import Arg, Atom, Node, Value
from lowtide.ir.operators.nodes import functional_base

Names = Mapping[Value, str]
_TILE = 8  # of fewer elements, moving them one by one is as fast


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


def map_body(stage: Map, address: Callable[[Layout | Packed], str]) -> list[str]:
    shape, steps = _collapsed(stage)
    twos = len(shape) > 2 and shape[-1] == 2 and steps[0][-2:] == [2, 1]
    if twos:
        return _interleaved(stage, shape, steps, address)
    if (turned := _turned(shape, steps)) is not None:
        return _by_tiles(stage, shape, steps, turned, address)
    *outer, inner = shape
    count = 1
    for size in outer:
        count *= size
    lines = [f"  const float* q{at} = {address(place)};" for at, place in enumerate(stage.inputs)]
    lines.append(f"  float* out = {address(stage.out)};")
    if count == 1:  # one run: threads share its vectors
        lines += [f"  Share share = share_of(({inner} + L - 1) / L, run.id, run.count);", "  long begin = share.begin * L;"]
        lines += [f"  long end = share.end * L < {inner} ? share.end * L : {inner};", "  long to = 0;"]
        lines += [f"  long at{at} = 0;" for at in range(len(stage.inputs))]
        return [*lines, *_inner(stage, steps, "begin", "end")]
    lines += [f"  Share share = share_of({count}, run.id, run.count);", "  for (long i = share.begin; i < share.end; i++) {"]
    lines += _offsets(outer, steps)
    return [*lines, *(f"  {line}" for line in _inner(stage, steps, "0", str(inner))), "  }"]


def _collapsed(stage: Map) -> tuple[list[int], list[list[int]]]:
    """Extents and, for the result and each input, strides: in the order in which the result lies, runs put together."""
    strides = (stage.out.stride, *stage.strides)
    dims = [dim for dim in range(len(stage.out.shape)) if stage.out.shape[dim] != 1]
    dims.sort(key=lambda dim: -stage.out.stride[dim])
    shape, steps = [1], [[0] for _ in strides]
    for dim in dims:
        size = stage.out.shape[dim]
        if all(mine[-1] == its[dim] * size for mine, its in zip(steps, strides, strict=True)) and shape[-1] != 1:
            shape[-1] *= size
            for mine, its in zip(steps, strides, strict=True):
                mine[-1] = its[dim]
            continue
        shape.append(size)
        for mine, its in zip(steps, strides, strict=True):
            mine.append(its[dim])
    return shape, steps


def _interleaved(stage: Map, shape: list[int], steps: list[list[int]], address: Callable[[Layout | Packed], str]) -> list[str]:
    """Results that lie in pairs, as of shuffled channels: all first ones of some pairs, then all second ones, put together as vectors."""
    *outer, pairs, _ = shape
    count = prod(outer)
    lines = [f"  const float* q{at} = {address(place)};" for at, place in enumerate(stage.inputs)]
    lines += [f"  float* out = {address(stage.out)};", f"  Share share = share_of({count}, run.id, run.count);"]
    lines += ["  for (long i = share.begin; i < share.end; i++) {", *_offsets(outer, steps)]
    lines += [
        f"    along({pairs}, [&]<int N>(long j) __attribute__((always_inline)) {{",
        "      auto one = [&](long which) __attribute__((always_inline)) {",
    ]
    for at, its in enumerate(steps[1:]):
        lines.append(f"        vec<N> x{at} = {_loaded(at, its[-2], f' + which * {its[-1]}')};")
    lines += [f"        {line}" for line in stage.lines]
    return [
        *lines,
        f"        return vec<N>({stage.result});",
        "      };",
        "      store_pairs<N>(out + to + 2 * j, one(0), one(1));",
        "    });",
        "  }",
    ]


def _turned(shape: list[int], steps: list[list[int]]) -> int | None:
    """The dimension along which a map's one input lies side by side, where that is another than its result's: a tile or more of both."""
    if len(steps) != 2 or steps[0][-1] != 1 or steps[1][-1] in (0, 1) or shape[-1] < _TILE:
        return None
    return next((dim for dim, size in enumerate(shape[:-1]) if steps[1][dim] == 1 and size >= _TILE and steps[0][dim] > 0), None)


def _by_tiles(stage: Map, shape: list[int], steps: list[list[int]], turned: int, address: Callable[[Layout | Packed], str]) -> list[str]:
    """A matrix whose rows become columns, or many: in registers, a tile at a time."""
    outer = [size for dim, size in enumerate(shape[:-1]) if dim != turned]
    rest = [[step for dim, step in enumerate(its[:-1]) if dim != turned] for its in steps]
    offsets = [line.strip().removeprefix("long ").replace("at0 =", "from =") for line in _offsets(outer, rest)]
    return [
        "  auto at = [](long i, long& to, long& from) __attribute__((always_inline)) {",
        *(f"    {line}" for line in offsets),
        "  };",
        "  auto f = []<int N>(vec<N> x0) __attribute__((always_inline)) {",
        *(f"    {line}" for line in stage.lines),
        f"    return vec<N>({stage.result});",
        "  };",
        f"  const float* in = {address(stage.inputs[0])};",
        f"  float* out = {address(stage.out)};",
        f"  turned<{shape[turned]}, {shape[-1]}>(run, {prod(outer)}, at, in, {steps[1][-1]}, out, {steps[0][turned]}, f);",
    ]


def _offsets(outer: list[int], steps: list[list[int]]) -> list[str]:
    index, below = [], 1
    for size in reversed(outer):
        index.append(f"i / {below} % {size}" if below > 1 else f"i % {size}")
        below *= size
    index.reverse()
    names = ["to", *(f"at{at}" for at in range(len(steps) - 1))]
    lines = []
    for name, its in zip(names, steps, strict=True):
        terms = [f"{where} * {step}" for where, step, size in zip(index, its, outer, strict=False) if step and size != 1]
        lines.append(f"    long {name} = {' + '.join(terms) or '0'};")
    return lines


def _inner(stage: Map, steps: list[list[int]], begin: str, end: str) -> list[str]:
    lines = [f"  along({end} - {begin}, [&]<int N>(long some) __attribute__((always_inline)) {{", f"    long j = {begin} + some;"]
    for at, its in enumerate(steps[1:]):
        lines.append(f"    vec<N> x{at} = {_loaded(at, its[-1])};")
    lines += [f"    {line}" for line in stage.lines]
    to = f"out + to + j * {steps[0][-1]}"
    lines.append(f"    store<N>({to}, {stage.result});" if steps[0][-1] == 1 else f"    spread<N>({to}, {steps[0][-1]}, {stage.result});")
    return [*lines, "  });"]


def _loaded(at: int, step: int, beside: str = "") -> str:
    if step == 0:
        return f"all<N>(q{at}[at{at}{beside}])"
    return f"load<N>(q{at} + at{at} + j{beside})" if step == 1 else f"every<N>(q{at} + at{at} + j * {step}{beside}, {step})"
