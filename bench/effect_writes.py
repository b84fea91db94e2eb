"""Places outside a program, and what programs of `bench.effect_programs` put there."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Meter:
    """As training scripts keep one."""

    last: Any = None

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def update(self, value: Any, count: int) -> None:
        """Another value, of so many rows."""
        self.last = value
        self.seen.append((value, count))


class State:
    """Sums, counts and averages."""

    def __init__(self) -> None:
        self.total, self.calls, self.best, self.text = 0.0, 0, 1e9, ""
        self.mean: Any = None
        self.pairs: tuple[Any, ...] = ()


class Places:
    """Of the caller's, empty at first."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """With new containers."""
        self.list: list[Any] = []
        self.queue = collections.deque[Any](maxlen=3)
        self.table: dict[str, Any] = {}
        self.lists = collections.defaultdict[str, list[Any]](list)
        self.counts = collections.Counter[str]()
        self.sums = [0.0, 0]
        self.totals = {"loss": 0.0, "steps": 0}
        self.meter, self.state = Meter(), State()

    def clear(self) -> None:
        """The same containers, without what is in them."""
        for each in (self.list, self.queue, self.table, self.lists, self.counts, self.meter.seen):
            each.clear()

    def left(self) -> dict[str, Any]:
        """What lies there."""
        return {name: vars(item) if isinstance(item, (Meter, State)) else item for name, item in vars(self).items()}


Put = Callable[[Places, Callable[[], Any]], object]

WRITES: dict[str, Put] = {
    "append": lambda places, value: places.list.append(value()),
    "extend": lambda places, value: places.list.extend([value(), value()]),
    "appendleft": lambda places, value: places.queue.appendleft((value(), 3)),
    "an entry": lambda places, value: places.table.__setitem__("a", [value()]),
    "entries": lambda places, value: places.table.update(b=value(), c={"d": value()}),
    "a list by default": lambda places, value: places.lists["a"].append(value()),
    "an attribute": lambda places, value: setattr(places.meter, "last", value()),
    "a meter": lambda places, value: places.meter.update(value(), 2),
    "a list filled anew": lambda places, value: (places.list.clear(), places.list.append(value()), places.list.append(len(places.list))),
    "a table emptied": lambda places, value: places.table.clear(),
}

VALUES: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda tensor: tensor,
    "detached": lambda tensor: tensor.detach(),
    "a number": lambda tensor: tensor.mean().item(),
    "numbers": lambda tensor: tensor.reshape(-1)[:2].tolist(),
    "a count": lambda tensor: (tensor > 0).sum().item(),
    "a copy": lambda tensor: tensor.detach().clone().mul_(2),
    "a text": lambda tensor: f"{tensor.mean().item():.4f}",
}


def _total(places: Places, tensor: Tensor) -> None:
    places.state.total += tensor.mean().item()
    places.state.calls += 1
    places.list.append(places.state.total / places.state.calls)


def _average(places: Places, tensor: Tensor) -> None:
    state, now = places.state, tensor.mean().item()
    state.mean = now if state.mean is None else 0.9 * state.mean + 0.1 * now


def _entries(places: Places, tensor: Tensor) -> None:
    places.totals["loss"] += tensor.mean().item() * 2
    places.totals["steps"] += 1


def _positions(places: Places, tensor: Tensor) -> None:
    places.sums[0] += tensor.mean().item()
    places.sums[1] += 1


def _best(places: Places, tensor: Tensor) -> None:
    places.state.best = min(places.state.best, tensor.mean().item())


def _counts(places: Places, tensor: Tensor) -> None:
    places.counts["right"] += (tensor > 0).sum().item()
    places.counts["all"] += tensor.numel()


def _text(places: Places, tensor: Tensor) -> None:
    places.state.text += f"{tensor.mean().item():.3f} "
    places.state.pairs += (tensor.mean().item(),)


SUMS: dict[str, Callable[[Places, Tensor], None]] = {
    "a total": _total,
    "an average": _average,
    "totals in a dictionary": _entries,
    "totals in a list": _positions,
    "the best": _best,
    "counts": _counts,
    "texts and tuples that grow": _text,
}
