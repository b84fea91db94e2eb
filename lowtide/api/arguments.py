"""What `optimize` and `explain` are given, checked and made light."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide.capture.batches import BATCHES
from lowtide.capture.optimizers.wrapped import accumulates_over, scalers_within
from lowtide.cost.device import Device
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.ir.regions import INDUCTOR
from lowtide.place.base import checked as checked_placer
from lowtide.remat.sweep.search import Sweep
from lowtide.schedule.base import checked as checked_solver


def check_arguments(model: Any, loss: Any, optimizer: Any, after_backward: Any, accumulate: int | str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got a {type(model).__name__}")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise CaptureError(
            f"what {type(model).__name__} does over processes or devices is no part of this: give the module within (`model.module`); "
            "lowtide.optimize takes a DistributedDataParallel to train it"
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module {path or type(module).__name__!r} is TorchScript (torch.jit.script or trace), which runs beyond Python on tensors "
                "of its own: give the nn.Module that it was made of"
            )
    if any(base.__name__ == "_FabricModule" for base in type(model).__mro__):
        raise CaptureError(
            "what Fabric has set up casts what goes in, and wants the backward pass for itself: give the module within (`model.module`), "
            "with `fabric.autocast()` in loss"
        )
    for each in optimizer if isinstance(optimizer, (list, tuple)) and optimizer else () if optimizer is None else (optimizer,):
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer: expected a torch.optim.Optimizer, or a list of them that step one after the other; got a {type(each).__name__}"
            )
    if (loss is None) != (optimizer is None):
        missing, given = ("loss", "optimizer") if loss is None else ("optimizer", "loss")
        raise TypeError(f"{missing}: a training step needs both `loss` and `optimizer`, got only `{given}`; leave both out for inference")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss: expected a function loss(model, *batch), got a {type(loss).__name__}")
    if loss is None and (after_backward is not None or accumulate != 1):
        raise TypeError("after_backward and accumulate belong to training: give `loss` and `optimizer` too")
    if accumulate != BATCHES and (not isinstance(accumulate, int) or accumulate < 1):
        raise ValueError(f'accumulate: expected a positive number of micro-batches, or "{BATCHES}" that are given; got {accumulate!r}')
    if accumulate == 1 and (count := accumulates_over(optimizer)) > 1:
        raise CaptureError(
            f"the accelerator of this optimizer accumulates over {count} batches, and a step updates at each call: give a list of batches "
            f'(`accumulate="{BATCHES}"`, and in loss a share of the mean: `loss / {count}`), or leave gradient_accumulation_steps out'
        )


def check_settings(
    *,
    flags: Mapping[str, Any],
    flags_or_none: Mapping[str, Any],
    effort: Any,
    search: Any,
    solver: Any,
    callback: Any,
    simulate: Any,
) -> None:
    """Refuse a setting of another kind than is expected, by its name: no word stands for yes or no."""
    for name, given in (*flags.items(), *((name, given) for name, given in flags_or_none.items() if given is not None)):
        if not isinstance(given, bool):
            or_none = ", or None" if name in flags_or_none else ""
            raise TypeError(f"{name}: expected True or False{or_none}, got {given!r}")
    if effort is not None and not isinstance(effort, str):
        raise TypeError(f'effort: expected "quick", "normal" or "thorough", got {effort!r}; a lowtide.Sweep is given as `search`')
    if search is not None and not isinstance(search, Sweep):
        raise TypeError(f"search: expected a lowtide.Sweep, got {search!r}; a level of effort is given as `effort`")
    if solver is not None:
        checked_solver(solver)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback: expected a function of a stage, got a {type(callback).__name__}")
    if simulate is not None and not isinstance(simulate, (str, Device)):
        raise TypeError(f"simulate: expected the name of a machine or a lowtide.Device, got a {type(simulate).__name__}")


def check_arena(arena: Any, placer: Any) -> None:
    """Refuse what says neither yes, no nor when, and what finds no addresses."""
    if arena is not None and not isinstance(arena, bool) and arena != "limit":
        raise TypeError(f'arena: expected True, False, "limit" or None, got {arena!r}')
    if placer is not None:
        checked_placer(placer)


def check_scaler(scaler: Any, optimizer: Any, swap_state: bool) -> None:
    """Refuse a scaler that cannot be meant, and one that is left out where the optimizer's wrapper uses one."""
    if scaler is None:
        if any(within.is_enabled() for within in scalers_within(optimizer)):
            raise CaptureError(
                f"this {type(optimizer).__name__} steps with a gradient scaler: give that to lowtide, too (`scaler=optimizer.scaler`)"
            )
        return
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler: expected a torch.amp.GradScaler, got a {type(scaler).__name__}")
    if optimizer is None:
        raise TypeError("scaler belongs to training: give `loss` and `optimizer` too")
    if isinstance(optimizer, (list, tuple)) and len(optimizer) > 1:
        raise CaptureError(
            "a scaler skips each of several optimizers by its own gradients alone, which one program does not: give one optimizer with "
            "groups for all parameters, or train in bfloat16, which needs no scaler"
        )
    if swap_state and scaler.is_enabled():
        raise ValueError("swap_state: expected it without `scaler`, as a step that is skipped ends before what was sent away is back")


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


def warn_of_nowhere_to_swap(swap_state: bool, device: torch.device, simulates: bool) -> None:
    """Say that an argument does nothing here, as torch's `pin_memory` does where there is no GPU."""
    if swap_state and device.type == "cpu" and not simulates:
        warnings.warn("swap_state=True does nothing on a CPU, which has no other memory to send state to", UserWarning, stacklevel=3)


def check_fuse(fuse: Any, exact: bool, *, varies: bool, tries: bool) -> None:
    """Refuse compilers that are not known, numbers that none of them keeps, and steps whose regions cannot be tried (not `tries`)."""
    if fuse is None:
        return
    if fuse != INDUCTOR:
        raise ValueError(f'fuse: expected "{INDUCTOR}" or None, got {fuse!r}')
    if exact:
        raise ValueError("fuse: inductor rounds otherwise than eager, sums above all: say exact=False too, or leave `fuse` out")
    if varies:
        raise ValueError(
            'fuse: a region is compiled for one shape: leave out `dynamic` and say on_new_shape="extend", by which each shape that comes '
            "has a plan and regions of its own; or leave `fuse` out"
        )
    if not tries:
        raise ValueError(
            "fuse: a region is compiled and tried where it is to run, so a step that is only planned (`simulate`, a model on the meta "
            "device) or tries nothing (workspaces=False) has none: leave `fuse` out there, and say it on the machine that runs the step"
        )


def device_of(model: nn.Module, wished: torch.device | str | None) -> torch.device:
    """Where the step runs: where the model lies, or for a model without memory where it is wished to."""
    found = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if found.type == "meta":
        target = torch.device(wished if wished is not None else "cpu")
        if target.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:  # whose C++ ends the process there
            raise ValueError(
                f"device: expected a device that is here, or a machine in `simulate` ('h200') and no `device`, got {wished}: "
                f"this torch ({torch.__version__}) is built without CUDA, and cannot follow a program there"
            )
        return target
    if wished is not None and torch.device(wished) != found:
        raise ValueError(f"device: the model lies on {found}; `device` is for models on the meta device (got {wished})")
    return found


def detached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch whose tensors belong to no graph, as a capture wants it; nothing is copied."""
    leaves, rebuild = tree.flatten((args, kwargs))
    plain: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, [_detached(leaf.value) for leaf in leaves])
    return plain


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, torch.Tensor) and item.requires_grad else item
