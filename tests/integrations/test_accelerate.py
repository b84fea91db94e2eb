"""What `accelerator.prepare` gives back is given to `lowtide.optimize`: the same losses, weights, schedules and checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from bench.in_values import in_values
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
            model,
            batch,
            loss=loss,
            optimizer=optimizer,
            **in_values(after_backward=clip, scaler=accelerator.scaler, workspaces=False, **given),
        )

    expected = trained(tmp_path / "own", precision, lambda *prepared: own(*prepared[:3]), resume=True)
    found = trained(tmp_path / "lowtide", precision, optimized, resume=True)
    assert not (told := differences(expected, found)), "\n".join(told[:8])


def test_an_accelerator_that_accumulates_wants_a_list_of_batches():
    accelerate.state.GradientState._reset_state()
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Linear(4, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(lowtide.CaptureError, match=r"accumulates over 2 batches.*`loss / 2`"):
            lowtide.optimize(model, torch.ones(3, 4), loss=lambda model, x: model(x).sum(), optimizer=optimizer)
        batches = [torch.ones(3, 4)] * 2
        step = lowtide.optimize(
            model,
            batches,
            loss=lambda model, x: model(x).sum() / 2,
            optimizer=optimizer,
            training=lowtide.Training(accumulate="batches"),
            planning=lowtide.Planning(workspaces=False),
        )
        assert len(step(*batches)) == 2
    finally:
        accelerate.state.GradientState._reset_state()


def test_a_loss_that_calls_backward_is_refused():
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        value = model(x).square().sum()
        accelerator.backward(value)
        return value

    with pytest.raises(lowtide.CaptureError, match=r"second time: .*calls no backward"):
        lowtide.optimize(model, torch.ones(3, 4), loss=loss, optimizer=optimizer)


def test_what_fabric_has_set_up_is_refused():
    fabric = pytest.importorskip("lightning").fabric.Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(lowtide.CaptureError, match=r"`model\.module`"):
        lowtide.optimize(model, torch.ones(3, 4), loss=lambda model, x: model(x).sum(), optimizer=optimizer)
    step = lowtide.optimize(
        model.module,
        torch.ones(3, 4),
        loss=lambda model, x: model(x).sum(),
        optimizer=optimizer,
        planning=lowtide.Planning(workspaces=False),
    )
    step(torch.ones(3, 4))
