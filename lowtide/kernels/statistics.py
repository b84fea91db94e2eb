"""Norms that update running statistics on the side: as functions, and once more.

As a function a norm returns its results, then copies of the statistics that were updated.
"""

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


def cudnn_batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mean: None, variance: None, *rest: float) -> Any:
    """Once more: the very kernel, beside running statistics that nobody reads, since without any cuDNN might take another."""
    return torch.ops.aten.cudnn_batch_norm(x, weight, bias, torch.zeros_like(weight), torch.ones_like(weight), *rest)


_RUNNING = "Tensor? running_mean, Tensor? running_var, bool training, float exponential_average_factor, float epsilon"
define(f"cudnn_batch_norm(Tensor input, Tensor weight, Tensor? bias, {_RUNNING}) -> (Tensor, Tensor, Tensor, Tensor)", cudnn_batch_norm)
