"""A region's body as a torch.fx module, for another compiler.

    takes   the body of a region, a graph of aten operators
    leaves  a module of its arguments in their order, that returns its results; numbers are given as tensors of no dimensions

An operator whose argument must be a number takes none that differs from call to call: such a one is written in sums and products.
"""

from __future__ import annotations

import operator as python
from typing import Any

import torch
from torch import fx

from lowtide.cost.lab.operators import argument, operator
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.table import functional_base, writes_in_place

_aten = torch.ops.aten
_NORM = "aten.native_batch_norm.default"  # whose schema does not say that it writes statistics


def module_of(body: Graph) -> fx.GraphModule:
    graph = fx.Graph()
    names: dict[Value, Any] = {value: graph.placeholder(f"v{at}") for at, value in enumerate(body.inputs)}
    for node in body.nodes:
        made = _call(graph, node, names)
        values = [value for value in node.outputs if value is not None]
        if len(node.outputs) == 1 and values and not _returns_list(node):
            names[values[0]] = made
        else:
            names |= {value: graph.call_function(python.getitem, (made, at)) for at, value in enumerate(node.outputs) if value is not None}
        names |= {after: names[before] for before, after in node.writes}
    graph.output(tuple(names[value] for value in body.outputs))
    return fx.GraphModule({}, graph)


def _returns_list(node: Node) -> bool:
    return isinstance(operator(node.op)._schema.returns[0].type, torch.ListType)


def _call(graph: fx.Graph, node: Node, names: dict[Value, Any]) -> Any:
    if any(value.dtype == "scalar" for value in node.inputs):
        return _scaled(graph, node, names)
    target = _aten._native_batch_norm_legit.default if node.op == _NORM and node.writes else operator(node.op)
    return graph.call_function(
        target, tuple(argument(arg, names) for arg in node.args), {key: argument(arg, names) for key, arg in node.kwargs}
    )


def _scaled(graph: fx.Graph, node: Node, names: dict[Value, Any]) -> Any:
    """A call with numbers that differ from call to call: `a + s * b` and the like, in the memory of `a` where the operator works there."""
    args, said = [argument(arg, names) for arg in node.args], {key: argument(arg, names) for key, arg in node.kwargs}
    call, name = graph.call_function, functional_base(node.op).removeprefix("aten.")
    in_place = writes_in_place(node.op)
    if name in ("mul", "div"):
        return call(getattr(_aten, f"{name}_" if in_place else name).Tensor, tuple(args))
    if name == "lerp":
        more = call(_aten.mul.Tensor, (call(_aten.sub.Tensor, (args[1], args[0])), args[2]))
    elif name in ("addcmul", "addcdiv"):
        pair = call(_aten.mul.Tensor if name == "addcmul" else _aten.div.Tensor, (args[1], args[2]))
        more = call(_aten.mul.Tensor, (pair, said.get("value", 1)))
    else:
        more = call(_aten.mul.Tensor, (args[1], said["alpha"])) if "alpha" in said else args[1]
    base = _aten.sub if name == "sub" else _aten.add
    inplace_base = _aten.sub_ if name == "sub" else _aten.add_
    return call((inplace_base if in_place else base).Tensor, (args[0], more))
