"""The nouns of the table: what is known of one operator beyond its schema, and the names of those that lowtide itself writes into graphs.

A new fact about operators is a new column here, and a test in `tests/ir/test_operators.py` that holds every row of it to torch.

Rules of rows read shapes and bytes of a node's arguments and results as plain numbers. They raise CheckError where a size is symbolic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TypeAlias

from lowtide.errors import CheckError
from lowtide.ir.graph import Arg, Node, Value, values_of
from lowtide.ir.operators.axes import Axis
from lowtide.ir.sizes import ITEM_BYTES, Size

# Copies to the host's memory and back, see `ir.graph`.
STORE, SAVE, DROP, LOAD = "host.store", "host.save", "host.drop", "host.load"

# Runs its body once for each part of an extent, see `ir.bodies`.
LOOP = "fission.loop"

# Runs its body by generated kernels, see `ir.bodies`.
REGION = "fuse.region"

# Arithmetic on Python numbers starts with this: "py.mul".
ARITHMETIC = "py."

# Functions of Python's `math` that arithmetic on numbers may call, as "py.math_sqrt".
MATH_FUNCTIONS = frozenset({
    "atan", "ceil", "cos", "exp", "expm1", "fabs", "floor", "log", "log10", "log1p", "log2", "pow", "sin", "sqrt", "tan", "tanh",
})  # fmt: skip

# Ends the program if its first argument, a number, is not zero; its further arguments are what the program returns.
STOP = "py.stop_if"

# Makes a Python number of a tensor of one element.
ITEM = "aten._local_scalar_dense.default"

# A part of a tensor, seen and written over.
AS_STRIDED, SCATTER = "aten.as_strided.default", "aten.as_strided_scatter.default"

CLONE, COPY = "aten.clone.default", "aten.copy_.default"


Count: TypeAlias = Callable[[Node], int]
AxesRule: TypeAlias = Callable[[Node], Iterator[Axis]]
BoundsRule: TypeAlias = Callable[[Node, Value], "Bounds | None"]
Bounds: TypeAlias = "tuple[int, int]"  # the least and the greatest number


class Draws(Enum):
    """Whether an operator draws from the random generator."""

    NEVER = "never"
    ALWAYS = "always"
    WITH_PROBABILITY = "if its probability of dropout is not zero"
    AGAIN = "torch tags it as one, but it is given the random state of its forward pass and draws nothing new"
    UNKNOWN = "of other people's operators nothing is known"


class Fake(Enum):
    """What an operator's fake kernel says otherwise than the real one does, for where no real one may be tried."""

    RIGHT = "nothing"
    STATISTICS_TYPE = "statistics of an input of half precision are float32 as soon as one of the other arguments is"
    LOSS_OF_ONE = "the loss of an example that is no batch has an extent of 1, where the real one has none"
    STRIDES_OF_VIEWS = "it keeps strides along extents of 1 where the real kernel makes them anew"
    ASKS_DATA_FOR_SHAPES = "it asks for data where shapes follow from shapes"
    FIXES_SIZES = "it takes symbolic sizes for numbers"
    KEEPS_ELEMENTS = "the sum or mean of a loss lies on the storage of all its elements, which the real one has made first"
    MISSING = "up to torch 2.11 there is none; results look as the first argument does"
    CUDNN_RNN = "rows that come first lie densely, and no buffer of the weights is made where none is given; of gradients there is none"


class Collective(Enum):
    """Which part an operator has in what the processes of a group do together."""

    NONE = "none: it is one process's own"
    BEGINS = "it begins; what it makes is whole only when it has ended"
    ENDS = "it waits for the end"
    LOADS = "it does both: what the processes hold parts of is made whole, as often as that is wanted"


class Fusion(Enum):
    """What an operator is to a generator of kernels (AGO, section II).

    A complex one has loops that reduce. A simple one only maps, moves or reduces what is there once: it can be a prologue or an epilogue
    of a complex one. Of what is neither nothing is generated: torch runs it.
    """

    NONE = "nothing is generated for it"
    COMPLEX = "a convolution or a product"
    SIMPLE = "a norm, a reduction, a window or a change of layout"
    ELEMENTWISE = "simple, and maps each element by itself, broadcast apart"


@dataclass(frozen=True, slots=True)
class Indices:
    """An integer result that holds indices along a dimension."""

    result: int
    dimension: int  # the position of the argument that names it
    default: int | None = None  # where it is left out; None: indices are into all of the tensor


@dataclass(frozen=True, slots=True)
class Statistics:
    """Running statistics that an operator updates on the side although its schema does not say so."""

    positions: tuple[int, ...]  # of the arguments
    flag: int | None  # the position of the argument that turns the update on; None where it is always on
    without: str = ""  # the operator that computes the same without them, where another argument is of their type, and updates nothing


@dataclass(frozen=True, slots=True)
class WithWrites:
    """The operator of the same arguments that writes nothing and returns `own` results of this one, followed by what this one writes."""

    name: str
    own: int


@dataclass(frozen=True, slots=True)
class MaskSplit:
    """How an operator whose mask chooses results is taken apart."""

    mask: int  # the position of the mask
    groups: tuple[tuple[int, ...], ...]  # results that one kernel computes


