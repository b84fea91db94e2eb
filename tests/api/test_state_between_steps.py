"""Optimizer state that lies on the host between steps: eager's numbers, the caller's objects, what is refused, and what it is worth.

The device is the CPU with the manners of a GPU whose copies are late; `tests/gpu` has the same where memory is pinned.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import arguments, variant
from lowtide.cost.presets import preset
from lowtide.errors import BudgetError
from lowtide.ir.graph import Kind
from lowtide.runtime.copies import StreamedMemory, StreamedTransfers
from tests.programs import RandomOrder
from tests.swapping import LateStreams

BETWEEN = lowtide.Run(state="host")
MIB = 2**20
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "centered": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "factored": lambda model: torch.optim.Adafactor(model.parameters()),  # whose state is small, and stays
}


@pytest.fixture
def late(monkeypatch):
    """The CPU as a device whose memory is not the host's."""
    memory = StreamedMemory(LateStreams())
    monkeypatch.setattr(variant, "host_memory", lambda device: memory)
    monkeypatch.setattr(arguments, "lies_on_host", lambda *given: True)
    monkeypatch.setattr(arguments, "warn_of_nowhere_to_swap", lambda *given: None)
    return memory


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 192), nn.Tanh(), nn.LayerNorm(192), nn.Linear(192, 128))


def _loss(model, x):
    return model(x).square().mean()


def _batch(turn):
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(turn))


def _step(model, optimizer, **planning):
    planning = lowtide.Planning(progress=False, workspaces=False, **planning)
    return lowtide.optimize(model, _batch(0), loss=_loss, optimizer=optimizer, run=BETWEEN, planning=planning)


def _assert_as_eager(make, model, optimizer, turns, again=lambda made: None):
    other = _net()
    eager = make(other)
    for turn in turns:
        if turn == 5:
            again(eager)
        eager.zero_grad()
        _loss(other, _batch(turn)).backward()
        eager.step()
    for one, two in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)
        for key, item in eager.state[one].items():
            assert torch.equal(torch.as_tensor(item), torch.as_tensor(optimizer.state[two][key])), key


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("solver", [None, RandomOrder(1)], ids=["", "any order"])
def test_ten_steps_give_eagers_numbers_and_state(name, solver, late):
    model = _net()
    optimizer = OPTIMIZERS[name](model)
    step = _step(model, optimizer, solver=solver)
    for turn in range(10):
        step(_batch(turn))
    _assert_as_eager(OPTIMIZERS[name], model, optimizer, range(10))
    assert step.source.count("host.fetch(") == step.source.count("host.save(") == {"adamw": 4, "momentum": 2, "centered": 6}.get(name, 0)
    assert late.taken_bytes == step.plan.pinned_bytes


@pytest.mark.parametrize("forgotten", ["arrived", "saved"])
def test_a_program_that_forgets_to_wait_is_noticed(forgotten, late, monkeypatch):
    monkeypatch.setattr(StreamedTransfers, forgotten, lambda *arguments: None)
    model = _net()
    optimizer = OPTIMIZERS["adamw"](model)
    step = _step(model, optimizer)

    def trained():
        for turn in range(3):
            step(_batch(turn))
        _assert_as_eager(OPTIMIZERS["adamw"], model, optimizer, range(3))

    with pytest.raises(AssertionError):
        trained()


def test_a_loaded_state_dict_is_what_the_next_steps_go_on_from(late):
    model = _net()
    optimizer = OPTIMIZERS["adamw"](model)
    step = _step(model, optimizer)
    for turn in range(5):
        step(_batch(turn))
    optimizer.load_state_dict(optimizer.state_dict() | {"param_groups": [optimizer.state_dict()["param_groups"][0] | {"lr": 0.01}]})
    for turn in range(5, 10):
        step(_batch(turn))
    _assert_as_eager(OPTIMIZERS["adamw"], model, optimizer, range(10), lambda eager: eager.param_groups[0].update(lr=0.01))
    assert len(step._lookup.families) == 1


