"""transformers' Trainer with lowtide's step: losses, norms, weights, optimizer state and schedules are Trainer's own, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import CaptureError
from tests.trainers import llama, outcome, rows, trainer
from tests.training import differences

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from lowtide.integrations.transformers import LowtideMixin, LowtideTrainer  # noqa: E402

PLAIN = {"optimize": {"planning": lowtide.Planning(workspaces=False)}}


def both(folder: Path, said: dict[str, Any], given: dict[str, Any] | None = None, **setting: Any) -> Any:
    """Train by Trainer, and by lowtide's; fail unless they end alike."""
    expected = trainer(transformers.Trainer, llama(), folder / "own", said, **setting)
    expected.train()
    kept = outcome(expected)
    found = trainer(LowtideTrainer, llama(), folder / "lowtide", said, **{**PLAIN, **(given or {})}, **setting)
    found.train()
    assert not (told := differences(kept, outcome(found))), "\n".join(told[:8])
    assert found.accelerator.sync_gradients  # of the process: other loops' optimizers would not step otherwise
    return found


def test_accumulates_clips_and_schedules_as_trainer(tmp_path: Path):
    """Five batches in threes: the last update has two."""
    done = both(tmp_path, {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "lr_scheduler_type": "cosine"})
    assert done.state.global_step == 4
    assert sorted(done._steps.by_count) == [2, 3]


def test_lengths_that_vary_in_bfloat16(tmp_path: Path):
    done = both(tmp_path, {"gradient_accumulation_steps": 2, "bf16": True}, {"dynamic": "auto"}, varying=True)
    assert done.lowtide_step is not None


def test_ranges_that_are_said_once_for_every_batch(tmp_path: Path):
    said = {"input_ids": {1: ("length", 2, 16)}, "labels": {1: "length"}, "attention_mask": {1: "length"}}
    done = both(tmp_path, {"gradient_accumulation_steps": 2}, {"dynamic": said}, varying=True)
    assert any("length_1" in line for line in done._steps.by_count[2].ranges)


def test_a_limit_holds_for_every_update(tmp_path: Path):
    done = both(tmp_path, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}, {"memory": "80%"})
    two = done._steps.by_count
    most = int(0.8 * two[2].plan.eager_peak_bytes)
    assert [step.plan.peak_bytes <= most for step in two.values()] == [True, True]


def test_losses_of_ones_own_and_label_smoothing(tmp_path: Path):
    def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch

    both(tmp_path, {"gradient_accumulation_steps": 2}, compute_loss_func=summed)
    both(tmp_path, {"label_smoothing_factor": 0.1})


def test_evaluates_saves_and_resumes(tmp_path: Path):
    said = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3, "per_device_eval_batch_size": 4}
    done = both(tmp_path, said, eval_dataset=rows(count=6))
    again = trainer(LowtideTrainer, llama(), tmp_path / "again", said, eval_dataset=rows(count=6), **PLAIN)
    again.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-3"))  # which Trainer itself has written
    kept, found = outcome(done), outcome(again)
    assert found["logs"][:-1] == kept["logs"][:-1]  # the last is of the whole run
    assert not differences({**kept, "logs": []}, {**found, "logs": []})


@pytest.mark.skipif(sys.platform != "linux", reason="arenas are for Linux")
def test_updates_run_in_an_arena_that_evaluation_does_not_pay_for(tmp_path: Path):
    taken: dict[str, list[int]] = {"update": [], "evaluation": []}

    class Looks(transformers.TrainerCallback):
        def _look(self, when: str) -> None:
            step = done.lowtide_step
            taken[when].append(0 if step is None else step.arena.taken_bytes)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self._look("update")

        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            self._look("evaluation")

    said = {"eval_strategy": "steps", "eval_steps": 4, "num_train_epochs": 2, "gradient_accumulation_steps": 1}
    done = trainer(LowtideTrainer, llama(), tmp_path, said, eval_dataset=rows(count=2), callbacks=[Looks()], **PLAIN)
    done.train()
    if done.lowtide_step.arena.absent:
        pytest.skip(done.lowtide_step.arena.absent)
    assert [each > 0 for each in taken["update"]] == [False] * 2 + [True] * 8  # the first of each kind is recorded
    assert taken["evaluation"] == [0, 0, 0]
    assert done.lowtide_step.arena.taken_bytes == 0


