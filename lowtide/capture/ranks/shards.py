"""Optimizer state in shards: each rank updates its own part of every parameter, and all gather what came of it.

ZeRO (Rajbhandari et al., SC 2020), section 5: stage 1 sums whole gradients, so that whoever looks at them finds what
DistributedDataParallel has; stage 2 leaves each rank its part of the sums alone, in half the traffic. Every parameter is cut into as many
equal parts as there are ranks, the last one filled up with zeros: the program is the same on all ranks, and so is what they hold. An
optimizer that computes each element by itself gives the same numbers part by part; any other is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch

import lowtide.kernels  # noqa: F401  (defines the operators of lowtide's own)
from lowtide.capture import operators
from lowtide.capture.optimizers.optimizer import Shadow
from lowtide.capture.ranks.exchange import buckets, refuse_complex
from lowtide.capture.ranks.ranks import Ranks
from lowtide.capture.ranks.sums import reduced_parts
from lowtide.errors import CaptureError
from lowtide.ir.graph import Node

Shards: TypeAlias = Mapping[torch.Tensor, torch.Tensor]  # by fake parameter: this rank's part, with its gradient

_MAKING = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "clone", "copy", "fill", "zero", "detach", "alias", "view"})


def own_shards(parameters: Iterable[torch.Tensor], ranks: Ranks) -> Shards:
    """This rank's parts, of parameters whose gradients are the means over all ranks."""
    found = {}
    for each in parameters:
        if each.grad is not None and each.grad.numel():
            found[each] = shard_of(each, ranks)
            found[each].grad = own(each.grad, ranks)
    return found


def shard_of(parameter: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's part of a parameter that all of them hold."""
    return own(parameter.detach(), ranks)


def own(whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's part of a tensor that all of them hold."""
    part: torch.Tensor = torch.ops.lowtide.own_part(whole, ranks.size, ranks.group)
    return part


def scatter(gradients: Sequence[torch.Tensor], ranks: Ranks) -> Sequence[torch.Tensor]:
    """One message: this rank's part of the mean of each."""
    rows = [_rows(each, ranks.size) for each in gradients]
    share = (rows[0] if len(rows) == 1 else torch.cat(rows, 1)).view(-1) * (1.0 / ranks.size)
    pieces: Sequence[torch.Tensor] = reduced_parts(share, ranks).split([row.shape[1] for row in rows])
    return pieces


def gather(shards: Shards, ranks: Ranks) -> None:
    """Write what all ranks have made of their parts over the parameters."""
    for bucket in buckets(shards, {each: each for each in shards}, ranks.bucket_bytes):
        parts = [shards[each] for each in bucket]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        for parameter, part in zip(bucket, gathered(sent, ranks).split([each.numel() for each in parts], 1), strict=True):
            _write(parameter, part)


def _write(parameter: torch.Tensor, rows: torch.Tensor) -> None:
    """Put the parts of all ranks, one a row, into a parameter: straight from where they lie, where it is cut without a rest."""
    if parameter.is_contiguous() and parameter.numel() == rows.numel():
        parameter.view(rows.shape).copy_(rows)
    else:
        parameter.copy_(rows.reshape(-1)[: parameter.numel()].view(parameter.shape))


def gathered(sent: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """[ranks, n] what all ranks have sent, n elements each."""
    whole: torch.Tensor = torch.ops.lowtide.wait_for(torch.ops.lowtide.all_gather(sent, ranks.size, ranks.group), sent)
    return whole.view(ranks.size, -1)


def refuse_whole_state(shadow: Shadow, ranks: Ranks) -> None:
    """Raise CaptureError for state that is not in shards."""
    for parameter, entries in shadow.optimizer.state.items():
        numel = shadow.fakes[parameter].numel()
        for key, item in entries.items():
            if isinstance(item, torch.Tensor) and item.dim() and item.shape != (-(-numel // ranks.size),):
                raise CaptureError(
                    f"the optimizer's {key} of {shadow.names.get(parameter, 'a parameter')} is not in {ranks.size} shards: its shape is "
                    f"{tuple(item.shape)}; give `shard` an optimizer without state, or load shards into it"
                )


def refuse_mixing(optimizer: torch.optim.Optimizer, nodes: Iterable[Node]) -> None:
    """Raise CaptureError for an optimizer that lets elements of a parameter know of one another."""
    for node in nodes:
        if any(prod(value.shape) > 1 for value in node.inputs) and not _is_elementwise(node):
            raise CaptureError(
                f"{type(optimizer).__name__} computes with whole parameters ({node.op}), of which each rank has a part: `shard` needs an "
                "optimizer that updates each element by itself, as SGD and AdamW do"
            )


def _is_elementwise(node: Node) -> bool:
    if not node.op.startswith("aten."):
        return False
    op: Any = operators.resolve(node.op)
    base = node.op.split(".")[1].removesuffix("_")
    return torch.Tag.pointwise in op.tags or operators.row(op).elementwise or operators.row(op).view or base in _MAKING


def _rows(gradient: torch.Tensor, size: int) -> torch.Tensor:
    """[size, ceil(n / size)] all parts of a gradient, one a row."""
    refuse_complex(gradient)
    flat, missing = gradient.reshape(-1), -gradient.numel() % size
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(size, -1)