@pytest.mark.parametrize("call", ["fetch", "save", "saved"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_state_is_whole_where_a_step_fails(call, error, late, monkeypatch):
    """What was not saved is as it was before the step, what was saved is as the step left it."""
    model = _net()
    optimizer = OPTIMIZERS["adamw"](model)
    step = _step(model, optimizer)
    for turn in range(2):
        step(_batch(turn))
    before = {key: item["exp_avg"].clone() for key, item in optimizer.state.items()}
    own, turns = getattr(StreamedTransfers, call), []

    def failing(self, *arguments):
        turns.append(1)
        if len(turns) == 2:
            raise error("as asked")
        return own(self, *arguments)

    monkeypatch.setattr(StreamedTransfers, call, failing)
    with pytest.raises((error, lowtide.StepError), match="as asked"):
        step(_batch(2))
    monkeypatch.undo()
    other, after = _net(), {}
    eager = OPTIMIZERS["adamw"](other)
    for turn in range(3):
        eager.zero_grad()
        _loss(other, _batch(turn)).backward()
        eager.step()
    after = [eager.state[each]["exp_avg"] for each in other.parameters()]
    for (key, old), new in zip(before.items(), after, strict=True):
        now = optimizer.state[key]["exp_avg"]
        assert torch.equal(now, old) or torch.equal(now, new)


def _planned(memory=None, **more):
    with torch.device("meta"):
        model = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(1024, 1024), nn.GELU())])
        x = torch.empty(2048, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    gpu = dataclasses.replace(preset("h100"), to_host_bytes_per_s=1e11, from_host_bytes_per_s=1e11)
    planning = lowtide.Planning(device="cuda", simulate=gpu, search=lowtide.Sweep(max_states=100), progress=False)
    limits = {"latency": 1.0} if memory is None else {}
    return lowtide.optimize(model, x, loss=_loss, optimizer=optimizer, memory=memory, planning=planning, run=BETWEEN, **limits, **more)


def test_plans_count_state_on_the_host_hide_its_copies_and_are_monotone_in_both_memories():
    step = _planned()
    plan = step.plan
    homes = {value.storage for value in plan.graph.inputs if value.storage.kind is Kind.HOST}
    assert len(homes) == 8
    assert plan.pinned_bytes == sum(storage.nbytes for storage in homes) == 32 * MIB
    assert plan.resident_bytes < plan.eager_peak_bytes - 32 * MIB
    copies_us = sum(preset("h100").launch_us + 1e6 * storage.nbytes / 1e11 for storage in homes)
    compute_us = sum(plan.node_us)
    assert compute_us <= plan.cost_report.time_us < compute_us + 1.3 * copies_us  # there and back would be twice that
    least = step.frontier[len(step.frontier) // 2].peak_bytes
    rows = [[step.at(memory={"cuda": most, "host": host}).plan for host in (64 * MIB, 128 * MIB)] for most in (least, plan.peak_bytes)]
    for row in (*rows, *zip(*rows, strict=True)):
        assert all(more.cost_report.time_us <= less.cost_report.time_us * (1 + 1e-9) for less, more in pairwise(row))
    with pytest.raises(BudgetError, match="the optimizer's state takes") as short:
        step.at(memory={"cuda": "1GiB", "host": "31MiB"})
    assert short.value.smallest_host_bytes == 32 * MIB
    with pytest.raises(BudgetError, match=r"^memory: ") as short:
        step.at(memory={"cuda": plan.resident_bytes + MIB, "host": "1GiB"})
    assert short.value.smallest_host_bytes is None


def test_what_it_does_not_go_with_is_refused():
    model = _net()
    with pytest.raises(ValueError, match="for a training step"):
        lowtide.optimize(model, _batch(0), run=BETWEEN)
    with pytest.raises(ValueError, match="only for one shape"):
        lowtide.optimize(
            model, _batch(0), loss=_loss, optimizer=OPTIMIZERS["adamw"](model), run=BETWEEN, shapes=lowtide.Shapes(dynamic="auto")
        )
    with pytest.warns(UserWarning, match='state="host" does nothing on a CPU'):
        lowtide.optimize(model, _batch(0), loss=_loss, optimizer=OPTIMIZERS["adamw"](model), run=BETWEEN)
