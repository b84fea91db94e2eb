"""What the ranks exchange in a step, as operators: buffers of rank 0 before the forward pass, means of gradients after the backward one.

The numbers are DistributedDataParallel's (PyTorch Distributed, Li et al., VLDB 2020, section 3.2): each gradient times 1/size, then summed.
Of two ranks' sums every order is one; of more, the library sums each piece of a bucket in an order of its own, so that other
buckets may round otherwise.

    takes   fakes of the parameters, with the gradients of all micro-batches; the recorder listens
    leaves  the means in `.grad`

A gradient exists from its last use in the backward pass on, and its bucket may leave as soon as all of it exists. A large one needs no
bucket: it travels in its own memory. Small ones are put together in the order in which they come to exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed._functional_collectives

from lowtide.capture.ranks.ranks import Ranks
from lowtide.capture.sizes.strides import is_dense
from lowtide.errors import CaptureError

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
    """All elements in one dimension."""
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
