"""Calls of operators that have rules of axes: (the extents of the axes that there should be, arguments, keyword arguments)."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.ir.operators.axes import elementwise

Call = tuple[list[int], tuple[Any, ...], dict[str, Any]]
_RANDOM = torch.Generator().manual_seed(0)


def r(*shape: int) -> torch.Tensor:
    """Random numbers, in double precision: `cast` gives them the precision of a test."""
    return torch.randn(shape, generator=_RANDOM, dtype=torch.float64)


def i(high: int, *shape: int) -> torch.Tensor:
    """Random whole numbers below `high`."""
    return torch.randint(0, high, shape, generator=_RANDOM)


def c(extents: list[int], *args: Any, **kwargs: Any) -> Call:
    """One call."""
    return extents, args, kwargs


def cast(arg: Any, dtype: torch.dtype) -> Any:
    """Arguments with their real tensors of another precision."""
    if isinstance(arg, torch.Tensor):
        return arg.to(dtype) if arg.dtype is torch.float64 else arg
    return type(arg)(cast(item, dtype) for item in arg) if isinstance(arg, (tuple, list)) else arg


def _elementwise() -> dict[str, list[tuple[Any, ...]]]:
    """A call of each overload of each operator that works element by element, by its schema."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for name in (*elementwise.TAGGED, *elementwise.UNTAGGED):
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base)
        for each in [overload] if overload else packet.overloads():
            args = None if "out" in each else _arguments(getattr(packet, each))
            if args is not None:
                found[f"aten.{base}.{each}"] = [args]
    return found


_TEXTS = {"approximate": "tanh", "rounding_mode": "floor"}


def _arguments(op: Any) -> tuple[Any, ...] | None:
    """Arguments of [4, 6] that the operator takes, one tensor broadcast; None where there are none."""
    for kind in ("real", "whole", "truth"):
        args = tuple(_argument(argument, place, kind) for place, argument in enumerate(op._schema.arguments) if not argument.kwarg_only)
        try:
            made = op(*args)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        if isinstance(made, torch.Tensor) and made.shape == (4, 6):
            return args
    return None


def _argument(argument: Any, place: int, kind: str) -> Any:
    text = str(argument.type)
    if text in ("Tensor", "Optional[Tensor]"):
        shape = (6,) if argument.name == "other" and place else (4, 6)
        truth = argument.name in ("mask", "condition") or kind == "truth"
        return i(2, *shape).bool() if truth else i(5, *shape) + 1 if kind == "whole" else r(*shape).abs().clamp(0.1, 0.9)
    if argument.has_default_value():
        return argument.default_value
    return {"number": 2, "int": 2, "float": 0.5, "bool": False, "str": _TEXTS.get(argument.name, "none")}.get(text)


ELEMENTWISE = _elementwise()

_PRODUCTS = {
    "aten.mm.default": [c([6, 4, 8], r(6, 4), r(4, 8))],
    "aten.bmm.default": [c([3, 6, 4, 8], r(3, 6, 4), r(3, 4, 8))],
    "aten.addmm.default": [c([6, 8], r(8), r(6, 4), r(4, 8)), c([6, 8], r(6, 8), r(6, 4), r(4, 8)), c([6, 8], r(1, 8), r(6, 4), r(4, 8))],
    "aten.baddbmm.default": [c([3, 6, 8], r(3, 6, 8), r(3, 6, 4), r(3, 4, 8)), c([3, 6, 8], r(3, 1, 8), r(3, 6, 4), r(3, 4, 8))],
    "aten.mv.default": [c([6, 4], r(6, 4), r(4))],
    "aten.addmv.default": [c([6], r(6), r(6, 4), r(4))],
    "aten.dot.default": [c([6], r(6), r(6))],
    "aten.vdot.default": [c([6], r(6), r(6))],
    "aten.addr.default": [c([6, 4], r(6, 4), r(6), r(4))],
    "aten.matmul.default": [
        c([2, 3, 6, 4, 8], r(2, 1, 6, 4), r(3, 4, 8)),
        c([2, 6, 4], r(2, 6, 4), r(4)),
        c([2, 4, 8], r(4), r(2, 4, 8)),
        c([4], r(4), r(4)),
    ],
    "aten.linear.default": [c([2, 6, 8], r(2, 6, 4), r(8, 4), r(8)), c([2, 6, 4, 8], r(2, 6, 4), r(8, 4))],
}

