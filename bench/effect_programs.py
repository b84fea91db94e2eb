"""Training programs made at random: what they do beside computing, what they read from outside, and what changes that between steps.

    program = build(7)      # always the same one, with objects of its own

A program is a small network whose forward, hook, loss and `after_backward` each do a few things of the tables below. Between some steps
the caller changes what it reads, and some batches have another shape or fail.
"""

from __future__ import annotations

import collections
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.effect_writes import SUMS, VALUES, WRITES, Places

WIDTH, CLASSES, ROWS, OTHER_ROWS = 4, 3, 5, 3
rate = 1.0  # a global that programs read
Use = Callable[["Net", "World", Tensor], Tensor]
Change = Callable[["Net", "World", random.Random], object]


class Settings:
    """What a loss reads of its own object, of that one's class, and of what hangs below."""

    of_class = 1.0

    def __init__(self) -> None:
        self.factor, self.below = 1.0, [0.5, 0.25]


class Criterion(nn.Module):
    """A loss with settings."""

    def __init__(self) -> None:
        super().__init__()
        self.smoothing, self.reduction = 0.1, "mean"

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(out, target, label_smoothing=self.smoothing, reduction=self.reduction).mean()


class Scaled(optim.SGD):
    """An optimizer with an attribute of its own."""

    factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Plain descent, times the factor."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.factor)


def _variable(value: float) -> tuple[Callable[[], float], Callable[[float], None]]:
    """Two functions that share a variable."""

    def read() -> float:
        return value

    def put(new: float) -> None:
        nonlocal value
        value = new

    return read, put


class World:
    """What lies outside the model."""

    def __init__(self, seed: int) -> None:
        self.places = Places()
        self.generator = torch.Generator().manual_seed(seed)
        self.settings = Settings()
        self.criterion = Criterion()
        self.config: dict[str, Any] = {"weight": 1.0, "nested": {"power": 2}}
        self.window = collections.deque([1.0, 2.0], maxlen=3)
        self.target = torch.full((WIDTH,), 0.5)
        self.table = torch.linspace(0, 1, WIDTH)
        self.read_variable, self.put_variable = _variable(1.0)
        self.scaled = functools.partial(torch.mul, other=1.0)
        self.activation: Callable[[Tensor], Tensor] = torch.tanh
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)).requires_grad_(False)
        self.array = np.array([0.5, 0.25])


