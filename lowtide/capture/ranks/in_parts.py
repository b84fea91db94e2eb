"""A model whose gradients, and perhaps parameters, each rank has a part of (ZeRO, stages 2 and 3), while a step is recorded.

Gradients leave in parts, as they come to exist: in the backward pass that completes them, between its gathers.

The order is that of their coming to exist, which is the same on all ranks; each message is as long as DistributedDataParallel's would be.

Where a hook will look at gradients, they would be gathered for that right away. To sum parts and to gather the sums moves what a sum of the
whole does, and over gloo takes longer: they are summed whole, in messages as long, and lie by themselves after that. Each rank keeps its
part, and a plan lets go of the whole behind what the hook reads of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.draft import Draft
from lowtide.capture.fakes import FakeModel
from lowtide.capture.ranks.data_parallel import MESSAGE_BYTES, Ranks, average, buckets
from lowtide.capture.ranks.shards import Shards, own, scatter, shard_of
from lowtide.capture.ranks.wholes import WholeTensors
from lowtide.capture.sizes.probes import is_dense
from lowtide.errors import CaptureError
from lowtide.kernels.parts import WHOLE_OF


class GradientSends:
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
            sent = [gradients[each] for each in bucket]
            if only_full and sum(each.nbytes for each in sent) < self._most_bytes:
                continue
            with torch.no_grad():
                self.sent |= zip(bucket, self._means(bucket) if sums_whole else scatter(sent, self._ranks), strict=True)
            for each, gradient in zip(bucket, sent, strict=True):
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


def in_parts(fakes: FakeModel, ranks: Ranks | None) -> InParts | None:
    """The parts of a model; None where all is whole. Raises CaptureError for parameters that are in shards and should not be, or should."""
    sharded = ranks is not None and ranks.shard == "parameters"
    for real, whole in fakes.parameters.items():
        group = WHOLE_OF[real].group if real in fakes.parts else None
        if group is not None and (ranks is None or not sharded or group != ranks.group):
            raise CaptureError(
                f'{fakes.names[real]} is in shards of a step with shard="parameters": say so here, too, with the same group, or do this '
                "within `with step.gathered():` of that step"
            )
        if sharded and group is None and whole.numel():
            raise CaptureError(
                f"{fakes.names[real]} is whole, and the step is for parameters in shards: call it outside of `step.gathered()`, and call "
                "lowtide.optimize again where a parameter was replaced"
            )
    return None if ranks is None or ranks.shard not in ("gradients", "parameters") else InParts(fakes, ranks)


class InParts:
    """What is in parts, pass by pass."""

    def __init__(self, fakes: FakeModel, ranks: Ranks) -> None:
        self.wholes, self._sending, self._ranks = WholeTensors(ranks), GradientSends(ranks), ranks
        self._parts = {fakes.parameters[real]: part for real, part in fakes.parts.items()}
        self._shown: dict[torch.Tensor, torch.Tensor] = {}  # by parameter: the whole gradient that a hook is given
        self.wholes.add(self._parts, writable=False)
        for whole in fakes.parameters.values():
            if whole.requires_grad:
                whole.register_post_accumulate_grad_hook(self._sending.arrived)

    def begin_backward(self, *, completes: bool, shown: bool) -> None:
        """A forward pass is over; `completes` says that gradients are whole, and may leave, where the backward one adds to them.

        They are `shown` to a hook later on.
        """
        self._sending.complete, self._sending.shown = completes, shown
        self.wholes.end_pass()

    def end_backward(self) -> None:
        self._sending.complete = False
        self.wholes.end_pass()

    def send_rest(self, parameters: Iterable[torch.Tensor]) -> None:
        """All backward passes are over: send what has not left yet."""
        self._sending.rest(parameters)

    def show(self, draft: Draft) -> None:
        """Put whole gradients before a hook: they are gathered where it reads them, and what it writes is written to parts."""
        for parameter, stride in self._sending.strides.items():
            with _disable_current_modes(), draft.fake_mode:  # making a fake is no part of the program
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                self._shown[parameter] = empty.new_empty_strided(empty.shape, stride) if stride else empty
            parameter.grad = self._shown[parameter]
        self.wholes.add({whole: self._sending.sent[parameter] for parameter, whole in self._shown.items()}, writable=True)
        for parameter, mean in self._sending.whole.items():
            self.wholes.put(self._shown[parameter], mean, draft)

    def shards(self, parameters: Iterable[torch.Tensor]) -> Shards:
        """This rank's part of each parameter that has a gradient, with its part of that; of those that the caller holds in parts all."""
        parts = dict(self._parts)
        for parameter in parameters:
            gradient = self._gradient(parameter)
            if gradient is not None:
                parts[parameter] = self._parts[parameter] if parameter in self._parts else shard_of(parameter, self._ranks)
                parts[parameter].grad = gradient
                parameter.grad = None
        for parameter in self._shown:  # of one that the optimizer does not know, too
            parameter.grad = None
        return parts

    def forget(self) -> None:
        self.wholes.forget()
        self._sending.forget()
        self._parts.clear()
        self._shown.clear()

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the gradient, as a hook has left it."""
        if parameter.grad is None:
            return None if parameter in self._shown else self._sending.sent.get(parameter)
        if not parameter.grad.numel():
            return None
        return self.wholes.parts[parameter.grad] if parameter.grad in self.wholes.parts else own(parameter.grad, self._ranks)