_X = r(4, 6, 10)
_VIEWS = {
    "aten.view.default": [
        c([4, 10], r(4, 6, 10), [24, 10]),
        c([4, 2], r(4, 6), [4, 2, 3]),
        c([2], r(6, 2), [4, 3]),
        c([4, 3], r(4, 6), [4, -1, 2, 1]),
    ],
    "aten._unsafe_view.default": [c([4, 10], r(24, 10), [4, 6, 10])],
    "aten.reshape.default": [c([4, 10], r(24, 10), [4, -1, 10])],
    "aten.view_as_real.default": [c([4, 6], torch.view_as_complex(torch.randn(4, 6, 2)))],
    "aten.view_as_complex.default": [c([4, 6], torch.randn(4, 6, 2))],
    "aten.permute.default": [c([4, 6, 10], _X, [2, 0, -2])],
    "aten.permute_copy.default": [c([4, 6, 10], _X, [2, 0, -2])],
    "aten.transpose.int": [c([4, 6, 10], _X, 1, -1)],
    "aten.t.default": [c([4, 6], r(4, 6)), c([6], r(6))],
    "aten.expand.default": [c([2, 5, 4, 6], r(4, 1, 6), [2, 4, 5, -1]), c([4, 6], r(4, 1, 6), [-1, 1, 6])],
    "aten.unsqueeze.default": [c([4, 6], r(4, 6), 1)],
    "aten.squeeze.dim": [c([4, 6], r(4, 1, 6, 1), 1)],
    "aten.squeeze.dims": [c([6], r(4, 1, 6, 1), [0, 1])],
    "aten.select.int": [c([4, 10], _X, -2, 3)],
    "aten.unbind.int": [c([4, 10], _X, 1), c([6, 10], _X)],
    "aten.slice.Tensor": [
        c([4, 10], _X, 1, 2, 5),
        c([4, 6, 10], _X, 1, 0, 2**63 - 1),
        c([4, 6, 10], _X, 2, 0, 10),
        c([6, 10], _X, 0, 1),
        c([4, 6, 10], _X),
    ],
    "aten.split.Tensor": [c([4, 10], _X, 4, 1), c([6, 10], _X, 3)],
    "aten.split_with_sizes.default": [c([4, 6], _X, [3, 7], -1)],
    "aten.unfold.default": [c([4, 10], _X, 1, 3, 2)],
    "aten.flip.default": [c([6], _X, [0, -1])],
    "aten.roll.default": [c([4], _X, [1, 2], [1, 2]), c([], _X, [1])],
    "aten.cat.default": [c([4, 10], [_X, r(4, 2, 10)], 1), c([4], [r(4, 3), r(0), r(4, 2)], 1)],
    "aten.stack.default": [c([4, 6], [r(4, 6), r(4, 6)], 1), c([4, 6], [r(4, 6), r(4, 6)], -1)],
    "aten.repeat.default": [c([4], r(4, 6), [2, 1, 3])],
    "aten.slice_backward.default": [c([4, 10], r(4, 3, 10), [4, 6, 10], 1, 2, 5, 1)],
    "aten.select_backward.default": [c([4, 10], r(4, 10), [4, 6, 10], 1, 2), c([6, 10], r(6, 10), [4, 6, 10], -3, 2)],
    "aten.constant_pad_nd.default": [c([4, 6], _X, [1, 2]), c([4, 6], _X, [1, -2, 0, 0], 0.5)],
}

_REDUCTIONS = {
    **{
        f"aten.{name}": [c([4, 6, 10], _X, [1], True), c([4, 6, 10], _X, [0, -1])]
        for name in ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default")
    },
    **{f"aten.{name}.default": [c([4, 6, 10], _X)] for name in ("sum", "mean", "max", "min", "prod", "any", "all")},
    **{f"aten.{name}.dim": [c([4, 10], _X, 1), c([4, 6], _X, -1, True)] for name in ("max", "min")},
    "aten.prod.dim_int": [c([4, 6, 10], _X, 1)],
    "aten.any.dim": [c([4, 6, 10], _X > 1, 1, True)],
    "aten.all.dim": [c([4, 6, 10], _X > -1, -1)],
    **{f"aten.{name}.default": [c([4, 10], _X, 1), c([4, 10], _X, 1, True), c([], _X, None)] for name in ("argmax", "argmin")},
    "aten.logsumexp.default": [c([4, 10], _X, [1]), c([4, 10], _X, [1], True)],
    **{
        f"aten.{name}.correction": [c([4, 10], _X, [1], correction=1.0), c([4, 10], _X, [1], correction=1.0, keepdim=True)]
        for name in ("std", "var", "var_mean")
    },
    "aten.linalg_vector_norm.default": [c([4, 10], _X, 2, [1], True), c([], _X, 2)],
    "aten.norm.ScalarOpt_dim": [c([4, 10], _X, 2, [1], True)],
    "aten.norm.ScalarOpt_dim_dtype": [c([4, 10], _X, 2, [1], True, dtype=torch.float64)],
    **{f"aten.{name}.default": [c([4, 6], _X, -1, False)] for name in ("_softmax", "_log_softmax")},
    **{
        f"aten.{name}.default": [c([4, 10], _X, _X + 1, 1, torch.float32)]
        for name in ("_softmax_backward_data", "_log_softmax_backward_data")
    },
    **{f"aten.{name}.default": [c([4, 10], _X, 1)] for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "argsort")},
    "aten.sort.default": [c([4, 10], _X, 1)],
    "aten.sort.stable": [c([4, 6], _X, dim=-1, stable=True)],
    "aten.topk.default": [c([4, 10], _X, 3, 1)],
    "aten.glu.default": [c([4, 10], _X, 1)],
    "aten.glu_backward.default": [c([4, 10], r(4, 3, 10), _X, 1)],
}

CALLS: dict[str, list[Call]] = {**_PRODUCTS, **_VIEWS, **_REDUCTIONS}
