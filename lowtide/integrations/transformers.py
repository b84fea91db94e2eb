"""transformers' Trainer, each of whose updates is one step of lowtide.

    trainer = LowtideTrainer(model, arguments, train_dataset=data, memory="60%")
    class MyTrainer(LowtideMixin, SFTTrainer): ...

Trainer collects the batches of an update (`get_batch_samples`) and asks for each by itself (`training_step`): the first is answered by the
whole update, forward to optimizer, the others by what that found for them. What Trainer does besides is Trainer's: it logs, evaluates,
saves, and steps the scheduler. Accelerate takes the step of its optimizer for one that is not due.

A Trainer between (trl's) may have a `training_step` that does something around its base's. So the update stands in the place of Trainer's
own, behind all of them (`_Updates`, which `LowtideMixin` adds to the bases of its subclasses).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from lowtide.api.step import Step
from lowtide.errors import CaptureError
from lowtide.integrations.accumulation import FrameworkOptions, FrameworkSteps
from lowtide.planning.request import MemoryLimits

_COUNT = "num_items_in_batch"  # beside what the model gets of a batch
_OWN_STEP = (
    "{}.training_step does not call `super().training_step`, in whose place the step of lowtide stands: override `compute_loss` instead, "
    "or call lowtide.optimize in a loop of your own"
)


class LowtideMixin(Trainer):
    """For Trainers of one's own: name it first among the bases."""

    _batches: Sequence[Any] = ()  # of this update
    _losses: Iterator[torch.Tensor] = iter(())  # of those that Trainer has not asked for yet
    _norm: Any = None  # of this update's gradients
    _steps: FrameworkSteps | None = None
    _has_updated = False  # whether the current call of `training_step` came to the update
    _logs: list[Any] | None = None  # while an update runs, what `compute_loss` logs

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if _Updates not in cls.__mro__:
            others = (base for base in cls.__bases__ if base is not Trainer)
            cls.__bases__ = (*others, _Updates)  # right before Trainer, behind every base that calls `super().training_step`

    def __init__(
        self, *args: Any, memory: MemoryLimits = None, dynamic: Mapping[Any, Any] | str | None = None,
        optimize: Mapping[str, Any] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """As the Trainer. `memory` and `dynamic` (of one batch) are those of `lowtide.optimize`, `optimize` is what else it is to be given.

        Raises CaptureError for what has no way into a step.
        """
        super().__init__(*args, **kwargs)
        self._options = FrameworkOptions(memory, dynamic, dict(optimize or {}))
        _refuse_other_steps(self)
        _refuse_arguments(self)

    @property
    def lowtide_step(self) -> Step | None:
        """The step of the latest update, with its plan; None before the first one."""
        return None if self._steps is None else self._steps.latest

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer. At the end memory that was kept from step to step is let go, and accelerate takes steps of optimizers again."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._empty_arena()
            self.accelerator.gradient_state._set_sync_gradients(True)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer, which evaluates and predicts by it; memory that was kept from step to step is let go before."""
        self._empty_arena()
        return super().evaluation_loop(*args, **kwargs)

    def _empty_arena(self) -> None:
        if self._steps is not None:
            self._steps.empty_arena()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer; the batches of the update that follows are kept."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        self._batches, self._losses = batches, iter(())
        return batches, count

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the Trainer between. Raises CaptureError where that one does not come to its base's `training_step`."""
        self._has_updated = False
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if not self._has_updated:
            raise CaptureError(_OWN_STEP.format(_overriding(type(self))[0].__name__))
        return loss

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the Trainer. What `compute_loss` logs is logged behind the update, with the numbers that this has found."""
        if self._logs is None:
            super().log(logs, *args, **kwargs)
        else:
            self._logs.append((logs, args, kwargs))

    def _log_all(self, waiting: Sequence[Any]) -> None:
        for logs, args, kwargs in waiting:
            super().log(logs, *args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """The norm of the gradients, which the step has clipped."""
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of the gradients that the step has used."""
        return self._norm


class _Updates(Trainer):
    """Trainer's own `training_step`, as an update by lowtide. It comes behind all other bases but Trainer."""

    _batches: Sequence[Any]  # what `LowtideMixin` has, which comes first among the bases
    _losses: Iterator[torch.Tensor]
    _norm: Any
    _steps: FrameworkSteps | None
    _options: FrameworkOptions
    _logs: list[Any] | None
    _log_all: Callable[[Sequence[Any]], None]

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None) -> torch.Tensor:
        """The loss of one batch. At the first batch of an update all of it is done."""
        self._has_updated = True
        if not self._batches or inputs is self._batches[0]:
            self._losses = iter(self._update(model, self._batches or [inputs], num_items_in_batch))
        loss = next(self._losses)
        self.accelerator.gradient_state._set_sync_gradients(False)  # as Trainer does itself: no step of the optimizer is due
        return loss

    def _update(self, model: nn.Module, batches: Sequence[Any], count: torch.Tensor | int | None) -> list[torch.Tensor]:
        """Forward, backward, clipping and the optimizer's step; the loss of each batch."""
        _refuse_callbacks(self)
        _refuse_unfinished(self, len(batches))
        model.train()
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()
        model = self.accelerator.unwrap_model(model)
        if self._steps is None or not self._steps.are_of(model, self.optimizer):
            self._steps = FrameworkSteps.of(model, self.optimizer, self._options, "compute_loss")
        scaler = self.accelerator.scaler
        scale = None if scaler is None else scaler.get_scale()
        window = [{**self._prepare_inputs(each), _COUNT: count} for each in batches]
        logs: list[Any] = []
        self._logs = logs
        try:
            losses, self._norm = self._steps.run(window, loss=_loss_of(self), after_backward=_clip(self.args.max_grad_norm), scaler=scaler)
        finally:
            self._logs = None
        self._log_all(logs)
        if scaler is not None:
            self.optimizer._is_overflow = scaler.get_scale() < scale  # what its own step would have found
        return losses


