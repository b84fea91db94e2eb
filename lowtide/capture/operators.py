"""What a call of an operator does: what it writes, what it draws, what its functional form is, where it may work in place.

Schemas and tags are torch's own; what they leave out is in the table of `ir.operators`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide.ir.graph import Node
from lowtide.ir.operators.nodes import draws, is_arithmetic
from lowtide.ir.operators.row import Draws, Operator
from lowtide.ir.operators.table import functional_base, row_of

_OPTIONS = ["Optional[int]dtype", "Optional[int]layout", "Optional[Device]device", "Optional[bool]pin_memory"]  # of a factory


def name_of(op: OpOverload) -> str:
    """The operator's name in a graph: "aten.add.Tensor"."""
    return f"{op._schema.name.replace('::', '.')}.{op._overloadname}"


def resolve(name: str) -> OpOverload:
    """The operator that `name_of` named."""
    namespace, base, overload = name.split(".")
    resolved: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return resolved


def row(op: OpOverload) -> Operator:
    return row_of(name_of(op))


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
        if argument.alias_info is not None and argument.alias_info.is_write and position != (row(op).gradients or None):
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
