"""What an operator does beyond its schema: what it writes, what it draws, what its functional form is, where it may work in place.

The one place for facts about aten that no schema tells.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide.ir.ops import DROPOUT_POSITION

# Statistics that an operator updates although its schema does not say so: positions of the arguments, and of the flag that turns it on.
_HIDDEN_WRITES: dict[str, tuple[tuple[int, ...], int]] = {
    "aten.native_batch_norm.default": ((3, 4), 5),
    "aten.cudnn_batch_norm.default": ((3, 4), 5),
    "aten.miopen_batch_norm.default": ((3, 4), 5),
    "aten._batch_norm_impl_index.default": ((3, 4), 5),
}

# Operators that give a tensor other memory: nothing that a graph of storages can say.
_REBINDING = {"set_", "resize_", "resize_as_", "_resize_output_"}

# Functional forms whose overload is not called as the in-place one is.
_FUNCTIONAL = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.normal_.default": "aten.normal_functional.default",
}

# Functional forms that return what the operator writes after their own results, and how many of those are the operator's own.
_WITH_WRITES = {
    "aten.native_batch_norm.default": ("aten._native_batch_norm_legit_functional.default", 3),
    "aten.rrelu_with_noise.default": ("aten.rrelu_with_noise_functional.default", 1),
    "aten.rrelu_with_noise_.default": ("aten.rrelu_with_noise_functional.default", 0),
}

# Operators that draw in the order of memory while their functional forms draw in that of indices.
_IN_MEMORY_ORDER = {"aten.bernoulli_.float"}

# Element-wise operators that lack the tag.
_POINTWISE = {
    "aten.hardtanh_backward.default",
    "aten.elu_backward.default",
    "aten.leaky_relu_backward.default",
    "aten.softplus_backward.default",
}


def name_of(op: OpOverload) -> str:
    """The operator's name in a graph: "aten.add.Tensor"."""
    return f"{op._schema.name.replace('::', '.')}.{op._overloadname}"


def resolve(name: str) -> OpOverload:
    """The operator that `name_of` named."""
    namespace, base, overload = name.split(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return found


def with_defaults(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments with the defaults that a call left out; the functional form may have none (`bernoulli_(x)`: p = 0.5)."""
    rest = [argument for argument in op._schema.arguments[len(args) :] if not argument.kwarg_only]
    return (*args, *(argument.default_value for argument in rest)) if all(argument.has_default_value() for argument in rest) else args


def written_positions(op: OpOverload, args: tuple[Any, ...]) -> tuple[int | str, ...]:
    """Which arguments a call writes: positions, or names where they are given by keyword only."""
    return _schema_writes(op) + _hidden_writes(op, args)


@functools.cache
def _schema_writes(op: OpOverload) -> tuple[int | str, ...]:
    found: list[int | str] = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(argument.name if argument.kwarg_only else position)
    return tuple(found)


def _hidden_writes(op: OpOverload, args: tuple[Any, ...]) -> tuple[int, ...]:
    positions, flag = _HIDDEN_WRITES.get(name_of(op), ((), 0))
    return tuple(at for at in positions if args[flag] and args[at] is not None)


def changes_geometry_only(op: OpOverload) -> bool:
    """Whether an operator changes a tensor's shape or strides in place and nothing else."""
    return torch.Tag.inplace_view in op.tags and name_of(op).split(".")[1] not in _REBINDING


def is_random(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws from the generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    position = DROPOUT_POSITION.get(name_of(op).split(".")[1])
    if position is None:
        return True
    probability = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(probability)


def draws_in_memory_order(op: OpOverload) -> bool:
    """Whether a tensor that is not contiguous gets other numbers from `op` than from its functional form."""
    return name_of(op) in _IN_MEMORY_ORDER


def rounds_otherwise_in_place(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether `op` in place gives other bits than its functional form: a complex division."""
    return name_of(op) == "aten.div_.Tensor" and bool(args[0].dtype.is_complex)


@functools.cache
def functional_form(op: OpOverload) -> OpOverload | None:
    """The operator that returns what `op` would write, or None. `x.add_(y)` -> `add(x, y)`; `add(x, y, out=z)` -> `add(x, y)`."""
    name = name_of(op)
    if name in _FUNCTIONAL:
        return resolve(_FUNCTIONAL[name])
    namespace, base, _ = name.split(".")
    if base in _REBINDING:
        return None
    by_keyword = any(isinstance(at, str) for at in _schema_writes(op))
    stem = base if by_keyword else base.removesuffix("_")
    if not by_keyword and stem == base:
        return None
    wanted = [str(a.type) + a.name for a in op._schema.arguments if not (by_keyword and a.alias_info is not None)]
    packet = getattr(getattr(torch.ops, namespace), stem, None)
    return _overload_with(packet, wanted)


def form_with_writes(op: OpOverload) -> tuple[OpOverload, int] | None:
    """The operator that takes what `op` takes, writes nothing, and returns `count` results of `op` followed by what `op` would write."""
    found = _WITH_WRITES.get(name_of(op))
    return None if found is None else (resolve(found[0]), found[1])


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

    Element-wise kernels read each element before they write it, so that the given tensor may be one of the inputs. Overloads that
    torch generates for completeness compute elsewhere and copy: of no use here.
    """
    if torch.Tag.pointwise not in op.tags and name_of(op) not in _POINTWISE:
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
