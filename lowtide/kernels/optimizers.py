"""Several optimizers as one: each has parameters, settings and state of its own, and they step one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch


class Optimizers(torch.optim.Optimizer):
    """Behaves as the one that has all their groups, in their order. Nothing is copied: what it shows is theirs."""

    def __init__(self, within: Sequence[torch.optim.Optimizer]) -> None:
        self.within = tuple(within)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.within for group in each.param_groups]

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        return _States(self.within)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.within:
            each.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for each in self.within:
            each.step()


def each_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that one stands for; itself where that is one."""
    return optimizer.within if isinstance(optimizer, Optimizers) else (optimizer,)


class _States(Mapping[torch.Tensor, Any]):
    def __init__(self, within: Sequence[torch.optim.Optimizer]) -> None:
        self.states = [each.state for each in within]
        self.owner = {id(item): each.state for each in within for group in each.param_groups for item in group["params"]}

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        state = self.owner.get(id(parameter))
        if state is None:
            state = next((each for each in self.states if parameter in each), self.states[0])
        return state[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(self.states)

    def __len__(self) -> int:
        return sum(map(len, self.states))
