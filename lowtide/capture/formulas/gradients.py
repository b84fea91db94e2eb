"""Gradients as eager computes them, where ATen has two formulas: eager's looks at the data, the one under a dispatch mode does not.

Where eager's formula branches on data, both branches are computed and one is taken, element by element: its bits are those of the
branch that eager takes.

And what eager's backward pass needs less of memory, of the same bits. Autograd sums gradients in place. Formulas write the gradient of what
reads elements by their places into zeros. And they look at data: of two branches that a captured program computes, eager computes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

import lowtide.kernels.operators  # noqa: F401  (defines lowtide::masked_sum)
from lowtide.capture.calls import resolve
from lowtide.capture.care.turns import during
from lowtide.capture.draft import Draft
from lowtide.capture.formulas.dispatch import FormulaFunction, as_aten, before_autocast, formula, wants_gradient
from lowtide.ir.graph import Node, Value

_ATEN = torch.ops.aten
_WRITING = (
    "index_put.default", "put.default", "scatter.src", "scatter.value", "scatter_add.default", "index_add.default",
    "index_fill.int_Scalar", "index_fill.int_Tensor",
)  # fmt: skip
_WRITERS = {resolve(f"aten.{name}"): resolve(f"aten.{name.replace('.', '_.')}") for name in _WRITING}
_ZEROS = {f"aten.{name}.default" for name in ("zeros", "zeros_like", "new_zeros")}
_CHOICE = "aten.where.self"
_NEAR = 8  # nodes: between a formula's zeros and what it writes there are views and conversions of places

rare_data: ContextVar[bool] = ContextVar("rare", default=False)


def rarely() -> AbstractContextManager[None]:
    """What is computed within, eager computes for rare data alone."""
    return during(rare_data, True)


def of_usual_data(nodes: Sequence[Node], rare: Set[str]) -> tuple[tuple[Node, ...], frozenset[str]]:
    """The nodes without those that make something rare; results that are the one branch that is left.

    All of them where what is rare is read by anything but a choice.
    """
    usual: list[Node] = []
    chosen: set[str] = set()
    for node in nodes:
        if any(value.name in rare for value in node.results):
            continue
        if any(value.name in rare for value in node.inputs):
            if node.op != _CHOICE:  # the gradient of such a branch
                return tuple(nodes), frozenset()
            left = tuple(arg for arg in node.args if not (isinstance(arg, Value) and arg.name in rare))
            node = replace(node, args=left, inplace=tuple(each for each in node.inplace if each[0] in left))
            chosen.update(value.name for value in node.results)
        usual.append(node)
    return tuple(usual), frozenset(chosen)


def form_of(func: OpOverload, args: tuple[Any, ...], draft: Draft) -> OpOverload | None:
    """The operator by which eager writes into zeros that the formula of a gradient has just made; None elsewhere."""
    writer = _WRITERS.get(func)
    if writer is None or torch.is_grad_enabled():
        return None
    formula = torch._C._current_autograd_node()
    if formula is None or isinstance(formula, torch.autograd.function.BackwardCFunction):  # the program's own writes as it says
        return None
    target = draft.value(args[0])
    return writer if any(target in node.results and node.op in _ZEROS for node in draft.nodes[-_NEAR:]) else None


class GradientSums:
    """Tells autograd's own additions, of what arrives at a node from several others, from those of a formula.

    Both come while the node is the current one whose gradient was made last. A formula reads what it adds to, or has made it; autograd
    takes what another formula has made, and adds what this one has. It does so in place, but for a view, whose base holds the storage,
    too: the gradient of a Linear's weight is one, so that a sum for a tied weight takes new memory.
    """

    def __init__(self) -> None:
        self._formula = -1  # the number of the node whose formula runs
        self._since = 0  # how many nodes were recorded before it

    def note(self, recorded: int) -> None:
        """A node is to be recorded behind so many others."""
        node = torch._C._current_autograd_node()
        formula = -1 if node is None else node._sequence_nr()
        if formula != self._formula:
            self._formula, self._since = formula, recorded

    def has(self, node: Node, nodes: Sequence[Node], tensor: Any) -> bool:
        """Whether `node`, behind `nodes`, is such an addition; `tensor` is what it adds to."""
        if node.op != "aten.add.Tensor" or self._formula < 0 or torch.is_grad_enabled() or tensor._is_view():
            return False
        formula, (before, now) = nodes[self._since :], node.args[:2]
        results = {value for each in formula for value in each.results}
        return now in results and before not in results and all(before not in each.inputs for each in formula)


class _OfOneTensor(FormulaFunction):
    """A call of a tensor and settings, whose gradient is a function of the result's, of the tensor, of the result and of the settings."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Tensor], gradient: Callable[..., Tensor], values: Tensor, *settings: Any) -> Tensor:
        result = call(values, *settings)
        ctx.save_for_backward(values, result)
        ctx.gradient, ctx.settings = gradient, settings
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.gradient(grad, *ctx.saved_tensors, *ctx.settings), *[None] * len(ctx.settings)


