"""How one call is tried on made-up data: as plain data, which can go to another process.

    takes   a node, and the nodes that make what it reads
    leaves  {"values": [...], "steps": [...]}, which JSON can hold: `trial` runs the steps and looks at the last

A value is made up as {"made": [dtype, shape, stride, device]}, is the number {"scalar": 1.0}, or is what an earlier step makes,
{"step": 0, "result": 3}. What one operator leaves for another to read, in a layout that is its own affair (the workspace of a recurrent
layer, bytes in a tensor of uint8), is never made up: the operator that makes it is run first. `with_makers` runs those of all that a call
reads, for a call that made-up data does not suit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Node, Value
from lowtide.ir.operators.nodes import is_arithmetic, is_collective, is_transfer
from lowtide.ir.sizes import ITEM_BYTES, Size, reach


def signature(node: Node) -> str:
    """Operator, layouts and devices of its tensors, which of them are one, other arguments.

    Names do not occur; what is written in place follows from the operator. An example:
    "aten.mm.default(%0:float32[2, 3]/[3, 1]@cpu, %1:float32[3, 4]/[4, 1]@cpu)".
    """
    seen: dict[Value, int] = {}
    given = [_spelled(arg, seen) for arg in node.args] + [f"{name}={_spelled(arg, seen)}" for name, arg in node.kwargs]
    return f"{node.op}({', '.join(given)})"


def _spelled(arg: Arg, seen: dict[Value, int]) -> str:
    """An argument as text. A value is spelled out at its first occurrence, and has its number from then on."""
    if isinstance(arg, tuple):
        return f"[{', '.join(_spelled(item, seen) for item in arg)}]"
    if isinstance(arg, Atom):
        return f"{arg.kind}:{arg.name}"
    if not isinstance(arg, Value):
        return repr(arg)
    if arg in seen:
        return f"%{seen[arg]}"
    seen[arg] = len(seen)
    return f"%{seen[arg]}:{arg.dtype}{list(arg.shape)}/{list(arg.stride)}@{arg.storage.device}"


Makers = Mapping[Value, Node]  # which node makes a value

_DEEPEST = 8  # steps before the call, one needing the other


def makers_of(nodes: Sequence[Node]) -> dict[Value, Node]:
    """Which of these nodes makes each value; a tensor that one has written in place is not what any made."""
    return {value: node for node in nodes for value in node.outputs if value is not None}


def recipe(node: Node, makers: Makers | None = None, *, with_makers: bool = False) -> dict[str, Any]:
    """How to try a call. Raises FormatError for a symbolic size, or for an argument that no graph holds."""
    steps: list[Node] = []
    _collect(node, makers or {}, steps, with_makers, 0)
    return _StepWriter(steps).document()


def argument_bytes(node: Node) -> int:
    """What the tensors take that a call reads. Raises FormatError for a symbolic size."""
    return sum(extent(value) * ITEM_BYTES[value.dtype] for value in node.inputs)


def extent(value: Value) -> int:
    """Elements from the first to the last that a value covers. Raises FormatError for a symbolic size."""
    return reach(numbers(value.shape), numbers(value.stride))


def numbers(sizes: Sequence[Size]) -> list[int]:
    """Sizes as numbers. Raises FormatError for a symbolic one."""
    for size in sizes:
        if not isinstance(size, int):
            raise FormatError(f"expected concrete sizes, got {size}: give its dimensions numbers first")
    return list(sizes)


def is_opaque(value: Value, makers: Makers) -> bool:
    """Whether a value is what one operator leaves for another: bytes, made beside other results."""
    return value.dtype == "uint8" and value in makers and len(makers[value].outputs) > 1


def _collect(node: Node, makers: Makers, steps: list[Node], all_makers: bool, depth: int) -> None:
    """The steps that a call needs, each after what it needs itself."""
    for value in node.inputs:
        maker = makers.get(value)
        if maker is None or maker in steps or depth == _DEEPEST or _is_untried(maker):
            continue
        makes_view = any(value.storage is given.storage for given in maker.inputs)
        if all_makers or is_opaque(value, makers) or (makes_view and _is_opaque_below(maker, value, makers)):
            _collect(maker, makers, steps, makes_view and all_makers, depth + 1)
    steps.append(node)


def _is_untried(maker: Node) -> bool:
    """Whether a node cannot run in a trial."""
    return is_arithmetic(maker) or is_transfer(maker) or is_collective(maker) or maker.body is not None


def _is_opaque_below(maker: Node, value: Value, makers: Makers) -> bool:
    """Whether a view is one of something opaque."""
    return any(is_opaque(given, makers) for given in maker.inputs if given.storage is value.storage)


class _StepWriter:
    """Writes steps down, each value once."""

    def __init__(self, steps: Sequence[Node]) -> None:
        self._steps = steps
        self._numbers: dict[Value, int] = {}
        self._values: list[dict[str, Any]] = []

    def document(self) -> dict[str, Any]:
        written = []
        for at, node in enumerate(self._steps):
            args = [self._argument(arg) for arg in node.args]
            written.append({"op": node.op, "args": args, "kwargs": {name: self._argument(arg) for name, arg in node.kwargs}})
            for index, value in enumerate(node.outputs):
                if value is not None:
                    self._note(value, {"step": at, "result": index})
        return {"values": self._values, "steps": written}

    def _note(self, value: Value, entry: dict[str, Any]) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self._values)
            self._values.append(entry)
        return self._numbers[value]

    def _argument(self, arg: Arg) -> Any:
        if isinstance(arg, Value):
            return {"value": self._note(arg, _made_up(arg))}
        if isinstance(arg, tuple):
            return [self._argument(item) for item in arg]
        if isinstance(arg, Atom):
            return {"atom": [arg.kind, arg.name]}
        if isinstance(arg, complex):
            return {"complex": [arg.real, arg.imag]}
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise FormatError(f"expected concrete sizes, got {arg}: give its dimensions numbers first")


def _made_up(value: Value) -> dict[str, Any]:
    if value.dtype == "scalar":
        return {"scalar": 1.0}
    return {"made": [value.dtype, numbers(value.shape), numbers(value.stride), value.storage.device]}
