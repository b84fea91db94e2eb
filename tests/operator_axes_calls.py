"""Calls of operators that have rules of axes: (the extents of the axes that there should be, arguments, keyword arguments)."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.ir.operators.elementwise import broadcast
from lowtide.ir.operators.nodes import ROWS

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
    if isinstance(arg, dict):
        return {key: cast(item, dtype) for key, item in arg.items()}
    return type(arg)(cast(item, dtype) for item in arg) if isinstance(arg, (tuple, list)) else arg


def _elementwise() -> dict[str, list[tuple[Any, ...]]]:
    """A call of each overload of each operator that works element by element, by its schema."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for name in [row.name.removeprefix("aten.") for row in ROWS.values() if row.axes is broadcast]:
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
    "aten.unsafe_split.Tensor": [c([4, 10], _X, 4, 1)],
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


def _norms() -> dict[str, list[Call]]:
    """Norms, with the statistics that their gradients need."""
    x, g, w, b = r(4, 6, 10), r(4, 6, 10), r(6, 10), r(6, 10)
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [10], w[0], b[0], 1e-5)
    groups = r(4, 6, 5)
    _, group_mean, group_rstd = torch.ops.aten.native_group_norm.default(groups, w[:, 0], b[:, 0], 4, 6, 5, 3, 1e-5)
    mu, var, c6 = r(6), r(6).abs(), r(6)
    _, saved, inverse = torch.ops.aten.native_batch_norm.default(groups, c6, c6, mu.clone(), var.clone(), True, 0.1, 1e-5)
    none = torch.empty(0, dtype=torch.float64)
    back = "aten.native_batch_norm_backward.default"
    return {
        "aten.native_layer_norm.default": [c([4, 6], x, [10], w[0], b[0], 1e-5), c([4], x, [6, 10], None, None, 1e-5)],
        "aten.native_layer_norm_backward.default": [
            c([4, 6], g, x, [10], mean, rstd, w[0], b[0], [True, True, True]),
            c([4, 6], g, x, [10], mean, rstd, w[0], None, [True, True, False]),
        ],
        "aten.native_group_norm.default": [c([4, 3], groups, w[:, 0], b[:, 0], 4, 6, 5, 3, 1e-5)],
        "aten.native_group_norm_backward.default": [
            c([4, 3], r(4, 6, 5), groups, group_mean, group_rstd, w[:, 0], 4, 6, 5, 3, [True, True, True])
        ],
        "aten.native_batch_norm.default": [
            c([6], groups, c6, c6, mu, var, True, 0.1, 1e-5),
            c([6, 4, 5], groups, c6, c6, mu, var, False, 0.1, 1e-5),
        ],
        back: [
            c([6], r(4, 6, 5), groups, c6, mu, var, saved, inverse, True, 1e-5, [True, True, True]),
            c([6, 4, 5], r(4, 6, 5), groups, c6, mu, var, none, none, False, 1e-5, [True, True, True]),
        ],
    }


_ONE, _TARGET, _PIXELS = torch.ones((), dtype=torch.float64), i(6, 10), i(6, 4, 3, 5)
_IGNORED = _TARGET.masked_fill(_TARGET == 2, -100)
_TOTAL = torch.tensor(9.0, dtype=torch.float64)


def _losses() -> dict[str, list[Call]]:
    scores, image, weight = r(10, 6), r(4, 6, 3, 5), r(6).abs()
    return {
        "aten.nll_loss_forward.default": [
            c([10], scores, _TARGET, None, 0, -100),
            c([10], scores, _IGNORED, weight, 1, -100),
            c([10], scores, _IGNORED, None, 1, -100),
            c([10], scores, _TARGET, None, 2, 2),
            c([], scores[0], _TARGET[0], None, 1, -100),
        ],
        "aten.nll_loss_backward.default": [
            c([10], r(10), scores, _TARGET, None, 0, -100, _TOTAL),
            c([10], _ONE, scores, _IGNORED, weight, 1, -100, _TOTAL),
            c([10], _ONE, scores, _TARGET, None, 2, 2, _TOTAL),
        ],
        "lowtide.cross_entropy_backward.default": [
            c([10], r(10), scores.log_softmax(1), _TARGET, None, 0, -100, _TOTAL),
            c([10], _ONE, scores.log_softmax(1), _IGNORED, weight, 1, -100, _TOTAL),
        ],
        "aten.nll_loss2d_forward.default": [c([4, 3, 5], image, _PIXELS, None, 1, 2), c([4, 3, 5], image, _PIXELS, None, 0, 2)],
        "aten.nll_loss2d_backward.default": [c([4, 3, 5], _ONE, image, _PIXELS, weight, 1, 2, _TOTAL)],
        "aten.mse_loss.default": [c([10, 6], scores, r(10, 6), number) for number in (0, 1, 2)],
        "aten.mse_loss_backward.default": [
            c([10, 6], r(10, 6), scores, r(10, 6), 0),
            c([], _ONE, scores, r(10, 6), 1),
            c([10, 6], _ONE, scores, r(10, 6), 2),
        ],
    }


