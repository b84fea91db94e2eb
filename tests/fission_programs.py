"""Programs of real operators on real tensors, as graphs; and regions of them run in parts, to be compared with the whole."""

from __future__ import annotations

import random
from typing import Any

import torch

from bench.parts import alike, combined, cut
from lowtide.capture import operators
from lowtide.fission.regions import Region
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.axes.axis import Reduced, argument, with_arguments


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
        made = operators.resolve(op)(*_real(args, self.tensors), **{key: _real(arg, self.tensors) for key, arg in kwargs.items()})
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


def wrong_results(program: Program, graph: Graph, region: Region, seed: int = 0) -> list[str]:
    """What of a region's results comes out otherwise when it runs in parts."""
    rng = random.Random(seed)
    pieces = cut(region.units, rng)
    parts = [_part(program, graph, region, start, stop) for start, stop in pieces]
    shares = [(stop - start) / region.units for start, stop in pieces]
    wrong = []
    for value, role in {**region.written, **region.accumulated}.items():
        made = combined(role, [part[value] for part in parts], shares)
        if isinstance(role, Reduced) and role.over is not None:
            continue  # divided in the end
        if not alike(made, program.tensors[value]):
            wrong.append(f"{value.name} {role}: {made.flatten()[:4]}, expected {program.tensors[value].flatten()[:4]}")
    return wrong


def _part(program: Program, graph: Graph, region: Region, start: int, stop: int) -> dict[Value, torch.Tensor]:
    """All values of one part."""
    here: dict[Value, torch.Tensor] = {}
    for value, dim in region.sliced.items():
        whole = program.tensors[value]
        each = whole.shape[dim] // region.units
        here[value] = whole.narrow(dim, start * each, (stop - start) * each)
    here |= {value: program.tensors[value] for value in region.shared}
    for place, axis in region.axes.items():
        node = graph.nodes[place]
        sizes = {path: argument(node, path) * (stop - start) // region.units for path in axis.sizes}
        mine = with_arguments(node, sizes | dict(axis.instead))
        args, kwargs = _real(mine.args, here), {key: _real(arg, here) for key, arg in mine.kwargs}
        made = operators.resolve(node.op)(*args, **kwargs)
        results = made if isinstance(made, (tuple, list)) else (made,)
        here |= {value: each for value, each in zip(node.outputs, results, strict=True) if value is not None}
    return here


def _real(arg: Any, tensors: dict[Value, torch.Tensor]) -> Any:
    """An argument with tensors in the place of values."""
    if isinstance(arg, Value):
        return tensors[arg]
    return type(arg)(_real(item, tensors) for item in arg) if isinstance(arg, (tuple, list)) else arg


def _frozen(arg: Any) -> Any:
    return tuple(map(_frozen, arg)) if isinstance(arg, (tuple, list)) else arg
