"""A model whose gradients, and perhaps parameters, each rank has a part of (ZeRO, stages 2 and 3), while a step is recorded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.draft import Draft
from lowtide.capture.fakes import FakeModel
from lowtide.capture.ranks.ranks import Ranks
from lowtide.capture.ranks.sending import Sending
from lowtide.capture.ranks.shards import Shards, own, shard_of
from lowtide.capture.ranks.wholes import Wholes
from lowtide.errors import CaptureError
from lowtide.kernels.parts import WHOLE_OF


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
        self.wholes, self._sending, self._ranks = Wholes(ranks), Sending(ranks), ranks
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
        found = dict(self._parts)
        for parameter in parameters:
            gradient = self._gradient(parameter)
            if gradient is not None:
                found[parameter] = self._parts[parameter] if parameter in self._parts else shard_of(parameter, self._ranks)
                found[parameter].grad = gradient
                parameter.grad = None
        for parameter in self._shown:  # of one that the optimizer does not know, too
            parameter.grad = None
        return found

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
