"""What `accelerator.prepare` gives back is given to `lowtide.optimize`: the same losses, weights, schedules and checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from tests.trainers import collate, llama, rows
from tests.training import differences

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")


def loss(model: Any, **batch: Any) -> torch.Tensor:
    return model(**batch).loss


def prepared(precision: str) -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2, collate_fn=collate)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def own(accelerator: Any, model: Any, optimizer: Any) -> Any:
    def step(**batch: Any) -> Any:
        value = loss(model, **batch)
        accelerator.backward(value)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach(), norm

    return step


def trained(folder: Path, precision: str, make: Any, resume: bool = False) -> Any:
    accelerator, model, optimizer, scheduler, loader = prepared(precision)
    torch.manual_seed(1)
    step, results = make(accelerator, model, optimizer, next(iter(loader))), []
    for number, batch in enumerate(loader):
        results.append(copy.deepcopy(step(**batch)))
        scheduler.step()
        if number == 2:
            accelerator.save_state(str(folder))
    if resume:
        accelerator.load_state(str(folder))
        results.append(copy.deepcopy(step(**batch)))
    state = optimizer.state_dict(), scheduler.state_dict()["last_epoch"], torch.get_rng_state()
    return copy.deepcopy((results, dict(accelerator.unwrap_model(model).state_dict()), *state))


@pytest.mark.parametrize(("precision", "given"), [("no", {}), ("bf16", {"memory": "99%"})])
def test_trains_what_was_prepared(tmp_path: Path, precision: str, given: dict[str, Any]):
    def optimized(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> lowtide.Step:
        def clip(model: Any) -> Any:
            return accelerator.clip_grad_norm_(model.parameters(), 0.5)

        return lowtide.optimize(
            model, batch, loss=loss, optimizer=optimizer, after_backward=clip, scaler=accelerator.scaler, workspaces=False, **given
        )

    expected = trained(tmp_path / "own", precision, lambda *prepared: own(*prepared[:3]), resume=True)
    found = trained(tmp_path / "lowtide", precision, optimized, resume=True)
    assert not (told := differences(expected, found)), "\n".join(told[:8])
