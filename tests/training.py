"""Trains a model twice from one seed, eagerly and with lowtide, and compares all that training leaves behind, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lowtide
from bench.in_values import in_values
from lowtide.capture.batches import positional_and_keyword
from lowtide.ir import tree

Make = Callable[[], tuple[nn.Module, Any, Callable[..., Any], torch.optim.Optimizer]]  # model, batch, loss, optimizer
Between = Callable[[nn.Module, torch.optim.Optimizer], Callable[[int], Any]]  # what to do after each step, told its number


@dataclass(frozen=True)
class Outcome:
    """What training leaves behind, with nothing shared with the model that it is of."""

    results: Any  # of each step, as loss() returned them
    batches: Any  # as they are after the step
    model: Any  # state_dict
    optimizer: Any  # state_dict
    generator: Tensor

    def differences(self, other: Outcome) -> list[str]:
        """Where the two are not the same bits, in words."""
        return [line for name in self.__dataclass_fields__ for line in differences(getattr(self, name), getattr(other, name), name)]


@dataclass(frozen=True)
class Settings:
    """How to train, alike for both."""

    steps: int = 3
    after_backward: Callable[[nn.Module], Any] | None = None
    accumulate: int = 1
    between: Between = lambda model, optimizer: lambda step: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # each step
    around_optimize: Callable[[], AbstractContextManager[Any]] = nullcontext
    steps_before: int = 0  # eager ones, in both
    options: Any = None  # further arguments of lowtide.optimize


def check(make: Make, **settings: Any) -> lowtide.Step:
    """Train both ways; fail unless they end alike. The step that was optimized."""
    how = Settings(**settings)
    expected, _ = _train(make, how, _eager_step)
    found, step = _train(make, how, _optimized_step)
    assert not (told := expected.differences(found)), "\n".join(told[:8])
    return step


def varied(batch: Any, turn: int) -> Any:
    """Another batch like it: rows in turn, so that numbers stay within the range they came from."""
    leaves, rebuild = tree.flatten(batch)
    return tree.unflatten(rebuild, [_rolled(leaf.value, turn) for leaf in leaves])


def differences(one: Any, two: Any, where: str = "") -> list[str]:
    """Where two nested structures are not the same bits. NaN equals NaN; 0.0 is not -0.0."""
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return [] if _same_tensor(one, two) else [f"{where}: expected {_brief(one)}, got {_brief(two)}"]
    ones, twos = tree.flatten(one)[0], tree.flatten(two)[0]
    if len(ones) == 1 and ones[0].where == "":
        return [] if type(one) is type(two) and repr(one) == repr(two) else [f"{where}: expected {one!r}, got {two!r}"]
    if [leaf.where for leaf in ones] != [leaf.where for leaf in twos]:
        return [f"{where}: expected entries {[leaf.where for leaf in ones]}, got {[leaf.where for leaf in twos]}"]
    return [line for a, b in zip(ones, twos, strict=True) for line in differences(a.value, b.value, where + a.where)]


def eager_step(model: nn.Module, loss: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, how: Settings) -> Any:
    """The plain loop's body."""
    optimizer.zero_grad()
    results = []
    for micro_args, micro_kwargs in _micro_batches(args, kwargs, how.accumulate):
        result = loss(model, *micro_args, **micro_kwargs)
        scalar = result if isinstance(result, Tensor) else result.loss if hasattr(result, "loss") else result[0]
        scaled = scalar / how.accumulate if how.accumulate > 1 else scalar
        scaled.backward()
        results.append(detached(scaled if isinstance(result, Tensor) else result))
    if how.after_backward is not None:
        how.after_backward(model)
    optimizer.step()
    return sum(results[1:], start=results[0]) if how.accumulate > 1 else results[0]


def detached(result: Any) -> Any:
    """A copy of a result, apart from the graph that made it."""
    leaves, rebuild = tree.flatten(result)
    return tree.unflatten(rebuild, [leaf.value.detach().clone() if isinstance(leaf.value, Tensor) else leaf.value for leaf in leaves])


def copied(tensors: Any) -> Any:
    """A deep copy of a nested structure, which may hold tensors within a graph."""
    return copy.deepcopy(detached(tensors))