class LowtideTrainer(LowtideMixin):
    """transformers' Trainer in less memory: `LowtideTrainer(model, arguments, train_dataset=data, memory="60%")`."""


def _loss_of(trainer: Any) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, **inputs: Any) -> torch.Tensor:
        count = inputs.pop(_COUNT)
        with trainer.compute_loss_context_manager():
            value = trainer.compute_loss(model, inputs, num_items_in_batch=count)
        if not _is_scaled(trainer, count):
            value = value / trainer.current_gradient_accumulation_steps
        share: torch.Tensor = value / trainer.accelerator.gradient_accumulation_steps
        return share

    return loss


def _is_scaled(trainer: Any, count: torch.Tensor | int | None) -> bool:
    """Whether the loss of a batch is its share of the update's already."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is not None:
        return bool(scaled)
    return (trainer.model_accepts_loss_kwargs and count is not None) or trainer.compute_loss_func is not None


def _clip(most: float) -> Callable[[nn.Module], torch.Tensor]:
    """Clips the gradients by their norm, and tells that."""

    def clip(model: nn.Module) -> torch.Tensor:
        if most > 0:
            return nn.utils.clip_grad_norm_(model.parameters(), most)
        return nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])

    return clip


def _refuse_other_steps(trainer: Trainer) -> None:
    """Raise CaptureError for a Trainer whose own `training_step` does not call that of its base, in whose place the update stands."""
    if _Updates not in type(trainer).__mro__:
        raise TypeError("LowtideMixin is a base for Trainers of your own: take LowtideTrainer, or derive a class from it and your Trainer")
    for base in _overriding(type(trainer)):
        step = inspect.unwrap(vars(base)["training_step"])
        if "super" not in getattr(getattr(step, "__code__", None), "co_names", ("super",)):
            raise CaptureError(_OWN_STEP.format(base.__name__))


def _overriding(trainer: type) -> list[type]:
    """The classes before the update that have a `training_step` of their own."""
    classes = trainer.__mro__
    before = classes[: classes.index(_Updates)]
    return [each for each in before if each is not LowtideMixin and "training_step" in vars(each)]


def _refuse_arguments(trainer: Trainer) -> None:
    """Raise CaptureError for what Trainer would do around or within the step that a captured one does not."""
    args, accelerator = trainer.args, trainer.accelerator
    reasons = {
        "activation checkpointing": _recomputes(args) and "`memory` says what is to be computed again: `gradient_checkpointing=False`",
        "activation_offloading": getattr(args, "activation_offloading", False) and "`memory` says what leaves the device: leave it out",
        "torch_compile": args.torch_compile and "the step runs as one program already: leave it out",
        "deepspeed": trainer.is_deepspeed_enabled and "it has an engine of its own: use one or the other",
        "fsdp": trainer.is_fsdp_enabled and "its parameters are held in shards: use one or the other",
        "several GPUs in one process": args.n_gpu > 1 and "start a process for each by torchrun, or set CUDA_VISIBLE_DEVICES to one",
        "several processes": accelerator.num_processes > 1 and "lowtide.optimize in a loop of your own may take them",
    }
    for name, reason in reasons.items():
        if reason:
            raise CaptureError(f"{name} does not go with a LowtideTrainer: {reason}")


def _recomputes(args: Any) -> bool:
    """Whether activations are to be computed again, by either of the argument's names."""
    return bool(getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False))


def _refuse_callbacks(trainer: Trainer) -> None:
    """Raise CaptureError for a callback that would look at gradients which are gone by then."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
            raise CaptureError(
                f"{type(callback).__name__}.on_pre_optimizer_step is to run between the backward pass and the optimizer, which are one "
                "step here: remove the callback"
            )


def _refuse_unfinished(trainer: Trainer, count: int) -> None:
    """Raise CaptureError for an update of which the data's end is a part: without their length Trainer does not see it come.

    It makes no step then, and adds those gradients to the first update of the next epoch.
    """
    wanted = trainer.args.gradient_accumulation_steps
    if count < wanted and not has_length(trainer.callback_handler.train_dataloader):
        raise CaptureError(
            f"the data ended after {count} of the {wanted} batches of an update, and have no length: Trainer would add their gradients to "
            "the next epoch's first update, and a step of lowtide is whole; give the data a length, or let them end after a multiple of "
            f"{wanted} batches"
        )