class Net(nn.Module):
    """Does in its forward what it is told."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, WIDTH)
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)
        self.norm = nn.BatchNorm1d(WIDTH) if dice.random() < 0.3 else nn.Identity()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros(()))
        self.scale, self.twice, self.kind = 1.0, False, "tanh"
        self.shift = torch.zeros(WIDTH)
        self.calls, self.last_seen = 0, None
        self.inside: list[Callable[[Net, Tensor], Tensor]] = []

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """Fails in its first operators, if at all."""
        hidden = self.norm(self.first(x) + self.rows(at))
        for each in self.inside:
            hidden = each(self, hidden)
        return self.last(hidden)


def _own_mean(net: Net, world: World, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
    return hidden - net.mean.clone()


def _mean_bound_anew(net: Net, world: World, hidden: Tensor) -> Tensor:
    net.mean = 0.9 * net.mean + 0.1 * hidden.detach().mean(0)
    return hidden - net.mean


def _counted(net: Net, world: World, hidden: Tensor) -> Tensor:
    net.steps += 1
    return hidden / (1 + net.steps.clone())


def _weight_written(net: Net, world: World, hidden: Tensor) -> Tensor:
    net.last.weight.data.mul_(0.99)
    return hidden


def _weight_elsewhere(net: Net, world: World, hidden: Tensor) -> Tensor:
    net.last.weight.data = net.last.weight.data * 0.99
    return hidden


def _mean_elsewhere(net: Net, world: World, hidden: Tensor) -> Tensor:
    net.mean.data = hidden.detach().mean(0)
    return hidden + net.mean


def _forked(net: Net, world: World, hidden: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(WIDTH)
    return hidden + 0.1 * noise


def _in_parts(net: Net, world: World, hidden: Tensor) -> Tensor:
    dropped = checkpoint(lambda given: functional.dropout(given.tanh(), 0.2, net.training), hidden, use_reentrant=False)
    assert isinstance(dropped, Tensor)
    return dropped


def _outside_written(net: Net, world: World, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        world.table.lerp_(hidden.mean(0), 0.1)
    return hidden + world.table.clone()


TENSORS: dict[str, Use] = {
    "own mean": _own_mean,
    "mean bound anew": _mean_bound_anew,
    "counted": _counted,
    "weight.data written": _weight_written,
    "weight.data elsewhere": _weight_elsewhere,
    "buffer.data elsewhere": _mean_elsewhere,
    "a tensor outside written": _outside_written,
    "a draw": lambda net, world, hidden: hidden + 0.1 * torch.rand_like(hidden),
    "dropout": lambda net, world, hidden: functional.dropout(hidden, 0.3, net.training),
    "a draw forked off": _forked,
    "a draw of its own generator": lambda net, world, hidden: hidden * torch.rand(WIDTH, generator=world.generator),
    "dropout in a checkpoint": _in_parts,
}
_MOSTLY_REFUSED = {"a draw forked off"}


def _put_global(net: Net, world: World, dice: random.Random) -> None:
    global rate
    rate = _number(dice)


def _number(dice: random.Random) -> float:
    return dice.choice((0.5, 1.0, 2.0, 3.0))


def _tensor(dice: random.Random) -> Tensor:
    return torch.tensor([dice.random() for _ in range(WIDTH)])


def _setter(of: str, name: str, make: Callable[[random.Random], Any] = _number) -> Change:
    """Sets an attribute of the model (""), or of something in the world."""
    return lambda net, world, dice: setattr(getattr(world, of) if of else net, name, make(dice))


def _by_default(net: Net, world: World, hidden: Tensor, factor: float = 1.0) -> Tensor:
    return hidden * factor


def _frozen(net: Net, world: World, dice: random.Random) -> None:
    net.rows.weight.requires_grad_(not net.rows.weight.requires_grad)


READS: dict[str, tuple[Use, Change]] = {
    "the model's number": (lambda net, world, hidden: hidden * net.scale, _setter("", "scale")),
    "the model's flag": (
        lambda net, world, hidden: hidden * 2 if net.twice else hidden,
        _setter("", "twice", lambda dice: dice.random() < 0.5),
    ),
    "the model's word": (
        lambda net, world, hidden: getattr(torch, net.kind)(hidden),
        _setter("", "kind", lambda dice: dice.choice(("tanh", "relu", "sin"))),
    ),
    "the model's tensor": (lambda net, world, hidden: hidden + net.shift, _setter("", "shift", _tensor)),
    "train and eval": (
        lambda net, world, hidden: functional.dropout(hidden, 0.3, net.training),
        lambda net, world, dice: net.train(not net.training),
    ),
    "a frozen layer": (lambda net, world, hidden: hidden, _frozen),
    "an object's number": (lambda net, world, hidden: hidden * world.settings.factor, _setter("settings", "factor")),
    "an object's list": (
        lambda net, world, hidden: hidden * sum(world.settings.below),
        lambda net, world, dice: world.settings.below.append(_number(dice)),
    ),
    "a class's number": (
        lambda net, world, hidden: hidden * world.settings.of_class,
        lambda net, world, dice: setattr(Settings, "of_class", _number(dice)),
    ),
    "a global": (lambda net, world, hidden: hidden * rate, _put_global),
    "a variable": (lambda net, world, hidden: hidden * world.read_variable(), lambda net, world, dice: world.put_variable(_number(dice))),
    "a keyword": (
        lambda net, world, hidden: world.scaled(hidden),
        lambda net, world, dice: world.scaled.keywords.update(other=_number(dice)),
    ),
    "an entry": (
        lambda net, world, hidden: hidden * world.config["weight"] + hidden ** world.config["nested"]["power"],
        lambda net, world, dice: world.config.update(weight=_number(dice)),
    ),
    "an entry below": (
        lambda net, world, hidden: hidden ** world.config["nested"]["power"],
        lambda net, world, dice: world.config["nested"].update(power=dice.choice((1, 2, 3))),
    ),
    "a deque": (
        lambda net, world, hidden: hidden * (sum(world.window) / len(world.window)),
        lambda net, world, dice: world.window.append(_number(dice)),
    ),
    "a tensor": (lambda net, world, hidden: hidden * world.target, _setter("target", "data", _tensor)),
    "a tensor bound anew": (
        lambda net, world, hidden: hidden * world.target,
        lambda net, world, dice: setattr(world, "target", _tensor(dice)),
    ),
    "a function": (
        lambda net, world, hidden: world.activation(hidden),
        lambda net, world, dice: setattr(world, "activation", dice.choice((torch.tanh, torch.relu, torch.sin))),
    ),
    "another model": (
        lambda net, world, hidden: hidden + world.teacher(hidden.detach()),
        lambda net, world, dice: world.teacher.train(not world.teacher.training),
    ),
    "an array": (
        lambda net, world, hidden: hidden * float(world.array.sum()),
        lambda net, world, dice: world.array.__setitem__(0, _number(dice)),
    ),
    "a default": (_by_default, lambda net, world, dice: setattr(_by_default, "__defaults__", (_number(dice),))),
    "the criterion's number": (
        lambda net, world, hidden: hidden,
        _setter("criterion", "smoothing", lambda dice: dice.choice((0.0, 0.1, 0.2))),
    ),
    "the criterion's word": (
        lambda net, world, hidden: hidden,
        _setter("criterion", "reduction", lambda dice: dice.choice(("mean", "sum"))),
    ),
}  # fmt: skip


@dataclass
class Program:
    """A training program, and what its caller does between steps."""

    net: Net
    world: World
    optimizer: optim.Optimizer
    loss: Callable[..., Tensor]
    after_backward: Callable[[nn.Module], None] | None
    parts: tuple[str, ...]  # what it does, in words
    batches: list[tuple[Tensor, Tensor, Tensor]]
    failing: frozenset[int]  # batches that eager itself refuses
    between: dict[int, list[Callable[[], object]]] = field(default_factory=dict)  # before which step the caller does what

    def left(self) -> dict[str, Any]:
        """All that a step leaves."""
        attributes = [self.net.calls, self.net.last_seen, self.net.shift]
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "places": self.world.places.left(),
            "attributes": [*attributes, self.world.table, self.world.target],
            "random": [torch.get_rng_state(), self.world.generator.get_state(), random.getstate()],
        }


class Trainer:
    """Whose method is a loss."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self.compute, self.weight = compute, 1.0

    def loss(self, net: nn.Module, x: Tensor, at: Tensor, target: Tensor) -> Tensor:
        return self.compute(net, x, at, target) * self.weight


