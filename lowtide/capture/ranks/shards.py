"""Optimizer state in shards: each rank updates its own part of every parameter, and all gather what came of it.

ZeRO (Rajbhandari et al., SC 2020), section 5: stage 1 sums whole gradients, so that whoever looks at them finds what
DistributedDataParallel has; stage 2 leaves each rank its part of the sums alone, in half the traffic. Every parameter is cut into as many
equal parts as there are ranks, the last one filled up with zeros: the program is the same on all ranks, and so is what they hold. An
optimizer that computes each element by itself gives the same numbers part by part; any other is refused.

Stage 2 sums by `reduce_scatter`; over gloo ranks exchange parts, which their keepers add.

gloo has no `reduce_scatter` of its own: PyTorch sums all on every rank, in a copy, and cuts the part out, which moves each byte twice. An
exchange moves it once. Terms are added in the order of ranks, one by one: of two there is one order, so that sums are
DistributedDataParallel's; of more, it is an order among several.

These collectives work from one tensor into another, in two nodes. Between them they read the first, which nobody may write or let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed._functional_collectives
from torch._C._distributed_c10d import _register_work, _resolve_process_group

import lowtide.kernels  # noqa: F401  (defines the operators of lowtide's own)
from lowtide.capture import operators
from lowtide.capture.optimizers.optimizer import Shadow
from lowtide.capture.ranks.data_parallel import Ranks, buckets, refuse_complex
from lowtide.errors import CaptureError
from lowtide.ir.graph import Node
from lowtide.kernels.library import LIBRARY, define

_TAG = 16_909  # of messages between ranks: those of one tag come in the order in which they were sent


def all_gather(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """[ranks * n] begins to gather what each rank of a group has sent, n elements each.

    On a CPU every rank sends its part to each other one, straight into its place of the whole there. gloo's own gather fills a second block
    as large, and copies that; two `all_gather_into_tensor` at a time have corrupted the heap (torch 2.13: once in some 20,000); and each
    of its collectives is carried out by a thread that has to be woken, which a message is not: a step has dozens of gathers.
    """
    if sent.device.type != "cpu":
        begun: torch.Tensor = _COLLECTIVES.all_gather_into_tensor(sent, ranks, group)
        return begun
    whole = sent.new_empty(ranks * sent.numel())
    places, peers = whole.view(ranks, -1).unbind(), _resolve_process_group(group)  # type: ignore[arg-type]
    rank = peers.rank()
    for distance in range(1, ranks):
        source = (rank - distance) % ranks
        _register_work(whole, peers.recv([places[source]], source, _TAG))
    for distance in range(1, ranks):
        _register_work(whole, peers.send([sent], (rank + distance) % ranks, _TAG))
    places[rank].copy_(sent)
    return whole


def _all_gather(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return sent.new_empty(ranks * sent.numel())


def load_parts(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return wait_for(all_gather(sent, ranks, group), sent)


def wait_for(begun: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """What was begun, once it is whole: the same memory. `sent` is what it was made of."""
    whole: torch.Tensor = _COLLECTIVES.wait_tensor(begun)
    return whole


define("all_gather(Tensor sent, int ranks, str group) -> Tensor", all_gather)
define("load_parts(Tensor sent, int ranks, str group) -> Tensor", load_parts)
define("wait_for(Tensor begun, Tensor sent) -> Tensor", wait_for)
torch.library.register_fake("lowtide::all_gather", _all_gather, lib=LIBRARY)
torch.library.register_fake("lowtide::load_parts", _all_gather, lib=LIBRARY)
torch.library.register_fake("lowtide::wait_for", lambda begun, sent: torch.empty_like(begun), lib=LIBRARY)


_COLLECTIVES = torch.ops._c10d_functional


def reduced_parts(terms: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """[n] this rank's part of the sum of what all ranks have, [size * n] each, their parts one behind the other."""
    if terms.device.type != "cpu" or not ranks.over_gloo:
        begun = _COLLECTIVES.reduce_scatter_tensor(terms, "sum", ranks.size, ranks.group)
        part: torch.Tensor = torch.ops.lowtide.wait_for(begun, terms)
        return part
    received = torch.ops.lowtide.wait_for(torch.ops.lowtide.exchange(terms, ranks.size, ranks.group), terms)
    total: torch.Tensor = torch.ops.lowtide.sum_parts(received, ranks.size)
    return total


def exchange(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """[ranks * n] begins to collect what each rank of a group has for this one: of what it sends, its part of as many."""
    count = sent.numel() // ranks
    begun: torch.Tensor = _COLLECTIVES.all_to_all_single(sent, [count] * ranks, [count] * ranks, group)
    return begun


define("exchange(Tensor sent, int ranks, str group) -> Tensor", exchange)
torch.library.register_fake("lowtide::exchange", lambda sent, ranks, group: torch.empty_like(sent), lib=LIBRARY)


Shards: TypeAlias = Mapping[torch.Tensor, torch.Tensor]  # by fake parameter: this rank's part, with its gradient

_MAKING = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "clone", "copy", "fill", "zero", "detach", "alias", "view"})


def own_shards(parameters: Iterable[torch.Tensor], ranks: Ranks) -> Shards:
    """This rank's parts, of parameters whose gradients are the means over all ranks."""
    shards = {}
    for each in parameters:
        if each.grad is not None and each.grad.numel():
            shards[each] = shard_of(each, ranks)
            shards[each].grad = own(each.grad, ranks)
    return shards


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
