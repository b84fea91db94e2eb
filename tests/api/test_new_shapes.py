"""Batches of other shapes than the step was made for: captured, run eagerly or refused; always eager's numbers, and within the limit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from bench.in_values import in_values
from lowtide.api import other_shapes
from tests.training import Settings, Snapshot, differences, eager_step

ROWS = 8


class Net(nn.Module):
    """Rows of any number and length; statistics and dropout, so that much could go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(self.drop(self.norm(hidden.flatten(0, -2)).view_as(hidden)))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(make_step: Callable[[nn.Module, Any], Any], sizes: list[tuple[int, ...]]) -> dict[str, Any]:
    """All that training on batches of these sizes leaves, with the results."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = make_step(model, optimizer)
    torch.manual_seed(1)
    results = [step(torch.randn(*size, 6)) for size in sizes]
    return copy.deepcopy(
        {"results": results, "model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "generator": torch.get_rng_state()}
    )


def eagerly(how: Settings) -> Callable[[nn.Module, Any], Any]:
    return lambda model, optimizer: lambda x: eager_step(model, loss, optimizer, (x,), {}, how)


def optimized(**arguments: Any) -> Callable[[nn.Module, Any], Any]:
    def make(model: nn.Module, optimizer: Any) -> Any:
        return lowtide.optimize(model, torch.ones(ROWS, 6), loss=loss, optimizer=optimizer, **in_values(workspaces=False, **arguments))

    return make


@settings(max_examples=3, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([(ROWS,), (4,), (6,), (2, 4), (12,)]), min_size=2, max_size=5),
    policy=st.sampled_from([None, "extend", "eager"]),
    accumulate=st.sampled_from([1, 2]),
    limit=st.sampled_from([None, "100%"]),
)
def test_numbers_are_eagers_whatever_shapes_come(sizes, policy, accumulate, limit):
    sizes = [size for size in sizes if limit is None or size != (12,)]  # which takes more than there is
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*pad or bucket")
        found = trained(optimized(on_new_shape=policy, accumulate=accumulate, memory=limit), sizes)
    expected = trained(eagerly(Settings(accumulate=accumulate)), sizes)
    assert not (told := differences(expected, found)), "\n".join(told[:6])


def step_of(**arguments: Any) -> tuple[Net, Any, lowtide.Step]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, optimized(**arguments)(model, optimizer)


def test_the_tail_of_an_epoch_is_captured_once(monkeypatch):
    _, _, step = step_of()
    captures = count_captures(monkeypatch)
    for _ in range(2):
        step(torch.ones(ROWS, 6))
        step(torch.ones(3, 6))
    assert len(captures) == 1


def test_a_second_new_shape_runs_eagerly_with_one_warning(monkeypatch):
    _, _, step = step_of()
    step(torch.ones(3, 6))
    captures = count_captures(monkeypatch)
    with pytest.warns(UserWarning, match=r'float32\[8, 6\].*got float32\[2, 6\].*on_new_shape="extend"') as told:
        step(torch.ones(2, 6))
    step(torch.ones(5, 6))
    assert len(told) == 1
    assert captures == []


def test_where_all_shapes_are_captured_many_are_warned_of_and_the_oldest_go(monkeypatch):
    monkeypatch.setattr(other_shapes, "MOST_SHAPES", 4)
    _, _, step = step_of(on_new_shape="extend")
    captures = count_captures(monkeypatch)
    for rows in (2, 3, 4):
        step(torch.ones(rows, 6))
    with pytest.warns(UserWarning, match=r"4 further shapes.*pad or bucket"):
        step(torch.ones(5, 6))
    step(torch.ones(6, 6))
    step(torch.ones(6, 6))
    assert len(captures) == 5
    step(torch.ones(2, 6))
    assert len(captures) == 6


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from lowtide.api.maker import StepMaker

    seen: list[Any] = []
    make = StepMaker.make
    monkeypatch.setattr(StepMaker, "make", lambda self, *args, **kwargs: seen.append(args) or make(self, *args, **kwargs))
    return seen


def test_an_error_where_that_is_asked_for():
    model, optimizer, step = step_of(on_new_shape="error")
    before = Snapshot.of(model, optimizer)
    with pytest.raises(lowtide.BatchError, match=r"batch \[0\]: expected float32\[8, 6\].*got float32\[3, 6\].*drop_last"):
        step(torch.ones(3, 6))
    before.assert_same(model, optimizer)


@pytest.mark.parametrize("policy", [None, "extend", "eager"])
def test_what_differs_otherwise_is_refused_whatever_is_asked_for(policy):
    _, _, step = step_of(on_new_shape=policy)
    with pytest.raises(lowtide.BatchError, match="convert it"):
        step(torch.ones(3, 6, dtype=torch.float64))


def test_what_is_no_way_to_go_is_refused():
    with pytest.raises(ValueError, match=r"on_new_shape: expected one of 'extend', 'eager', 'error' or None, got 'ignore'"):
        step_of(on_new_shape="ignore")


def test_a_limit_holds_for_every_shape_and_what_cannot_keep_it_changes_nothing():
    model, optimizer, step = step_of(memory="100%")
    limit_bytes = step.plan.eager_peak_bytes
    for rows in (2, 4, 7):
        plan = step.plan_for(torch.ones(rows, 6))
        assert plan.peak_bytes <= limit_bytes
        step(torch.ones(rows, 6))
        measured = step.measure(torch.ones(rows, 6))
        assert measured.peak_bytes <= limit_bytes
    before = Snapshot.of(model, optimizer)
    with pytest.raises(lowtide.BudgetError):
        step(torch.ones(4000, 6))
    before.assert_same(model, optimizer)
    step(torch.ones(ROWS, 6))


def test_the_plan_of_a_shape_is_known_before_it_runs():
    model, optimizer, step = step_of()
    before = Snapshot.of(model, optimizer)
    plan = step.plan_for(torch.ones(3, 6))
    before.assert_same(model, optimizer)
    assert plan.resident_bytes == step.plan.resident_bytes - 5 * 6 * 4
    assert step.plan_for(torch.ones(ROWS, 6)).peak_bytes == step.plan.peak_bytes


def test_a_step_that_can_only_be_planned_plans_for_other_shapes():
    with torch.device("meta"):
        model, batch = Net(), torch.ones(ROWS, 6)
    step = lowtide.optimize(
        model, batch, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(simulate="a100")
    )
    assert step.plan_for(torch.ones(64, 6, device="meta")).peak_bytes > step.plan.peak_bytes
    with pytest.raises(lowtide.StepError):
        step(torch.ones(3, 6))


def test_the_arena_is_one_for_all_shapes():
    _, _, step = step_of(arena="always")
    if step.arena.absent:
        pytest.skip(step.arena.absent)
    for _ in range(4):
        step(torch.ones(ROWS, 6))
        step(torch.ones(3, 6))
    assert step.arena.served_steps >= 4


def test_inference_of_other_batches():
    model = Net().eval()
    call = lowtide.optimize(model, torch.ones(ROWS, 6), planning=lowtide.Planning(workspaces=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for rows in (ROWS, 1, 5, 16):
            x = torch.randn(rows, 6)
            assert torch.equal(call(x), model(x))
            assert not call(x).requires_grad


def test_a_failure_in_an_eager_step_is_the_loops_own():
    _, _, step = step_of(on_new_shape="eager")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(torch.ones(3, 5))


def test_what_follows_the_backward_pass_is_done_and_handed_back():
    def clip(model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    results = []
    for policy in ("extend", "eager"):
        _, _, step = step_of(on_new_shape=policy, after_backward=clip)
        torch.manual_seed(2)
        results.append(step(torch.randn(3, 6)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_what_a_saved_plan_keeps_to_counts_for_other_shapes(tmp_path):
    _, _, limited = step_of(memory="100%")
    assert limited.plan.cost_report is not None
    limited.plan.save(tmp_path / "plan.json")
    _, _, step = step_of(plan=tmp_path / "plan.json")
    assert step.plan_for(torch.ones(2 * ROWS, 6)).cost_report is not None, "planned as near to its bytes as can be"
