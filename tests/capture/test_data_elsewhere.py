"""Data that a program puts elsewhere in a step: each step does it again, as eager PyTorch does, and `optimize` changes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from tests.training import check, copied, differences

STEPS = 10


class Pair(nn.Module):
    """A trained network and one that follows it, with a buffer, an attribute and tensors in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 4), nn.Linear(6, 4)
        for parameter in self.k.parameters():
            parameter.requires_grad = False
        self.register_buffer("mean", torch.zeros(4))
        self.memory, self.kept = torch.zeros(4), [torch.zeros(4)]

    def follow(self) -> None:
        for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
            b.data = b.data * 0.9 + a.data * 0.1

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) - self.k(x).detach() + self.mean + self.memory + self.kept[0]


def _plain(model: Pair, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def _momentum(model: Pair, x: Tensor) -> Tensor:
    model.follow()
    return _plain(model, x)


def _max_norm(model: Pair, x: Tensor) -> Tensor:
    model.q.weight.data = torch.renorm(model.q.weight.data, 2, 0, 0.5)
    return _plain(model, x)


def _buffer(model: Pair, x: Tensor) -> Tensor:
    model.mean.data = model.mean * 0.9 + model.q(x).detach().mean(0) * 0.1
    return _plain(model, x)


def _buffer_set(model: Pair, x: Tensor) -> Tensor:
    model.mean.set_(model.mean * 0.9 + model.q(x).detach().mean(0) * 0.1)
    return _plain(model, x)


def _attribute(model: Pair, x: Tensor) -> Tensor:
    model.memory.data = model.memory * 0.9 + model.q(x).detach().mean(0) * 0.1
    model.kept[0].data = model.kept[0] * 0.8 + model.q(x).detach().amax(0) * 0.1
    return _plain(model, x)


def _after_use(model: Pair, x: Tensor) -> Tensor:
    """The backward pass reads the old data through a view, and so does the rest of the forward pass."""
    y, old, view = _plain(model, x), model.q.weight.data, model.q.weight[1:]
    model.q.weight.data = model.q.weight.data * 0.9
    return y + (old.sum() * model.q.weight.sin()).mean() + view.pow(2).mean()


def _shared_later(model: Pair, x: Tensor) -> Tensor:
    """What was put there goes on under its own name: both are one."""
    new = model.q.weight.data * 0.9
    model.q.weight.data = new
    new.mul_(1.1)
    return _plain(model, x)


def _turned(model: Pair, x: Tensor) -> Tensor:
    model.q.weight.data = (model.q.weight.data.t() * 0.9).t()
    return _plain(model, x)


def _own(model: Pair, x: Tensor) -> Tensor:
    model.q.weight.data = model.q.weight.data.mul_(0.9)
    return _plain(model, x)


def _twice(model: Pair, x: Tensor) -> Tensor:
    first = model.mean.data
    model.mean.data = model.mean + x.mean()
    second = model.mean.data
    model.mean.data = model.mean * 0.5
    return _plain(model, x) + (first + second).sum() * model.q.bias.sum()


def _codebook(model: Pair, x: Tensor) -> Tensor:
    z = model.q(x)
    nearest = F.one_hot(torch.cdist(z, model.k.weight[:, :4]).argmin(1), 4).float()
    model.k.weight.data = model.k.weight * 0.9 + 0.1 * F.pad(nearest.t() @ z, (0, 2)).detach()
    return _plain(model, x) + F.mse_loss(z, (nearest @ model.k.weight[:, :4]).detach())


def _first_batch(model: Pair, x: Tensor) -> Tensor:
    if model.mean.abs().sum().item() == 0:
        model.mean.data = model.q(x).detach().mean(0)
        model.q.bias.data = 1 / (model.q(x).detach().std(0) + 1e-6)
    return _plain(model, x)


def _vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.99, model.parameters())


def _vector_before(model: Pair, x: Tensor) -> Tensor:
    _vector(model)
    return _plain(model, x)


def _same_data(model: nn.Module) -> None:
    model.k.weight.data = model.q.weight.data


def _part(model: nn.Module) -> None:
    whole = torch.cat([model.mean * 0.9, model.memory])
    model.mean.data, model.memory.data = whole[:4], whole[4:]


LOSSES = [
    _momentum, _max_norm, _buffer, _buffer_set, _attribute, _after_use, _shared_later, _turned, _own, _twice, _codebook, _first_batch,
    _vector_before,
]  # fmt: skip
HOOKS: list[Callable[[Any], None]] = [Pair.follow, _vector, _same_data, _part]
OPTIMIZERS = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
]


