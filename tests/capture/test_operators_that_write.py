"""Operators of other libraries that write into what they are given: what the step has made is made anew, what the caller has is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.cost.operators import operator
from lowtide.cost.trials import definers
from lowtide.kernels.apart import apart, origin

torch.library.define("writing::gather", "(Tensor(a!) into, Tensor x, float scale) -> ()")
torch.library.define("writing::update", "(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!)? v, float lr, int step) -> ()")
torch.library.define("writing::halve_", "(Tensor(a!) x) -> Tensor(a!)")
torch.library.define("writing::more", "(Tensor(a!) x) -> Tensor")


@torch.library.impl("writing::gather", "CompositeExplicitAutograd")
def gather(into: Tensor, x: Tensor, scale: float) -> None:
    into.mul_(scale).add_(x.expand(4, *x.shape).sum(0))


@torch.library.impl("writing::update", "CompositeExplicitAutograd")
def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor | None, lr: float, step: int) -> None:
    m.mul_(0.9).add_(g, alpha=0.1)
    if v is not None:
        v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.sub_(lr * m / ((1 if v is None else v.sqrt() + 1e-3) * (1 - 0.9**step)))


@torch.library.impl("writing::halve_", "CompositeExplicitAutograd")
def halve(x: Tensor) -> Tensor:
    return x.mul_(0.5)


@torch.library.impl("writing::more", "CompositeExplicitAutograd")
def more(x: Tensor) -> Tensor:
    return x.mul_(0.5) + 1


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.one, self.two = way, nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x))
        with torch.no_grad():
            beside = torch.zeros(2, *hidden.shape)
            if self.way == "part":
                torch.ops.writing.gather(beside[1], hidden.detach(), 0.5)
            if self.way in ("whole", "twice"):
                beside = torch.ones_like(hidden)
                for _ in range(1 + (self.way == "twice")):
                    torch.ops.writing.gather(beside, hidden.detach(), 0.5)
            if self.way == "buffer":
                torch.ops.writing.gather(self.seen, hidden.detach(), 0.5)
                beside = self.seen.clone()
            if self.way == "returned":
                beside = torch.ops.writing.halve_(hidden.detach().clone()) + 1
        return self.two(hidden + 0.1 * (beside if beside.dim() == 2 else beside.sum(0)))


class Updates(torch.optim.Optimizer):
    def __init__(self, parameters: Any, both: bool) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.both = both

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"], state["m"] = 0, torch.zeros_like(parameter)
                    state["v"] = torch.zeros_like(parameter) if self.both else None
                state["step"] += 1
                torch.ops.writing.update(parameter, parameter.grad, state["m"], state["v"], group["lr"], state["step"])


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def check(model: nn.Module, made: Any, **settings: Any) -> lowtide.Step:
    twin, x = copy.deepcopy(model), torch.randn(3, 6)
    mine, its = made(model.parameters()), made(twin.parameters())
    step = lowtide.optimize(model, x, loss=square, optimizer=mine, **settings)
    for number in range(4):
        for each in (mine, its):
            each.param_groups[0]["lr"] = 0.01 * (number + 1)
        its.zero_grad()
        loss = square(twin, x)
        loss.backward()
        its.step()
        assert torch.equal(step(x), loss)
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        for key, item in its.state[other].items():
            here = mine.state[parameter][key]
            assert torch.equal(here, item) if isinstance(item, Tensor) else here == item
    return step


@pytest.mark.parametrize("way", ["whole", "twice", "part", "buffer", "returned"])
def test_written_in_the_forward_pass(way: str):
    check(Net(way), lambda parameters: torch.optim.SGD(parameters, 0.01), planning=lowtide.Planning(workspaces=False))


@pytest.mark.parametrize("both", [True, False])
def test_an_update_makes_its_state_and_writes_it_from_then_on(both: bool):
    step = check(Net("none"), lambda parameters: Updates(parameters, both), planning=lowtide.Planning(workspaces=False))
    assert "writing.update" in step.source
    assert "apart_" not in step.source


def test_the_process_that_tries_it_is_told_what_it_is_made_of():
    """Which is what a library there defines."""
    (made,) = definers(["lowtide.apart_2_3__writing__update__default.default", "aten.add.Tensor", "writing.update.default"])
    assert made["op"] == "writing.update.default"


def test_an_operator_that_returns_more_is_refused():
    class More(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            with torch.no_grad():
                beside = torch.ops.writing.more(torch.ones_like(hidden))
            return self.two(hidden * beside)

    model = More("none")
    with pytest.raises(lowtide.CaptureError, match=r"writing\.more\.default at .* has no functional form"):
        lowtide.optimize(model, torch.ones(3, 6), loss=square, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def test_its_name_says_of_what_it_was_made():
    made = apart(torch.ops.writing.update.default, (2, 3))
    assert made is not None
    name = f"lowtide.{made._opname}.default"
    assert origin(name) == ("writing.update.default", (2, 3))
    assert operator(name) is made
    assert apart(torch.ops.aten.add_.Tensor, (0,)) is None
    assert origin("lowtide.pack_bits.default") is None
    p, g, m = torch.ones(3), torch.full((3,), 2.0), torch.zeros(3)
    new = made(p, g, m, torch.zeros(3), 0.1, 1)
    assert torch.equal(m, torch.zeros(3))
    assert torch.allclose(new[0], torch.full((3,), 0.2))
    assert not torch.equal(p, torch.ones(3))


@pytest.mark.parametrize(
    "written",
    [lambda z: (z, z), lambda z: (z[:2], z[1:]), lambda z: (z, z.view(8, 3).t()), lambda z: (z.t()[:2], z.t()[2:4])],
    ids=["itself", "parts", "another view", "columns"],
)
def test_one_that_reads_where_it_writes_is_refused(written: Any):
    """What it reads there depends on how it goes about it."""

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            with torch.no_grad():
                beside = hidden.detach().clone()
                torch.ops.writing.gather(*written(beside), 0.5)
            return self.two(hidden * beside)

    model = Reads("none")
    with pytest.raises(lowtide.CaptureError, match=r"writing\.gather\.default at .* has no functional form"):
        lowtide.optimize(model, torch.ones(3, 6), loss=square, optimizer=torch.optim.SGD(model.parameters(), 0.1))
