"""The loss within what a loss function returns, and what a call returns of the rest."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.capture.blocks import dtype_name
from lowtide.errors import CaptureError
from lowtide.ir import tree


def checked_loss(result: Any) -> torch.Tensor:
    loss = _loss_of(result)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            "loss() must return a scalar tensor, a tuple that starts with one, or an object with a `.loss`; it returned a "
            f"{type(result).__name__}"
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"loss() must return a scalar; it returned a tensor of shape {tuple(loss.shape)}: reduce it, for instance with .mean()"
        )
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss ({dtype_name(loss.dtype)}) does not depend on any parameter that requires gradients: nothing could be trained"
        )
    return loss


def _loss_of(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result
    if hasattr(result, "loss"):
        return result.loss
    return result[0] if isinstance(result, (tuple, list)) and result else None


def with_loss(result: Any, loss: torch.Tensor) -> Any:
    """The user's result, detached, with the loss that was differentiated."""
    if isinstance(result, torch.Tensor):
        return loss.detach()
    leaves, rebuild = tree.flatten(result)
    user_loss = _loss_of(result)
    items = [loss if leaf.value is user_loss else leaf.value for leaf in leaves]
    return tree.unflatten(rebuild, [each.detach() if isinstance(each, torch.Tensor) else each for each in items])


def share_of(loss: torch.Tensor, accumulate: int | str) -> torch.Tensor:
    """What is differentiated of a micro-batch's loss: its share of their mean, or all of it where micro-batches are given."""
    return loss / accumulate if isinstance(accumulate, int) and accumulate > 1 else loss


def joined(results: list[Any], accumulate: int | str) -> Any:
    """What a call returns of its micro-batches: what each has given where they are given, else the loss of the whole batch.

    Other results of parts that were cut would need a rule for joining them, which only the user knows.
    """
    if isinstance(accumulate, str):
        return results
    if len(results) == 1:
        return results[0]
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise CaptureError(
            "with accumulate > 1, loss() must return the loss alone: results of several micro-batches cannot be joined for you"
        )
    total: torch.Tensor = results[0]
    for result in results[1:]:
        total = total + result
    return total