def _planes() -> dict[str, list[Call]]:
    """Pools and interpolation, with the indices that their gradients need."""
    x, clip, aten = r(4, 6, 8, 8), r(4, 6, 8, 8, 8), torch.ops.aten
    found: dict[str, list[Call]] = {}
    for dims, image in ((2, x), (3, clip)):
        two, none, one = [2] * dims, [0] * dims, [1] * dims
        pooled, where = getattr(aten, f"max_pool{dims}d_with_indices").default(image, two, two, none, one, False)
        adapted, place = getattr(aten, f"adaptive_max_pool{dims}d").default(image, [4] * dims)
        mine = {
            f"max_pool{dims}d_with_indices": c([4, 6], image, two, two, none, one, False),
            f"max_pool{dims}d_with_indices_backward": c([4, 6], pooled, image, two, two, none, one, False, where),
            f"avg_pool{dims}d": c([4, 6], image, two, two, none, False, True, None),
            f"avg_pool{dims}d_backward": c([4, 6], pooled, image, two, two, none, False, True, None),
            f"_adaptive_avg_pool{dims}d": c([4, 6], image, [3] * dims),
            f"_adaptive_avg_pool{dims}d_backward": c([4, 6], adapted, image),
            f"adaptive_max_pool{dims}d": c([4, 6], image, [4] * dims),
            f"adaptive_max_pool{dims}d_backward": c([4, 6], adapted, image, place),
        }
        found |= {f"aten.{name}.default": [each] for name, each in mine.items()}
    for name in ("upsample_bilinear2d", "upsample_bicubic2d"):
        found[f"aten.{name}.default"] = [c([4, 6], x, [12, 12], False, None, None)]
        found[f"aten.{name}_backward.default"] = [c([4, 6], r(4, 6, 12, 12), [12, 12], [4, 6, 8, 8], False, None, None)]
    for name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
        found[f"aten.{name}.default"] = [c([4, 6], x, [12, 12], None, None)]
        found[f"aten.{name}_backward.default"] = [c([4, 6], r(4, 6, 12, 12), [12, 12], [4, 6, 8, 8], None, None)]
    found |= {f"aten.{name}.default": [c([4, 6], x, 1)] for name in ("tril", "triu")}
    found["aten.pixel_shuffle.default"] = [c([4], r(4, 12, 3, 3), 2)]
    found["aten.pixel_unshuffle.default"] = [c([4], x, 2)]
    found["aten.im2col.default"] = [c([4, 6], x, [2, 2], [1, 1], [0, 0], [2, 2])]
    found["aten.col2im.default"] = [c([4, 6], r(4, 24, 16), [8, 8], [2, 2], [1, 1], [0, 0], [2, 2])]
    return found


def _convolutions() -> dict[str, list[Call]]:
    """Plain, transposed, in groups, of one element."""
    x, g, mask = r(4, 6, 5, 5), r(4, 8, 5, 5), [True, True, True]
    plain = ([1, 1], [1, 1], [1, 1], False, [0, 0])
    point = ([1, 1], [0, 0], [1, 1], False, [0, 0])
    back = ([1, 1], [1, 1], [1, 1], True, [0, 0])
    return {
        "aten.convolution.default": [
            c([4, 8], x, r(8, 6, 3, 3), r(8), *plain, 1),
            c([4, 8, 6], x, r(8, 6, 3, 3), None, *plain, 1),
            c([4, 2], x, r(8, 3, 3, 3), r(8), *plain, 2),
            c([4, 6], x, r(12, 1, 3, 3), None, *plain, 6),
            c([4, 8, 5, 5], x, r(8, 6, 1, 1), r(8), *point, 1),
            c([4, 8, 6], x, r(6, 8, 3, 3), None, *back, 1),
            c([4, 2], x, r(6, 4, 3, 3), r(8), *back, 2),
        ],
        "aten.convolution_backward.default": [
            c([4, 8, 6], g, x, r(8, 6, 3, 3), [8], *plain, 1, mask),
            c([4, 8, 6], g, x, r(8, 6, 3, 3), None, *plain, 1, [True, True, False]),
            c([4, 8, 6], g, x, r(8, 6, 3, 3), None, *plain, 1, [False, True, False]),
            c([4, 2], g, x, r(8, 3, 3, 3), [8], *plain, 2, mask),
            c([4, 8, 6, 5, 5], g, x, r(8, 6, 1, 1), [8], *point, 1, mask),
            c([4, 8, 6], g, x, r(6, 8, 3, 3), [8], *back, 1, mask),
        ],
    }


