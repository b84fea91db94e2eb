"""Lightning's Trainer on a small module: what a training leaves behind, by one strategy or another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from bench import torchvision_shim

torchvision_shim.install()  # torchmetrics imports torchvision
pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything  # noqa: E402

QUIET = pytest.mark.filterwarnings(
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
