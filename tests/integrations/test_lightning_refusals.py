"""What Lightning's Trainer may do around a step, and lowtide's strategy refuses: told with what would differ, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lightning_training import PLAIN, QUIET, Net, fit  # first: puts something in the place of torchvision, or skips

# isort: split
import torch
import torchmetrics
from lightning.pytorch.callbacks import LambdaCallback

from lowtide.errors import CaptureError
from lowtide.integrations.lightning import LowtideStrategy

pytestmark = QUIET


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
        ({"training_step": doing(lambda self, loss, at: SEEN.append(at))}, r"uses batch_idx at a list, .*where it stays"),
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