def _attention() -> dict[str, list[Call]]:
    """With and without a mask, causal, fewer heads of keys."""
    q, k, v, g = r(2, 4, 6, 8), r(2, 4, 10, 8), r(2, 4, 10, 8), r(2, 4, 6, 8)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    whole, mask = r(2, 1, 6, 10), r(6, 10)
    out, logs = forward(q, k, v)
    masked, masked_logs = forward(q, k, v, attn_mask=mask)
    return {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": [
            c([2, 4, 6], q, k, v),
            c([2, 4], q, q, q, 0.0, True),
            c([2, 4, 6], q, k, v, 0.0, False, attn_mask=whole),
            c([2, 4, 6], q, k, v, 0.0, False, attn_mask=mask),
        ],
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": [
            c([2, 4, 6], g, q, k, v, out, logs, 0.0, False),
            c([2, 4, 6], g, q, k, v, masked, masked_logs, 0.0, False, attn_mask=mask),
            c([2, 4], g, q, q, q, q, logs, 0.0, True),
        ],
    }


def _lookups() -> dict[str, list[Call]]:
    """Indices in all places, broadcast ones and masks among them."""
    x, w = r(4, 6, 10), i(4, 5, 1)
    rows, columns = i(4, 5, 1), i(6, 7)
    return {
        "aten.embedding.default": [c([5, 6, 8], r(12, 8), i(12, 5, 6), -1, False, False)],
        "aten.embedding_dense_backward.default": [
            c([5, 6, 8], r(5, 6, 8), i(12, 5, 6), 12, 3, False),
            c([8], r(5, 6, 8), i(12, 5, 6), 12, -1, True),
        ],
        "aten.index.Tensor": [
            c([5, 7, 10], x, [rows, columns]),
            c([4, 10, 5], x, [None, i(6, 5)]),
            c([6, 5, 7], x, [rows, None, i(10, 7)]),
            c([5, 6, 10], x, [w]),
            c([], x, [x > 0]),
        ],
        "aten.index_put.default": [
            c([10], x, [rows, columns], r(5, 7, 10)),
            c([4, 10], x, [None, i(6, 5)], r(4, 5, 10), True),
            c([4, 10], x, [None, i(6, 5)], r(10), True),
            c([4, 6, 10], x, [x > 0], _ONE),
            c([], x, [x > 0], r(int((x > 0).sum()))),
        ],
        "aten.gather.default": [c([4, 3, 10], x, 1, i(6, 4, 3, 10)), c([4, 3], x, 1, i(6, 4, 3, 2))],
        "aten.scatter.src": [c([4, 10], x, 1, i(6, 4, 3, 10), r(4, 3, 10))],
        "aten.scatter.value": [c([4, 10], x, 1, i(6, 4, 3, 10), 2.0)],
        "aten.scatter_add.default": [c([4, 10], x, 1, i(6, 4, 3, 10), r(4, 3, 10)), c([4], x, 1, i(6, 4, 3, 2), r(4, 3, 10))],
        "aten.index_select.default": [c([4, 5, 10], x, 1, i(6, 5))],
        "aten.index_copy.default": [c([4, 10], x, 1, torch.randperm(6)[:5], r(4, 5, 10))],
        "aten.index_fill.int_Scalar": [c([4, 10], x, 1, i(6, 5), 2.0)],
        "aten.index_add.default": [c([4, 10], x, 1, i(6, 5), r(4, 5, 10))],
        "lowtide.add_rows.default": [c([12, 10], r(12, 10), torch.arange(12, dtype=torch.int32), i(12, 30), r(30, 10))],
    }


_FILLED = {
    **{f"aten.{name}.default": [c([4, 6], [4, 6])] for name in ("zeros", "ones")},
    "aten.empty.memory_format": [c([4, 6], [4, 6])],
    "aten._prelu_kernel_backward.default": [c([4, 6], r(4, 6), r(1, 6), r(4, 6))],
    "aten.full.default": [c([4, 6], [4, 6], 2)],
    **{f"aten.{name}.default": [c([4, 6], r(3), [4, 6])] for name in ("new_zeros", "new_ones", "new_empty")},
    "aten.new_full.default": [c([4, 6], r(3), [4, 1, 6], 2)],
    "aten.new_empty_strided.default": [c([6], r(3), [4, 6], [1, 4])],
    "aten._safe_softmax.default": [c([4, 6], _X, -1)],
    "aten._fft_c2c.default": [c([6], torch.complex(torch.randn(4, 6, 10), torch.randn(4, 6, 10)), [0, 2], 0, True)],
}

CALLS: dict[str, list[Call]] = {
    **_PRODUCTS, **_VIEWS, **_REDUCTIONS, **_norms(), **_losses(), **_planes(), **_convolutions(), **_attention(), **_lookups(), **_FILLED,
}  # fmt: skip
