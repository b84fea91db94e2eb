"""Rows of what only looks at memory, gets it, fills it, or reads and writes it in places."""

from __future__ import annotations

from lowtide.ir.operators.row import Fake, Operator
from lowtide.ir.operators.traffic import index_put, into_positions, likelihood, lookup

_VIEWS = (
    "_conj", "_fw_primal", "_indices", "_make_dual", "_neg_view", "_nested_get_values", "_nested_view_from_buffer",
    "_nested_view_from_jagged", "_reshape_alias", "_sparse_broadcast_to", "_values", "alias", "as_strided", "ccol_indices", "col_indices",
    "crow_indices", "detach", "diagonal", "expand", "indices", "lift_fresh", "permute", "row_indices", "select", "slice", "slice_inverse",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "values", "view_as_complex", "view_as_real",
)  # fmt: skip

_UNTOUCHED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

_FILLED = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "copy", "fill", "zero")

# Gradients for which the input is asked for its shape alone.
_SHAPED = (
    "nll_loss", "nll_loss2d", "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip

_FIXING = ("constant_pad_nd", "im2col", "col2im", "linspace", "logspace")

ROWS = (
    *(Operator(name=f"aten.{name}", view=True) for name in _VIEWS),
    Operator(name="aten.view", view=True, fake=Fake.STRIDES_OF_VIEWS),
    Operator(name="aten._unsafe_view", fake=Fake.STRIDES_OF_VIEWS),
    *(Operator(name=f"aten.{name}.default", fake=Fake.FIXES_SIZES) for name in _FIXING),
    *(Operator(name=f"aten.{name}", rebinds=True) for name in ("set_", "resize_", "resize_as_", "_resize_output_")),
    *(Operator(name=f"aten.{name}", untouched=True) for name in _UNTOUCHED),
    *(Operator(name=f"aten.{name}", unread=(0,)) for name in _FILLED),
    *(Operator(name=f"aten.{name}_backward", unread=(1,)) for name in _SHAPED),
    *(Operator(name=f"aten.{name}", moved_bytes=lookup) for name in ("embedding", "index", "index_select", "gather", "take")),
    *(Operator(name=f"aten.{name}", moved_bytes=likelihood) for name in ("nll_loss_forward", "nll_loss2d_forward")),
    Operator(name="aten.index_put_", moved_bytes=index_put),
    Operator(name="aten.scatter_", moved_bytes=into_positions(2, 3)),
    Operator(name="aten.scatter_add_", moved_bytes=into_positions(2, 3, adds=True)),
    Operator(name="aten.index_copy_", moved_bytes=into_positions(2, 3)),
    Operator(name="aten.index_add_", moved_bytes=into_positions(2, 3, adds=True)),
)
