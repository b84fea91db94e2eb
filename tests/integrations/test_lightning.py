"""Lightning's Trainer with lowtide's strategy: losses, weights, counts, logs and checkpoints are Lightning's own, bit for bit."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from bench import torchvision_shim
from bench.in_values import in_values
from lowtide.errors import CaptureError
from tests.training import differences

torchvision_shim.install()  # torchmetrics imports torchvision
pytest.importorskip("lightning")

import torchmetrics  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything  # noqa: E402
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, StochasticWeightAveraging  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.utilities import grad_norm  # noqa: E402

from lowtide.integrations.lightning import LowtideStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|GPU|LeafSpec|isinstance|log_every_n_steps|checkpoint|dataloader_iter|lr_scheduler.step).*",
    "ignore::FutureWarning",
)

PLAIN = {"optimize": {"planning": lowtide.Planning(workspaces=False)}}


class Net(LightningModule):
    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.words, self.drop, self.norm, self.head = nn.Embedding(20, 8), nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 20)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        logits = self.head(self.norm(self.drop(self.words(tokens))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(tokens))
        self.log_dict({"right": (logits.argmax(-1) == labels).float().mean(), "two": 2.0}, batch_size=len(tokens))
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("checked", self.head(self.norm(self.words(batch[0]))).square().mean(), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}}


class Keeps(Callback):
    """What is to be seen at the end of each batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        loss = outputs["loss"].detach().clone() if last else None  # of others only the logs are known
        self.seen.append((trainer.global_step, loss, {name: each for name, each in trainer.callback_metrics.items() if last}))


def loader(batches: list[Any]) -> Any:
    return torch.utils.data.DataLoader(batches, batch_size=None)


def fit(folder: Path, strategy: Any, count: int = 5, lengths: tuple[int, ...] = (6,), kind: Any = Net, **said: Any) -> Any:
    """All that training leaves, and the trainer."""
    seed_everything(0, verbose=False)
    module, keeps = kind(), Keeps()
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(20, (2, lengths[at % len(lengths)]), generator=generator) for at in range(count)]
    batches = [(tokens, tokens.roll(1, 1)) for tokens in drawn]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    usual = {"max_epochs": 2, "enable_checkpointing": False, "default_root_dir": folder, "callbacks": [keeps, *said.pop("further", ())]}
    trainer = Trainer(**{**usual, **quiet, **{name: each for name, each in said.items() if name != "from_checkpoint"}}, strategy=strategy)
    trainer.fit(module, loader(batches), loader(batches[:2]), ckpt_path=said.get("from_checkpoint"))
    optimizer = trainer.optimizers[0].state_dict()
    kept = {"seen": keeps.seen, "model": dict(module.state_dict()), "optimizer": optimizer, "generator": torch.get_rng_state()}
    return copy.deepcopy({**kept, "steps": trainer.global_step, "metrics": dict(trainer.callback_metrics)}), trainer


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


class Counts(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (2 if batch_idx % 2 else 1)


class Looks(Net):
    def on_after_backward(self) -> None:
        return None


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


SEEN: list[Any] = []


@pytest.mark.parametrize(
    ("kind", "why"), [(Counts, "batch_idx at"), (Looks, "Looks.on_after_backward"), (ByHand, "automatic optimization")]
)
def test_refuses_what_has_no_way_in(tmp_path: Path, kind: Any, why: str):
    with pytest.raises(CaptureError, match=why):
        fit(tmp_path, LowtideStrategy(**PLAIN), kind=kind)


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


def stepping(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    optimizer_closure() if batch_idx % 2 else optimizer.step(closure=optimizer_closure)


def twice(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    optimizer.step(closure=optimizer_closure)
    optimizer.step()


def slower(self: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.0


def norms(self: Any, optimizer: Any) -> None:
    self.log("norm", torch.tensor([each.grad.norm() for each in self.parameters()], dtype=torch.float64).norm())


def doing(what: Any) -> Any:
    """A training step that does something beside."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        returned = Net.training_step(self, batch, batch_idx)
        return returned if (other := what(self, returned["loss"], batch_idx)) is None else other

    return training_step


class Counted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.hidden = torchmetrics.MeanMetric(), (torchmetrics.MeanMetric(),)


@pytest.mark.parametrize(
    ("methods", "why"),
    [
        ({"optimizer_step": stepping}, r"optimizer_step calls the closure without the optimizer's step"),
        ({"optimizer_step": twice}, r"optimizer_step steps the optimizer without the closure"),
        ({"optimizer_zero_grad": lambda self, *given: None}, r"Mine.optimizer_zero_grad is overridden: a step lets gradients go"),
        ({"backward": lambda self, loss: (loss * 2).backward()}, r"Mine.backward is overridden: .* change that loss"),
        ({"on_before_zero_grad": lambda self, optimizer: None}, r"on_before_zero_grad is overridden: .* use on_train_batch_end"),
        ({"on_before_optimizer_step": slower}, r"sets a number of the optimizer .*: set it in on_train_batch_start"),
        ({"on_before_optimizer_step": norms}, r"wants the numbers of tensors at .*: torch.stack"),
        (
            {"training_step": doing(lambda self, loss, at: loss * self.mean(loss))},
            r"uses the value of a metric at .*functional",
        ),
        ({"training_step": doing(lambda self, loss, at: self.mean(loss))}, r"returns batch_idx or the value of a metric"),
        ({"training_step": doing(lambda self, loss, at: SEEN.append(at))}, r"a list that it reaches had . items"),
        ({"training_step": doing(lambda self, loss, at: {"loss": loss, "at": at})}, r"value of a metric in \['at'\]"),
        ({"training_step": doing(lambda self, loss, at: self.log("m", self.hidden[0]))}, r"no attribute of the module"),
        ({"training_step": doing(lambda self, loss, at: self.trainer.save_checkpoint("x"))}, r"calls trainer.save_checkpoint at .*once"),
        ({"training_step": doing(lambda self, loss, at: setattr(self.trainer, "should_stop", True))}, r"sets trainer.should_stop at"),
        ({"training_step": lambda self, dataloader_iter: None}, r"fetches batches by itself"),
    ],
)
def test_refuses_what_would_differ(tmp_path: Path, methods: dict[str, Any], why: str):
    with pytest.raises(CaptureError, match=why):
        fit(tmp_path, LowtideStrategy(**PLAIN), kind=type("Mine", (Counted,), methods))


def test_refuses_several_devices_and_callbacks_that_look_at_gradients(tmp_path: Path):
    with pytest.raises(CaptureError, match="expects one device, Trainer has 2"):
        fit(tmp_path, LowtideStrategy(**PLAIN), devices=2)
    looks = LambdaCallback(on_before_zero_grad=lambda *given: None)
    with pytest.raises(CaptureError, match=r"LambdaCallback\.on_before_zero_grad is overridden"):
        fit(tmp_path, LowtideStrategy(**PLAIN), further=[looks])


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
