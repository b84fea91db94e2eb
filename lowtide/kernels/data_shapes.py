"""What eager computes with shapes that depend on data, as one operator whose results have fixed shapes; and what rounds as in place.

Products of matrices that are written into a layout of the program's own are computed in that layout.

And what a program checks of what only the running step knows.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable

import torch

from lowtide.kernels.library import LIBRARY, define


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of the values where a mask holds, added up in the order in which eager adds what it has selected."""
    return values.masked_select(mask).sum()


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    exact = values.dtype.is_floating_point or values.dtype.is_complex
    return values.new_empty((), dtype=None if exact else torch.int64)


def divided(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What `self.div_(other)` leaves in `self`: a complex division rounds otherwise in place, as its loop cannot be vectorised there."""
    return self.clone().div_(other)


def truncated_normal(
    like: torch.Tensor, mean: float, std: float, a: float, b: float, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """What `torch.nn.init.trunc_normal_` leaves: how often it draws follows from what it has drawn."""
    return torch.nn.init.trunc_normal_(torch.empty_like(like), mean, std, a, b, generator)


def _added_in_layout(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`product` into a tensor of these strides that holds `self`: from one layout to another, products of matrices round otherwise."""

    def added(self: torch.Tensor, one: torch.Tensor, two: torch.Tensor, strides: list[int], **factors: float) -> torch.Tensor:
        return product(self.new_empty_strided(self.shape, strides).copy_(self), one, two, **factors)

    return added


def _in_layout(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same of a product that is not added to anything."""
    return lambda one, two, strides: product(one, two, out=_product_like(one, two, strides))


def _product_like(one: torch.Tensor, two: torch.Tensor, strides: list[int]) -> torch.Tensor:
    return one.new_empty_strided((*one.shape[:-1], two.shape[-1]), strides)


for _name in ("addmm", "baddbmm", "addbmm"):
    define(
        f"{_name}_in_layout(Tensor self, Tensor one, Tensor two, SymInt[] strides, *, Scalar beta=1, Scalar alpha=1) -> Tensor",
        _added_in_layout(getattr(torch.Tensor, f"{_name}_")),
    )
    torch.library.register_fake(
        f"lowtide::{_name}_in_layout", lambda self, one, two, strides, **factors: self.new_empty_strided(self.shape, strides), lib=LIBRARY
    )
for _name in ("mm", "bmm"):
    define(f"{_name}_in_layout(Tensor one, Tensor two, SymInt[] strides) -> Tensor", _in_layout(getattr(torch, _name)))
    torch.library.register_fake(f"lowtide::{_name}_in_layout", _product_like, lib=LIBRARY)

define("truncated_normal(Tensor like, float mean, float std, float a, float b, *, Generator? generator=None) -> Tensor", truncated_normal)
torch.library.register_fake("lowtide::truncated_normal", lambda like, *settings, **drawn: torch.empty_like(like), lib=LIBRARY)
define("masked_sum(Tensor values, Tensor mask) -> Tensor", masked_sum)
define("divided(Tensor self, Tensor other) -> Tensor", divided)
torch.library.register_fake("lowtide::masked_sum", _masked_sum, lib=LIBRARY)
torch.library.register_fake("lowtide::divided", lambda self, other: self.clone(), lib=LIBRARY)


CHECK = "lowtide.require.default"  # the operator, and a mark on what it raises


def require(flag: torch.Tensor, expected: bool, error: str, text: str) -> None:
    """Raise an exception of Python's own with this text unless a flag is as expected."""
    if bool(flag.item()) is expected:
        return
    kind = getattr(builtins, error, None)
    raised = (kind if isinstance(kind, type) and issubclass(kind, BaseException) else RuntimeError)(text)
    setattr(raised, CHECK, True)
    raise raised


def _require(flag: torch.Tensor, expected: bool, error: str, text: str) -> None:
    """Of a flag that is not known nothing can be said."""


define("require(Tensor flag, bool expected, str error, str text) -> ()", require)
torch.library.register_fake("lowtide::require", _require, lib=LIBRARY)
