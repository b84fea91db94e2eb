"""What optimizers are refused for before, or behind, a recording: their kind, whose parameters they have, lists that lie in two places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lowtide.base.messages import warn
from lowtide.base.skeleton import Skeleton
from lowtide.capture.optimizers.own_code import own_attributes
from lowtide.capture.optimizers.scalars import Fact, Guard
from lowtide.errors import CaptureError
from lowtide.ir.graph import Graph, Kind, Slot
from lowtide.kernels.optimizers import each_of

_DEEPEST = 8  # of settings within one another


def refuse_kind(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CaptureError(
            f"{name} evaluates the model several times a step, as often as the data asks for: it cannot be captured; use a "
            "first-order optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CaptureError(f"{name} works on sparse gradients, which cannot be captured: use Adam, and embeddings with sparse=False")


def is_beside(key: Any, names: Mapping[torch.Tensor, str]) -> bool:
    """Whether an optimizer's parameter is none of the model's: one that a layer made anew or a tied weight has left there.

    Eager's step finds no gradient on it and leaves it alone, with its state. (A program that reads it is refused where it does.)
    """
    return isinstance(key, torch.nn.Parameter) and key not in names


def refuse_strangers(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    name = " and ".join(type(each).__name__ for each in each_of(optimizer))
    places = ((at, number, item) for at, group in enumerate(optimizer.param_groups) for number, item in enumerate(group["params"]))
    beside = [f"parameter {number} of group {at}, of shape {tuple(item.shape)}" for at, number, item in places if item not in names]
    if beside and len(beside) == sum(len(group["params"]) for group in optimizer.param_groups):
        raise CaptureError(
            f"no parameter of {name} is one of the model's ({beside[0]}): hold all that is trained in one module. If they were, the model "
            f"has others in their place now (as load_state_dict(assign=True) leaves), which {name} does not train, in eager PyTorch "
            "neither: make the optimizer anew"
        )
    if beside:
        warn(f"{beside[0]} of {name} is no parameter of the model: steps do not train it, as in eager PyTorch")
    keys = (key for key in optimizer.state if not isinstance(key, str) and key not in names and not is_beside(key, names))
    if (stranger := next(keys, None)) is not None:
        raise CaptureError(f"{name} keeps state under {described(stranger)}, which is no parameter of the model: it cannot be captured")


def refuse_idle(optimizer: torch.optim.Optimizer, graphs: Sequence[Graph], facts: Iterable[Fact], assigned: Iterable[Slot]) -> None:
    """Raise CaptureError for a training step that would train nothing: neither now, nor when what it counts decides otherwise.

    The first step may train nothing, where it only makes state. `assigned`: what steps put into their slots.
    """
    if any(before.storage.kind is Kind.PARAMETER for graph in graphs for node in graph.nodes for before, _ in node.writes):
        return
    decisive = (slot for fact in facts for slots in ([[fact.slot]] if isinstance(fact, Guard) else fact.applied) for slot in slots)
    if not {*assigned}.isdisjoint(decisive):
        return
    names = " and ".join(type(each).__name__ for each in each_of(optimizer))
    raise CaptureError(
        f"the step of {names} changes no parameter: none of those in its groups has a gradient from this loss, or its "
        "step does nothing; check `requires_grad` and which parameters it was given"
    )


def described(key: Any) -> str:
    return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)


def containers_in(item: Any, around: tuple[int, ...] = ()) -> Iterator[int]:
    """By id, those that can be written into. Raises CaptureError for one that holds itself."""
    skeleton = Skeleton.of(item)
    if skeleton is None:
        return
    if id(item) in around:
        raise CaptureError(f"the optimizer keeps a {type(item).__name__} in its state that holds itself, which cannot be captured")
    if skeleton.kind is not tuple:
        yield id(item)
    for _, each in skeleton.entries(item):
        yield from containers_in(each, (*around, id(item)))


def refuse_shared_containers(optimizer: torch.optim.Optimizer, attributes: Callable[[int], Mapping[str, Slot]] = lambda number: {}) -> None:
    """Raise CaptureError where a list or a dictionary lies in two places: what is written into one would not be in the other.

    Looked at are states, and `attributes` of each optimizer that a step is given; settings and other attributes beside these.
    """
    places: list[Any] = []
    for number, each in enumerate(each_of(optimizer)):
        own = attributes(number)
        places += (each.state[key] if isinstance(key, str) else [*each.state[key].values()] for key in each.state)
        places += [item for name, item in own_attributes(each).items() if name in own] if own else []
        if own:  # one of these may be reached by another name, too
            others = [item for name, item in own_attributes(each).items() if name not in own and name != "state"]
            beside = {id(item) for other in others for item in _holders_in(other)}
            places += [item for name, item in own_attributes(each).items() if name in own and not beside.isdisjoint(containers_in(item))]
    count = Counter(number for each in places for number in containers_in(each))
    if count and max(count.values()) > 1:
        raise CaptureError(
            "the optimizer keeps one list or dictionary in several places, of which steps would make several: give each place its own"
        )


def _holders_in(item: Any, depth: int = 0) -> Iterator[Any]:
    """Lists and dictionaries within one another, of any kind."""
    if isinstance(item, (list, tuple, dict)) and depth < _DEEPEST:
        yield item
        for each in item.values() if isinstance(item, dict) else item:
            yield from _holders_in(each, depth + 1)