@dataclass(frozen=True)
class Snapshot:
    """All that a failed capture could have touched: values, identities, attributes, hooks, modes, generators."""

    values: Any
    identities: Any

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Snapshot:
        values = [
            copied({name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if not tensor.is_meta}),
            copied([parameter.grad for parameter in model.parameters() if parameter.grad is not None]),
            copied(optimizer.state_dict()) if optimizer is not None else None,
            torch.get_rng_state().clone(),
        ]
        return cls(values, [_modes(), _generators(), _of_modules(model), _of_optimizer(optimizer)])

    def assert_same(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Fail if anything changed since."""
        now = Snapshot.of(model, optimizer)
        assert not (told := differences(self.values, now.values)), "\n".join(told)
        assert self.identities == now.identities


def _train(make: Make, how: Settings, stepper: Any) -> tuple[Outcome, Any]:
    torch.manual_seed(0)
    model, batch, loss, optimizer = make()
    args, kwargs = positional_and_keyword(batch)
    torch.manual_seed(1)
    for turn in range(how.steps_before):
        eager_step(model, loss, optimizer, *varied((args, kwargs), turn), Settings())
    step = stepper(model, loss, optimizer, batch, how)
    between = how.between(model, optimizer)
    results, batches = [], []
    for turn in range(how.steps):
        turn_args, turn_kwargs = varied((args, kwargs), turn)
        with how.around():
            results.append(copied(step(*turn_args, **turn_kwargs)))
        batches.append((turn_args, turn_kwargs))
        between(turn)
    return Outcome(results, batches, copied(dict(model.state_dict())), copied(optimizer.state_dict()), torch.get_rng_state()), step


def _eager_step(model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, batch: Any, how: Settings) -> Callable[..., Any]:
    return lambda *args, **kwargs: eager_step(model, loss, optimizer, args, kwargs, how)


def _optimized_step(model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, batch: Any, how: Settings) -> lowtide.Step:
    before = Snapshot.of(model, optimizer)
    with how.around_optimize():
        step = lowtide.optimize(
            model, batch, loss=loss, optimizer=optimizer,
            **in_values(after_backward=how.after_backward, accumulate=how.accumulate, **{"workspaces": False, **(how.options or {})}),
        )  # fmt: skip
    before.assert_same(model, optimizer)
    return step


def _micro_batches(args: Any, kwargs: Any, count: int) -> list[Any]:
    leaves, rebuild = tree.flatten((args, kwargs))
    parts = [leaf.value.chunk(count) if isinstance(leaf.value, Tensor) and leaf.value.dim() else [leaf.value] * count for leaf in leaves]
    return [tree.unflatten(rebuild, [part[index] for part in parts]) for index in range(count)] if count > 1 else [(args, kwargs)]


def _rolled(item: Any, turn: int) -> Any:
    if not isinstance(item, Tensor):
        return item
    twin = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype)
    return twin.copy_(item.roll(turn, 0) if item.dim() else item)


def _same_tensor(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    same = _bytes(one) == _bytes(two)
    if one.dtype.is_floating_point or one.dtype.is_complex:
        nan = (one.isnan() & two.isnan()).reshape(-1, 1)
        return bool((same | nan).all())
    return bool(same.all())


def _bytes(tensor: Tensor) -> Tensor:
    fresh = tensor.detach().clone(memory_format=torch.contiguous_format)  # a dimension of one element may have any stride, but not here
    return fresh.reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _brief(item: Any) -> str:
    if not isinstance(item, Tensor):
        return repr(item)
    return f"{item.dtype}{list(item.shape)} {item.detach().flatten()[:6].tolist()}"


def _generators() -> Any:
    return random.getstate(), repr(np.random.get_state(legacy=False))


def _modes() -> Any:
    hooks = nn.modules.module
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        torch.overrides._len_torch_function_stack(),
        len(hooks._global_forward_hooks),
        len(hooks._global_forward_pre_hooks),
    )


def _of_modules(model: nn.Module) -> Any:
    """By module: attributes by identity, tables by content."""
    tables = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    found = []
    for path, module in model.named_modules():
        found.append((path, [(name, id(item)) for name, item in module.__dict__.items()]))
        found.append((path, [[(key, id(item)) for key, item in module.__dict__[table].items()] for table in tables]))
        lists = {name: [id(part) for part in item] for name, item in module.__dict__.items() if isinstance(item, list)}
        found.append((path, lists))
    return found, [(id(parameter), id(parameter.grad), parameter.requires_grad) for parameter in model.parameters()]


def _of_optimizer(optimizer: torch.optim.Optimizer | None) -> Any:
    if optimizer is None:
        return None
    state = {id(key): {name: id(item) for name, item in entries.items()} for key, entries in optimizer.state.items()}
    groups = [
        [(key, repr(item) if key != "params" else [id(part) for part in item]) for key, item in group.items()]
        for group in optimizer.param_groups
    ]
    return [(name, id(item)) for name, item in optimizer.__dict__.items()], state, groups
