"""Lightning's Trainer with lowtide's strategy: losses, weights, counts, logs and checkpoints are Lightning's own, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import torchvision_shim
from lowtide.errors import CaptureError
from tests.training import differences

torchvision_shim.install()  # torchmetrics imports torchvision
pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything  # noqa: E402

from lowtide.integrations.lightning import LowtideStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|GPU|LeafSpec|isinstance|log_every_n_steps|checkpoint).*", "ignore::FutureWarning"
)

PLAIN = {"optimize": {"workspaces": False}}


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
    usual = {"max_epochs": 2, "enable_checkpointing": False, "default_root_dir": folder, "callbacks": [keeps]}
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
