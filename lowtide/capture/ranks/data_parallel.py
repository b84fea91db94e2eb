"""A model within DistributedDataParallel: what that was set to do, and its module called in its place while a capture lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.capture.ranks.ranks import Ranks
from lowtide.errors import CaptureError

_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's own


def module_of(model: nn.Module) -> nn.Module:
    if not isinstance(model, DistributedDataParallel):
        return model
    within: nn.Module = model.module
    return within


def ranks_of(model: nn.Module, group: dist.ProcessGroup | None, shard: str = "") -> Ranks | None:
    """What the processes exchange that train this model together; None where there is one process by itself.

    Raises CaptureError for what a wrapper was set to do and a step would not.
    """
    if not isinstance(model, DistributedDataParallel):
        return None if group is None else Ranks(group.group_name, group.size(), _BUCKET_BYTES, True, shard, _over_gloo(group))
    for found, what in _unlike(model):
        if found:
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
    found: dist.ProcessGroup = model.process_group
    return found


def _over_gloo(group: dist.ProcessGroup) -> bool:
    """Whether tensors on a CPU travel by gloo."""
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


@contextmanager
def passing_on(wrapper: nn.Module | None) -> Iterator[None]:
    """Calls of the wrapper are calls of its module; those of any other raise CaptureError, as they would speak with other processes."""
    cls: Any = DistributedDataParallel
    held = cls.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) != id(wrapper):
            raise CaptureError("a DistributedDataParallel is called within the step: give it to lowtide.optimize in place of its module")
        if why := unlike_a_step(self):
            raise CaptureError(why)
        return self.module(*args, **kwargs)

    cls.forward = forward
    try:
        yield
    finally:
        cls.forward = held
