"""What `optimize` and `explain` are given, checked and made light."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lowtide.api.home import check_state_is_there
from lowtide.api.options import Run, Training
from lowtide.base.messages import warn
from lowtide.base.skeleton import leaves
from lowtide.capture.batches import BATCHES
from lowtide.capture.optimizers.wrappers import accumulates_over, holds_optimizer, scalers_within, torch_optimizer
from lowtide.capture.program import TrainingProgram
from lowtide.cost.device import Device
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.planning.request import Limit


def _optimizers_within(wrapper: Any) -> str:
    """What to give in the place of an object of the user's that steps several optimizers."""
    names = [name for name, item in getattr(wrapper, "__dict__", {}).items() if holds_optimizer(item)]
    if not names:
        return ""
    several = [isinstance(vars(wrapper)[name], (list, tuple)) for name in names]
    given = ", ".join(f"{'*' * many}wrapper.{name}" for name, many in zip(names, several, strict=True))
    return f", which holds optimizers: give those (`optimizer=[{given}]`) where its step() does no more than to step them"


def checked_optimizer(
    model: Any, loss: Any, optimizer: Any, training: Training, run: Run, *, varies: bool = False, together: bool = False
) -> torch.optim.Optimizer | None:
    """The torch optimizer that is meant, None for inference. Raises TypeError, ValueError and CaptureError for what cannot be captured."""
    check_arguments(model, loss, optimizer, training)
    check_scaler(training.scaler, optimizer, run)
    trained: torch.optim.Optimizer | None = torch_optimizer(optimizer)
    check_swapping(model, trained, run)
    check_state_on_host(run, trains=trained is not None, varies=varies, together=together)
    if trained is not None and run.state != "host":
        check_state_is_there(trained)
    return trained


def training_program(model: nn.Module, loss: Any, optimizer: Any, training: Training, **further: Any) -> TrainingProgram | None:
    """What is captured of a training step; None for inference."""
    if loss is None or optimizer is None:
        return None
    return TrainingProgram(model, loss, optimizer, training.after_backward, training.accumulate, training.scaler, **further)


def check_arguments(model: Any, loss: Any, optimizer: Any, training: Training) -> None:
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
                f"{_optimizers_within(each)}"
            )
    if (loss is None) != (optimizer is None):
        missing, given = ("loss", "optimizer") if loss is None else ("optimizer", "loss")
        raise TypeError(f"{missing}: a training step needs both `loss` and `optimizer`, got only `{given}`; leave both out for inference")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss: expected a function loss(model, *batch), got a {type(loss).__name__}")
    if loss is None and training != Training():
        raise TypeError("training: after_backward, accumulate and scaler belong to training: give `loss` and `optimizer` too")
    if training.accumulate == 1 and (count := accumulates_over(optimizer)) > 1:
        raise CaptureError(
            f"the accelerator of this optimizer accumulates over {count} batches, and a step updates at each call: give a list of "
            f'batches (`Training(accumulate="{BATCHES}")`, and in loss a share of the mean: `loss / {count}`), or leave '
            "gradient_accumulation_steps out"
        )


def check_scaler(scaler: torch.amp.GradScaler | None, optimizer: Any, run: Run) -> None:
    """Refuse a scaler that cannot be meant, and one that is left out where the optimizer's wrapper uses one."""
    if scaler is None:
        if any(within.is_enabled() for within in scalers_within(optimizer)):
            raise CaptureError(
                f"this {type(optimizer).__name__} steps with a gradient scaler: give that to lowtide, too "
                "(`Training(scaler=optimizer.scaler)`)"
            )
        return
    if isinstance(optimizer, (list, tuple)) and len(optimizer) > 1:
        raise CaptureError(
            "a scaler skips each of several optimizers by its own gradients alone, which one program does not: give one optimizer with "
            "groups for all parameters, or train in bfloat16, which needs no scaler"
        )
    if run.state != "device" and scaler.is_enabled():
        raise ValueError(
            f'state: expected "device" with `scaler`, as a step that is skipped ends before what was sent away is back, got "{run.state}"'
        )


def check_swapping(model: nn.Module, optimizer: torch.optim.Optimizer | None, run: Run) -> None:
    """Refuse to lend what lies in memory that nobody can let go of."""
    if run.state != "swap":
        return
    states = {} if optimizer is None else optimizer.state
    tensors = ((f"the optimizer's {'.'.join(map(str, path))}", item) for state in states.values() for path, item in leaves(state))
    for name, tensor in (*model.named_parameters(), *tensors):
        if isinstance(tensor, torch.Tensor) and not tensor.untyped_storage().resizable():
            raise ValueError(f'state="swap": {name} lies in memory that cannot be let go of (from numpy, shared or mapped); clone it first')