def _checked(loss: Any, hook: Any, optimizer: Any, **settings: Any) -> lowtide.Step:
    def make() -> Any:
        model = Pair()
        return model, (torch.randn(8, 6),), loss, optimizer([each for each in model.parameters() if each.requires_grad])

    return check(make, steps=STEPS, after_backward=hook, **settings)


@pytest.mark.parametrize("at", range(len(LOSSES)), ids=[loss.__name__ for loss in LOSSES])
def test_data_put_elsewhere_in_the_loss_are_eagers(at: int):
    _checked(LOSSES[at], None, OPTIMIZERS[at % 2])


@pytest.mark.parametrize("hook", HOOKS)
def test_data_put_elsewhere_after_the_backward_pass_are_eagers(hook: Any):
    _checked(_plain, hook, OPTIMIZERS[0])


@pytest.mark.parametrize("loss", [_after_use, _twice])
def test_data_put_elsewhere_by_each_micro_batch_are_eagers(loss: Any):
    _checked(loss, None, OPTIMIZERS[0], accumulate=2)


def test_a_network_in_the_closure_follows():
    """Real tensors, which the capture reads as constants."""
    outcomes = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model, batches = nn.Linear(6, 4), torch.randn(STEPS, 8, 6)
        target = copy.deepcopy(model).requires_grad_(False)

        def loss(model: nn.Module, x: Tensor, target: nn.Module = target) -> Tensor:
            for a, b in zip(model.parameters(), target.parameters(), strict=True):
                b.data = b.data * 0.9 + a.data * 0.1
            return (model(x) - target(x)).pow(2).mean() + model(x).pow(2).mean()

        _run(model, loss, batches, optimized)
        outcomes.append(copied([model.state_dict(), target.state_dict()]))
    assert differences(*outcomes) == []


def test_who_looks_at_the_old_data_keeps_them():
    """Views that were made before a step see what eager shows them, and so do those that are made between steps."""
    outcomes = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model, batches = Pair(), torch.randn(4, 8, 6)
        seen: list[Tensor] = [model.k.weight.detach(), model.q.weight.detach(), model.k.bias.data]

        def between(model: Pair = model, seen: list[Tensor] = seen) -> None:
            seen.append(model.k.weight.detach())
            model.k.bias.data.add_(1.0)

        _run(model, _momentum, batches, optimized, between)
        outcomes.append(copied([seen, model.state_dict()]))
    assert differences(*outcomes) == []


def test_what_a_step_returns_is_what_lies_in_the_parameter():
    """`vector` is returned: in eager its memory is the parameters' own until they are put elsewhere again."""

    def loss(model: Pair, x: Tensor) -> tuple[Tensor, Tensor]:
        vector = nn.utils.parameters_to_vector(model.k.parameters()) * 0.5
        nn.utils.vector_to_parameters(vector, model.k.parameters())
        return _plain(model, x), vector

    outcomes = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model, batches = Pair(), torch.randn(4, 8, 6)

        def between(model: Pair = model) -> None:
            model.k.weight.data.add_(1.0)

        outcomes.append([_run(model, loss, batches, optimized, between), copied(model.state_dict())])
    assert differences(*outcomes) == []


def test_momentum_takes_no_more_memory_than_eager_counts():
    """New data are written where the old ones are: the step holds none of them until its end."""

    def make() -> Any:
        model = nn.ModuleDict({"q": nn.Linear(256, 256), "k": nn.Linear(256, 256)})
        model["k"].requires_grad_(False)

        def loss(model: Any, x: Tensor) -> Tensor:
            for _ in range(3):
                model["k"].weight.data = model["k"].weight.data * 0.9 + model["q"].weight.data * 0.1
            return (model["q"](x) - model["k"](x)).pow(2).mean()

        return model, (torch.randn(2, 256),), loss, torch.optim.SGD(model["q"].parameters(), lr=0.1)

    plan = check(make, steps=2).plan
    assert plan.peak_bytes - plan.resident_bytes < 3 * 256 * 256 * 4  # two products and a gradient, and no copy of what is new


