"""A model within DistributedDataParallel: what that was set to do, its module called in its place, and what the ranks exchange in a step.

Exchanges are operators of the graph: buffers of rank 0 before the forward pass, means of gradients after the backward one.

The numbers are DistributedDataParallel's (PyTorch Distributed, Li et al., VLDB 2020, section 3.2): each gradient times 1/size, then summed.
Of two ranks' sums every order is one; of more, the library sums each piece of a bucket in an order of its own, so that other
buckets may round otherwise.

    takes   fakes of the parameters, with the gradients of all micro-batches; the recorder listens
    leaves  the means in `.grad`

A gradient exists from its last use in the backward pass on, and its bucket may leave as soon as all of it exists. A large one needs no
bucket: it travels in its own memory. Small ones are put together in the order in which they come to exist.

Each collective comes after the one that began before it, as they have to meet in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.capture.care.turns import placed
from lowtide.capture.sizes.probes import is_dense
from lowtide.errors import CaptureError


@dataclass(frozen=True)
class Ranks:
    """A process group. Nothing here differs between its ranks, as the graph is to be the same on all of them."""

    group: str  # its name, which collectives call it by
    size: int
    bucket_bytes: int  # gradients travel together up to this size
    broadcasts_buffers: bool  # those of rank 0 count, at the start of each step
    shard: str = ""  # what each rank holds its own part of: "optimizer", "gradients"
    over_gloo: bool = False  # whether tensors on a CPU travel by gloo, of which it is known what is slow


CALLED_BY_LAYERS = frozenset({"c10d"})  # the operators of torch.distributed's own functions
REFUSED = (
    "speaks with other processes through a handle, which a graph cannot hold: the gradients' means and the buffers' broadcast are part of "
    "a step, other calls of torch.distributed (as in SyncBatchNorm) are not"
)


MESSAGE_BYTES = 4 * 2**20  # long enough for a link's rate: a larger bucket would hold more, and be ready later

_BY_GLOO = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip

Age: TypeAlias = Callable[[torch.Tensor], int]  # when a tensor came to exist, as the recording counts

_COLLECTIVES = torch.ops._c10d_functional


def broadcast_buffers(buffers: Iterable[torch.Tensor], ranks: Ranks) -> None:
    """Write what rank 0 holds over the buffers of all ranks: those of one type in one message."""
    for alike in _alike(buffer for buffer in buffers if buffer.numel()):
        if ranks.over_gloo and alike[0].device.type == "cpu" and alike[0].dtype not in _BY_GLOO:
            raise CaptureError(
                f"a buffer of {alike[0].dtype} cannot be sent by gloo, and rank 0's are sent at the start of each step: make it one of "
                "another type, as int64, or no buffer (DistributedDataParallel has broadcast_buffers=False)"
            )
        pieces = [buffer.reshape(-1) for buffer in alike]
        sent = _COLLECTIVES.broadcast(torch.cat(pieces), 0, ranks.group)
        received = _COLLECTIVES.wait_tensor(sent).split([piece.numel() for piece in pieces])
        for buffer, piece in zip(alike, received, strict=True):
            buffer.copy_(piece.view(buffer.shape))


def average_gradients(parameters: Sequence[torch.Tensor], ranks: Ranks, age: Age) -> None:
    """Put the mean over all ranks in the place of each gradient."""
    gradients = {each: each.grad for each in parameters if each.grad is not None and each.grad.numel()}
    for bucket in buckets(sorted(gradients, key=lambda each: age(gradients[each])), gradients, ranks.bucket_bytes):
        average(bucket, ranks)


def buckets(parameters: Iterable[torch.Tensor], content: Mapping[torch.Tensor, torch.Tensor], most_bytes: int) -> list[list[torch.Tensor]]:
    """Parameters whose contents, a tensor each, travel together: each bucket behind those that are full before it."""
    most_bytes = min(most_bytes, MESSAGE_BYTES)
    full: list[list[torch.Tensor]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        tensor = content[parameter]
        if tensor.nbytes >= most_bytes:
            full.append([parameter])
            continue
        kind = tensor.dtype, tensor.device
        bucket = open_.setdefault(kind, [])
        bucket.append(parameter)
        if sum(content[each].nbytes for each in bucket) >= most_bytes:
            full.append(open_.pop(kind))
    return [*full, *open_.values()]


def average(bucket: Sequence[torch.Tensor], ranks: Ranks) -> None:
    """One message: the gradients one behind the other, each as it lies in memory, of which each becomes the mean over all ranks."""
    flat = [_in_memory_order(_gradient(parameter)) for parameter in bucket]
    share = (flat[0] if len(flat) == 1 else torch.cat(flat)) * (1.0 / ranks.size)
    mean = _COLLECTIVES.wait_tensor(_COLLECTIVES.all_reduce(share, "sum", ranks.group))
    start = 0
    for parameter in bucket:
        gradient = _gradient(parameter)
        parameter.grad = _laid_out(mean, start, gradient)
        start += gradient.numel()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "only those that have a gradient are exchanged"
    return parameter.grad


def _in_memory_order(gradient: torch.Tensor) -> torch.Tensor:
    refuse_complex(gradient)
    if gradient.is_contiguous() or not is_dense(gradient):
        return gradient.reshape(-1)
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())


def refuse_complex(gradient: torch.Tensor) -> None:
    """Raise CaptureError for what no message can hold."""
    if gradient.is_complex():
        raise CaptureError("gradients of complex numbers cannot be exchanged between processes yet: keep the plain loop for this model")


def _laid_out(mean: torch.Tensor, start: int, gradient: torch.Tensor) -> torch.Tensor:
    piece = mean if mean.numel() == gradient.numel() else mean.narrow(0, start, gradient.numel())
    if gradient.is_contiguous() or not is_dense(gradient):
        return piece.view(gradient.shape)
    return piece.as_strided(gradient.shape, gradient.stride(), start)


def _alike(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    yield from kinds.values()


_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's own


def module_of(model: nn.Module) -> nn.Module:
    module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def ranks_of(model: nn.Module, group: dist.ProcessGroup | None, shard: str = "") -> Ranks | None:
    """What the processes exchange that train this model together; None where there is one process by itself.

    Raises CaptureError for what a wrapper was set to do and a step would not.
    """
    if not isinstance(model, DistributedDataParallel):
        return None if group is None else Ranks(group.group_name, group.size(), _BUCKET_BYTES, True, shard, _over_gloo(group))
    for setting, what in _unlike(model):
        if setting:
            raise CaptureError(f"this DistributedDataParallel {what}, which a step would not do: make one without, or keep the loop")
    own: dist.ProcessGroup = model.process_group
    sends = bool(model.broadcast_buffers)
    return Ranks(own.group_name, own.size(), int(model.bucket_bytes_cap), sends, shard, _over_gloo(own))


def group_of(model: nn.Module, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of the processes that train together. Raises ValueError where a wrapper has another, or this process is not in it."""
    if group is not None and not hasattr(group, "group_name"):  # torch gives a number to processes outside
        raise ValueError(f"group: expected a group of torch.distributed that this process is in, got {group!r}")
    if not isinstance(model, DistributedDataParallel):
        return group
    if group is not None and group is not model.process_group:
        raise ValueError("group: this DistributedDataParallel has a group of its own: leave it out")
    processes: dist.ProcessGroup = model.process_group
    return processes


