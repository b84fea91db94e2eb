"""What `optimize` and `explain` are given, checked and made light."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowtide.ir import tree


def check_arguments(model: Any, loss: Any, optimizer: Any, after_backward: Any, accumulate: int) -> None:
    """Refuse what cannot be meant."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got a {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    if (loss is None) != (optimizer is None):
        missing, given = ("loss", "optimizer") if loss is None else ("optimizer", "loss")
        raise TypeError(f"{missing}: a training step needs both `loss` and `optimizer`, got only `{given}`; leave both out for inference")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss: expected a function loss(model, *batch), got a {type(loss).__name__}")
    if loss is None and (after_backward is not None or accumulate != 1):
        raise TypeError("after_backward and accumulate belong to training: give `loss` and `optimizer` too")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: expected a positive number of micro-batches, got {accumulate!r}")


def check_swapping(model: nn.Module, optimizer: torch.optim.Optimizer | None, swap: bool, swap_state: bool) -> None:
    """Refuse to lend what lies in memory that nobody can let go of."""
    if not swap_state:
        return
    if not swap:
        raise ValueError("swap_state: expected it together with `swap`, got swap=False")
    states = {} if optimizer is None else optimizer.state
    held = ((f"the optimizer's {key}", value) for state in states.values() for key, value in state.items())
    for name, tensor in (*model.named_parameters(), *held):
        if isinstance(tensor, torch.Tensor) and not tensor.untyped_storage().resizable():
            raise ValueError(f"swap_state: {name} lies in memory that cannot be let go of (from numpy, shared or mapped); clone it first")


def device_of(model: nn.Module, wished: torch.device | str | None) -> torch.device:
    """Where the step runs: where the model lies, or for a model without memory where it is wished to."""
    found = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if found.type == "meta":
        return torch.device(wished if wished is not None else "cpu")
    if wished is not None and torch.device(wished) != found:
        raise ValueError(f"device: the model lies on {found}; `device` is for models on the meta device (got {wished})")
    return found


def without_data(batch: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch's looks without its data: what a later capture needs, and no reason to keep the caller's tensors alive."""
    leaves, rebuild = tree.flatten(batch)
    light: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, [_meta(leaf.value, device) for leaf in leaves])
    return light


def _meta(item: Any, device: torch.device) -> Any:
    if not isinstance(item, torch.Tensor) or item.device != device or item.requires_grad or item.layout is not torch.strided:
        return item  # what cannot be captured is refused by the capture
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