def test_an_arena_is_left_out_where_that_is_said(tmp_path: Path):
    done = both(
        tmp_path, {"max_steps": 2}, {"optimize": {"planning": lowtide.Planning(workspaces=False), "run": lowtide.Run(arena="never")}}
    )
    assert done.lowtide_step.arena is None


def test_noise_in_embeddings_and_a_schedule_that_reads_metrics(tmp_path: Path):
    said = {"neftune_noise_alpha": 5.0, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
    both(tmp_path, said, eval_dataset=rows(count=4))


def test_stops_early_and_ends_with_the_best_model(tmp_path: Path):
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    said = {**every, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.5}
    patience = [transformers.EarlyStoppingCallback(1)]
    done = both(tmp_path, said, eval_dataset=rows(count=4), callbacks=patience)
    assert done.state.global_step < 5


class Scaled:
    """fp16 with a gradient scaler on a CPU, which accelerate offers on GPUs alone; its first scale is too large."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)  # type: ignore[attr-defined]
        self.accelerator.native_amp = True  # type: ignore[attr-defined]
        self.accelerator.state._mixed_precision = "fp16"  # type: ignore[attr-defined]


def test_a_scaler_that_skips_steps(tmp_path: Path):
    found = []
    for bases, given in (((Scaled, transformers.Trainer), {}), ((Scaled, LowtideMixin), PLAIN)):
        done = trainer(type("Trained", bases, {}), llama(), tmp_path, {"num_train_epochs": 5}, **given)
        done.train()
        found.append({**outcome(done), "scale": done.accelerator.scaler.state_dict()})
        transformers.trainer.AcceleratorState._reset_state(True)
    assert found[0]["scale"]["scale"] < 2.0**40
    assert found[0]["scheduler"] < found[0]["steps"]  # skipped ones are not counted
    assert not (told := differences(*found)), "\n".join(told[:8])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lora(tmp_path: Path):
    peft = pytest.importorskip("peft")
    found = []
    for kind, given in ((transformers.Trainer, {}), (LowtideTrainer, {**PLAIN, "memory": "95%"})):
        torch.manual_seed(3)
        model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
        done = trainer(kind, model, tmp_path, {"gradient_accumulation_steps": 2}, **given)
        done.train()
        found.append(outcome(done))
    assert not (told := differences(*found)), "\n".join(told[:8])


def test_trains_twice(tmp_path: Path):
    """A second call of train() makes another optimizer."""
    found = []
    for kind, given in ((transformers.Trainer, {}), (LowtideTrainer, PLAIN)):
        done = trainer(kind, llama(), tmp_path, {"max_steps": 2}, **given)
        done.train()
        done.train()
        found.append(outcome(done))
    assert not (told := differences(*found)), "\n".join(told[:8])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("said", "why"),
    [({"gradient_checkpointing": True}, "`memory` says what is to be computed again"), ({"torch_compile": True}, "leave it out")],
)
def test_refuses_what_does_not_go_with_a_step(tmp_path: Path, said: dict[str, Any], why: str):
    with pytest.raises(CaptureError, match=why):
        trainer(LowtideTrainer, llama(), tmp_path, said)


class Counting(transformers.Trainer):
    """As trl's: something around the training step of its base."""

    calls = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().training_step(*args, **kwargs)


class LowtideCounting(LowtideMixin, Counting): ...


def test_a_trainer_between_does_what_it_does_around_a_step(tmp_path: Path):
    expected = trainer(Counting, llama(), tmp_path / "own")
    expected.train()
    found = trainer(LowtideCounting, llama(), tmp_path / "lowtide", **PLAIN)
    found.train()
    assert not (told := differences(outcome(expected), outcome(found))), "\n".join(told[:8])
    assert found.calls == expected.calls > 0
    assert found.lowtide_step is not None


def test_refuses_a_training_step_that_never_asks_its_base(tmp_path: Path):
    class Own(transformers.Trainer):
        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Any:
            return self.compute_loss(model, inputs)

    with pytest.raises(CaptureError, match=r"Own\.training_step does not call `super\(\)\.training_step`"):
        trainer(type("Mixed", (LowtideMixin, Own), {}), llama(), tmp_path)
    last = type("Last", (LowtideTrainer,), {"training_step": Own.training_step})
    with pytest.raises(CaptureError, match=r"Last\.training_step does not call"):
        trainer(last, llama(), tmp_path)


def test_refuses_a_training_step_that_does_not_come_to_its_base(tmp_path: Path):
    class Skips(transformers.Trainer):
        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Any:
            return super().compute_loss(model, inputs)

    with pytest.raises(CaptureError, match=r"Skips\.training_step does not call"):
        trainer(type("Mixed", (LowtideMixin, Skips), {}), llama(), tmp_path).train()


def test_the_mixin_alone_is_no_trainer(tmp_path: Path):
    with pytest.raises(TypeError, match="take LowtideTrainer"):
        trainer(LowtideMixin, llama(), tmp_path)


def test_refuses_a_callback_that_would_miss_the_gradients(tmp_path: Path):
    class Looks(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            return None

    made = trainer(LowtideTrainer, llama(), tmp_path, callbacks=[Looks()])
    with pytest.raises(CaptureError, match=r"Looks\.on_pre_optimizer_step"):
        made.train()


def test_trainer_still_has_what_the_adapter_overrides():
    for name in ("get_batch_samples", "training_step", "evaluation_loop", "_clip_grad_norm", "_get_grad_norm", "_prepare_inputs"):
        assert callable(getattr(transformers.Trainer, name))


def test_refuses_data_without_a_length_that_end_within_an_update(tmp_path: Path):
    """Trainer makes no step of what is left over, and adds its gradients to the next epoch's first update."""

    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Any:
            yield from rows(count=self.count)

    said = {"gradient_accumulation_steps": 2, "max_steps": 4}
    made = trainer(LowtideTrainer, llama(), tmp_path, said, **PLAIN)
    made.train_dataset = Stream(10)
    with pytest.raises(CaptureError, match=r"ended after 1 of the 2 batches of an update.*give the data a length"):
        made.train()
    assert made.state.global_step == 2
    found = []
    for kind, given in ((transformers.Trainer, {}), (LowtideTrainer, PLAIN)):
        done = trainer(kind, llama(), tmp_path, said, **given)
        done.train_dataset = Stream(8)
        done.train()
        found.append(outcome(done))
    assert not (told := differences(*found)), "\n".join(told[:8])


def keeping(base: Any) -> Any:
    """A Trainer whose loss keeps what it computes, as trl's do."""

    class Keeps(base):  # type: ignore[misc]
        def compute_loss(self, model: nn.Module, inputs: Any, *given: Any, **named: Any) -> Any:
            out = model(**inputs)
            self.kept["train"].setdefault("loss", []).append(out.loss.detach())
            self.kept["train"].setdefault("mean", []).append(out.logits.mean().item())
            self.last = out.logits.detach()
            return out.loss

    return Keeps


def test_what_a_loss_keeps_is_kept_by_each_step(tmp_path: Path):
    found = []
    for base, given in ((transformers.Trainer, {}), (LowtideTrainer, PLAIN)):
        own = trainer(keeping(base), llama(0.0), tmp_path / base.__name__, **given)
        own.kept = {"train": {}}
        own.train()
        found.append([own.kept, own.last])
    assert not differences(*found)
    assert len(found[1][0]["train"]["mean"]) == 5