# The product.


@formula(_ATEN.prod.default, _ATEN.prod.dim_int)
def _prod(op: OpOverload, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not wants_gradient(values):
        return op(values, *args, **kwargs)  # type: ignore[no-any-return]
    if op is _ATEN.prod.default:
        call = partial(op, dtype=kwargs.get("dtype", args[0] if args else None))
        return _OfOneTensor.of(call, _product_gradient, *before_autocast(op, values))
    call, keepdim = partial(op, dtype=kwargs.get("dtype")), args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    return _OfOneTensor.of(call, _product_gradient_along, *before_autocast(op, values, args[0] if args else kwargs["dim"], keepdim))


def _product_gradient(grad: Tensor, given: Tensor, result: Tensor) -> Tensor:
    if given.dim() == 0:
        return grad.to(given.dtype)
    values = given.to(grad.dtype)
    zeros = (values == 0).sum()
    plain = grad * (result / values).conj()
    with rarely():
        safe = _safe_product_gradient(grad, values.contiguous().view(-1), 0).view_as(values)
        if not torch.is_grad_enabled():
            safe = torch.where(zeros > 1, torch.zeros_like(values, memory_format=torch.contiguous_format), safe)
    return torch.where(zeros == 0, plain, safe).to(given.dtype)


def _product_gradient_along(grad: Tensor, given: Tensor, result: Tensor, dim: int, keepdim: bool) -> Tensor:
    if given.dim() == 0:
        return grad.to(given.dtype)
    values = given.to(grad.dtype)
    if not keepdim:
        grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
    zeros = values == 0
    of_lines = zeros.sum(dim, keepdim=True)
    plain = grad * (result / values).conj()
    with rarely():
        safe = _safe_product_gradient(grad, values, dim)
    return torch.where(of_lines.sum() > 0, safe, plain).to(given.dtype)


def _safe_product_gradient(grad: Tensor, values: Tensor, dim: int) -> Tensor:
    """The product of all others, from the products before and after each."""
    length = values.shape[dim]
    if values.numel() == 0:
        return torch.zeros_like(values)
    if length == 1:
        return grad
    shape = list(values.shape)
    shape[dim] = 1
    ones = torch.ones(shape, dtype=grad.dtype, device=grad.device)
    before = torch.cat([ones, values.narrow(dim, 0, length - 1)], dim).cumprod(dim)
    after = torch.cat([ones, values.narrow(dim, 1, length - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * after).conj()


# The running product.


@formula(_ATEN.cumprod.default, _ATEN.cumprod_.default)
def _cumprod(op: OpOverload, values: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if not wants_gradient(values):
        return op(values, dim, dtype=dtype)  # type: ignore[no-any-return]
    if op is _ATEN.cumprod_.default:
        return _RunningProductInPlace.of(values, dim)
    return _OfOneTensor.of(partial(op, dtype=dtype), _running_product_gradient, *before_autocast(op, values, dim))


class _RunningProductInPlace(FormulaFunction):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int) -> Tensor:
        before = values.clone()
        result: Tensor = _ATEN.cumprod_.default(values, dim)
        ctx.mark_dirty(values)
        ctx.save_for_backward(before, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        values, result = ctx.saved_tensors
        return _running_product_gradient(grad, values, result, ctx.dim), None


def _running_product_gradient(grad: Tensor, values: Tensor, result: Tensor, dim: int) -> Tensor:
    """Without zeros a quotient; with zeros ATen has two formulas that round differently: the slow one can be differentiated."""
    grad = grad.to(values.dtype)
    if values.numel() <= 1 or values.shape[dim] == 1:
        return grad
    weighed, zeros = result.conj() * grad, values == 0
    any_zero = zeros.any()
    plain = _reversed_sums(weighed, dim).div(values.conj())
    slow = torch.is_grad_enabled() and values.requires_grad
    with rarely():
        with_zeros = _asked_running_product(grad, values, dim) if slow else _around_zeros(grad, weighed, values, result, dim)
    return torch.where(any_zero, with_zeros, plain)


def _asked_running_product(grad: Tensor, values: Tensor, dim: int) -> Tensor:
    with torch.enable_grad(), as_aten():
        (gradient,) = torch.autograd.grad(_ATEN.cumprod.default(values, dim), values, grad, create_graph=True)
    return gradient


def _around_zeros(grad: Tensor, weighed: Tensor, values: Tensor, result: Tensor, dim: int) -> Tensor:
    """Before the first zero of a line the quotient, at it the products up to the second one, behind it nothing.

    ATen selects, whose results' sizes depend on data; and on fakes some releases of torch take the slow formula.
    """
    zeros = (values == 0).cumsum(dim)
    before, at_one = zeros == 0, zeros == 1
    quotient = _reversed_sums(weighed.masked_fill(~before, 0.0), dim).div(values.conj())
    place = at_one.to(torch.uint8).max(dim, keepdim=True).indices
    first = torch.zeros_like(at_one).scatter(dim, place, True).logical_and(at_one)
    behind = values.conj().masked_fill(~at_one, 1.0).masked_fill(first, 1.0).cumprod(dim)
    up_to = result.conj().gather(dim, (place - 1).relu()).masked_fill(place == 0, 1.0)
    at_first = grad.masked_fill(~at_one, 0.0).mul(behind).sum(dim, keepdim=True).mul(up_to)
    return torch.where(first, at_first, torch.where(before, quotient, torch.zeros_like(values)))


def _reversed_sums(values: Tensor, dim: int) -> Tensor:
    """Each step has a name, as C++ holds all of an expression until its end."""
    flipped = values.flip(dim)
    sums = flipped.cumsum(dim)
    return sums.flip(dim)


# The largest, the smallest, the middle of all: the gradient is shared among those that are equal.


@formula(_ATEN.max.default, _ATEN.min.default, _ATEN.median.default, _ATEN.nanmedian.default)
def _extreme(op: OpOverload, values: Tensor) -> Tensor:
    if not wants_gradient(values) or values.device.type != "cpu":
        return op(values)  # type: ignore[no-any-return]
    return _OfOneTensor.of(op, _shared_gradient, values)


def _shared_gradient(grad: Tensor, values: Tensor, result: Tensor) -> Tensor:
    equal = torch.where(result.isnan(), values.isnan(), values == result)
    return grad.new_zeros(values.shape, dtype=values.dtype).masked_fill(equal, grad / equal.sum())


# Filling with a trained value.


@formula(_ATEN.masked_fill.Tensor, _ATEN.masked_fill_.Tensor)
def _masked_fill(op: OpOverload, tensor: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return _MaskedFill.of(op, tensor, mask, value) if wants_gradient(value) else op(tensor, mask, value)


class _MaskedFill(FormulaFunction):
    @staticmethod
    def forward(ctx: Any, op: OpOverload, tensor: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        if op._schema.is_mutable:
            ctx.mark_dirty(tensor)
        return op(tensor, mask, value)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, Tensor]:
        (mask,) = ctx.saved_tensors
        filled = grad.masked_fill(mask, 0) if ctx.needs_input_grad[1] else None
        return None, filled, None, _MaskedSum.of(grad, mask)


class _MaskedSum(FormulaFunction):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.like = values.shape
        return torch.ops.lowtide.masked_sum(values, mask)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grad, torch.zeros_like(grad)).expand(ctx.like), None
