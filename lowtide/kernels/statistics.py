"""Norms that update running statistics on the side, as functions: their results, then copies of the statistics that were updated."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.kernels.library import define


def _define(op: Any) -> None:
    places = [at for at, argument in enumerate(op._schema.arguments) if argument.name in ("running_mean", "running_var")]

    def functional(*args: Any) -> tuple[torch.Tensor, ...]:
        given = [arg.clone() if at in places else arg for at, arg in enumerate(args)]
        return (*op(*given), *(given[at] for at in places))

    name, _, rest = str(op._schema).removeprefix("aten::").partition("(")
    define(f"{name}_functional({rest.removesuffix(')')}, Tensor, Tensor)", functional)


for _name in (
    "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats",
):  # fmt: skip
    _define(getattr(torch.ops.aten, _name).default)
