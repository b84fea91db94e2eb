"""Places of the caller's that only a method or a default names: found, filled by each step, and whole after a refusal."""

from __future__ import annotations

import collections
import sys
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import bench
import lowtide
from bench.in_values import in_values
from lowtide.capture.care import surroundings

LAST = [None]


class KeepsInAGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LAST[0] = self.layer(x)
        return LAST[0].square()


def test_a_place_that_only_a_module_names_is_found():
    LAST[0] = None
    model, x = KeepsInAGlobal(), torch.ones(2, 4)
    step = lowtide.optimize(
        model,
        x,
        loss=lambda model, x: model(x).sum(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        planning=lowtide.Planning(workspaces=False),
    )
    assert LAST == [None]
    with torch.no_grad():
        made = model.layer(x)
    step(x)
    assert torch.equal(LAST[0], made)


def test_an_ordered_table_is_whole_after_a_refusal_and_after_steps():
    model, x = KeepsInAGlobal(), torch.ones(2, 4)
    table = collections.OrderedDict(a=1, b=2)

    def refused(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        table["c"] = model.layer(x)
        return model.layer(x).sum() * (1.0 if table["c"].sum() > 0 else -1.0)

    def kept(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        table["c"] = model.layer(x).mean()
        return model.layer(x).sum()

    said = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "workspaces": False}
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        lowtide.optimize(model, x, loss=refused, **in_values(**said))
    assert list(table.items()) == [("a", 1), ("b", 2)]
    step = lowtide.optimize(model, x, loss=kept, **in_values(**said))
    step(x), step(x)
    assert list(table) == ["a", "b", "c"]
    table.move_to_end("a")
    assert list(table) == ["b", "c", "a"]


def test_a_default_is_as_it_was_after_a_refusal():
    model, x = KeepsInAGlobal(), torch.ones(2, 4)

    def refused(model: nn.Module, x: torch.Tensor, kept: Any = []) -> torch.Tensor:  # noqa: B006
        kept.append(model.layer(x))
        return model.layer(x).sum() * (1.0 if kept[-1].sum() > 0 else -1.0)

    with pytest.raises(lowtide.CaptureError):
        lowtide.optimize(
            model, x, loss=refused, optimizer=torch.optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
        )
    assert refused.__defaults__ == ([],)


class Computes:
    """As a Trainer: an object whose method names the place."""

    def compute(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        LAST[0] = model.layer(x)
        return LAST[0].sum() * (1.0 if LAST[0].sum() > 0 else -1.0)


def test_a_place_that_only_an_objects_method_names_is_put_back():
    model, x, computes = KeepsInAGlobal(), torch.ones(2, 4), Computes()
    LAST[0] = None
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        lowtide.optimize(
            model,
            x,
            loss=lambda model, x: computes.compute(model, x),
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            planning=lowtide.Planning(workspaces=False),
        )
    assert LAST == [None]


def test_what_a_class_of_another_language_keeps_is_left_to_it(monkeypatch):
    """Nothing can be put into such a class. torch's own is one, taken here for the user's."""
    monkeypatch.setattr(surroundings, "is_written_by_user", lambda cls: True)
    assert isinstance(vars(torch.FloatTensor)["__annotations__"], dict)
    assert surroundings.containers_of_class(torch.FloatTensor) == []
    assert "kept" in surroundings.containers_of_class(KeepsInAClass)


class KeepsInAClass:
    kept: list[Any] = []  # noqa: RUF012


def test_a_memo_that_a_refused_program_began_is_gone():
    """Else the user's own loop would find a tensor of the capture where it looks first."""
    model, x, by_module = KeepsInAGlobal(), torch.ones(2, 4), weakref.WeakKeyDictionary[nn.Module, torch.Tensor]()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        global begun
        import bench.memos as elsewhere

        if model not in by_module:
            by_module[model] = elsewhere.of_this_test = begun = torch.randn(4)
        total = (model.layer(x) * by_module[model]).sum()
        return total if total > 0 else -total

    memos = types.ModuleType("bench.memos")
    memos.__file__ = __file__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bench.memos", memos)
        patch.setattr(bench, "memos", memos, raising=False)
        with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
            lowtide.optimize(model, x, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert not by_module
    assert "begun" not in globals()
    assert not hasattr(memos, "of_this_test")
