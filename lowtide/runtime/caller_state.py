"""How a model and an optimizer look: all that a captured program takes for granted, by place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import NamedTuple

import torch
from torch import nn

from lowtide.kernels.optimizers import each_of
from lowtide.runtime.caller import Caller
from lowtide.runtime.tokens import Token, Tokens, Watch, global_hooks, switches

_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_ABOUT_FILES = frozenset({
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
})  # fmt: skip
# tables that say how the hooks of another are called; its items are what they are of
_HOW_CALLED = {
    "_forward_hooks_with_kwargs": "_forward_hooks", "_forward_hooks_always_called": "_forward_hooks",
    "_forward_pre_hooks_with_kwargs": "_forward_pre_hooks",
}  # fmt: skip
_CALLS = frozenset({"__call__", "__getattr__", "__getattribute__", "__setattr__"})


class Location(NamedTuple):
    """Where something is: "attribute" "p" of module "layer1.0"."""

    what: str
    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.what} {self.name!r} of {self.path!r}" if self.path or self.name else self.what


@dataclass(frozen=True)
class Reads:
    """The attributes of modules that a program reads, as (path of the module, name); None stands for all.

    ("layer1", "__dict__") stands for all of that module.
    """

    pairs: frozenset[tuple[str, str]] | None = None

    def of_module(self, path: str, name: str) -> bool:
        return self.pairs is None or (path, name) in self.pairs or (path, "__dict__") in self.pairs

    def anywhere(self, name: str) -> bool:
        """Whether it reads an attribute of this name of any module."""
        return self.pairs is None or name in self._names or "__dict__" in self._names

    def of(self, locations: Mapping[Location, Token]) -> dict[Location, Token]:
        reads = {
            "attribute": lambda location: self.of_module(location.path, location.name),
            "class attribute": lambda location: self.anywhere(location.name),
        }
        return {location: token for location, token in locations.items() if location.what not in reads or reads[location.what](location)}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for _, name in self.pairs or ())


EVERYTHING = Reads()


class CallerState:
    """How a caller's objects look now, and what to watch so that a change is seen without looking again."""

    def __init__(self, caller: Caller, reads: Reads = EVERYTHING) -> None:
        self.locations: dict[Location, Token] = {}
        self._watch, self._reads, self._trains = Watch(), reads, caller.optimizer is not None
        self._known: dict[int, Token] = {}  # tensors and modules of the model: which of them, not what is in them
        self._tokens = Tokens(self._watch, self._known)
        self.unwatched = self._tokens.unwatched
        self._paths: list[tuple[str, nn.Module]] = []
        self._find("", caller.model)
        self._groups = {} if caller.optimizer is None else self._trained(caller.optimizer)
        for path, module in self._paths:
            self._look_at(path, module)
        for cls in dict.fromkeys(cls for _, module in self._paths for cls in type(module).__mro__):
            self._look_at_class(cls)
        for name, table in global_hooks().items():
            self._put("hooks", "", name, self._tokens.of(table))
        self._put("switches of torch", "", "", switches())

    def watched(self) -> Watch:
        return self._watch.sealed()

    def _put(self, what: str, path: str, name: str, token: Token) -> None:
        self.locations[Location(what, path, name)] = token

    def _find(self, path: str, module: nn.Module) -> None:
        """Number modules and tensors in their order; what is there twice has one number, and so does what replaces it in both places."""
        if id(module) in self._known:
            return
        self._known[id(module)] = "module", len(self._known)
        self._paths.append((path, module))
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None:
                    self._known.setdefault(id(tensor), ("tensor", len(self._known)))
        for name, child in module._modules.items():
            if child is not None:
                self._find(f"{path}.{name}" if path else name, child)

    def _trained(self, optimizer: torch.optim.Optimizer) -> dict[int, tuple[int, int]]:
        """Where each parameter is in the optimizer's groups."""
        self._watch.groups(optimizer)
        for group in optimizer.param_groups:
            self._watch.container(group["params"])
        for number, each in enumerate(each_of(optimizer)):
            path = str(number or "")
            self._watch.container(each.param_groups)
            self._put("class of the optimizer", path, "", type(each))
            self._watch.container(each.__dict__)
            own = vars(each).get("step")  # a scheduler's wrapper around the class's step only counts
            counts = getattr(own, "_wrapped_by_lr_sched", False) and getattr(own, "__wrapped__", None) is type(each).step
            self._put("step of the optimizer", path, "", self._tokens.of(None if counts else own))
        self._put("groups of the optimizer", "", "", tuple(len(group["params"]) for group in optimizer.param_groups))
        return {id(each): (at, index) for at, group in enumerate(optimizer.param_groups) for index, each in enumerate(group["params"])}

    def _look_at(self, path: str, module: nn.Module) -> None:
        self._watch.module(module)
        self._watch.container(module.__dict__)
        self._put("class", path, "", type(module))
        for name, item in module.__dict__.items():
            if self._counts(path, module, name):
                # The program reads a tensor anew in each step.
                place = Location("attribute", path, name)
                self.locations[place] = torch.Tensor if type(item) is torch.Tensor else self._tokens.of(item, place)
        for name, parameter in module._parameters.items():
            self._put("parameter", path, name, None if parameter is None else self._parameter(parameter))
        for what, tables in (("buffer", module._buffers), ("module", module._modules)):
            for name, each in tables.items():
                self._put(what, path, name, None if each is None else self._known[id(each)])
        for name in _TABLES:
            self._watch.container(module.__dict__[name])

    def _counts(self, path: str, module: nn.Module, name: str) -> bool:
        """Whether a program may read this attribute of a module, or torch does where it calls it."""
        if name in _HOW_CALLED:
            return bool(module.__dict__.get(_HOW_CALLED[name], True))
        return name not in _TABLES and name not in _ABOUT_FILES and (name.endswith("_hooks") or self._reads.of_module(path, name))

    def _parameter(self, parameter: torch.Tensor) -> Token:
        if self._trains:  # where nothing is differentiated, neither matters: a small network's call is short
            self._watch.parameter(parameter)
        hooks = tuple(self._tokens.of(getattr(parameter, name, None)) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        return self._known[id(parameter)], type(parameter), parameter.requires_grad, self._groups.get(id(parameter)), hooks

    def _look_at_class(self, cls: type) -> None:
        """What a class of the model's modules brings, torch's base apart: functions, and what else the program reads."""
        if cls in (object, nn.Module):
            return
        self._watch.container(cls.__dict__)
        for name, item in cls.__dict__.items():
            if name in _CALLS or (not name.startswith("__") and (isinstance(item, FunctionType) or self._reads.anywhere(name))):
                self._put("class attribute", f"{cls.__module__}.{cls.__qualname__}", name, self._tokens.of(item))
