"""One call of an operator: the tensors in its arguments and results, how its arguments are written down, why it cannot be traced."""

from __future__ import annotations

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

from lowtide.capture import operators
from lowtide.capture.blocks import geometry_of_value
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Atom, Node, Value
from lowtide.ir.operators.row import Collective
from lowtide.ir.result_specs import pieces_of
from lowtide.ir.sizes import contiguous_stride

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
UNTRACEABLE = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_ATOMS: dict[str, type] = {"dtype": torch.dtype, "device": torch.device, "layout": torch.layout, "memory_format": torch.memory_format}


NESTED = (
    "makes a nested tensor, whose rows have lengths that no graph can hold: pad the rows to one length, with a mask beside them "
    "(torch.nn.utils.rnn.pad_sequence, before the step). An nn.TransformerEncoder that is handed a padding mask in eval() makes one by "
    "itself, unless you set `encoder.use_nested_tensor = False`"
)


def atom_of(item: Any) -> Atom | None:
    """An argument that only torch can spell; None for any other."""
    return next((Atom(kind, str(item).removeprefix("torch.")) for kind, cls in _ATOMS.items() if isinstance(item, cls)), None)


def torchs(atom: Atom) -> Any:
    """What an atom spells."""
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
            f"{operators.name_of(func)} at {users_line()} returns several lists of tensors, of which a graph can hold one: call one that "
            "returns the tensors of one list"
        )
    return [piece if isinstance(piece, FakeTensor) else None for piece in pieces_of(out)]


def may_take(func: OpOverload, recorded: Any, outputs: tuple[Value | None, ...]) -> tuple[tuple[Value, str], ...]:
    """The inputs whose memory an element-wise operator may give its result, if they die there: same geometry, so that the same kernel runs.

    `recorded` are the arguments as the graph writes them: positional ones, then keywords with theirs.
    """
    overload = operators.out_form(func)
    if overload is None or len(outputs) != 1 or outputs[0] is None:
        return ()
    out, row = outputs[0], operators.row(func)
    plainly = out.storage.device == "cpu" and out.stride == contiguous_stride(out.shape)
    if row.in_memory_of and row.collective is Collective.NONE and not plainly:  # a kernel that looks at no strides is proven there alone
        return ()
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
    name, line = operators.name_of(func), users_line()
    if "nested" in name:
        return f"{name} at {line} {NESTED}"
    return f"{name} at {line} cannot be run without data: {error}"
