"""Lightning's Trainer with lowtide's strategy: losses, weights, counts, logs and checkpoints are Lightning's own, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lightning_training import PLAIN, QUIET, Net, fit  # first: puts something in the place of torchvision, or skips

# isort: split
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import grad_norm
from torch import nn

import lowtide
from bench.in_values import in_values
from lowtide.integrations.lightning import LowtideStrategy
from tests.training import differences

pytestmark = QUIET


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ({"gradient_clip_val": 0.1}, {}),
        ({"accumulate_grad_batches": 2, "precision": "bf16-mixed"}, {}),
        ({"accumulate_grad_batches": 3, "lengths": (6, 9)}, {"dynamic": "auto"}),
        ({}, {"memory": "99%"}),
    ],
)
def test_trains_as_lightning_does(tmp_path: Path, said: dict[str, Any], given: dict[str, Any]):
    expected, _ = fit(tmp_path, "auto", **said)
    found, trainer = fit(tmp_path, LowtideStrategy(**{**PLAIN, **given}), **said)
    assert not (told := differences(expected, found)), "\n".join(told[:8])
    assert trainer.strategy.lowtide_step.plan.peak_bytes <= trainer.strategy.lowtide_step.plan.eager_peak_bytes


class Manual(LightningModule):
    """As refused automatic optimization advises: a step of lowtide within `training_step`, or the loop that it stands for."""

    is_captured, step = False, None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def loss(layers: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(layers(tokens).flatten(0, 1), labels.flatten())

        optimizer = self.optimizers()
        if self.is_captured:
            made = {"loss": loss, "optimizer": optimizer, "workspaces": False, "on_new_shape": "eager"}
            self.step = self.step or lowtide.optimize(self.layers, batch, **in_values(**made))
            return self.step(*batch)
        optimizer.zero_grad()
        value = loss(self.layers, *batch)
        self.manual_backward(value)
        optimizer.step()
        return value

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("checked", self.layers(batch[0]).square().mean(), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, foreach=False)


class ManualCaptured(Manual):
    is_captured = True


@pytest.mark.parametrize("lengths", [(6,), (6, 7)])
def test_manual_optimization_counts_steps_as_lightning_does(tmp_path: Path, lengths: tuple[int, ...]):
    """A batch of another length is run by the loop, and counted, too."""
    (expected, _), (found, _) = (
        fit(tmp_path, "auto", kind=kind, lengths=lengths, max_steps=7, max_epochs=9) for kind in (Manual, ManualCaptured)
    )
    assert not (told := differences(expected, found)), "\n".join(told[:8])
    assert found["steps"] == 7


class Weighs(Net):
    """Its mean over an epoch weighs each batch by the rows that Lightning counts in it."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [each.t() for each in batch]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        returned = super().training_step(batch, batch_idx)
        self.log("mean", returned["loss"], on_step=False, on_epoch=True)
        return returned


def test_weighs_what_is_logged_by_its_own_batch(tmp_path: Path):
    said = {"kind": Weighs, "lengths": (6, 9), "accumulate_grad_batches": 2}
    expected, _ = fit(tmp_path, "auto", **said)
    found, _ = fit(tmp_path, LowtideStrategy(**PLAIN), **said)
    assert not (told := differences(expected, found)), "\n".join(told[:8])


class Sure(Net):
    """Draws no random numbers, as loaders do at the beginning of a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


@pytest.mark.skipif(sys.platform != "linux", reason="arenas are for Linux")
def test_updates_run_in_an_arena_that_validation_does_not_pay_for(tmp_path: Path):
    """Validation comes within an update, too."""
    taken: dict[str, list[int]] = {"update": [], "validation": []}

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self._look(trainer, "update")

        def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
            self._look(trainer, "validation")

        def _look(self, trainer: Any, when: str) -> None:
            step = getattr(trainer.strategy, "lowtide_step", None)
            taken[when].append(0 if step is None else step.arena.taken_bytes)

    said = {"count": 10, "accumulate_grad_batches": 2, "val_check_interval": 5, "max_epochs": 1, "kind": Sure, "further": [Looks()]}
    expected, _ = fit(tmp_path, "auto", **said)
    found, trainer = fit(tmp_path, LowtideStrategy(**PLAIN), **said)
    step = trainer.strategy.lowtide_step
    if step.arena.absent:
        pytest.skip(step.arena.absent)
    assert not (told := differences(expected, found)), "\n".join(told[:8])
    assert max(taken["update"]) > 0
    assert max(taken["validation"]) == step.arena.taken_bytes == 0


def test_goes_on_from_lightnings_checkpoint(tmp_path: Path):
    _, first = fit(tmp_path, "auto", max_epochs=1)
    first.save_checkpoint(tmp_path / "first.ckpt")
    expected, _ = fit(tmp_path, "auto", from_checkpoint=tmp_path / "first.ckpt")
    found, trainer = fit(tmp_path, LowtideStrategy(**PLAIN), from_checkpoint=tmp_path / "first.ckpt")
    assert not (told := differences(expected, found)), "\n".join(told[:8])
    assert trainer.global_step == 10


class Early(Net):
    """Another program in the first steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * 3 if self.global_step < 4 else loss


def test_a_step_that_reads_the_trainer_is_told_what_changes(tmp_path: Path):
    """Each program is right, and there is one for each step: until lowtide has had enough."""
    with pytest.raises(UserWarning, match="attribute '_trainer' of '' has changed"):
        fit(tmp_path, LowtideStrategy(**PLAIN), kind=Early)