def _over_gloo(group: dist.ProcessGroup) -> bool:
    return isinstance(group, dist.ProcessGroup) and "cpu:gloo" in dist.get_backend_config(group).split(",")


def _unlike(model: Any) -> Iterator[tuple[bool, str]]:
    """What may have been set, and what that means."""
    yield bool(model._comm_hooks), "has a communication hook"
    yield model.mixed_precision is not None, "has mixed precision of its own"
    yield bool(model.parameters_to_ignore), "ignores some parameters or buffers"
    yield bool(getattr(model, "_delay_all_reduce_params", ())), "delays the sums of some gradients"
    yield getattr(model, "buffer_hook", None) is not None, "has a hook for its buffers"
    yield bool(model._forward_hooks or model._forward_pre_hooks), "has hooks on its forward"


def unlike_a_step(wrapper: Any) -> str:
    """What a wrapper is in the middle of that a step would not do; nothing where all is as usual."""
    if not isinstance(wrapper, DistributedDataParallel):
        return ""
    if not wrapper.require_backward_grad_sync:
        return (
            "within `no_sync` ranks would update by gradients of their own, and a step takes the mean of all: leave it out, and give "
            "several micro-batches at once (Training(accumulate=...)), which are summed over ranks once"
        )
    if wrapper._join_config.enable:
        return "within `join` ranks may have batches in different number, and all ranks run a step together: give all of them as many"
    return ""


def passing_on(wrapper: nn.Module | None) -> AbstractContextManager[None]:
    """Calls of the wrapper are calls of its module; those of any other raise CaptureError, as they would speak with other processes."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) != id(wrapper):
            raise CaptureError("a DistributedDataParallel is called within the step: give it to lowtide.optimize in place of its module")
        if why := unlike_a_step(self):
            raise CaptureError(why)
        return self.module(*args, **kwargs)

    return placed(DistributedDataParallel, "forward", forward)
