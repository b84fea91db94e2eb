"""Whether anything was put elsewhere since: by identity alone, in some microseconds; torch's switches that choose what a program does."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.backends import mha
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_hooks_with_kwargs,
    _global_forward_pre_hooks,
)

_KERNELS = (  # which choose how something is computed
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_mkldnn_enabled,
    torch._C._get_nnpack_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
)
_AUTOCAST_DEVICES = ("cpu", "cuda")


def switches() -> tuple[Any, ...]:
    """Their positions now; some microseconds."""
    return (meaning(), mha._is_fastpath_enabled, *[ask() for ask in _KERNELS])


def meaning() -> tuple[Any, ...]:
    """The positions of those that choose what is computed, not by which kernels alone."""
    state = torch.get_default_dtype(), torch._C._len_torch_function_stack()
    return (*state, *map(_cast, _AUTOCAST_DEVICES)) if torch._C._is_any_autocast_enabled() else state


def _cast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def global_hooks() -> dict[str, Any]:
    """The tables of hooks that run around every module, by name."""
    return {
        "before forward": _global_forward_pre_hooks,
        "after forward": _global_forward_hooks,
        "after forward, always": _global_forward_hooks_always_called,
        "after forward, with keywords": _global_forward_hooks_with_kwargs,
        "before backward": _global_backward_pre_hooks,
        "after backward": _global_backward_hooks,
    }


_values = methodcaller("values")
_flags = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_BUILT_IN = {dict, list, set, OrderedDict, deque}
_MAPPINGS = (dict, MappingProxyType)


class ContentWatch:
    """What containers hold, and what certain questions about objects are answered, as both were when it was sealed.

    Each call asks for all of it, since things are put into a dictionary without anyone being told. What is compared is `is` alone, and
    loops run within `map` and `all`: some 30 ns an entry. Most containers are tables of hooks, which are empty.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._empty: list[Any] = []
        self._full: list[Any] = []
        self._mappings: list[Any] = []
        self._lists: list[Any] = []
        self._questions: list[tuple[Callable[[Any], Any], Any]] = []

    def container(self, item: Any) -> None:
        if id(item) in self._known:
            return
        self._known.add(id(item))
        if type(item) in _BUILT_IN and not item:
            self._empty.append(item)
            return
        self._full.append(item)
        (self._mappings if isinstance(item, _MAPPINGS) else self._lists).append(item)

    def question(self, ask: Callable[[Any], Any], item: Any) -> None:
        """Watch what `ask` says of an item: the same object, or the same bytes."""
        self._questions.append((ask, item))

    def seal(self) -> None:
        self._lengths = [*map(len, self._full)]
        self._keys = [*chain.from_iterable(self._mappings)]
        self._items, self._held = [*chain.from_iterable(self._lists)], [*chain.from_iterable(map(_values, self._mappings))]
        self._answers = [(ask, item, ask(item)) for ask, item in self._questions]

    def same(self) -> bool:
        """Whether all of it is as it was. False may also be said of what only looks alike."""
        try:
            return (
                not any(self._empty)
                and [*map(len, self._full)] == self._lengths
                and all(map(is_, chain.from_iterable(map(_values, self._mappings)), self._held))
                and [*chain.from_iterable(self._mappings)] == self._keys  # texts and numbers, which is quicker than one by one
                and all(map(is_, chain.from_iterable(self._lists), self._items))
                and all((now := ask(item)) is before or (type(now) is bytes and now == before) for ask, item, before in self._answers)
            )
        except (RuntimeError, ValueError):  # another thread changes a container meanwhile; an array is no key that can be compared
            return False


class Watch(ContentWatch):
    """Contents, the classes of modules, the flags of parameters, torch's switches; as all were when it was sealed."""

    def __init__(self) -> None:
        super().__init__()
        self._modules: list[nn.Module] = []
        self._parameters: list[torch.Tensor] = []
        self._groups: Callable[[], Any] = tuple

    def module(self, module: nn.Module) -> None:
        self._modules.append(module)

    def parameter(self, parameter: torch.Tensor) -> None:
        """Watch whether a parameter is trained, and that it has no other hooks."""
        self._parameters.append(parameter)

    def groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch which lists the groups of an optimizer keep their parameters in."""
        self._groups = lambda: [group["params"] for group in optimizer.param_groups]

    def sealed(self) -> Watch:
        """Itself, with everything as it is now."""
        self.seal()
        self._types, self._flags = [*map(type, self._modules)], [*map(_flags, self._parameters)]
        self._in_groups, self._switches = self._groups(), switches()
        return self

    def same(self) -> bool:
        return (
            switches() == self._switches
            and super().same()
            and all(map(is_, map(type, self._modules), self._types))
            and [*map(_flags, self._parameters)] == self._flags
            and [*map(id, self._groups())] == [*map(id, self._in_groups)]
        )
