"""Gradients leave in parts, as they come to exist: in the backward pass that completes them, between its gathers.

The order is that of their coming to exist, which is the same on all ranks; each message is as long as DistributedDataParallel's would be.

Where a hook will look at gradients, they would be gathered for that right away. To sum parts and to gather the sums moves what a sum of the
whole does, and over gloo takes longer: they are summed whole, in messages as long, and lie by themselves after that. Each rank keeps its
part, and a plan lets go of the whole behind what the hook reads of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from lowtide.capture.ranks.exchange import MESSAGE_BYTES, average, buckets
from lowtide.capture.ranks.ranks import Ranks
from lowtide.capture.ranks.shards import own, scatter
from lowtide.capture.sizes.strides import is_dense


class Sending:
    """What of the gradients was sent, and what waits for others to travel with."""

    def __init__(self, ranks: Ranks) -> None:
        self.complete = False  # whether this backward pass is the last: what comes to exist now is whole
        self.sent: dict[torch.Tensor, torch.Tensor] = {}  # this rank's part of each gradient's mean, by parameter
        self.strides: dict[torch.Tensor, tuple[int, ...]] = {}  # of the gradients when they were whole, by parameter; in no order: ()
        self.whole: dict[torch.Tensor, torch.Tensor] = {}  # the mean of each gradient, where it was summed whole, by parameter
        self.shown = False  # whether a hook will look at them
        self._ranks, self._most_bytes = ranks, min(ranks.bucket_bytes, MESSAGE_BYTES)
        self._waiting: list[torch.Tensor] = []

    def arrived(self, parameter: torch.Tensor) -> None:
        if self.complete and parameter.grad is not None and parameter.grad.layout is torch.strided and parameter.grad.numel():
            self._waiting.append(parameter)
            self._send(only_full=True)

    def rest(self, parameters: Iterable[torch.Tensor]) -> None:
        """Nothing more comes: send what waits, and what the last pass has not added to."""
        waiting = set(self._waiting)
        self._waiting += [each for each in parameters if each.grad is not None and each.grad.numel() and each not in waiting]
        self._send(only_full=False)

    def forget(self) -> None:
        for table in (self.sent, self.strides, self.whole, self._waiting):
            table.clear()

    def _send(self, *, only_full: bool) -> None:
        gradients = {each: each.grad for each in self._waiting if each.grad is not None}
        sums_whole = self.shown and self._ranks.over_gloo and all(each.device.type == "cpu" for each in gradients)
        for bucket in buckets(self._waiting, gradients, self._most_bytes):
            held = [gradients[each] for each in bucket]
            if only_full and sum(each.nbytes for each in held) < self._most_bytes:
                continue
            with torch.no_grad():
                self.sent |= zip(bucket, self._means(bucket) if sums_whole else scatter(held, self._ranks), strict=True)
            for each, gradient in zip(bucket, held, strict=True):
                self.strides[each] = gradient.stride() if is_dense(gradient) else ()
                each.grad = None
        self._waiting = [each for each in self._waiting if each.grad is not None]

    def _means(self, bucket: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """One message: this rank's part of the mean of each, which is whole, too."""
        average(bucket, self._ranks)
        for each in bucket:
            assert each.grad is not None, "only those that have a gradient are sent"
            self.whole[each] = each.grad if len(bucket) == 1 else each.grad.clone()  # by itself, where it is looked for
            yield own(self.whole[each], self._ranks)
