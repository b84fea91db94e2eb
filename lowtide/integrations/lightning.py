"""Lightning's Trainer, each of whose updates is one step of lowtide, where the module's optimization is automatic.

    trainer = Trainer(strategy=LowtideStrategy(memory="60%"))

Lightning asks its strategy for the training step, the backward pass and the optimizer's step of each batch. Here the first of these does
all three; counting, logging, schedulers and checkpoints are Lightning's. With `accumulate_grad_batches` the batches of an update are kept
until the last one comes, which runs them all: the loss that callbacks see of the others is NaN, what the module logs is logged then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType

from lowtide.api.step import Step
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.integrations.windows import Options, Steps

_MISSED = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")  # hooks that would run when the step is over


class LowtideStrategy(SingleDeviceStrategy):
    """A strategy for one device under which each update of the parameters is one step of lowtide."""

    def __init__(
        self,
        memory: int | str | None = None,
        dynamic: Mapping[Any, Any] | str | None = None,
        optimize: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """`memory` and `dynamic` (of one batch) are those of `lowtide.optimize`, `optimize` is what else it is to be given.

        Further arguments are those of SingleDeviceStrategy, such as `device`.
        """
        super().__init__(**kwargs)
        self._options = Options(memory, dynamic, dict(optimize or {}))
        self._steps: Steps | None = None
        self._clips: tuple[Any, Any] = (None, None)  # how far, and by which algorithm
        self._waiting: list[Any] = []  # batches of this update
        self._noted: list[_Logged] | None = None  # what is logged while a program is captured or run

    @property
    def lowtide_step(self) -> Step | None:
        """The step of the latest update, with its plan; None before the first one."""
        return None if self._steps is None else self._steps.latest

    def setup(self, trainer: Any) -> None:
        """As Lightning; what the module logs is noted from here on. Raises CaptureError for what has no way into a step."""
        super().setup(trainer)
        _refuse(trainer, self.lightning_module, self.optimizers)
        self._steps, self._waiting = None, []
        self._clips = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        module = self.lightning_module
        own = {"log": _noting(self, type(module).log.__get__(module)), "clip_gradients": _clipping(self.precision_plugin, self._clips)}
        module.__dict__.update(own)  # theirs ask the trainer, which is another one after each batch

    def teardown(self) -> None:
        """As Lightning."""
        if self.lightning_module is not None:
            for name in ("log", "clip_gradients"):
                self.lightning_module.__dict__.pop(name, None)
        super().teardown()

    def training_step(self, batch: Any, *position: Any) -> Any:
        """All of an update at its last batch."""
        self._waiting.append({"batch": batch})
        if self.lightning_module.trainer.fit_loop._should_accumulate():
            return torch.full((), float("nan"), device=self.root_device)
        batches, self._waiting = self._waiting, []
        results = self._update(batches, len(position))
        for *_, logged in results:
            for each in logged:
                each.replay(self.lightning_module)
        _, loss, beside, _ = results[-1]
        return loss if beside is None else {**beside, "loss": loss}

    def _update(self, batches: list[Any], positions: int) -> list[Any]:
        """Forward, backward, clipping and the optimizer's step; of each batch the share, the loss, what is beside it, what was logged."""
        module, (optimizer,) = self.lightning_module, self.optimizers
        if self._steps is None or not self._steps.are_of(module, optimizer):
            self._steps = Steps.of(module, optimizer, self._options)
        scaler = getattr(self.precision_plugin, "scaler", None)
        program = {
            "loss": self._loss(module.trainer.accumulate_grad_batches, positions),
            "after_backward": self._clip(optimizer),
            "scaler": scaler,
        }
        return self._steps.run(batches, **program)[0]

    def _loss(self, count: int, positions: int) -> Callable[..., Any]:
        """The module's training step, with what it logs."""

        def loss(module: LightningModule, batch: Any) -> tuple[torch.Tensor, torch.Tensor, Any, list[_Logged]]:
            noted: list[_Logged] = []
            self._noted = noted
            try:
                with self.precision_plugin.train_step_context():
                    returned = module.training_step(batch, *[Position()] * positions)
            finally:
                self._noted = None
            if returned is None:
                raise CaptureError("training_step returned None: a captured step cannot skip a batch; filter the data instead")
            value, beside = (returned["loss"], dict(returned)) if isinstance(returned, Mapping) else (returned, None)
            if beside is not None:
                del beside["loss"]
            return value / count, value, beside, noted

        return loss

    def _clip(self, optimizer: Any) -> Callable[[Any], None]:
        """The module's `configure_gradient_clipping`, as Lightning calls it."""
        name_of = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        groups = [({**group, "params": []}, [name_of[each] for each in group["params"]]) for group in optimizer.param_groups]

        def clip(module: Any) -> None:
            most, algorithm = self._clips
            there = dict(module.named_parameters())  # with gradients, which those that the optimizer holds have not
            stand_in = SimpleNamespace(param_groups=[{**group, "params": [there[name] for name in names]} for group, names in groups])
            module.configure_gradient_clipping(stand_in, gradient_clip_val=most, gradient_clip_algorithm=algorithm)

        return clip

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Done already."""
        return closure_loss.detach()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Runs the training step, which is all."""
        return closure()


