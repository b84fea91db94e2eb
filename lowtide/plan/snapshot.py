"""What memory holds at one step of a program, what tensors are for in people's words, and where in the user's program they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lowtide.base import fields
from lowtide.base.messages import bytes_text, op_text
from lowtide.errors import FormatError
from lowtide.ir.graph import Graph, Kind, Node, Source, Storage, Value
from lowtide.ir.operators.nodes import is_transfer
from lowtide.ir.sizes import Size


def source_text(source: Source | None) -> str:
    """The module and the line: "blocks.0.mlp, model.py:12"; "" where neither is known."""
    if source is None:
        return ""
    line = f"{PurePath(source.file).name}:{source.line}"
    return f"{source.module}, {line}" if source.module else line


_TEXTS = {
    Kind.PARAMETER: "parameters",
    Kind.BUFFER: "buffers",
    Kind.STATE: "optimizer state",
    Kind.INPUT: "batch",
    Kind.CONSTANT: "constants",
    Kind.ACTIVATION: "activations",
    Kind.GRADIENT: "gradients",
    Kind.TEMPORARY: "the optimizer's temporaries",
}


def kind_text(kind: Kind) -> str:
    return _TEXTS.get(kind, kind.value)


def kinds_text(by_kind: Mapping[Kind, int]) -> str:
    """Bytes by kind in a line: "parameters 9.00 MiB, batch 1.00 KiB"; nothing of what has none."""
    return ", ".join(f"{kind_text(kind)} {bytes_text(nbytes)}" for kind, nbytes in by_kind.items() if nbytes)


_PHASES = {Kind.ACTIVATION: "forward", Kind.BUFFER: "forward", Kind.GRADIENT: "backward"}


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """What a storage is as a tensor, and which node makes it."""

    storage: Storage
    dtype: str
    shape: tuple[Size, ...]
    maker: Node | None  # None: it is an input of the graph

    @property
    def op(self) -> str:
        """The operator that makes it, "" where it is an input."""
        return "" if self.maker is None else self.maker.op

    @property
    def source(self) -> Source | None:
        return None if self.maker is None else self.maker.source


def storage_specs(graph: Graph) -> dict[Storage, StorageSpec]:
    """Every storage of a graph, as the first value on it looks: that of the input, or of the node that makes it."""
    specs: dict[Storage, StorageSpec] = {}
    for value, maker in _values(graph):
        if value.storage not in specs:
            specs[value.storage] = StorageSpec(value.storage, value.dtype, value.shape, maker)
    return specs


def specs_by_name(graph: Graph) -> dict[str, StorageSpec]:
    return {storage.name: spec for storage, spec in storage_specs(graph).items()}


def _values(graph: Graph) -> Iterator[tuple[Value, Node | None]]:
    for value in graph.inputs:
        yield value, None
    for node in graph.nodes:
        for result in node.outputs:
            if result is not None:
                yield result, node


def phase_of(node: Node) -> str:
    """Which part of a training step a node is of: "forward", "backward" or "optimizer"; of inference all is "forward".

    A node of the forward pass that is run again, for the backward pass, is still of the forward pass.
    """
    given = {value.storage for value in node.inputs}
    kinds = [after.storage.kind for _, after in node.writes]
    kinds += [value.storage.kind for value in node.outputs if value is not None and value.storage not in given]
    if is_transfer(node):
        kinds = [value.storage.kind for value in (*node.inputs, *node.results) if value.storage.kind is not Kind.HOST]
    return _PHASES.get(kinds[0], "optimizer") if kinds else "forward"


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A storage and the steps `[start, end)` over which it lives; where its memory is taken over, it ends where the taker starts."""

    name: str
    nbytes: int  # as the allocator rounds it
    kind: Kind
    dtype: str
    shape: tuple[Size, ...]
    op: str  # of the node that makes it, "" where it is an input
    source: Source | None  # of that node
    start: int
    end: int

    @classmethod
    def of(cls, spec: StorageSpec, nbytes: int, start: int, end: int) -> LiveTensor:
        return cls(spec.storage.name, nbytes, spec.storage.kind, spec.dtype, spec.shape, spec.op, spec.source, start, end)

    def row(self) -> list[Any]:
        """What JSON keeps of it: the rest is in the graph."""
        return [self.name, self.nbytes, self.start, self.end]

    @property
    def module(self) -> str:
        """The path of the module that makes it, "" where none does."""
        return "" if self.source is None else self.source.module

    @property
    def dtype_and_shape(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def made_by(self) -> str:
        """The operator and where, "gelu of blocks.0.mlp, model.py:12"; "the caller" of an input."""
        where = source_text(self.source)
        return f"{op_text(self.op)}{f' of {where}' if where else ''}" if self.op else "the caller"


@dataclass(frozen=True)
class Snapshot:
    """One step of a program in some order: what runs, and what memory holds. The tensors' bytes and the workspace are the footprint."""

    step: int
    steps: int  # of the program
    op: str
    source: Source | None
    phase: str  # of which its operator is: "forward", "backward" or "optimizer"
    footprint_bytes: int
    workspace_bytes: int  # what the operator needs beside its inputs and results
    tensors: tuple[LiveTensor, ...]  # all that have bytes, the largest first

    @classmethod
    def of(cls, graph: Graph, step: int, node: Node, workspace_bytes: int, tensors: tuple[LiveTensor, ...]) -> Snapshot:
        footprint_bytes = workspace_bytes + sum(tensor.nbytes for tensor in tensors)
        return cls(step, len(graph.nodes), node.op, node.source, phase_of(node), footprint_bytes, workspace_bytes, tensors)

    @property
    def by_kind(self) -> dict[Kind, int]:
        """Bytes by what tensors are for, the most first."""
        return _summed((tensor.kind, tensor.nbytes) for tensor in self.tensors)

    def by_module(self, kind: Kind) -> dict[str, int]:
        """Bytes of the tensors of a kind by the module that made them, the most first."""
        return _summed((tensor.module, tensor.nbytes) for tensor in self.tensors if tensor.kind is kind)

    def rows(self) -> dict[str, Any]:
        """What JSON keeps of it: the rest is in the graph."""
        return {"step": self.step, "workspace_bytes": self.workspace_bytes, "tensors": [tensor.row() for tensor in self.tensors]}


def _summed(pairs: Iterator[tuple[Any, int]]) -> dict[Any, int]:
    total: Counter[Any] = Counter()
    for key, nbytes in pairs:
        total[key] += nbytes
    return dict(total.most_common())


def snapshot_from(where: str, item: Any, graph: Graph, order: Sequence[int]) -> Snapshot:
    """The snapshot that `Snapshot.rows` wrote, of this graph in this order. Raises FormatError for what cannot be one."""
    fields.check_fields(where, item, {"step", "workspace_bytes", "tensors"})
    step, workspace_bytes, rows = fields.integer(where, item, "step"), fields.integer(where, item, "workspace_bytes"), item.get("tensors")
    if not 0 <= step < len(order):
        fields.refuse(where, "step", f"0 or more and below {len(order)}", step)
    if workspace_bytes < 0 or not isinstance(rows, list):
        fields.refuse(where, "tensors", "a list, and 'workspace_bytes' 0 or more", rows)
    known = specs_by_name(graph)
    tensors = tuple(tensor_from(where, row, known, len(order)) for row in rows)
    if not all(tensor.start <= step < tensor.end for tensor in tensors):
        fields.refuse(where, "tensors", f"tensors that live at step {step}", rows)
    return Snapshot.of(graph, step, graph.nodes[order[step]], workspace_bytes, tensors)


def tensor_from(where: str, row: Any, known: Mapping[str, StorageSpec], steps: int) -> LiveTensor:
    """The tensor that `LiveTensor.row` wrote. Raises FormatError for what cannot be one."""
    if not isinstance(row, list) or [type(item) for item in row] != [str, int, int, int]:
        fields.refuse(where, "tensor", "[storage, bytes, start, end]", row)
    name, nbytes, start, end = row
    if name not in known or nbytes < 0 or not 0 <= start <= end <= steps:
        raise FormatError(f"{where}: expected a storage of the graph, with its bytes and a life within {steps} steps, got {row}")
    return LiveTensor.of(known[name], nbytes, start, end)
