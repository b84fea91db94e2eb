"""Draws from a generator of the program's own (`generator=g`): each step draws from that very one, as eager does."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

import lowtide
from bench.in_values import in_values

Draw = Callable[[Tensor, Generator], Tensor]

DRAWS: dict[str, Draw] = {
    "rand": lambda x, g: torch.rand(x.shape, generator=g),
    "randn": lambda x, g: torch.randn(x.shape, generator=g),
    "randint": lambda x, g: torch.randint(9, x.shape, generator=g) * 0.1,
    "randperm": lambda x, g: x[:, torch.randperm(x.shape[1], generator=g)],
    "into": lambda x, g: torch.rand(x.shape, generator=g, out=torch.empty_like(x)),
    "bernoulli": lambda x, g: torch.bernoulli(x.sigmoid(), generator=g),
    "bernoulli p": lambda x, g: torch.bernoulli(x, 0.3, generator=g),
    "multinomial": lambda x, g: x.sigmoid().multinomial(x.shape[1], generator=g) * 0.1,
    "normal": lambda x, g: torch.normal(0.0, 1.0, x.shape, generator=g),
    "normal around": lambda x, g: torch.normal(x, x.exp(), generator=g),
    "poisson": lambda x, g: torch.poisson(x.exp(), generator=g),
    "uniform_": lambda x, g: torch.empty_like(x).uniform_(-1, 1, generator=g),
    "normal_": lambda x, g: torch.empty_like(x).normal_(generator=g),
    "random_": lambda x, g: torch.empty_like(x).random_(2, 9, generator=g),  # an operator that is called `from`
    "bernoulli_": lambda x, g: torch.empty_like(x).bernoulli_(0.3, generator=g),
    "transposed": lambda x, g: torch.empty_like(x).t().bernoulli_(0.3, generator=g).t(),
    "exponential_": lambda x, g: torch.empty_like(x).exponential_(generator=g),  # whose fake kernel takes no generator
    "truncated": lambda x, g: nn.init.trunc_normal_(torch.empty_like(x), std=0.5, generator=g),  # draws until all lie within
    "truncated tail": lambda x, g: nn.init.trunc_normal_(torch.empty_like(x), 0.0, 1.0, 1.5, 3.0, g) + nn.init.trunc_normal_(x.clone()),
    "kaiming": lambda x, g: nn.init.kaiming_uniform_(torch.empty_like(x), generator=g),
    "among others": lambda x, g: functional.dropout(x) + torch.rand(x.shape, generator=g) + torch.rand(x.shape),
    "torch's own": lambda x, g: torch.rand(x.shape, generator=torch.default_generator),
    "mapped": lambda x, g: torch.vmap(lambda row: row + torch.rand(row.shape, generator=g), randomness="different")(x),
}


def trained(draw: Draw, optimized: bool, rows: int = 8, layers: int = 1, **options: Any) -> tuple[Any, ...]:
    """Losses of five steps, parameters and the states of both generators behind them; the step, if there is one."""
    torch.manual_seed(0)
    own, model = Generator().manual_seed(5), nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(4, 4), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x = torch.randn(rows, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x + draw(x, own)) * draw(x, own)).square().mean()

    def eager(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        result = loss(model, x)
        result.backward()
        optimizer.step()
        return result.detach()

    states = own.get_state(), torch.get_rng_state()
    step = lowtide.optimize(model, x, loss=loss, optimizer=optimizer, **in_values(**options)) if optimized else None
    assert all(map(torch.equal, states, (own.get_state(), torch.get_rng_state()))), "a capture moves no generator"
    losses = [(step or eager)(x).detach() for _ in range(5)]
    return [*losses, *model.parameters(), own.get_state(), torch.get_rng_state()], step


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_step_draws_what_eager_draws(draw: Draw) -> None:
    eager, (own, step) = trained(draw, False)[0], trained(draw, True, workspaces=False)
    assert all(map(torch.equal, eager, own))
    assert ("batch_0, generator" in step.source) == (draw is not DRAWS["torch's own"])


def test_within_a_limit_nothing_is_drawn_twice() -> None:
    size = {"rows": 512, "layers": 4}
    own, step = trained(DRAWS["bernoulli_"], True, memory="75%", workspaces=False, effort="quick", **size)
    assert all(map(torch.equal, trained(DRAWS["bernoulli_"], False, **size)[0], own))
    assert step.source.count("generator=generator") == 2
    assert step.source.count("gelu.default") > 4, "some are computed again"


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.noise = nn.Linear(4, 4), Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.randn(x.shape, generator=self.noise)


def is_eager(step: Callable[[Tensor], Tensor], model: Noisy, x: Tensor) -> bool:
    """Whether a call gives what the model gives, and leaves its generator as the model does."""
    before = model.noise.get_state()
    found, after = step(x), model.noise.get_state()
    model.noise.set_state(before)
    return torch.equal(found, model(x)) and torch.equal(after, model.noise.get_state()) and not torch.equal(before, after)


@pytest.mark.parametrize("check", ["auto", "never"])
def test_another_generator_in_its_place(check: str) -> None:
    model, x = Noisy(), torch.ones(3, 4)
    step = lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False), run=lowtide.Run(check=check))
    assert all(is_eager(step, model, x) for _ in range(3))
    model.noise.manual_seed(7)
    assert is_eager(step, model, x)
    model.noise = Generator().manual_seed(9)
    assert all(is_eager(step, model, x) for _ in range(3))


def test_a_range_of_shapes() -> None:
    model, x = Noisy(), torch.ones(3, 4)
    step = lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False), shapes=lowtide.Shapes(dynamic={0: {0: ("rows", 2, 16)}}))
    assert all(is_eager(step, model, torch.ones(rows, 4)) for rows in (3, 16))


def test_a_saved_plan(tmp_path: Any) -> None:
    model, x = Noisy(), torch.ones(3, 4)
    lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False)).save(tmp_path / "plan.json")
    assert is_eager(lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False), plan=tmp_path / "plan.json"), model, x)


def test_a_comparison_draws_the_same_numbers_and_moves_nothing() -> None:
    model, x = Noisy(), torch.ones(3, 4)
    step = lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False))
    before = model.noise.get_state()
    assert step.verify(x).bit_equal
    assert torch.equal(before, model.noise.get_state())


def test_the_second_look_sees_another_one() -> None:
    generators = [Generator().manual_seed(seed) for seed in range(9)]
    model = nn.Linear(4, 4)
    model.forward = lambda x: x + torch.rand(4, generator=Hidden(generators).now)  # type: ignore[assignment]
    step = lowtide.optimize(model, torch.ones(4), planning=lowtide.Planning(workspaces=False), run=lowtide.Run(check="always"))
    found = step(torch.ones(4))
    del generators[0]
    assert not torch.equal(step(torch.ones(4)), found)
    assert not torch.equal(generators[0].get_state(), Generator().manual_seed(1).get_state())


class Hidden:
    """Something that nobody follows."""

    __slots__ = ("_which",)

    def __init__(self, which: list[Generator]) -> None:
        self._which = which

    @property
    def now(self) -> Generator:
        return self._which[0]


def before(x: Tensor, g: Generator) -> Tensor:
    g.manual_seed(1)
    return torch.rand(4, generator=g)


def after(x: Tensor, g: Generator) -> Tensor:
    drawn = torch.rand(4, generator=g)
    g.manual_seed(1)
    return drawn


def again(x: Tensor, g: Generator) -> Tensor:
    state = g.get_state()
    drawn = torch.rand(4, generator=g)
    g.set_state(state)
    return drawn - torch.rand(4, generator=g)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (before, r"at \S*\.py:\d+ draws from a generator after the program has seeded it.*seed before the step"),
        (after, "the program seeds a generator that it draws from.*seed before the step"),
        (again, r"at \S*\.py:\d+ draws from a generator after .* has put back its state.*draw once"),
        (lambda x, g: torch.rand(4, generator=Generator()), r"at \S*\.py:\d+ draws from a generator that the program makes anew.*hold it"),
        (lambda x, g: torch.rand(4, generator=g.clone_state()), "makes anew in each step"),
        (lambda x, g: x * 2 if torch.rand((), generator=g).item() > 0.5 else x, "depends on data.*a random draw"),
    ],
)
def test_what_no_step_would_do(draw: Draw, message: str) -> None:
    own, model = Generator().manual_seed(5), nn.Linear(4, 4)
    drawn = Generator().manual_seed(5)
    model.noise, model.draw = own, draw  # type: ignore[assignment]
    model.forward = lambda x: x + model.draw(x, model.noise)  # type: ignore[assignment, operator, arg-type]
    with pytest.raises(lowtide.CaptureError) as raised:
        lowtide.optimize(model, torch.ones(4), planning=lowtide.Planning(workspaces=False))
    assert re.search(message, str(raised.value))
    assert torch.equal(own.get_state(), drawn.get_state()), "a refusal moves no generator"


def test_a_file_holds_no_generator(tmp_path: Any) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.noise = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), Generator()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers(x)
            return y + torch.randn(y.shape, generator=self.noise)

    x = torch.ones(1, 3, 8, 8)
    step = lowtide.optimize(Network().eval(), x, exact=False)
    with pytest.raises(lowtide.StepError, match="draws from a generator of the program's own, which a file cannot hold: leave `generator="):
        step.save_frozen(tmp_path / "network", x)
    assert not torch.equal(step.frozen(x)(x), step.frozen(x)(x))