def check_memories(limit: Limit, device: torch.device, simulated: Device | None, *, swap: bool, varies: bool = False) -> None:
    """Refuse limits by name of memories that the program does not run in, or copies nothing to. Raises ValueError."""
    devices = (device.type,) if simulated is None else (device.type, "cuda")
    if limit.device and limit.device not in devices:
        raise ValueError(f"memory: expected a limit of {device.type}, on which the program runs, got one of {limit.device}")
    if limit.host_bytes is None:
        return
    if device.type == "cpu" and simulated is None:
        raise ValueError(
            'memory: the program runs on the host itself, whose memory is what `memory="8GiB"` limits: leave "host" out, which is for '
            "what a GPU copies there"
        )
    if not swap:
        raise ValueError('memory: expected "host" only where something is copied there; got it where nothing is (`Run(swap=False)`)')
    if varies:
        raise ValueError(
            'memory: expected "host" only for a program of one shape; got it with `dynamic`: leave one of them out, or say '
            'Shapes(on_new_shape="extend"), by which each shape that comes has a plan of its own'
        )


def warn_of_nowhere_to_swap(run: Run, device: torch.device, simulates: bool) -> None:
    """Say that an argument does nothing here, as torch's `pin_memory` does where there is no GPU."""
    if run.state != "device" and device.type == "cpu" and not simulates:
        warn(f'state="{run.state}" does nothing on a CPU, which has no other memory to send state to')


def lies_on_host(run: Run, device: torch.device, simulates: bool) -> bool:
    """Whether the optimizer's state lies on the host between steps, in a memory that is not the device's."""
    return run.state == "host" and (device.type != "cpu" or simulates)


def check_state_on_host(run: Run, *, trains: bool, varies: bool, together: bool) -> None:
    """Refuse what state on the host between steps does not go with. Raises ValueError."""
    if run.state != "host":
        return
    expected = 'state: expected "host"'
    if not trains:
        raise ValueError(f"{expected} for a training step, got it without `loss` and `optimizer`, whose state would lie on the host")
    if varies:
        raise ValueError(
            f'{expected} only for one shape; got it with `dynamic`: leave one of them out, or say Shapes(on_new_shape="extend")'
        )
    if together:
        raise ValueError(f'{expected} only for one process, got several: there Parallel(shard="optimizer") leaves each a part of the state')


def warn_of_gradients_let_go(model: nn.Module, optimizer: torch.optim.Optimizer, graded: Iterable[str]) -> None:
    """Say which of the parameters that get gradients the optimizer does not hold: eager PyTorch adds those up, and nobody clears them."""
    optimized, parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}, dict(model.named_parameters())
    if others := [name for name in graded if id(parameters[name]) not in optimized]:
        warn(
            f"the optimizer does not hold {len(others)} parameters that get gradients ({others[0]}{', ...' if others[1:] else ''}): a step "
            "keeps no gradient of theirs in `.grad`, as eager PyTorch would; freeze them (`requires_grad_(False)`) or give them to the "
            "optimizer"
        )


def check_kernels(kernels: str, exact: bool, *, varies: bool, tries: bool) -> None:
    """Refuse numbers that a compiler does not keep, and steps whose regions cannot be tried (not `tries`)."""
    if kernels != "compiled":
        return
    if exact:
        raise ValueError("kernels: compiled ones round otherwise than eager, sums above all: say exact=False too, or leave `kernels` out")
    if varies:
        raise ValueError(
            'kernels: a region is compiled for one shape: leave out `dynamic` and say Shapes(on_new_shape="extend"), by which each shape '
            "that comes has a plan and regions of its own; or leave `kernels` out"
        )
    if not tries:
        raise ValueError(
            "kernels: a region is compiled and tried where it is to run, so a step that is only planned (`simulate`, a model on the meta "
            "device) or tries nothing (workspaces=False) has none: leave `kernels` out there, and say it on the machine that runs the step"
        )


def device_of(model: nn.Module, wished: torch.device | str | None, machine: Device | None) -> torch.device:
    """Where the step runs: where the model lies, or for a model without memory where it is wished to: here, or on the simulated machine."""
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device.type == "meta":
        target = torch.device(wished if wished is not None else "cpu")
        gpu = torch.cuda.is_available() or (machine is not None and machine.memory_bytes)
        if target.type not in ("cpu", "cuda" if gpu else "cpu"):
            raise ValueError(f"device: expected a device that is here, or a GPU by name in `simulate` ('h200'), got {target}")
        return target
    if wished is not None and torch.device(wished) != device:
        raise ValueError(f"device: the model lies on {device}; `device` is for models on the meta device (got {wished})")
    return device


def detached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch whose tensors belong to no graph, as a capture wants it; nothing is copied."""
    leaves, rebuild = tree.flatten((args, kwargs))
    plain: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, [_detached(leaf.value) for leaf in leaves])
    return plain


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, torch.Tensor) and item.requires_grad else item
