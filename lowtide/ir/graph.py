"""The nouns: Storage, Value, Node, Graph. Immutable, compared by identity, without torch.

    Graph   = inputs: Value*   nodes: Node*   outputs: Value*   dimensions: Dimension*
    Node    = op(args, kwargs) -> outputs     writes: (before, after)*   after: Node*   inplace: (Value, op)*   body: Graph?
    Arg     = Value | Atom | None | bool | int | float | complex | str | Size | (Arg, ...)
    Value   = a typed, strided view of one version of a Storage
    Storage = a block of bytes on a device
    Slot    = where the caller keeps what the graph reads

`nodes` stand in program order, one order that is right; every topological order of `edges.predecessors` is. Memory is counted on
storages, never on values. A storage that a node makes is written once, by that node (the normal form that `capture` leaves); only storages
that the caller owns are written again, by nodes that list what they write in `writes`. Each write makes a new version of the
storage: a node that reads version k comes after the writer of k and before the writer of k + 1. These hazards follow from the values
alone, so a rewrite cannot lose them.

A Python number that changes from step to step (a learning rate, Adam's bias correction) is a value too: of dtype "scalar", no shape,
and a storage of 0 bytes. So is a generator that the program draws from, where it names one.

What has been sent to the host lies on a storage of kind "host". Three operators know of it: `host.store(t) -> h` begins to copy the whole
storage of `t`; `host.drop(t, h)` is the last use of that copy of `t`, once the store is done; `host.load(h) -> t2` makes a new storage and
begins to fill it. Such a storage is no memory of the device, and counts nowhere. Where `t` is the caller's, the drop also writes it: it
empties the caller's block, which the load fills again, so `t2` is of the caller's kind and counts as the caller's from there on.

State that lies on the host between steps is an input of kind "host". A load makes of it a storage of kind "state", which the step writes;
`host.save(t, h)` begins to copy that back over `h`, which is a write of `h`, and a drop of `t` comes after it. What a step makes of such
state anew is stored and dropped, and the copy returned.

A node may own a body, a graph of its own that it runs; `ir.bodies` says what becomes of arguments and results.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, TypeAlias, Union

from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.sizes import Size

Path: TypeAlias = "tuple[str | int, ...]"


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in the caller's program: `table` says of which kind, `path` where among those.

    parameter, buffer  (name, ...)                     of the model, "layer1.0.conv1.weight", or what such a one is made of
    attribute          (name,)                         a plain tensor of a module, "layer1.memory"
    state              (parameter's name, key, ...)    of the optimizer: a tensor or a number, perhaps within lists and dictionaries
    optimizer          (its index, attribute, ...)     the same of what it keeps for no parameter
    group              (group's index, key, ...)       a hyper-parameter
    scaler             (attribute,)                    of the gradient scaler
    batch              (leaf's index,)
    constant           (index,)                        a tensor that the program closes over, or a generator that it draws from
    data               (table, *path)                  the memory of the tensor that lies in another slot
    requires_grad      (table, *path)                  whether that tensor is trained
    early              (number,)                       none: what only a step that ends early puts somewhere
    """

    table: str
    path: Path

    def __str__(self) -> str:
        return f"{self.table} {'.'.join(map(str, self.path))}"


class Kind(str, enum.Enum):
    """What a storage is for, and with it who owns it."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "state"  # of an optimizer
    INPUT = "input"  # part of the batch
    CONSTANT = "constant"  # a tensor that the program closes over
    ARGUMENT = "argument"  # of a body: the graph around it holds that meanwhile
    SCALAR = "scalar"  # a Python number
    HOST = "host"  # a copy in the host's memory
    ACTIVATION = "activation"  # made by the forward pass
    GRADIENT = "gradient"  # made by the backward pass
    TEMPORARY = "temporary"  # made by the optimizer

    @property
    def caller_owned(self) -> bool:
        """Whether the caller holds such a storage for the whole step when it is an input of the graph."""
        return self in _CALLER_OWNED


_CALLER_OWNED = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.STATE, Kind.INPUT, Kind.CONSTANT, Kind.ARGUMENT})


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """A block of bytes. Its name is unique in a graph."""

    name: str
    nbytes: Size
    device: str  # "cpu", "cuda:0"
    kind: Kind


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor: shape and stride over a storage, as it is after `version` writes. Its name is unique in a graph."""

    name: str
    storage: Storage
    dtype: str  # "float32": a key of sizes.ITEM_BYTES
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]  # elements
    offset: Size = 0  # elements
    version: int = 0


