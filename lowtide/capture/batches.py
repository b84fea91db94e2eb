"""Batches as a capture takes them: what they may hold, that the program leaves them as they are, how they are cut or made longer.

Where a program reads no values that are no tensors (file names, ids, objects), it does the same whatever they are: so stand-ins of the same
types take their places, note whatever is done with them, and raise.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from lowtide.capture.sizes.probes import memory_order
from lowtide.errors import BatchError, CaptureError, ShapeError
from lowtide.ir import tree
from lowtide.ir.shapes.dimension import Varying

_TYPES = (str, bytes, int, float)  # flags and None are there to be read
_LEFT_ALONE = frozenset({
    "__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__doc__", "__getattribute__", "__setattr__",
    "__delattr__", "__dir__", "__class_getitem__", "__sizeof__",
})  # fmt: skip
_NOTICED = ("__init_subclass__", "__del__")
_OTHERS = ("__bool__", "__fspath__", "__bytes__", "__complex__", "__int__", "__index__", "__float__", "__iter__", "__len__", "__getitem__")


class ReadError(Exception):
    """A stand-in was read."""


def can_stand_in(value: Any) -> bool:
    """Whether there are stand-ins for values of its type: those above, and objects of plain classes, which may be made empty."""
    kind = type(value)
    if kind in _TYPES:
        return True
    if type(kind) not in (type, ABCMeta) or any(name in vars(base) for base in kind.__mro__[:-1] for name in _NOTICED):
        return False  # a class of it would be noted, or its end would do something
    if any("__slots__" in vars(base) for base in kind.__mro__):
        return False  # looking for tensors in it reads them
    try:
        return bool(_empty(type(kind.__name__, (kind,), {})))
    except TypeError:  # it has no classes of its own (None, bool), or more memory than Python knows
        return False


def _empty(kind: type) -> list[Any]:
    return [object.__new__(kind)]


def with_stand_ins(
    args: tuple[Any, ...], kwargs: dict[str, Any], where: Set[str], reads: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch with stand-ins for the leaves at these places, which write into `reads` what is done with them."""
    leaves, rebuild = tree.flatten((args, kwargs))
    items = [_stand_in(leaf.value, reads.append) if leaf.where in where else leaf.value for leaf in leaves]
    built: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, items)
    return built


def _stand_in(value: Any, note: Callable[[str], None]) -> Any:
    def raising(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(name)
            raise ReadError(f"{name} of a value of the batch")

        return method

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return raising(name)(self)

    base = type(value)
    own = {name for name in dir(base) if callable(getattr(base, name))}
    names = [name for name in {*own, *_OTHERS} if name.startswith("__") and name not in _LEFT_ALONE]
    stand_in = type(base.__name__, (base,), {name: raising(name) for name in names} | {"__getattribute__": attribute})
    return stand_in(_UNLIKELY[base]) if base in _UNLIKELY else _empty(stand_in)[0]


_UNLIKELY: dict[type, Any] = {str: "\0lowtide", bytes: b"\0lowtide", int: -0x10BD_71DE, float: -1.0727368e-37}  # what C reads of them


def largest(args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return stretched(args, kwargs, varying, {each.extent_name: each.extent(each.most) for each in varying.dimensions})


def stretched(
    args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying, wanted: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with these extents, by name; tensors that have that shape already are passed on.

    Raises ShapeError where there is no memory for it.
    """
    leaves, rebuild = tree.flatten((args, kwargs))
    extents = [{dim: wanted[name] for dim, name in varying.of_leaf(index).items()} for index in range(len(leaves))]
    try:
        values = [_stretched(leaf.value, own) for leaf, own in zip(leaves, extents, strict=True)]
    except RuntimeError as error:  # torch's own for memory that there is not, and for more elements than it can count
        where = ", ".join(f"{name} = {extent}" for name, extent in wanted.items())
        raise ShapeError(f"dynamic: a batch of {where} cannot be made on this machine ({error}): let the ranges end lower") from error
    stretched_batch: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, values)
    return stretched_batch


def _stretched(item: Any, extents: Mapping[int, int]) -> Any:
    if not extents or all(item.shape[dim] == extent for dim, extent in extents.items()):
        return item
    shape = [extents.get(dim, extent) for dim, extent in enumerate(item.shape)]
    order = memory_order(item)[::-1]
    longer = item.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(item.dim())])
    for dim, extent in extents.items():
        places = torch.arange(extent, device=item.device) % max(item.shape[dim], 1)
        item = item.index_select(dim, places)
    return longer.copy_(item)


BATCHES = "batches"  # in place of a number of micro-batches: they are given, not cut


def positional_and_keyword(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is passed on:

    a tuple (a NamedTuple, too) or list as positional arguments, a mapping as keyword arguments, anything else as the one argument.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def objects_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a batch holds beside tensors: objects that the program gets as they are."""
    return [leaf.value for leaf in tree.flatten((args, kwargs))[0] if not isinstance(leaf.value, torch.Tensor)]


def refuse_batch_leaf(leaf: tree.Leaf) -> None:
    """Raise CaptureError for a tensor whose gradient somebody may wait for. Who asks for a capture has looked that it is a plain one."""
    tensor: torch.Tensor = leaf.value
    if tensor.requires_grad:
        raise CaptureError(
            f"batch{leaf.where} requires gradients, which a captured step does not return: pass it detached. Where the loss differentiates "
            "by it (torch.autograd.grad), let the loss begin with `x = x.detach().requires_grad_()`; where an optimizer trains it, hold it "
            "in the model as a parameter"
        )


def refuse_changed_batch(batch: Any, before: list[tree.Leaf]) -> None:
    """The program has structures of its own for the batch's; what it puts into them, the caller would not see."""
    now = tree.flatten(batch)[0]
    changed = [old for old, new in zip(before, now, strict=False) if old.where != new.where or old.value is not new.value]
    if not changed and len(now) == len(before):
        return
    where = (changed or now[len(before) :] or before[len(now) :])[0].where
    raise CaptureError(
        f"the program changes what the batch holds, at batch{where}, and a captured step would leave the caller's as it is: make a copy in "
        "the program and return that, or do without (a cache: use_cache=False)"
    )


def micro_batches(args: tuple[Any, ...], kwargs: dict[str, Any], count: int | str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The batch cut along the first dimension of its tensors into `count` equal parts; what has no such dimension goes to every part.

    With BATCHES each argument is a micro-batch.
    """
    if isinstance(count, str):
        yield from (positional_and_keyword(each) for each in (*args, *kwargs.values()))
        return
    if count == 1:
        yield args, kwargs
        return
    leaves, rebuild = tree.flatten((args, kwargs))
    pieces = [_cut(leaf, count) for leaf in leaves]
    for index in range(count):
        yield tree.unflatten(rebuild, [piece[index] for piece in pieces])


def _cut(leaf: tree.Leaf, count: int) -> Sequence[Any]:
    if not isinstance(leaf.value, torch.Tensor) or leaf.value.dim() == 0:
        return [leaf.value] * count
    if leaf.value.shape[0] % count:
        raise BatchError(f"batch{leaf.where} has {leaf.value.shape[0]} rows, which {count} micro-batches cannot share equally")
    return leaf.value.chunk(count)
