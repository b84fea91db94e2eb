"""Programs of real operators on real tensors, as graphs; and regions of them run in parts, to be compared with the whole."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping
from typing import Any

import torch

from bench.parts import alike, combined, cut
from lowtide.capture import calls
from lowtide.ir.graph import Atom, Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.axes import Reduced, argument, with_arguments
from lowtide.split.sets import SplitSet

_ROUNDING = 1e-13


class Program:
    """Grows a graph node by node, and runs it at once."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []
        self.tensors: dict[Value, torch.Tensor] = {}
        self._storages: dict[int, Storage] = {}

    def given(self, tensor: torch.Tensor, kind: Kind = Kind.INPUT) -> Value:
        """One more input."""
        self.inputs.append(self._value(tensor, kind))
        return self.inputs[-1]

    def run(self, op: str, *args: Any, kind: Kind = Kind.ACTIVATION, **kwargs: Any) -> Value:
        """One more node that writes nothing; its first result."""
        named = {key: _known(arg, self.tensors) for key, arg in kwargs.items()}
        made = calls.resolve(op)(*_known(_frozen(args), self.tensors), **named)
        results = made if isinstance(made, (tuple, list)) else (made,)
        outputs = tuple(self._value(each, kind) for each in results)
        self.nodes.append(Node(op, _frozen(args), outputs, tuple((key, _frozen(arg)) for key, arg in kwargs.items())))
        return outputs[0]

    def graph(self, *outputs: Value) -> Graph:
        """The program so far."""
        return Graph(tuple(self.inputs), tuple(self.nodes), outputs)

    def _value(self, tensor: torch.Tensor, kind: Kind) -> Value:
        memory = tensor.untyped_storage()
        storage = self._storages.setdefault(memory.data_ptr(), Storage(f"s{len(self._storages)}", memory.nbytes(), "cpu", kind))
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = Value(f"v{len(self.tensors)}", storage, dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        self.tensors[value] = tensor
        return value


def wrong_results(tensors: Mapping[Value, Any], graph: Graph, region: SplitSet, seed: int = 0) -> list[str]:
    """What of a region's results comes out otherwise when it runs in parts."""
    rng = random.Random(seed)
    pieces = cut(region.units, rng)
    parts = [_part(tensors, graph, region, start, stop) for start, stop in pieces]
    shares = [(stop - start) / region.units for start, stop in pieces]
    wrong = []
    for value, role in {**region.written, **region.accumulated}.items():
        made = combined(role, [part[value] for part in parts], shares)
        if isinstance(role, Reduced) and role.over is not None:
            continue  # divided in the end
        if not alike(made, tensors[value]) and not _rounded_away(made, tensors[value]):
            wrong.append(f"{value.name} {role}: {made.flatten()[:4]}, expected {tensors[value].flatten()[:4]}")
    return wrong


def _rounded_away(made: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two sums of numbers near 1 that cancel differ by their rounding alone."""
    alike_else = made.shape == expected.shape and made.dtype == expected.dtype == torch.float64
    return alike_else and float((made - expected).abs().max()) < _ROUNDING


def _part(tensors: Mapping[Value, Any], graph: Graph, region: SplitSet, start: int, stop: int) -> dict[Value, torch.Tensor]:
    """All values of one part."""
    here: dict[Value, torch.Tensor] = {}
    for value, dim in region.sliced.items():
        whole = tensors[value]
        each = whole.shape[dim] // region.units
        here[value] = whole.narrow(dim, start * each, (stop - start) * each)
    numbers = {value for place in region.axes for value in graph.nodes[place].inputs if value.dtype == "scalar"}
    here |= {value: tensors[value] for value in (*region.shared, *numbers)}
    for place, axis in region.axes.items():
        node = graph.nodes[place]
        sizes = {path: argument(node, path) * (stop - start) // region.units for path in axis.sizes}
        mine = with_arguments(node, sizes | dict(axis.instead))
        args, kwargs = _known(mine.args, here), {key: _known(arg, here) for key, arg in mine.kwargs}
        here |= _ran(mine, args, kwargs)
    return here


def _frozen(arg: Any) -> Any:
    return tuple(map(_frozen, arg)) if isinstance(arg, (tuple, list)) else arg


def evaluated(graph: Graph, given: dict[Value, torch.Tensor | float]) -> dict[Value, Any]:
    """All values of a captured graph, run node by node on these inputs; what a node writes is written to a copy."""
    here: dict[Value, Any] = dict(given)
    for node in graph.nodes:
        args, kwargs = _known(node.args, here), {name: _known(arg, here) for name, arg in node.kwargs}
        here |= _ran(node, args, kwargs)
    return here


def _ran(node: Node, args: Any, kwargs: dict[str, Any]) -> dict[Value, Any]:
    """The results of one call, whose written arguments are its own."""
    if node.op.startswith("py."):
        return {value: _ARITHMETIC[node.op](*args) for value in node.results}
    fresh = {before: _at(node, args, kwargs, before).clone() for before, _ in node.writes}
    args = tuple(fresh.get(value, arg) if isinstance(value, Value) else arg for value, arg in zip(node.args, args, strict=True))
    made = calls.resolve(node.op)(*args, **kwargs)
    results = made if isinstance(made, (tuple, list)) else (made,)
    outputs = {value: each for value, each in zip(node.outputs, results, strict=False) if value is not None}
    return outputs | {after: fresh[before] for before, after in node.writes}


_ARITHMETIC = {
    "py.add": operator.add, "py.sub": operator.sub, "py.mul": operator.mul, "py.truediv": operator.truediv, "py.pow": operator.pow,
    "py.neg": operator.neg,
}  # fmt: skip


def _at(node: Node, args: Any, kwargs: dict[str, Any], value: Value) -> torch.Tensor:
    found = [arg for one, arg in zip(node.args, args, strict=True) if one is value]
    found += [kwargs[name] for name, one in node.kwargs if one is value]
    return found[0]


def _known(arg: Any, here: dict[Value, Any]) -> Any:
    """An argument with what values are known to be, and torch's own objects."""
    if isinstance(arg, Value):
        return here[arg]
    if isinstance(arg, Atom):
        return torch.device(arg.name) if arg.kind == "device" else getattr(torch, arg.name)
    return tuple(_known(item, here) for item in arg) if isinstance(arg, tuple) else arg