def test_an_optimizer_that_puts_its_state_elsewhere_is_refused():
    class Rebinds(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                held = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                held.data = held * 0.9 + parameter.grad
                parameter.add_(held, alpha=-0.1)

    model = nn.Linear(6, 4)
    optimizer = Rebinds(model.parameters(), lr=0.1)
    optimizer.state = {each: {"mean": torch.zeros_like(each)} for each in model.parameters()}
    with pytest.raises(lowtide.CaptureError, match=r"test_data_elsewhere.py.*copy_"):
        lowtide.optimize(model, (torch.randn(8, 6),), loss=lambda m, x: m(x).mean(), optimizer=optimizer)


@pytest.mark.parametrize("seed", range(6))
def test_random_effects_are_eagers_or_refused(seed: int):
    """Programs that put data of all kinds into tensors of all kinds, read old and new ones, write them in place, keep views outside."""
    outcomes: list[Any] = []
    for optimized in (False, True):
        torch.manual_seed(seed)
        model, batches = Pair(), torch.randn(5, 8, 6)
        before, acts, after = _acts(random.Random(seed))
        seen: list[Tensor] = []

        def loss(model: Pair, x: Tensor, before: Any = before, acts: Any = acts) -> Tensor:
            for act in before:
                act(model, x)
            first = _plain(model, x)
            return first + sum((act(model, x) for act in acts), torch.zeros(())) + _plain(model, x)

        def between(model: Pair = model, seen: list[Tensor] = seen) -> None:
            seen.append(model.k.weight.detach())
            model.mean.data.add_(0.01)

        hook = None if after is None else lambda model, after=after: [after(model, torch.ones(8, 6)), None][1]
        try:
            result = _run(model, loss, batches, optimized, between, hook)
        except lowtide.CaptureError:
            assert optimized
            return
        outcomes.append(copied([result, seen, model.state_dict(), model.memory, model.kept]))
    assert differences(*outcomes) == []


def _acts(rng: random.Random) -> tuple[list[Any], list[Any], Any]:
    """What a random program does before and after it uses the model, and after its backward pass."""

    def of(shape: tuple[int, ...]) -> Callable[[Pair], Tensor]:
        if shape == (4, 6):
            return rng.choice([lambda m: m.q.weight, lambda m: m.k.weight])
        return rng.choice([lambda m: m.mean, lambda m: m.memory, lambda m: m.kept[0], lambda m: m.k.bias, lambda m: m.q.bias])

    def act() -> Callable[[Pair, Tensor], Tensor]:
        shape = rng.choice([(4, 6), (4,)])
        target, other, scale, kind = of(shape), of(shape), rng.uniform(0.5, 0.9), rng.randrange(7)

        def run(model: Pair, x: Tensor) -> Tensor:
            one, two = target(model), other(model).detach()
            old, view = one.data, one.detach()[1:]
            if kind == 0:
                one.data = one.data * scale + two * 0.1
            elif kind == 1:
                whole = torch.cat([one.data * scale, two])
                one.data = whole[:4]
            elif kind == 2:
                one.data = two * scale + x.mean()
                one.data.mul_(0.9)
            elif kind == 3:
                one.data = (one.data.t() * scale).t()
            elif kind == 4:
                one.data.mul_(scale).add_(two, alpha=0.1)
            elif kind == 5:
                new = two * scale
                one.data = new
                new.add_(0.01)
            else:
                one.data = old.clone()
                old.mul_(scale)
            return (old.sum() * 0.1 + view.sum() + one.sum().detach()) * model.q.bias.sum()

        return run

    return [act() for _ in range(rng.randrange(3))], [act() for _ in range(rng.randrange(1, 3))], act() if rng.random() < 0.5 else None


def _run(model: nn.Module, loss: Any, batches: Tensor, optimized: bool, between: Any = None, hook: Any = None) -> list[Any]:
    """What each step has returned; nothing is copied, so that what is returned shows what becomes of its memory."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05, momentum=0.9)
    step, results = None, []
    if optimized:
        step = lowtide.optimize(
            model,
            (batches[0],),
            loss=loss,
            optimizer=optimizer,
            training=lowtide.Training(after_backward=hook),
            planning=lowtide.Planning(workspaces=False),
        )
    for x in batches:
        if step is not None:
            results.append(step(x))
        else:
            optimizer.zero_grad()
            result = loss(model, x)
            (result if isinstance(result, Tensor) else result[0]).backward()
            with torch.no_grad():
                _ = None if hook is None else hook(model)
            optimizer.step()
            results.append(result.detach() if isinstance(result, Tensor) else tuple(each.detach() for each in result))
        if between is not None:
            between()
    return results


class Lays(torch.optim.SGD):
    """Sees that everything is contiguous first, as bitsandbytes' optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data.contiguous()
            parameter.grad = parameter.grad.contiguous()
        super().step()


def test_an_optimizer_that_gives_a_parameter_the_data_that_it_has():
    _checked(_plain, None, lambda parameters: Lays(parameters, lr=0.05, momentum=0.9))
