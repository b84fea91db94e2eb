"""One call of an operator: what it writes and draws, its tensors, how its arguments are written down, why it cannot be traced.

Schemas and tags are torch's own; what they leave out is in the table of `ir.operators`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from lowtide.capture.blocks import geometry_of_value
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Atom, Node, Value
from lowtide.ir.operators.nodes import draws, functional_base, is_arithmetic, row_of
from lowtide.ir.operators.row import Collective, Draws, Operator
from lowtide.ir.result_specs import pieces_of
from lowtide.ir.sizes import contiguous_stride

_OPTIONS = ["Optional[int]dtype", "Optional[int]layout", "Optional[Device]device", "Optional[bool]pin_memory"]  # of a factory
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
UNTRACEABLE = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_ATOMS: dict[str, type] = {"dtype": torch.dtype, "device": torch.device, "layout": torch.layout, "memory_format": torch.memory_format}
NESTED = (
    "makes a nested tensor, whose rows have lengths that no graph can hold: pad the rows to one length, with a mask beside them "
    "(torch.nn.utils.rnn.pad_sequence, before the step). An nn.TransformerEncoder that is handed a padding mask in eval() makes one by "
    "itself, unless you set `encoder.use_nested_tensor = False`"
)


@functools.cache
def name_of(op: OpOverload) -> str:
    """The operator's name in a graph: "aten.add.Tensor"."""
    return f"{op._schema.name.replace('::', '.')}.{op._overloadname}"


def resolve(name: str) -> OpOverload:
    namespace, base, overload = name.split(".")
    resolved: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return resolved


@functools.cache
def row(op: OpOverload) -> Operator:
    return row_of(name_of(op))


@functools.cache
def is_over_lists(op: OpOverload) -> bool:
    """Whether an operator does to each tensor of lists what another one does to one tensor."""
    return op._schema.name.startswith("aten::_foreach_")


