"""Gradients of parameters in shards leave as they come to exist: in the backward pass that completes them, between its gathers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lowtide.capture.ranks.exchange import MESSAGE_BYTES, buckets
from lowtide.capture.ranks.ranks import Ranks
from lowtide.capture.ranks.shards import scatter


class Sending:
    """What of the gradients was sent, and what waits for others to travel with."""

    def __init__(self, ranks: Ranks, most_bytes: int = MESSAGE_BYTES) -> None:
        self.ranks, self.most_bytes = ranks, min(ranks.bucket_bytes, most_bytes)
        self.complete = False  # whether this backward pass is the last: what comes to exist now is whole
        self.sent: dict[torch.Tensor, torch.Tensor] = {}  # this rank's part of each gradient's mean, by parameter
        self._waiting: list[torch.Tensor] = []

    def arrived(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient was added to."""
        if not self.complete or parameter.grad is None or parameter.grad.layout is not torch.strided:
            return
        self._waiting.append(parameter)
        self._send(only_full=True)

    def rest(self, parameters: Iterable[torch.Tensor]) -> None:
        """Nothing more comes: send what waits, and what no last pass has added to."""
        waiting = set(self._waiting)
        self._waiting += [each for each in parameters if each.grad is not None and each.grad.numel() and each not in waiting]
        self._send(only_full=False)

    def forget(self) -> None:
        """Hold on to no fake."""
        self.sent.clear()
        self._waiting.clear()

    def _send(self, *, only_full: bool) -> None:
        gradients = {each: each.grad for each in self._waiting if each.grad is not None}
        for bucket in buckets(self._waiting, gradients, self.most_bytes):
            held = [gradients[each] for each in bucket]
            if only_full and sum(each.nbytes for each in held) < self.most_bytes:
                continue
            with torch.no_grad():
                self.sent |= zip(bucket, scatter(held, self.ranks), strict=True)
            for each in bucket:
                each.grad = None
        self._waiting = [each for each in self._waiting if each.grad is not None]
