"""Operators of which one of several results is a list: its tensors are results of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.lower.interpreter import watched

_LIBRARY = torch.library.Library("lowtide_tests", "FRAGMENT")


def _apart(x: Tensor, count: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """The parts of its rows are views of one copy, as gradients of cuDNN's are."""
    rows = x.clone()
    return x.sum(), [rows[at] for at in range(count)], x.double() + 1


def _plainly(x: Tensor, count: int) -> tuple[Tensor, list[Tensor], Tensor]:
    return x.new_empty(()), list(torch.empty_like(x)[:count]), torch.empty_like(x, dtype=torch.float64)


def _raising(x: Tensor, count: int) -> tuple[Tensor, list[Tensor], Tensor]:
    raise ValueError("a fake kernel stumbles")


for _name, _fake in (("apart", _apart), ("apart_otherwise", _plainly), ("apart_raising", _raising)):
    _LIBRARY.define(f"{_name}(Tensor x, int count) -> (Tensor, Tensor[], Tensor)")
    _LIBRARY.impl(_name, _apart, "CPU")
    torch.library.register_fake(f"lowtide_tests::{_name}", _fake, lib=_LIBRARY)
_LIBRARY.define("several(Tensor x) -> (Tensor[], Tensor[])")
_LIBRARY.impl("several", lambda x: ([x + 1], [x + 2, x + 3]), "CompositeExplicitAutograd")


class Apart(nn.Module):
    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.call, self.count = getattr(torch.ops.lowtide_tests, name), count

    def forward(self, x: Tensor) -> list[Tensor]:
        total, parts, more = self.call(x * 2, self.count)
        return [total.tanh(), *(part.exp() for part in parts[1:]), more]


@pytest.mark.parametrize("arena", ["auto", "always"])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", ["apart", "apart_otherwise"])
def test_the_tensors_of_a_list_are_results(name: str, count: int, arena: str) -> None:
    model, x = Apart(name, count), torch.randn(4, 5)
    step = lowtide.optimize(model, x, run=lowtide.Run(arena=arena))
    (call,) = (node for node in step.plan.graph.nodes if node.op.startswith("lowtide_tests."))
    assert len(call.outputs) == count + 2
    assert len({value.storage for value in call.outputs[1:-1] if value is not None}) == min(1, count)
    for _ in range(2):
        x = torch.randn(4, 5)
        assert all(torch.equal(one, two) for one, two in zip(step(x), model(x), strict=True))


@pytest.mark.parametrize("name", ["apart", "apart_otherwise"])
def test_what_runs_node_by_node_finds_them(name: str) -> None:
    model, x = Apart(name, 3), torch.randn(4, 5)
    graph = lowtide.optimize(model, x).plan.graph
    assert all(torch.equal(one, two) for one, two in zip(watched(graph, [x]), model(x), strict=True))


def test_an_operator_whose_fake_raises_is_tried() -> None:
    """What it gives is taken to lie apart, tensor by tensor."""
    model, x = Apart("apart_raising", 2), torch.randn(4, 5)
    step = lowtide.optimize(model, x)
    assert all(torch.equal(one, two) for one, two in zip(step(x), model(x), strict=True))


def test_several_lists_are_refused() -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.lowtide_tests.several(x)[1][1]

    with pytest.raises(lowtide.CaptureError, match=r"several.default at .* returns several lists of tensors.*the tensors of one list"):
        lowtide.optimize(Several(), torch.randn(3), planning=lowtide.Planning(workspaces=False))
