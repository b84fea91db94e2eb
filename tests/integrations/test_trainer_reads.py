"""What `compute_loss` of a Trainer reads of its trainer is as Trainer itself would read it, in each step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.trainers import llama, outcome, trainer
from tests.training import differences

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from lowtide.integrations.transformers import LowtideMixin  # noqa: E402

SAID = {"num_train_epochs": 2}


def both(folder: Path, compute_loss: Any, callbacks: Any = ()) -> None:
    """Ten updates by Trainer and by lowtide's, which end alike."""
    ends = []
    for bases, given in (((transformers.Trainer,), {}), ((LowtideMixin,), {"optimize": {"planning": lowtide.Planning(workspaces=False)}})):
        kind: Any = type("Mine", bases, {"compute_loss": compute_loss, "gain": 1.0})
        own = trainer(kind, llama(dropout=0.0), folder / bases[0].__name__, SAID, **given)
        for callback in callbacks:
            own.add_callback(callback(own))
        own.train()
        ends.append(outcome(own))
    assert not (told := differences(*ends)), "\n".join(told[:8])


def test_what_a_callback_sets_is_noticed(tmp_path: Path):
    class Sets(transformers.TrainerCallback):
        def __init__(self, own: Any) -> None:
            self.own = own

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                self.own.gain = 0.5
            if state.global_step == 7:
                args.label_smoothing_factor = 0.25

    def compute_loss(
        self: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss * self.gain
        return loss * (1.0 - self.args.label_smoothing_factor)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lowtide")
        both(tmp_path, compute_loss, [Sets])


def test_the_step_that_it_reads_is_told_and_left_to_the_loop(tmp_path: Path):
    def compute_loss(
        self: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss
        return loss * min(1.0, (1 + self.state.global_step) / 6)

    with pytest.warns(UserWarning, match=r"'global_step' of a TrainerState, read at .*test_trainer_reads\.py:\d+.*was \d+ and is \d+"):
        both(tmp_path, compute_loss)


def test_what_it_logs_is_logged_by_each_step(tmp_path: Path):
    """The log of a class between, too; whatever else logs does so as ever."""

    def compute_loss(
        self: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss
        self.log({"eval_loss": round(loss.item(), 5)})
        return loss

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lowtide")
        both(tmp_path, compute_loss)