class Position:
    """Stands for `batch_idx`, which a program that serves every batch cannot look at."""

    def _refuse(self, *others: Any) -> Any:
        raise CaptureError(
            f"training_step uses batch_idx at {users_line()}: a captured step is the same for every batch; use a hook of the module or of "
            "a callback (on_train_batch_end) for what is to happen now and then"
        )


for _name in ("bool", "float", "int", "index", "hash", "eq", "ne", "lt", "le", "gt", "ge", "format", "str", "neg", "add", "radd", "sub",
              "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "rmod", "pow", "rpow"):  # fmt: skip
    setattr(Position, f"__{_name}__", Position._refuse)


class _Logged(dict[str, Any]):
    """One call of `log`: its name, its value, how."""

    def replay(self, module: LightningModule) -> None:
        """Make that call with the numbers of the step that has just run."""
        given = dict(self)
        module.log(given.pop("name"), given.pop("value"), **given)


def _noting(strategy: LowtideStrategy, log: Callable[..., None]) -> Callable[..., None]:
    """`log` for as long as a strategy is in charge: what is logged within a program comes out of it with its results."""

    def noted(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if strategy._noted is None:
            log(name, value, *args, **kwargs)
        elif args or not isinstance(value, (torch.Tensor, int, float)):
            raise CaptureError(f"self.log({name!r}, ...): expected a tensor or a number, and further arguments by name, got {value!r}")
        else:
            strategy._noted.append(_Logged(name=name, value=value.detach() if isinstance(value, torch.Tensor) else value, **kwargs))

    return noted


def _clipping(precision: Any, said: tuple[Any, Any]) -> Callable[..., None]:
    """`clip_gradients` of a module, which looks for the trainer's settings where nothing is given: those that were `said`."""

    def clip_gradients(optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        most = said[0] if gradient_clip_val is None else gradient_clip_val
        algorithm = gradient_clip_algorithm or said[1] or GradClipAlgorithmType.NORM
        precision.clip_gradients(optimizer, most or 0.0, GradClipAlgorithmType(algorithm))

    return clip_gradients


def _refuse(trainer: Any, module: LightningModule, optimizers: list[Any]) -> None:
    """Raise CaptureError for what Lightning would do around or within the step that a captured one does not."""
    if trainer.state.fn != "fit":
        return
    if not module.automatic_optimization or len(optimizers) != 1:
        raise CaptureError(
            "LowtideStrategy expects automatic optimization with one optimizer: with manual optimization call lowtide.optimize in "
            "training_step, where the parts of your step are"
        )
    for hook in _MISSED:
        for owner, base in ((module, LightningModule), *((each, Callback) for each in trainer.callbacks)):
            if getattr(type(owner), hook) is not getattr(base, hook):
                raise CaptureError(
                    f"{type(owner).__name__}.{hook} is to run within the step, between backward pass and optimizer, which are one program "
                    "here: clip in configure_gradient_clipping, or do without"
                )
