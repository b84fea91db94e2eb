"""Parameters in shards (ZeRO, stage 3): whole only while a pass reads them, gathered from all ranks by operators of the graph.

    takes   fakes of whole parameters, which the program computes with, and of the parts that the caller holds; the recorder asks
    leaves  a gather before the first read in each pass, and gradients of the parts

A pass is the forward or the backward one of a micro-batch. Where it ends, all that was gathered is let go but the last bucket, which the
backward pass begins with: what is read behind that is gathered again. What a whole parameter is in the graph changes with each gather, as
if that had been written into it; tensors that autograd has saved are read as what is there then. Nothing is gathered ahead here: a plan
begins a gather as early as its peak lets it.

The buckets are made in the order in which the model holds its parameters, so that they hold what is read together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from lowtide.capture.blocks import address
from lowtide.capture.draft import Draft
from lowtide.capture.fakes import FakeModel
from lowtide.capture.ranks.exchange import buckets
from lowtide.capture.ranks.ranks import Ranks
from lowtide.capture.ranks.sending import Sending
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.kernels.parts import WHOLE_OF

TOGETHER_BYTES = 2**18  # parameters below travel together: a larger one needs no copy to be whole

_COLLECTIVES = torch.ops._c10d_functional


def wholes_of(fakes: FakeModel, ranks: Ranks | None) -> Wholes | None:
    """The whole parameters of a model in shards; None for another. Raises CaptureError for one that should not be, or should and is not."""
    sharded = ranks is not None and ranks.shard == "parameters"
    for real, whole in fakes.parameters.items():
        part_of = None if real not in fakes.parts else WHOLE_OF[real].group
        if part_of is not None and (ranks is None or not sharded or part_of != ranks.group):
            raise CaptureError(
                f'{fakes.names[real]} is in shards of a step with shard="parameters": say so here, too, with the same group, or do this '
                "within `with step.gathered():` of that step"
            )
        if sharded and part_of is None and whole.numel():
            raise CaptureError(
                f"{fakes.names[real]} is whole, and the step is for parameters in shards: call it outside of `step.gathered()`, and call "
                "lowtide.optimize again where a parameter was replaced"
            )
    if ranks is None or not sharded:
        return None
    return Wholes({fakes.parameters[real]: part for real, part in fakes.parts.items()}, ranks)


class Wholes:
    """The whole parameters of a recording."""

    def __init__(self, parts: Mapping[torch.Tensor, torch.Tensor], ranks: Ranks) -> None:
        """`parts` by whole parameter, in the model's order."""
        self.parts, self.ranks = dict(parts), ranks
        self._bucket_of: dict[int, list[torch.Tensor]] = {}  # by address
        for bucket in buckets(self.parts, {whole: whole for whole in self.parts}, TOGETHER_BYTES):
            self._bucket_of |= {address(whole): bucket for whole in bucket}
        self._there: set[int] = set()  # addresses of what this pass has gathered
        self._last: list[torch.Tensor] = []
        self.sending = Sending(ranks)
        for whole in self.parts:
            if whole.requires_grad:
                whole.register_post_accumulate_grad_hook(self.sending.arrived)

    def begin_backward(self, *, completes: bool) -> None:
        """A forward pass is over; `completes` says that gradients are whole, and may leave, where the backward one adds to them."""
        self.sending.complete = completes
        self._end_pass()

    def end_backward(self) -> None:
        """A backward pass is over."""
        self.sending.complete = False
        self._end_pass()

    def forget(self) -> None:
        """Hold on to no fake."""
        self.parts.clear()
        self._bucket_of.clear()
        self._last.clear()
        self.sending.forget()

    def read(self, tensors: Iterable[torch.Tensor], draft: Draft, recording: AbstractContextManager[Any]) -> None:
        """The program is about to read these: gather those that are not there, with what travels beside them."""
        for tensor in tensors:
            if not self.holds(tensor) or address(tensor) in self._there:
                continue
            bucket = self._bucket_of[address(tensor)]
            with recording, torch.no_grad():
                for whole, found in zip(bucket, self._gathered(bucket), strict=True):
                    draft.renew(whole, draft.value(found))
            self._last = bucket
            self._there |= {address(whole) for whole in bucket}

    def refuse_write(self, tensors: Iterable[torch.Tensor], name: str) -> None:
        """Raise CaptureError for a write to what is gone after the pass."""
        if any(map(self.holds, tensors)):
            raise CaptureError(
                f'operator {name} at {users_line()} writes a parameter, of which each rank holds a part: with shard="parameters" the write '
                'would be lost; leave it to the optimizer, or say shard="optimizer"'
            )

    def _end_pass(self) -> None:
        """Let go of what was gathered, but for the last bucket."""
        self._there = {address(whole) for whole in self._last}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a whole parameter or lies in one."""
        return tensor.layout is torch.strided and address(tensor) in self._bucket_of

    def _gathered(self, bucket: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        """What the ranks hold of a bucket, put together: each laid out as the whole parameter is."""
        parts = [self.parts[whole] for whole in bucket]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        size = self.ranks.size
        rows = _COLLECTIVES.wait_tensor(_COLLECTIVES.all_gather_into_tensor(sent, size, self.ranks.group)).view(size, -1)
        for whole, piece in zip(bucket, rows.split([len(part) for part in parts], 1), strict=True):
            found = piece.reshape(-1)[: whole.numel()].view(whole.shape)
            yield found if found.stride() == whole.stride() else found.new_empty_strided(whole.shape, whole.stride()).copy_(found)