class Clips(Net):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


def test_clips_as_the_module_says(tmp_path: Path):
    expected, _ = fit(tmp_path, "auto", kind=Clips)
    found, _ = fit(tmp_path, LowtideStrategy(**PLAIN), kind=Clips)
    assert not (told := differences(expected, found)), "\n".join(told[:8])


class Logs(Net):
    """Metrics, the trainer and gradients, as modules use them."""

    def __init__(self) -> None:
        super().__init__()
        self.right = torchmetrics.Accuracy("multiclass", num_classes=20)
        both = {"mean": torchmetrics.MeanMetric(), "most": torchmetrics.MaxMetric()}
        self.both, self.late = torchmetrics.MetricCollection(both, prefix="of_"), torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        returned = super().training_step(batch, batch_idx)
        loss, logits = returned["loss"], returned["logits"]
        self.log("share", self.right(logits.flatten(0, 1), batch[1].flatten()), on_step=True, batch_size=2)
        self.log("right_metric", self.right, on_step=True, on_epoch=True, batch_size=2)
        self.log_dict(self.both(loss), batch_size=2)
        self.late.update(loss)
        if self.trainer.is_global_zero and len(self.trainer.optimizers) == 1:
            self.log("rate", self.optimizers().param_groups[0]["lr"], False, batch_size=2)
        return loss * (1 + self.current_epoch / self.trainer.max_epochs)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([each.grad.norm() for each in self.parameters()]).norm())
        self.log_dict(grad_norm(self, norm_type=2))

    def on_train_epoch_end(self) -> None:
        self.log("late", self.late.compute())
        self.late.reset()


@pytest.mark.parametrize("said", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_logs_as_lightning_does(tmp_path: Path, recwarn: Any, said: dict[str, Any]):
    """What is read of the trainer is captured anew where it has changed, and nowhere else."""
    expected, _ = fit(tmp_path, "auto", kind=Logs, **said)
    recwarn.clear()
    found, _ = fit(tmp_path, LowtideStrategy(**PLAIN), kind=Logs, **said)
    assert not (told := differences(expected, found)), "\n".join(told[:8])
    assert not [each for each in recwarn if "captured" in str(each.message)]


class Clipped(Callback):
    """A limit of the gradients' norm that changes, and an epoch that ends in the middle of an update."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.gradient_clip_val = (0.1, 0.01)[trainer.current_epoch]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if trainer.current_epoch == 0 and batch_idx == 3 else None


class Joins(Callback):
    """A layer that is trained from the second epoch on."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.words.requires_grad_(trainer.current_epoch > 0)


class Copies(Callback):
    """Nothing of lowtide's lies in a module between batches, so that it can be copied."""

    def on_train_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
        assert not {"log", "clip_gradients"} & vars(module).keys()
        assert module.trainer is trainer


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (lambda: GradientAccumulationScheduler({0: 1, 1: 4}), {}),
        (Clipped, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
        (Joins, {"gradient_clip_val": 0.1}),
        (lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1), {"max_epochs": 3}),
        (Copies, {}),
    ],
)
def test_follows_callbacks(tmp_path: Path, callback: Any, said: dict[str, Any]):
    expected, _ = fit(tmp_path, "auto", further=[callback()], **said)
    found, _ = fit(tmp_path, LowtideStrategy(**PLAIN), further=[callback()], **said)
    assert not (told := differences(expected, found)), "\n".join(told[:8])


class Normed(Net):
    """Its statistics are gathered by a pass without updates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), nn.Unflatten(1, (6, 8)))


def test_gathers_statistics_without_an_update(tmp_path: Path):
    """Lightning steps once more behind that pass, on gradients of the epoch before; a strategy may leave that out."""

    class Rests(SingleDeviceStrategy):
        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            rests = self.lightning_module.trainer.fit_loop._skip_backward
            return closure() if rests else super().optimizer_step(optimizer, closure, model, **kwargs)

    said = {"kind": Normed, "max_epochs": 3}
    expected, _ = fit(tmp_path, Rests(), further=[StochasticWeightAveraging(0.01, swa_epoch_start=1)], **said)
    found, _ = fit(tmp_path, LowtideStrategy(**PLAIN), further=[StochasticWeightAveraging(0.01, swa_epoch_start=1)], **said)
    assert not (told := differences(expected["model"], found["model"])), "\n".join(told[:8])


def test_takes_the_device_of_the_trainer():
    strategy = LowtideStrategy()
    strategy.parallel_devices = [torch.device("cuda:1")]
    assert strategy.root_device == torch.device("cuda:1")
    strategy = LowtideStrategy(device="cpu")
    strategy.parallel_devices = [torch.device("cuda:1")]
    assert strategy.root_device == torch.device("cpu")


class Gathers(Net):
    """Keeps the losses of an epoch, as Lightning's guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step_outputs: list[torch.Tensor] = []
        self.means: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.training_step_outputs.append(loss.detach())
        self.means.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(torch.stack(self.training_step_outputs).mean().item())
        self.training_step_outputs.clear()


def test_what_a_training_step_keeps_is_kept_by_each_step(tmp_path: Path):
    modules = [fit(tmp_path, strategy, kind=Gathers)[1].lightning_module for strategy in ("auto", LowtideStrategy(**PLAIN))]
    assert modules[0].means == modules[1].means
    assert len(modules[1].means) == 12