def free_name(wanted: str, taken: set[str]) -> str:
    """A name that is none of those `taken`, with `_` behind it where it takes that; it is one of them from now on."""
    while wanted in taken:
        wanted += "_"
    taken.add(wanted)
    return wanted


@dataclass(frozen=True, slots=True)
class Atom:
    """An argument that only torch can spell: Atom("dtype", "float32"), Atom("device", "cuda:0")."""

    kind: str  # "dtype", "device", "layout" or "memory_format"
    name: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's program a node comes from."""

    file: str
    line: int
    module: str = ""  # path of the innermost module, "layer1.0.conv1"


Arg: TypeAlias = Union["Value", Atom, bool, int, float, complex, str, Size, "tuple[Arg, ...]", None]


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One call of an operator. Two nodes are never the same one, however alike: a recomputed copy is a second node."""

    op: str  # "aten.add.Tensor"; "py.mul" for arithmetic on scalars
    args: tuple[Arg, ...]
    outputs: tuple[Value | None, ...]  # None: a result that does not exist or that nobody reads
    kwargs: tuple[tuple[str, Arg], ...] = ()
    writes: tuple[tuple[Value, Value], ...] = ()  # (before, after): same tensor, next version
    after: tuple[Node, ...] = ()  # control edges
    inplace: tuple[
        tuple[Value, str], ...
    ] = ()  # an input whose storage outputs[0] may take over if it dies here, and the overload to call then
    body: Graph | None = None
    source: Source | None = None
    inputs: tuple[Value, ...] = field(init=False, repr=False)  # the values that the node reads, in the order of its arguments, each once
    results: tuple[Value, ...] = field(init=False, repr=False)  # what exists once it has run: outputs, new versions of what it wrote

    def __post_init__(self) -> None:
        inputs = dict.fromkeys(values_of((*self.args, *(arg for _, arg in self.kwargs))))
        object.__setattr__(self, "inputs", tuple(inputs))
        results = self.outputs if None not in self.outputs else (value for value in self.outputs if value is not None)
        object.__setattr__(self, "results", (*results, *(after for _, after in self.writes)))


@dataclass(frozen=True, eq=False, slots=True)
class Graph:
    """A program: what it reads, what it does, what it gives back."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    dimensions: tuple[Dimension, ...] = ()  # of its sizes, and of those within bodies; a body may have more of its own

    def __repr__(self) -> str:
        return f"Graph({len(self.inputs)} inputs, {len(self.nodes)} nodes, {len(self.outputs)} outputs)"

    def __str__(self) -> str:
        """Its text, one line an input and a node. Raises FormatError for a graph that text cannot hold."""
        text: str = import_module("lowtide.ir.text.graph_text").to_text(self)  # which is made of graphs
        return text


def values_of(arg: Arg) -> list[Value]:
    """The values within an argument, depth first."""
    if isinstance(arg, Value):
        return [arg]
    return [value for item in arg for value in values_of(item)] if isinstance(arg, tuple) else []


def with_values(arg: Arg, new: Callable[[Value], Any]) -> Any:
    """An argument with something else in the place of each value within."""
    if isinstance(arg, Value):
        return new(arg)
    return tuple(with_values(item, new) for item in arg) if isinstance(arg, tuple) else arg


def arguments(node: Node, new: Callable[[Value], Any]) -> dict[str, Any]:
    """What a node is given, with something else in the place of each value: as `replace` takes it."""
    return {"args": with_values(node.args, new), "kwargs": tuple((name, with_values(arg, new)) for name, arg in node.kwargs)}


@dataclass(frozen=True, eq=False)
class HeldStorages:
    """What eager holds for longer than the graph needs it, and what it computes beside.

    Gradients are held until after the step; the rest until names in the program or autograd let go of it.
    """

    values: tuple[Value, ...] = ()  # to the end
    until: Mapping[str, str] = field(default_factory=dict)  # by storage: the first result of the last node that runs while it is held
    summed: frozenset[str] = frozenset()  # sums of gradients, and of branches: where the first of their inputs that dies lay
    program: Graph | None = None  # with what nothing needs and eager computes all the same; None where that is nothing
    point: Mapping[str, int] | None = None  # at which it is meant, where it is over dimensions

    def at(self, point: Mapping[str, int]) -> HeldStorages:
        """The same of a program over dimensions, at a point."""
        return replace(self, point=point)


NOTHING_HELD = HeldStorages()
