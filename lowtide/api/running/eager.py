"""One step as the caller's own loop would do it, on the same objects: for batches that no program was made for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.capture.batches import micro_batches
from lowtide.capture.losses import checked_loss, joined, share_of, with_loss
from lowtide.capture.numbers import beside
from lowtide.capture.program import TrainingProgram
from lowtide.runtime.hooks import already_run


def run_eagerly(
    model: nn.Module, program: TrainingProgram | None, args: tuple[Any, ...], kwargs: dict[str, Any], *, begun: bool = False
) -> Any:
    """One training step, or without a program one call of the model without gradients; what a captured one would return.

    `begun`: hooks that precede the optimizer's step have run.
    """
    if program is None:
        with torch.no_grad():
            return model(*args, **kwargs)
    with torch.enable_grad(), already_run(program.optimizer) if begun else nullcontext():
        return _trained(program, args, kwargs)


def _trained(program: TrainingProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model, optimizer = program.model, program.optimizer
    scaler = program.scaler if program.scaler is not None and program.scaler.is_enabled() else None
    optimizer.zero_grad()
    results = [_differentiated(program, scaler, *piece) for piece in micro_batches(args, kwargs, program.accumulate)]
    returned = None
    if program.after_backward is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        with torch.no_grad():
            returned = program.after_backward(model)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    for count in program.counters:
        count()
    optimizer.zero_grad()  # a captured step leaves no gradients, either
    return beside(joined(results, program.accumulate), returned)


def _differentiated(program: TrainingProgram, scaler: torch.amp.GradScaler | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss of one micro-batch, and its backward pass."""
    result = program.loss(program.model, *args, **kwargs)
    loss = checked_loss(result)
    piece = share_of(loss, program.accumulate)
    (piece if scaler is None else scaler.scale(piece)).backward()
    return with_loss(result, piece)