@dataclass(frozen=True, slots=True)
class ReadsResult:
    """`backward(gradient, input, *parameters, ...)` gives the same bits for the output of `forward(input, *parameters)`."""

    forward: str
    defaults: tuple[Arg, ...]  # of the parameters
    rising: int | None = None  # the parameter that has to be positive for it
    bounds: bool = False  # whether the parameters are bounds, which the dtype has to hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator. `name` is that of all its overloads, "aten.mm", or of one of them, "aten.bernoulli.p"."""

    name: str
    draws: Draws = Draws.NEVER
    probability: int = 0  # where WITH_PROBABILITY: the position of the argument
    in_memory_order: bool = False  # draws in the order of memory while its functional form draws in that of indices
    view: bool = False  # its results are its first argument seen in another way, and no memory
    scratch_like: tuple[int, ...] = ()  # before its results it asks for memory as large as these arguments, which nobody reads
    once: bool = False  # it writes over what it is given, which nobody else reads: a second run would give something else
    rebinds: bool = False  # gives a tensor other memory: nothing that a graph of storages can say
    factorises: bool = False  # fails for some matrices
    statistics: Statistics | None = None
    functional: str = ""  # the one that returns what this one writes, where it has another name or other arguments
    with_writes: WithWrites | None = None
    complex_in_place: str = ""  # in place it rounds complex numbers otherwise than its functional form; this one rounds them so
    in_layout: str = ""  # in another layout it rounds otherwise; this one makes what it writes in the layout that it is told
    elementwise: bool = False  # although torch's tag does not say so
    rounds_once: bool = False  # of real numbers: the same bits whatever the layout that its kernel goes through
    fake: Fake = Fake.RIGHT
    answers_without_data: bool = False  # its fake kernel answers what it cannot know
    shaped_by: tuple[int, ...] | None = None  # the arguments from whose data the results' shapes follow, where not from all
    split: MaskSplit | None = None
    reads_result: ReadsResult | None = None
    flops: Count | None = None  # floating-point operations of one run; None: as good as none
    moved_bytes: Count | None = None  # bytes read and written, each once; None: all arguments but the unread, and all results
    unread: tuple[int, ...] = ()  # arguments that are asked for their shapes alone, or written over as a whole
    untouched: bool = False  # its memory is had, not touched
    collective: Collective = Collective.NONE
    in_memory_of: str = ""  # the overload that may leave its result in the memory of an argument, where torch's tags name none
    launches: int = 1  # kernels that one run starts on a device
    axes: AxesRule | None = None  # along what it can be run in parts
    any_strides: bool = False  # it is known to read tensors however they are laid out; not all kernels look at strides
    fusion: Fusion = Fusion.NONE
    fusible: bool = False  # in a training step it gains by sharing a kernel: elementwise, a norm, a reduction, a change of layout
    scaled: bool = False  # a number that differs from call to call may be among its arguments: it does a few sums and products
    indices: Indices | None = None
    planes: int = 0  # its integer result holds indices into so many dimensions at the end
    refuses: BoundsRule | None = None  # bounds outside of which it raises, of an argument of integers
    out: str = ""  # the form that writes where it is told
    adding: str = ""  # the form that adds its result to its first argument
    added: str = ""  # the operator that adds its product to its first argument, and gives the sum
    by_tensor: str = (
        ""  # the overload that takes a tensor for the number that is its second argument, with the same bits of floats and doubles
    )
    of_sizes: str = ""  # the form that takes sizes in the place of a tensor of these sizes
    weight_of_rows: int = 0  # of a product of rows by a weight: where the weight stands, behind the rows, and before those a bias
    gradients: int = 0  # of an update of lists of tensors: where gradients stand, which it only reads, whatever its schema says
    only_reads: tuple[int, ...] = ()  # arguments that it does not write, although its schema says so
    first: str = ""  # of such an update: the operator that makes the state of one tensor, as the first of them
    epsilon: int = 0  # where the epsilon of a batch norm stands, of one that may have statistics given


def shape_of(node: Node, position: int) -> tuple[int, ...]:
    """The shape of the argument at a position. Raises CheckError unless that is a tensor."""
    return ints(node, node.args[position] if position < len(node.args) else None)


def made_shape(node: Node) -> tuple[int, ...]:
    """The shape of the first result. Raises CheckError where it does not exist."""
    return ints(node, node.outputs[0])


def ints(node: Node, value: Arg) -> tuple[int, ...]:
    """The shape of a tensor among the arguments of `node`. Raises CheckError for anything else."""
    if not isinstance(value, Value):
        raise CheckError(f"{node.op}: expected a tensor to count its operations by, got {value!r}")
    return tuple(map(_int, value.shape))


def bytes_of(values: Iterable[Value]) -> int:
    """The bytes of values, of each dimension of stride 0 once."""
    return sum(map(_value_bytes, values))


def read_bytes(node: Node, unread: Container[int]) -> int:
    """The bytes of all arguments but those at the positions `unread`, each once."""
    args = tuple(arg for position, arg in enumerate(node.args) if position not in unread)
    return bytes_of(dict.fromkeys(values_of((*args, *(arg for _, arg in node.kwargs)))))


def _value_bytes(value: Value) -> int:
    distinct = [_int(size) for size, stride in zip(value.shape, value.stride, strict=True) if stride != 0 or size == 0]
    return prod(distinct) * ITEM_BYTES[value.dtype]


def _int(size: Size) -> int:
    try:
        return operator.index(size)
    except TypeError as error:
        raise CheckError(f"expected a size, got {size}: give its dimensions values first") from error


def below(given: Arg, dimension: Arg) -> Bounds | None:
    """From 0 up to the extent of an argument along a dimension."""
    if not isinstance(given, Value) or not isinstance(dimension, int) or not given.shape:
        return None
    return up_to(given.shape[dimension])


def up_to(count: Size) -> Bounds | None:
    return (0, count - 1) if isinstance(count, int) and count > 0 else None
