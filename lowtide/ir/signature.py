"""A call as one line: all that its results, its memory and its time depend on, but for the machine."""

from __future__ import annotations

from lowtide.ir.graph import Arg, Atom, Node, Value


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
