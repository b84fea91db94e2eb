"""Lightning's Trainer, each of whose updates is one step of lowtide, where the module's optimization is automatic.

    trainer = Trainer(strategy=LowtideStrategy(memory="60%"))

Lightning asks its strategy for the training step, the backward pass and the optimizer's step of each batch. Here the first of these does
all three; counting, logging, schedulers and checkpoints are Lightning's. With `accumulate_grad_batches` the batches of an update are kept
until the last one comes, which runs them all: the loss that callbacks see of the others is NaN, what the module logs is logged then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy

from lowtide.api.step import Step
from lowtide.errors import CaptureError
from lowtide.integrations import lightning_notes as notes
from lowtide.integrations.accumulation import FrameworkOptions, FrameworkSteps
from lowtide.integrations.lightning_notes import Notes, TrainerReads
from lowtide.planning.request import MemoryLimits

_OVER = "which are one program here: use on_before_optimizer_step of the module, which is captured with it, or do without"
_NOT_OF_A_MODULE = {  # methods of a module that would do something else than the step does, or at another time
    "on_before_backward": f"it is to run between forward and backward pass, {_OVER}",
    "on_after_backward": f"it is to run between backward pass and optimizer, {_OVER}",
    "on_before_zero_grad": "it is to run before gradients are let go, which are never there all at once: use on_train_batch_end",
    "optimizer_zero_grad": "a step lets gradients go as soon as they are used: leave it out, or set accumulate_grad_batches of Trainer",
    "backward": "a step differentiates the loss that training_step returns: change that loss instead",
}
_NOT_OF_A_CALLBACK = {
    **{name: _NOT_OF_A_MODULE[name] for name in ("on_before_backward", "on_after_backward", "on_before_zero_grad")},
    "on_before_optimizer_step": f"it is to run between backward pass and optimizer, {_OVER}",
}


class LowtideStrategy(SingleDeviceStrategy):
    """A strategy for one device under which each update of the parameters is one step of lowtide."""

    def __init__(
        self, memory: MemoryLimits = None, dynamic: Mapping[Any, Any] | str | None = None, optimize: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """`memory` and `dynamic` (of one batch) are those of `lowtide.optimize`, `optimize` is what else it is to be given.

        `device` is Trainer's by default; further arguments are those of SingleDeviceStrategy.
        """
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._is_said = device is not None
        self._options = FrameworkOptions(memory, dynamic, dict(optimize or {}))
        self._steps: FrameworkSteps | None = None
        self._reads: dict[int, TrainerReads] = {}  # by number of batches, as programs are
        self._waiting: list[Any] = []  # batches of this update
        self._names: list[tuple[dict[str, Any], list[str]]] = []  # the optimizer's groups, and the names of the parameters in each
        self._is_stepping, self._updates = False, 0
        self.num_nodes = 1

    @property
    def lowtide_step(self) -> Step | None:
        """The step of the latest update, with its plan; None before the first one."""
        return None if self._steps is None else self._steps.latest

    @property
    def parallel_devices(self) -> list[torch.device]:
        """What Trainer is to run on: it gives its own choice where nothing is said."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) > 1:
            raise CaptureError(
                f"LowtideStrategy expects one device, Trainer has {len(devices)}: give devices=1, or train by torchrun with "
                "lowtide.optimize in a loop of your own, which takes several processes"
            )
        if devices and not self._is_said:
            self._root_device = torch.device(devices[0])

    def setup(self, trainer: Any) -> None:
        """As Lightning. Raises CaptureError for what has no way into a step."""
        super().setup(trainer)
        _refuse(trainer, self.lightning_module, self.optimizers)
        self._steps, self._waiting, self._reads = None, [], {}

    def on_validation_start(self, *ending: BaseException) -> None:
        """Memory that was kept from step to step is let go; also where training ends, be it by an error or an interrupt."""
        if self._steps is not None:
            self._steps.empty_arena()

    on_train_end = on_exception = on_validation_start

    def training_step(self, batch: Any, *position: Any) -> Any:
        trainer = self.lightning_module.trainer
        loop = trainer.fit_loop
        if loop._skip_backward:  # only statistics are wanted (StochasticWeightAveraging)
            return super().training_step(batch, *position)
        if isinstance(batch, Iterator):
            raise CaptureError("training_step(dataloader_iter) fetches batches by itself: take `batch` instead, as the step needs it whole")
        if loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self._waiting = []  # an epoch may have ended in the middle of an update
        self._waiting.append({"batch": batch})
        if loop._should_accumulate():
            return torch.full((), float("nan"), device=self.root_device)
        if not self._is_stepping:
            raise CaptureError(
                f"{type(self.lightning_module).__name__}.optimizer_step calls the closure without the optimizer's step, which are one: "
                "expected optimizer.step(closure=optimizer_closure) for each batch; to accumulate set accumulate_grad_batches of Trainer"
            )
        batches, self._waiting = self._waiting, []
        return self._update(batches, len(position))

    def _update(self, batches: list[Any], positions: int) -> Any:
        """Forward, backward, clipping and the optimizer's step; what training_step returned for the last batch."""
        module, (optimizer,) = self.lightning_module, self.optimizers
        if self._steps is None or not self._steps.are_of(module, optimizer):
            self._steps, self._reads = FrameworkSteps.of(module, optimizer, self._options, "training_step"), {}
        name_of = {parameter: name for name, parameter in module.named_parameters()}
        self._names = [
            ({**group, "params": []}, [name_of[each] for each in group["params"] if each in name_of]) for group in optimizer.param_groups
        ]
        reads = self._reads.setdefault(len(batches), TrainerReads(module.trainer))
        scaler = getattr(self.precision_plugin, "scaler", None)
        with reads.instead_of_the_trainer(module):
            results, clipped = self._steps.run(batches, loss=self._loss(positions), after_backward=self._clip, scaler=scaler)
        self._updates += 1
        for each, (*_, calls) in zip(batches, results, strict=True):
            logged = module.trainer._results
            logged.batch, logged.batch_size = each["batch"], None  # a mean over the epoch weighs a log by its own batch
            notes.run(calls, module)
        for hook, calls in (clipped or {}).items():
            notes.run(calls, module, hook)
        _, loss, beside, _ = results[-1]
        return loss if beside is None else {**beside, "loss": loss}

    def _loss(self, positions: int) -> Callable[..., Any]:
        """The module's training step, with what it does beside."""

        def loss(module: LightningModule, batch: Any) -> tuple[torch.Tensor, torch.Tensor, Any, list[Any]]:
            with Notes(module).taken() as calls, self.precision_plugin.train_step_context():
                returned = module.training_step(batch, *[notes.position() for _ in range(positions)])
            if returned is None:
                raise CaptureError("training_step returned None: a captured step cannot skip a batch; filter the data instead")
            notes.refuse_unknown(returned)
            value, beside = (returned["loss"], dict(returned)) if isinstance(returned, Mapping) else (returned, None)
            if beside is not None:
                del beside["loss"]
            return value / module.trainer.accumulate_grad_batches, value, beside, calls

        return loss

    def _clip(self, module: Any) -> dict[str, list[Any]]:
        """The module's `on_before_optimizer_step` and `configure_gradient_clipping`, as Lightning calls them; what they log."""
        there = dict(module.named_parameters())  # with gradients, which those that the optimizer holds have not
        groups = [{**group, "params": [there[name] for name in names]} for group, names in self._names]
        stand_in, before_hooks = SimpleNamespace(param_groups=groups), [{**group} for group in groups]
        with Notes(module).taken() as before:
            module.on_before_optimizer_step(stand_in)
        most, algorithm = module.trainer.gradient_clip_val, module.trainer.gradient_clip_algorithm
        with Notes(module).taken() as behind:
            module.configure_gradient_clipping(stand_in, gradient_clip_val=most, gradient_clip_algorithm=algorithm)
        if any(now[name] is not group.get(name) for now, group in zip(groups, before_hooks, strict=True) for name in now):
            raise CaptureError(
                "on_before_optimizer_step or configure_gradient_clipping sets a number of the optimizer (a learning rate), which a step "
                "reads at its beginning: set it in on_train_batch_start"
            )
        return {"on_before_optimizer_step": before, "configure_gradient_clipping": behind}

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return closure_loss.detach()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Runs the training step, which is all. Raises CaptureError where it does not lead to one."""
        before, self._is_stepping = self._updates, True
        try:
            returned = closure()
        finally:
            self._is_stepping = False
        if self._updates == before and not self.lightning_module.trainer.fit_loop._skip_backward:
            raise CaptureError(
                f"{type(self.lightning_module).__name__}.optimizer_step steps the optimizer without the closure, which are one: "
                "expected optimizer.step(closure=optimizer_closure), once for each batch"
            )
        return returned


def _refuse(trainer: Any, module: LightningModule, optimizers: list[Any]) -> None:
    """Raise CaptureError for what Lightning would do around or within the step that a captured one does not."""
    if trainer.state.fn != "fit":
        return
    if not module.automatic_optimization or len(optimizers) != 1:
        raise CaptureError(
            "LowtideStrategy expects automatic optimization with one optimizer: with manual optimization call lowtide.optimize in "
            "training_step, where the parts of your step are"
        )
    if trainer.num_nodes > 1:
        raise CaptureError(f"LowtideStrategy expects one process, Trainer has {trainer.num_nodes} nodes: give num_nodes=1")
    owners = ((module, LightningModule, _NOT_OF_A_MODULE), *((each, Callback, _NOT_OF_A_CALLBACK) for each in trainer.callbacks))
    for owner, base, reasons in owners:
        for hook, why in reasons.items():
            if hook in vars(owner) or getattr(type(owner), hook) is not getattr(base, hook):
                raise CaptureError(f"{type(owner).__name__}.{hook} is overridden: {why}")
