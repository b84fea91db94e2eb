"""Runs an operator in parts along an axis of its row, on real tensors, and puts the parts together by what the axis says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lowtide.capture import calls
from lowtide.ir.graph import Arg, Atom, Kind, Node, Storage, Value
from lowtide.ir.operators.axes import ArgumentPath, Axis, Combine, Reduced, Role
from lowtide.ir.operators.nodes import axes_of, row_of

_FOLDS: dict[Combine, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    Combine.SUM: lambda parts: sum(parts[1:], parts[0]),
    Combine.MAX: lambda parts: torch.stack(parts).amax(0),
    Combine.MIN: lambda parts: torch.stack(parts).amin(0),
    Combine.PRODUCT: lambda parts: torch.stack(parts).prod(0),
    Combine.ANY: lambda parts: torch.stack(parts).any(0),
    Combine.ALL: lambda parts: torch.stack(parts).all(0),
    Combine.SAME: lambda parts: parts[-1],
}


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> tuple[Node, list[torch.Tensor]]:
    """The node of a call, and the tensors that are its results: outputs, then what it wrote. Arguments are left as they were."""
    op, kwargs = calls.resolve(name), kwargs or {}
    mine = _copied(tuple(args))
    values: dict[int, Value] = {}
    listed = tuple(_arg(arg, values) for arg in mine)
    named = tuple((key, _arg(arg, values)) for key, arg in kwargs.items())
    written = [place for place in calls.written_positions(op, mine) if isinstance(place, int) and isinstance(mine[place], torch.Tensor)]
    returned = op(*mine, **kwargs)
    made = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    fresh = [None if not isinstance(each, torch.Tensor) or any(each is mine[place] for place in written) else each for each in made]
    outputs = tuple(None if each is None else _value(f"out{at}", each) for at, each in enumerate(fresh))
    writes = tuple((listed[place], _value(f"after{place}", mine[place])) for place in written)
    if writes and all(each is None for each in fresh):
        outputs = ()
    results = [each for each in fresh if each is not None] + [mine[place] for place in written]
    return Node(name, listed, outputs, named, writes), results


def wrong_axes(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None, seed: int = 0) -> Iterator[str]:
    """What does not come out as it should, of all axes of a call."""
    node, whole = call(name, args, kwargs)
    for axis in axes_of(node):
        pieces = cut(int(axis.extent), random.Random(seed))
        got = in_parts(node, axis, pieces, args, kwargs or {})
        for index, (one, two) in enumerate(zip(got, whole, strict=True)):
            if not (one.shape == two.shape if row_of(name).untouched else alike(one, two)):
                yield f"{name} {axis} {pieces}: result {index} is {one.shape} {one.flatten()[:4]}, expected {two.shape} {two.flatten()[:4]}"


def cut(extent: int, rng: random.Random) -> list[tuple[int, int]]:
    """Pieces of any sizes, at least two."""
    ends = sorted({*rng.sample(range(1, extent), min(extent - 1, rng.randint(1, 3))), extent})
    return list(zip([0, *ends], ends, strict=False))


def in_parts(node: Node, axis: Axis, pieces: list[tuple[int, int]], args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The results of all parts, put together as the axis says."""
    parts = [call(node.op, *_part(axis, piece, args, kwargs))[1] for piece in pieces]
    shares = [(stop - start) / int(axis.extent) for start, stop in pieces]
    made = [combined(role, [part[index] for part in parts], shares) for index, role in enumerate(axis.results)]
    over = [role.over if isinstance(role, Reduced) else None for role in axis.results]
    return [each if at is None else each / made[at] for each, at in zip(made, over, strict=True)]


def combined(role: Role, parts: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    """One result of all parts."""
    if isinstance(role, int):
        return torch.cat(parts, role)
    if role.combine is Combine.MEAN:
        return sum(part * share for part, share in zip(parts, shares, strict=True))
    return _FOLDS[role.combine](parts)


def alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two results are the same: whole numbers to the bit, others as far as another order of sums allows."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not two.dtype.is_floating_point and not two.dtype.is_complex:
        return torch.equal(one, two)
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.complex64: 2e-4}.get(two.dtype, 6e-2)
    finite = two[torch.isfinite(two)].abs()
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance * (float(finite.max()) if finite.numel() else 0.0), equal_nan=True)


def _part(axis: Axis, piece: tuple[int, int], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one part."""
    start, stop = piece
    sliced, instead, extent = dict(axis.sliced), dict(axis.instead), int(axis.extent)

    def of(arg: Any, path: ArgumentPath) -> Any:
        if path in instead:
            return instead[path]
        if path in sliced:
            each = arg.shape[sliced[path]] // extent
            return arg.narrow(sliced[path], start * each, (stop - start) * each)
        if path in axis.sizes:
            return arg * (stop - start) // extent
        return type(arg)(of(item, (*path, at)) for at, item in enumerate(arg)) if isinstance(arg, (tuple, list)) else arg

    return tuple(of(arg, (at,)) for at, arg in enumerate(args)), {key: of(arg, (key,)) for key, arg in kwargs.items()}


def _copied(arg: Any) -> Any:
    """With tensors of their own, in the same layout."""
    if isinstance(arg, torch.Tensor):
        return arg.clone(memory_format=torch.preserve_format)
    return tuple(map(_copied, arg)) if isinstance(arg, (tuple, list)) else arg


def _arg(arg: Any, values: dict[int, Value]) -> Arg:
    if isinstance(arg, torch.Tensor):
        return values.setdefault(id(arg), _value(f"in{len(values)}", arg))
    if isinstance(arg, (tuple, list)):
        return tuple(_arg(item, values) for item in arg)
    return Atom("dtype", str(arg)) if isinstance(arg, (torch.dtype, torch.device, torch.memory_format, torch.layout)) else arg


def _value(name: str, tensor: torch.Tensor) -> Value:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Value(name, Storage(name, tensor.nbytes, "cpu", Kind.ACTIVATION), dtype, tuple(tensor.shape), tuple(tensor.stride()))
