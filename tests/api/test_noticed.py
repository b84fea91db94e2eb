"""What changes a program between steps is noticed, by whatever door it comes; what does not is let pass."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from bench import torchvision_shim
from tests.api.networks import adamw, rows, sgd, squares, workload
from tests.training import check, copied, differences
from tests.unseen import note, taken


class Settings:
    """A configuration object, as transformers' models have one."""

    def __init__(self) -> None:
        self.scale, self.inner, self.unread = 2.0, types.SimpleNamespace(shift=0.5, powers={"x": 1}), 0


class Tunable(nn.Module):
    """What it computes depends on attributes of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.0)
        self.factors, self.terms, self.table, self.flags = (1.0, 2.0), [0.5], {"gain": 1.0, "deep": [1.0]}, {"bias"}
        self.squash, self.config, self.rate, self.number = torch.tanh, Settings(), 0.25, 3
        self.history: list[float] = []
        self.count = 0
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.first(x)) * self.factors[0] * self.table["gain"] * self.table["deep"][0] + sum(self.terms) * self.rate
        h = h + 1.0 if "bias" in self.flags else h
        h = self.squash(h * self.config.scale + self.config.inner.shift) ** self.config.inner.powers["x"] + self.offset
        return self.last(self.drop(h) * self.number)


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _negated(module: nn.Module, args: Any) -> Any:
    return tuple(-arg for arg in args)


class _Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


def _exchange(model: Tunable) -> None:
    model.act = nn.Sigmoid() if isinstance(model.act, nn.Tanh) else nn.Tanh()


def _reclass(model: Tunable) -> None:
    model.first.__class__ = _Louder if type(model.first) is nn.Linear else nn.Linear


def _own_forward(model: Tunable) -> None:
    model.last.forward = lambda x: nn.functional.linear(x, model.last.weight) * 0.5


def _module_again(model: Tunable) -> None:
    model.act = copy.deepcopy(model.act)


CHANGES: dict[str, Callable[[Tunable], Any]] = {
    "a module for another": _exchange,
    "class": _reclass,
    "forward": _own_forward,
    "no forward": lambda model: model.last.__dict__.pop("forward", None),
    "forward hook": lambda model: model.first.register_forward_hook(_doubled),
    "forward pre-hook": lambda model: model.last.register_forward_pre_hook(_negated),
    "backward hook": lambda model: model.act.register_full_backward_hook(lambda module, gi, go: (gi[0] * 0.5,)),
    "hook of a parameter": lambda model: model.first.weight.register_hook(lambda gradient: gradient * 0.5),
    "tuple": lambda model: setattr(model, "factors", (model.factors[0] + 1.0, 2.0)),
    "list": lambda model: model.terms.append(0.25),
    "dictionary": lambda model: model.table.update(gain=model.table["gain"] * 1.5),
    "nested": lambda model: model.table["deep"].insert(0, 0.75),
    "set": lambda model: model.flags.symmetric_difference_update({"bias"}),
    "callable": lambda model: setattr(model, "squash", torch.sigmoid if model.squash is torch.tanh else torch.tanh),
    "partial": lambda model: setattr(model, "squash", functools.partial(torch.clamp, max=float(len(model.terms)))),
    "config": lambda model: setattr(model.config, "scale", model.config.scale + 1.0),
    "config within": lambda model: setattr(model.config.inner, "shift", -0.5),
    "table of the config": lambda model: model.config.inner.powers.update(x=2),
    "number": lambda model: setattr(model, "rate", model.rate * 2),
    "frozen": lambda model: model.last.requires_grad_(not model.last.weight.requires_grad),
    "dropout": lambda model: setattr(model.drop, "p", 0.5),
    "mode": lambda model: model.train(not model.training),
}
HARMLESS: dict[str, Callable[[Tunable], Any]] = {
    "nothing": lambda model: None,
    "a counter that nobody reads": lambda model: setattr(model, "count", model.count + 1),
    "a list that nobody reads": lambda model: model.history.append(0.5),
    "a new attribute": lambda model: setattr(model, f"note_{model.count}", object()),
    "an equal number": lambda model: setattr(model, "number", int(str(model.number))),
    "an equal list": lambda model: setattr(model, "terms", list(model.terms)),
    "an equal tuple": lambda model: setattr(model, "factors", (float(str(model.factors[0])), 2.0)),
    "an equal module": _module_again,
    "another buffer": lambda model: setattr(model, "offset", model.offset + 0.25),
    "state_dict": lambda model: model.load_state_dict(copied(dict(model.state_dict()))),
}
ALL = CHANGES | HARMLESS


def changed_by(*turns: str):
    def between(model: Tunable, optimizer: torch.optim.Optimizer):
        return lambda step: ALL[turns[step]](model) if step < len(turns) else None

    return between


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str):
    check(workload(Tunable, rows, squares, sgd), steps=2, between=changed_by(change))


@settings(max_examples=8)
@given(st.lists(st.sampled_from(list(ALL)), min_size=2, max_size=4))
def test_any_changes_are_noticed_or_harmless(turns: list[str]):
    check(workload(Tunable, rows, squares, adamw), steps=len(turns) + 1, between=changed_by(*turns))


def test_what_is_harmless_is_not_captured_again():
    torch.manual_seed(0)
    model = Tunable()
    taken("captures")
    step = _step(model, lambda model, x: note("captures") or model(x).square().mean())
    step(torch.ones(4, 6))
    taken("captures")
    for change in HARMLESS.values():
        change(model)
        step(torch.ones(4, 6))
    assert not taken("captures")
    model.rate = 1.0
    step(torch.ones(4, 6))
    assert len(taken("captures")) == 1


def test_a_state_that_was_there_before_is_not_captured_again():
    torch.manual_seed(0)
    model = Tunable()
    taken("captures")
    step = _step(model, lambda model, x: note("captures") or model(x).square().mean())
    for _ in range(4):
        model.rate = 0.5
        step(torch.ones(4, 6))
        model.rate = 0.25
        step(torch.ones(4, 6))
    assert len(taken("captures")) == 2


def _step(model: nn.Module, loss: Callable[..., Any] = squares) -> lowtide.Step:
    return lowtide.optimize(
        model,
        (torch.ones(4, 6),),
        loss=loss,
        optimizer=sgd(model),
        planning=lowtide.Planning(workspaces=False),
        run=lowtide.Run(check="never"),
    )


def test_hooks_around_all_modules_are_noticed():
    def between(model: nn.Module, optimizer: torch.optim.Optimizer):
        handles = []

        def change(step: int) -> None:
            if step == 0:
                handles.append(nn.modules.module.register_module_forward_hook(_doubled_linear))
            for handle in handles if step == 1 else ():
                handle.remove()

        return change

    check(workload(Tunable, rows, squares, sgd), steps=3, between=between)


def _doubled_linear(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if type(module) is nn.Linear else output  # what returns nothing and writes nothing is refused


def test_a_method_of_a_class_is_noticed(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = Tunable()
    step = _step(model)
    x = torch.ones(4, 6)
    before = step(x)
    monkeypatch.setattr(Tunable, "forward", lambda self, x: self.last(self.first(x)))
    expected = squares(model, x).detach()
    assert torch.equal(step(x), expected)
    assert not torch.equal(before, expected)


def test_the_default_dtype_is_noticed():
    class Made(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.ones(4, 1, dtype=torch.get_default_dtype())

    torch.manual_seed(0)
    model = Made(6, 2)
    x = torch.ones(4, 6)
    fn = lowtide.optimize(model, (x,), planning=lowtide.Planning(workspaces=False))
    assert fn(x).dtype is torch.float32
    try:
        torch.set_default_dtype(torch.float64)
        assert fn(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_that_the_optimizer_lost_is_told(momentum: float):
    torch.manual_seed(0)
    model = Tunable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    step = lowtide.optimize(model, (torch.ones(4, 6),), loss=squares, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    step(torch.ones(4, 6))
    model.load_state_dict(copied(dict(model.state_dict())), assign=True)
    before = copied(dict(model.state_dict()))
    with pytest.raises(lowtide.CaptureError, match=r"load_state_dict\(assign=True\).*make the optimizer anew"):
        step(torch.ones(4, 6))
    assert not differences(before, copied(dict(model.state_dict())))


def test_a_parameter_replaced_in_model_and_optimizer_is_trained():
    def between(model: nn.Module, optimizer: torch.optim.Optimizer):
        def change(step: int) -> None:
            model.load_state_dict(copied(dict(model.state_dict())), assign=True)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.state.clear()

        return change

    check(workload(Tunable, rows, squares, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)), between=between)


def test_weights_untied_between_steps_are_noticed():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).tanh())

    torch.manual_seed(0)
    model, x = Tied(), torch.ones(4, 6)
    fn = lowtide.optimize(model, (x,), planning=lowtide.Planning(workspaces=False))
    fn(x)
    model.two.weight = nn.Parameter(torch.randn(6, 6))
    assert torch.equal(fn(x), model(x))


def test_transformers_configuration_is_noticed():
    torchvision_shim.install()  # transformers imports torchvision
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, max_position_embeddings=16
    )
    model, tokens = BertModel(config).eval(), torch.randint(0, 32, (2, 5))
    fn = lowtide.optimize(model, {"input_ids": tokens}, planning=lowtide.Planning(workspaces=False))
    assert fn(input_ids=tokens).hidden_states is None
    model.config.output_hidden_states = True
    with torch.no_grad():
        expected = model(input_ids=tokens).hidden_states
    assert not differences(expected, fn(input_ids=tokens).hidden_states)


class Worded(Tunable):
    """Computes with how long a text is, which is no number that a step could be given."""

    def __init__(self) -> None:
        super().__init__()
        self.word = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / len(self.word)


def test_what_changes_before_every_call_is_told_and_then_left_to_the_loop():
    torch.manual_seed(0)
    model = Worded()
    twin, x = copy.deepcopy(model), torch.ones(4, 6)
    step, eager = _step(model), sgd(twin)
    calls: list[int] = []
    step._caller.optimizer.register_step_pre_hook(lambda *_: calls.append(1))

    def anneal(steps: int) -> None:
        for _ in range(steps):
            model.word = twin.word = model.word + "a"
            step(x)
            eager.zero_grad()
            squares(twin, x).backward()
            eager.step()

    with pytest.warns(UserWarning, match="3 calls in a row: attribute 'word' of '' was.*run as the loop would") as told:
        anneal(12)
    assert len(told) == 1
    assert len(step._lookup.families) == 4
    assert len(calls) == 12
    assert not differences(dict(model.state_dict()), dict(twin.state_dict()))


def test_what_comes_again_is_captured_though_its_cause_was_given_up():
    model = Worded()
    step = _step(model)

    def run() -> None:
        for rate in (2, 3, 4, 5, 6, 5, 5, 5):
            model.word = "a" * rate
            step(torch.ones(4, 6))

    with pytest.warns(UserWarning, match="3 calls in a row"):
        run()
    assert len(step._lookup.families) == 5


def test_what_changes_within_an_object_is_named():
    model = Tunable()
    model.config.inner.shift = 0.5
    step = _step(model)

    def anneal(steps: int) -> None:
        for _ in range(steps):
            model.config.inner.shift += 1.0
            step(torch.ones(4, 6))

    with pytest.warns(UserWarning, match=r"attribute 'inner' of a Settings.* has changed: 'shift' was 3.5 and is 4.5"):
        anneal(5)


def test_a_first_run_that_computes_something_else_is_refused_until_it_was_made():
    class Caching(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 2)
            self.config = types.SimpleNamespace()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gain = getattr(self.config, "gain", None)
            self.config.gain = 2.0
            return super().forward(x) * (gain or 1.0)

    model, x = Caching(), torch.ones(4, 6)
    with pytest.raises(lowtide.CaptureError, match=r"attribute 'gain' of a SimpleNamespace is set.*call the model or the loss once before"):
        lowtide.optimize(model, (x,), planning=lowtide.Planning(workspaces=False))
    assert not vars(model.config)
    model(x)
    fn = lowtide.optimize(model, (x,), planning=lowtide.Planning(workspaces=False))
    assert torch.equal(fn(x), model(x))


def test_what_each_run_changes_is_refused():
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 2)
            self.config = types.SimpleNamespace(runs=0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.config.runs += 1
            return super().forward(x) * self.config.runs

    with pytest.raises(lowtide.CaptureError, match=r"attribute 'runs' of a SimpleNamespace is set.*buffer"):
        lowtide.optimize(Counting(), (torch.ones(4, 6),), planning=lowtide.Planning(workspaces=False))


_WITH_SETS = """
import torch, lowtide
from torch import nn
from tests.unseen import note, taken

class Named(nn.Linear):
    def __init__(self, number):
        super().__init__(6, 6)
        self.names = {f"name_{number}_{index}" for index in range(5)} | {(number, "pair"), frozenset({"a", "b"})}

    def forward(self, x):
        return super().forward(x) * len(self.names)

model, x = nn.Sequential(*[Named(number) for number in range(20)]), torch.ones(4, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = lambda model, x: note("captures") or model(x).sum()
settings = {"planning": lowtide.Planning(workspaces=False), "run": lowtide.Run(check="never")}
step = lowtide.optimize(model, (x,), loss=loss, optimizer=optimizer, **settings)
step(x)
for module in model:
    module.names = set(reversed(list(module.names)))  # equal, perhaps in another order
step(x)
assert len(taken("captures")) == 1
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_sets_have_no_order(seed: str):
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", _WITH_SETS], env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
