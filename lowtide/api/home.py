"""Optimizer state between steps on the host: sent there where it is elsewhere, fetched back where the caller wants it.

State comes to the device by itself where the caller loads a `state_dict`, as torch casts it to where the parameter is, and where the
optimizer has stepped before `lowtide.optimize`. A step finds that nothing it knows fits what the caller holds, and sends it home first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.api.variant import Variant
from lowtide.base.skeleton import Keys, leaves, put
from lowtide.capture.optimizers.optimizer import LEAST_BYTES
from lowtide.errors import StepError
from lowtide.ir.graph import Kind
from lowtide.kernels.optimizers import each_of
from lowtide.runtime.caller import OwnHook, View

_FETCH = "call step.fetch_state(), or optimizer.load_state_dict(optimizer.state_dict()),"


def send_home(now: View, variants: Iterable[Variant]) -> bool:
    """Put on the host what programs look for there and the caller holds on the device; whether anything was."""
    sent = False
    for variant in variants:
        for value, slot in zip(variant.captured.graph.inputs, variant.captured.slots, strict=True):
            if value.storage.kind is not Kind.HOST or variant.program.host is None:
                continue
            try:
                item = now.read(slot)
            except StepError:  # another state of the optimizer's
                continue
            if isinstance(item, torch.Tensor) and torch.device(item.device) != torch.device(value.storage.device):
                now.assign([slot], [variant.program.host.home(item).copy_(item.detach())])
                sent = True
    return sent


def fetch(optimizer: torch.optim.Optimizer) -> None:
    """Put back where its parameter is what lies on the host."""
    for entries, path, item, device in list(_at_home(optimizer)):
        put(entries, path, item.to(device))


def _at_home(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Keys, torch.Tensor, torch.device]]:
    for parameter, entries in optimizer.state.items():
        for path, item in leaves(entries) if isinstance(parameter, torch.Tensor) and not parameter.is_cpu else ():
            if isinstance(item, torch.Tensor) and item.is_cpu and item.untyped_storage().nbytes() >= LEAST_BYTES:
                yield entries, path, item, parameter.device


@dataclass(frozen=True)
class RefusesStateAway(OwnHook):
    """A hook before the optimizer's own step, which says why that cannot run now."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raises StepError where state lies on the host."""
        if any(True for _ in _at_home(optimizer)):
            raise StepError(
                f'the state of this {type(optimizer).__name__} lies on the host between lowtide\'s steps (state="host"), its '
                f"parameters on the device: {_FETCH} before optimizer.step(); lowtide's next step sends it back"
            )


def refuse_steps_without_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer's own step say so where its state is away, once."""
    for each in each_of(optimizer):
        if not _is_sent_home(each):
            each.register_step_pre_hook(RefusesStateAway())


def check_state_is_there(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to capture a step for state on the device while another step has sent that to the host. Raises ValueError."""
    if any(_is_sent_home(each) and any(True for _ in _at_home(each)) for each in each_of(optimizer)):
        raise ValueError(
            f'state: expected "host", as another step keeps the state of this {type(optimizer).__name__} there, got "device": {_FETCH} '
            'first, or give Run(state="host")'
        )


def _is_sent_home(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(hook, RefusesStateAway) for hook in optimizer._optimizer_step_pre_hooks.values())