def build(seed: int, steps: int) -> Program:
    """The program of a number, and the batches and changes of so many steps."""
    global rate
    rate, Settings.of_class, _by_default.__defaults__ = 1.0, 1.0, (1.0,)
    dice, parts = random.Random(seed), list[str]()
    torch.manual_seed(seed)
    random.seed(seed)
    net, world = Net(dice), World(seed)
    reads = dice.sample(sorted(READS), dice.randint(1, 3))
    usual = sorted(TENSORS.keys() - _MOSTLY_REFUSED) if dice.random() < 0.9 else sorted(TENSORS)
    tensors = dice.sample(usual, dice.randint(0, 2))
    uses = [READS[name][0] for name in reads] + [TENSORS[name] for name in tensors]
    parts += [*reads, *tensors]
    dice.shuffle(uses)

    def some(most: int) -> Callable[[Tensor], None]:
        """A few writes into places, of values of a tensor."""
        chosen = [(name, dice.choice(sorted(VALUES))) for name in dice.choices(sorted(WRITES), k=dice.randint(0, most))]
        sums = dice.choices(sorted(SUMS), k=dice.randint(0, 1) if most else 0)
        parts.extend([*(f"{write} of {value}" for write, value in chosen), *sums])
        writes, adds = [(WRITES[write], VALUES[value]) for write, value in chosen], [SUMS[name] for name in sums]

        def put(tensor: Tensor) -> None:
            for write, value in writes:
                write(world.places, lambda value=value: value(tensor))
            for add in adds:
                add(world.places, tensor)

        return put

    in_forward, in_hook, in_loss, in_backward = some(1), some(1), some(1), some(1)
    net.inside = [functools.partial(lambda use, net, hidden: use(net, world, hidden), use) for use in uses]
    net.inside.append(lambda net, hidden: in_forward(hidden) or hidden)
    if dice.random() < 0.5:
        parts.append("a hook")
        net.last.register_forward_hook(lambda module, given, out: in_hook(out) or out * 1)
    checks, schedules = dice.random() < 0.3, dice.random() < 0.05

    def compute(net: nn.Module, x: Tensor, at: Tensor, target: Tensor) -> Tensor:
        value = world.criterion(net(x, at), target)
        in_loss(value)
        if checks and not math.isfinite(value.item()):
            raise FloatingPointError("the loss has no number")
        return value

    trainer = Trainer(compute)
    loss = dice.choice((compute, trainer.loss, functools.partial(trainer.loss)))

    def after_backward(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradient = net.last.weight.grad
        assert gradient is not None
        in_backward(gradient)
        if schedules:
            optimizer.param_groups[0]["lr"] *= 0.9

    makes: list[Callable[..., optim.Optimizer]] = [
        lambda given: optim.SGD(given, lr=0.03, momentum=0.9, foreach=False),
        lambda given: optim.Adam(given, lr=0.03, foreach=False),
        lambda given: Scaled(given, lr=0.03),
    ]
    optimizer = dice.choice(makes)(net.parameters())
    program = Program(
        net, world, optimizer, loss, after_backward if dice.random() < 0.4 else None, tuple(parts), *_batches(dice, steps, checks)
    )
    _plan_changes(program, dice, reads, trainer, steps)
    return program


def _batches(dice: random.Random, steps: int, checks: bool) -> tuple[list[tuple[Tensor, Tensor, Tensor]], frozenset[int]]:
    batches, failing = [], set()
    varies, fails = dice.random() < 0.4, dice.random() < 0.3
    generator = torch.Generator().manual_seed(dice.randrange(2**32))
    for number in range(steps):
        rows = OTHER_ROWS if varies and number and dice.random() < 0.15 else ROWS
        x = torch.rand(rows, WIDTH, generator=generator)
        at, target = torch.randint(8, (rows,), generator=generator), torch.randint(CLASSES, (rows,), generator=generator)
        if fails and number and dice.random() < 0.12:
            failing.add(number)
            kind = dice.choice(("row", "width", "class", "nan"))
            if kind == "row":
                at[0] = 8
            elif kind == "width":
                x = x[:, 1:].contiguous()
            elif kind == "class" or not checks:
                target[0] = CLASSES
            else:
                x[0, 0] = math.nan
        batches.append((x, at, target))
    return batches, frozenset(failing)


def _plan_changes(program: Program, dice: random.Random, reads: list[str], trainer: Trainer, steps: int) -> None:
    """What the caller changes, and before which steps: a change may come several times."""
    net, world, optimizer, own = program.net, program.world, program.optimizer, random.Random(dice.random())
    changes: list[Callable[[], object]] = [functools.partial(READS[name][1], net, world, own) for name in reads]
    group = optimizer.param_groups[0]
    others: list[Callable[[], object]] = [
        lambda: group.update(lr=group["lr"] * 0.7),
        lambda: setattr(trainer, "weight", _number(own)),
        lambda: setattr(optimizer, "factor", _number(own)),
        lambda: group.update(weight_decay=own.choice((0.0, 0.01))),
        world.places.begin,
        world.places.clear,
        lambda: net.load_state_dict({name: item.clone() for name, item in net.state_dict().items()}),
        lambda: net.register_buffer("mean", _tensor(own)),
    ]
    changes += dice.sample(others, 2)
    for number in range(1, steps):
        if dice.random() < 0.18:
            program.between[number] = [dice.choice(changes)]