def with_defaults(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments with the defaults that a call left out; the functional form may have none (`bernoulli_(x)`: p = 0.5)."""
    rest = [argument for argument in op._schema.arguments[len(args) :] if not argument.kwarg_only]
    return (*args, *(argument.default_value for argument in rest)) if all(argument.has_default_value() for argument in rest) else args


def written_positions(op: OpOverload, args: tuple[Any, ...]) -> tuple[int | str, ...]:
    """Which arguments a call writes: positions, or names where they are given by keyword only."""
    return _schema_writes(op) + _hidden_writes(op, args)


@functools.cache
def _schema_writes(op: OpOverload) -> tuple[int | str, ...]:
    positions: list[int | str] = []
    for position, argument in enumerate(op._schema.arguments):
        if (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and position not in (row(op).gradients or None, *row(op).only_reads)
        ):
            positions.append(argument.name if argument.kwarg_only else position)
    return tuple(positions)


def _hidden_writes(op: OpOverload, args: tuple[Any, ...]) -> tuple[int, ...]:
    statistics = row(op).statistics
    if statistics is None or (statistics.flag is not None and not args[statistics.flag]):
        return ()
    return tuple(at for at in statistics.positions if args[at] is not None)


def changes_geometry_only(op: OpOverload) -> bool:
    """Whether an operator changes a tensor's shape or strides in place and nothing else."""
    return torch.Tag.inplace_view in op.tags and not row(op).rebinds


def is_random(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws from the generator. Of an operator that the table does not know, torch's tag says so."""
    if (known := row(op)).draws in (Draws.NEVER, Draws.UNKNOWN):
        return torch.Tag.nondeterministic_seeded in op.tags
    return draws(known, args, kwargs)


def node_is_random(node: Node) -> bool:
    return not is_arithmetic(node) and is_random(resolve(node.op), node.args, dict(node.kwargs))


def rounds_number(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether `op` rounds a number to the dtype of the tensor that it writes, which its functional form does not."""
    return op is torch.ops.aten.mul_.Scalar and args[0].device.type == "cpu" and args[0].dtype in (torch.bfloat16, torch.float16)


def complex_in_place(op: OpOverload, args: tuple[Any, ...]) -> OpOverload | None:
    """The operator that gives what `op` leaves in a complex argument, where its functional form gives other bits; else None."""
    instead = row(op).complex_in_place
    return resolve(instead) if instead and args[0].dtype.is_complex else None


def in_layout(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """The call that makes what `op` writes into a tensor that is not contiguous; None where its functional form makes the same."""
    if not (instead := row(op).in_layout) or not op._schema.is_mutable or (out := kwargs.get("out", args[0])).is_contiguous():
        return None
    read = {key: item for key, item in kwargs.items() if key != "out"}
    if out is not args[0] and (
        len(args) != 2 or read or (out.dtype, *out.shape) != (args[0].dtype, *args[0].shape[:-1], args[1].shape[-1])
    ):
        return None
    return resolve(instead), (*args, list(out.stride())), read


def rounds_once(op: OpOverload, kwargs: dict[str, Any], result: Any) -> bool:
    """Whether a call gives the same bits into any layout. A factor (`alpha`) is one more rounding, which some kernels leave out."""
    return row(op).rounds_once and kwargs.get("alpha", 1) == 1 and not result.dtype.is_complex


@functools.cache
def functional_form(op: OpOverload) -> OpOverload | None:
    """The operator that returns what `op` would write, or None. `x.add_(y)` -> `add(x, y)`; `add(x, y, out=z)` -> `add(x, y)`.

    What makes a tensor of no other one is told, beside what `op` is told, as what (`eye(4, out=z)` -> `eye(4, dtype=...)`).
    """
    known, name = row(op), name_of(op)
    if known.functional or known.rebinds:
        return resolve(known.functional) if known.functional else None
    namespace, base, _ = name.split(".")
    by_keyword = any(isinstance(at, str) for at in _schema_writes(op))
    stem = base if by_keyword else functional_base(name).split(".")[1]
    if not by_keyword and stem == base:
        return None
    wanted = [str(a.type) + a.name for a in op._schema.arguments if not (by_keyword and a.alias_info is not None)]
    packet = getattr(getattr(torch.ops, namespace), stem, None)
    return _overload_with(packet, wanted) or (_overload_with(packet, [*wanted, *_OPTIONS]) if by_keyword else None)


def is_factory(op: OpOverload) -> bool:
    """Whether an operator is told of what dtype, and where, a tensor is to be."""
    return [str(a.type) + a.name for a in op._schema.arguments[-len(_OPTIONS) :]] == _OPTIONS


def options_like(tensor: torch.Tensor) -> dict[str, Any]:
    """What a factory is told that makes a tensor like this one."""
    return {"dtype": tensor.dtype, "layout": tensor.layout, "device": tensor.device, "pin_memory": False}


def form_with_writes(op: OpOverload) -> tuple[OpOverload, int] | None:
    """The operator that takes what `op` takes, writes nothing, and returns `count` results of `op` followed by what `op` would write."""
    form = row(op).with_writes
    return None if form is None else (resolve(form.name), form.own)


def _overload_with(packet: Any, wanted: list[str]) -> OpOverload | None:
    """The overload of `packet` that writes nothing and takes exactly the `wanted` arguments."""
    for overload in packet.overloads() if packet is not None else ():
        candidate: OpOverload = getattr(packet, overload)
        if not candidate._schema.is_mutable and [str(a.type) + a.name for a in candidate._schema.arguments] == wanted:
            return candidate
    return None


@functools.cache
def out_form(op: OpOverload) -> str | None:
    """The overload of an element-wise operator that writes its result into a given tensor, "aten.add.out"; None if there is none.

    So do those collectives that leave their result where their argument lay. Element-wise kernels read each element before they write it,
    so that the given tensor may be one of the inputs. Overloads that torch generates for completeness compute elsewhere and copy: of no
    use here.
    """
    if row(op).in_memory_of:
        return row(op).in_memory_of
    if torch.Tag.pointwise not in op.tags and not row(op).elementwise:
        return None
    if len(op._schema.returns) != 1 or op._schema.is_mutable:
        return None
    wanted = [str(a.type) + a.name for a in op._schema.arguments]
    packet = op._overloadpacket
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        outs = [a for a in candidate._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        plain = [str(a.type) + a.name for a in candidate._schema.arguments if a not in outs]
        if torch.Tag.generated not in candidate.tags and len(outs) == 1 and outs[0].kwarg_only and plain == wanted:
            return name_of(candidate)
    return None


def atom_of(item: Any) -> Atom | None:
    """An argument that only torch can spell; None for any other."""
    return next((Atom(kind, str(item).removeprefix("torch.")) for kind, cls in _ATOMS.items() if isinstance(item, cls)), None)


def torchs(atom: Atom) -> Any:
    return torch.device(atom.name) if atom.kind == "device" else getattr(torch, atom.name)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in tensors_in(item)]
    return []


def without_generators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for fakes, which draw nothing, and of which some refuse what they would draw from."""
    kept = [None if isinstance(item, torch.Generator) else item for item in (*args, *kwargs.values())]
    return tuple(kept[: len(args)]), dict(zip(kwargs, kept[len(args) :], strict=True))


def targets_of(written: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes, given the positions and keywords of what it writes."""
    arguments = [kwargs.get(at) if isinstance(at, str) else args[at] for at in written]
    return tensors_in(arguments)


def results_of(func: OpOverload, out: Any) -> list[torch.Tensor | None]:
    """An operator's results in order: a list of tensors counts as its items, None stands for a tensor that was not made.

    A real tensor among them is a constant from there on, not made by the operator.
    """
    if len(func._schema.returns) == 0:
        return []
    if sum(isinstance(each.type, torch.ListType) for each in func._schema.returns) > 1:
        raise CaptureError(
            f"{name_of(func)} at {users_line()} returns several lists of tensors, of which a graph can hold one: call one that "
            "returns the tensors of one list"
        )
    return [piece if isinstance(piece, FakeTensor) else None for piece in pieces_of(out)]


def may_take(func: OpOverload, recorded: Any, outputs: tuple[Value | None, ...]) -> tuple[tuple[Value, str], ...]:
    """The inputs whose memory an element-wise operator may give its result, if they die there: same geometry, so that the same kernel runs.

    `recorded` are the arguments as the graph writes them: positional ones, then keywords with theirs.
    """
    overload = out_form(func)
    if overload is None or len(outputs) != 1 or outputs[0] is None:
        return ()
    out, known = outputs[0], row(func)
    plainly = out.storage.device == "cpu" and out.stride == contiguous_stride(out.shape)
    if known.in_memory_of and known.collective is Collective.NONE and not plainly:
        return ()  # a kernel that looks at no strides is proven there alone
    if out.dtype.startswith("complex"):  # a complex division in place takes another loop, and gives other bits
        return ()
    inputs = Node("", recorded[0], (), recorded[1]).inputs
    return tuple(
        (value, overload)
        for value in inputs
        if geometry_of_value(value) == geometry_of_value(out)
        and value.storage.nbytes == out.storage.nbytes
        and value.storage.device == out.storage.device
        and not value.storage.kind.caller_owned
        and not any(other.storage is value.storage for other in inputs if other is not value)
    )


def why_unread(name: str, follows_from: str) -> str:
    """What it means for the user that `name` reads numbers which follow from what only the running step knows."""
    rate = "set the rate to 0 with which the draw is compared (layerdrop, module_dropout), or " if "a random draw" in follows_from else ""
    return (
        f"control flow depends on data: {name} at {users_line()} reads a tensor's value, which no graph can follow, since it follows from "
        f"{follows_from}; {rate}use torch.where or masks; to print, format or log a number, put `value.detach()` into a list and print it "
        "after the step; what only checks may stay where its other way raises (`if not ok.all(): raise ValueError(...)`, "
        "`assert ok.all()`)"
    )


def why_unshaped(name: str, follows_from: str) -> str:
    """What it means for the user that the shape of what `name` gives follows from what only the running step knows."""
    return (
        f"a shape depends on data: the result of {name} at {users_line()} has no fixed shape, since that follows from {follows_from}; "
        "pad to a fixed size or use masks"
    )


def why_unshaped_in_range(name: str) -> str:
    """The same where batches of a range are asked for, of which each has other data."""
    return (
        f"a shape depends on data: how much {name} at {users_line()} finds follows from what a batch of the range holds, and from none of "
        "its extents, so that `dynamic` cannot bound it; keep all of the tensor and mask it (torch.where, ignore_index of cross_entropy, a "
        "sum over mask * x), or leave `dynamic` out, so that batches are captured by what they hold"
    )


def why_untraceable(func: OpOverload, error: Exception) -> str:
    """What an operator that has no answer without data means for its user."""
    name, line = name_of(func), users_line()
    if "nested" in name:
        return f"{name} at {line} {NESTED}"
    return f"{name} at {line} cannot be run without data: {error}"


def instead_of(func: OpOverload) -> str:
    """What gives a new tensor in the place of an operator that writes, in words."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    if name.startswith("_") or not hasattr(torch, name):
        return "make a new tensor of what it should hold, and go on with that"
    return f"use torch.{name}(...), which returns a new tensor, and go on with that"
