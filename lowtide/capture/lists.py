"""Operators over lists of tensors, recorded tensor by tensor: `_foreach_mul_(gradients, 0.5)`, `_fused_adamw_(parameters, gradients, ...)`.

What they do to one tensor of a list does not depend on the others. Apart, a gradient is used and let go as soon as it exists; together,
all gradients would have to be there first. On a CPU torch runs a `_foreach_` operator by the operator of one tensor, and so is it recorded.
On a device its kernels round in their own way (a division by a number, for one): there it stays what it is, with lists of one tensor each.

Each call starts a kernel of its own. On a device small tensors therefore stay together: waiting for them costs next to no memory.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _of_others

from lowtide.capture import calls
from lowtide.capture.blocks import address
from lowtide.capture.calls import tensors_in
from lowtide.capture.care.turns import undoing
from lowtide.capture.draft import Draft
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.sizes import reach

# Tensors of at most so many bytes are computed in one call on a device: a kernel over them takes no longer than it takes to start it.
SMALL_BYTES = 2**16

Operation: TypeAlias = Callable[..., Any]

_FOREACH = "_foreach_"
_WHOLE = frozenset({"norm", "max"})  # reductions: on a device, what they read is waited for anyway

# Of these the kernel of one tensor is what torch's own loop on a CPU calls, whatever stands beside the tensor.
OF_ONE = frozenset({
    "abs", "add", "addcdiv", "addcmul", "ceil", "copy", "cos", "div", "exp", "expm1", "floor", "lerp", "log", "mul", "neg", "pow",
    "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "sub", "tanh", "zero",
})  # fmt: skip


@contextmanager
def fakes_in_lists() -> Iterator[None]:
    """torch looks at the class of tensors to choose between lists and one after the other: a fake is what it stands for."""
    with undoing() as undo:
        for classes in (_of_optimizers, _of_others):
            classes.append(FakeTensor)
            undo(partial(classes.remove, FakeTensor))
        yield


class ListCall(NamedTuple):
    """One of the calls that do together what a call over lists does."""

    op: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: tuple[int, ...]  # of its tensors in the lists
    listed: bool  # whether it takes lists, and gives one


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], draft: Draft) -> Callable[[], Any] | None:
    """What calls others in the place of a call over lists, and gives its result; None where it is one call already, or none over lists."""
    base = func._schema.name.removeprefix("aten::")
    updates = bool(calls.row(func).gradients)
    if not updates and not base.startswith(_FOREACH):
        return None
    if kwargs.get("grad_scale") is not None:
        raise CaptureError(
            f"operator {calls.name_of(func)} at {users_line()} divides gradients by a scale while it updates: unscale them before it"
        )
    first = next(item for item in args if isinstance(item, (list, tuple)))
    makes = updates and not all(map(draft.owns, tensors_in(args[2:-1] if len(args) > 3 else args[2:])))
    groups = [(at,) for at in range(len(first))] if makes else _groups(first)
    single = _of_one(base, func, args) if not updates and first and first[0].device.type == "cpu" else None
    if single is None and base.removeprefix(_FOREACH) in _WHOLE:
        return None
    if makes and len(first) == 1:
        return lambda: _first_update(func, args, kwargs, draft)
    if single is None and len(groups) <= 1:
        return None
    parts = [ListCall(single or func, *_taken(group, len(first), args, kwargs, single is None), group, single is None) for group in groups]

    def one_by_one() -> list[torch.Tensor] | None:
        results = [call.op(*call.args, **call.kwargs) for call in parts]
        return _together(parts, results) if func._schema.returns else None

    return one_by_one


def _first_update(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], draft: Draft) -> None:
    """The update of a parameter whose state is made in this very step."""
    states = tensors_in(args[2:5])
    makers = {draft.makers()[draft.value(state)].op for state in states}
    wanted = {"aten.empty_like.default" if "is_first_step" in kwargs else "aten.zeros_like.default"}
    if makers != wanted or not kwargs.get("is_first_step", True) or any(map(draft.owns, states)):
        raise CaptureError(
            f"operator {calls.name_of(func)} at {users_line()} updates a state that this step has made in another way than torch's "
            "optimizers do: make it before the step"
        )
    form = calls.resolve(f"{calls.row(func).first}.{func._overloadname}")
    settings = {key: item for key, item in kwargs.items() if key not in ("is_first_step", "grad_scale", "found_inf")}
    results = form(args[0][0], args[1][0], *(steps[0] for steps in args[5:]), **settings)
    for state, result in zip(states, tensors_in([results]), strict=True):
        draft.renew(state, draft.value(result))


def _together(parts: Sequence[ListCall], results: Sequence[Any]) -> list[torch.Tensor]:
    """What a call over lists returns, of what its parts return."""
    pieces = {
        at: piece
        for call, result in zip(parts, results, strict=True)
        for at, piece in zip(call.positions, result if call.listed else (result,), strict=True)
    }
    return [pieces[at] for at in sorted(pieces)]


def _groups(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """The positions of those that are computed in one call: small ones on a device together, all others alone."""
    if _differ(tensors):  # torch takes other kernels where one of a list is laid out, or rounded, otherwise
        return [tuple(range(len(tensors)))]
    shared = collections.Counter(map(address, tensors))  # which one node cannot write twice
    small = {
        at
        for at, each in enumerate(tensors)
        if each.device.type != "cpu" and each.numel() * each.element_size() <= SMALL_BYTES and shared[address(each)] == 1
    }
    alone = ((at,) for at in range(len(tensors)) if at not in small)
    return [*alone, *([tuple(sorted(small))] if small else [])]


def _differ(tensors: Sequence[torch.Tensor]) -> bool:
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    dense = all(tensor.numel() in (0, reach(tensor.shape, tensor.stride())) for tensor in tensors)  # of as many elements as they span
    return any(tensor.device.type != "cpu" for tensor in tensors) and (len(kinds) > 1 or not dense)


def _of_one(base: str, func: OpOverload, args: tuple[Any, ...]) -> Operation | None:
    """What torch's loop on a CPU calls."""
    name = base.removeprefix(_FOREACH)
    if name == "norm":
        return _norm
    packet: Any = getattr(torch.ops.aten, name, None) if name.rstrip("_") in OF_ONE else None
    if packet is None or (len(args) > 3 and isinstance(args[3], torch.Tensor)):  # factors in one tensor, which the loop takes apart
        return None
    if func._overloadname not in ("Scalar", "ScalarList") or "Scalar" not in packet.overloads() or name.startswith("pow"):
        return cast("Operation", packet)
    return cast("Operation", packet.Scalar)


def _norm(tensor: torch.Tensor, order: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    norm: torch.Tensor = torch.ops.aten.linalg_vector_norm.default(tensor, order, dtype=dtype)
    return norm


def _taken(group: tuple[int, ...], count: int, args: tuple[Any, ...], kwargs: dict[str, Any], listed: bool) -> tuple[Any, Any]:
    """The arguments of a group: of each list the group's items, or the one item where no list is taken."""

    def taken(item: Any) -> Any:
        if not isinstance(item, (list, tuple)) or len(item) != count:
            return item
        return [item[at] for at in group] if listed else item[group[0]]

    if not listed and len(args) > 3:  # the factor of a product has a name where one tensor is taken
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    return tuple(map(taken, args)), {key: taken(item) for key, item in kwargs.items()}
