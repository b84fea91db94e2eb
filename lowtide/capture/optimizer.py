"""Capturing an optimizer's step from its own code, whatever the optimizer.

A shadow of the optimizer (same class, same settings, fake parameters and state, traced hyper-parameters) takes a step while the
recorder listens. Nothing is known here of SGD or Adam: what is not traceable in an optimizer is found by tracing it, and what
escapes the trace by tracing it twice with other stand-in numbers and comparing the two programs.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowtide.capture.blocks import geometry
from lowtide.capture.recorder import Recorder
from lowtide.capture.scalars import Guard, Scalars, Traced
from lowtide.errors import CaptureError
from lowtide.ir.graph import Kind, Value
from lowtide.ir.slots import Slot

# Settings that choose an implementation, not a result. The single-tensor one updates each parameter by nodes of its own.
_IMPLEMENTATION = {"foreach": False, "fused": False}


@dataclass(frozen=True)
class Update:
    """What an optimizer's step leaves behind: new state to be put into slots, and the guards under which its program is right."""

    assigned: tuple[tuple[Slot, Value], ...]
    guards: tuple[Guard, ...]
    state_entries: int  # before the step, of all parameters together


class _ItemReader(TorchFunctionMode):
    """Lets the optimizer's `tensor.item()` give a traced number."""

    def __init__(self, scalars: Scalars) -> None:
        super().__init__()
        self.scalars = scalars

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.item:
            return self.scalars.read(args[0])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Shadow:
    """The state of an optimizer in fake tensors: what its next step starts from."""

    optimizer: torch.optim.Optimizer
    names: Mapping[torch.Tensor, str]  # of the real parameters
    fakes: Mapping[torch.Tensor, torch.Tensor]  # of the real parameters
    state: Mapping[torch.Tensor, Mapping[str, Any]]  # by real parameter; fake tensors and numbers

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        fakes: Mapping[torch.Tensor, torch.Tensor],
        recorder: Recorder,
    ) -> Shadow:
        """The shadow of an optimizer as it is now."""
        _refuse_what_cannot_be_traced(optimizer, names)
        state = {
            parameter: {key: _fake_state(item, recorder, names[parameter], key) for key, item in entries.items()}
            for parameter, entries in optimizer.state.items()
        }
        return cls(optimizer, names, fakes, state)

    def step(self, recorder: Recorder, seed: int) -> tuple[Update, Shadow]:
        """Record one step on `recorder`; what it assigns, and the shadow that the step after it starts from."""
        scalars = Scalars(recorder, seed)
        twin = object.__new__(type(self.optimizer))  # copy.copy would leave out what a class of the user's own keeps
        twin.__dict__.update(self.optimizer.__dict__)
        twin.param_groups = [self._group(index, scalars) for index in range(len(self.optimizer.param_groups))]
        start = self._declare_state(recorder, scalars)
        twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        twin.state = defaultdict(dict, {self.fakes[parameter]: dict(entries) for parameter, entries in start.items()})
        groups, attributes = [dict(group) for group in twin.param_groups], dict(twin.__dict__)
        _run(twin, scalars)
        _refuse_changed_groups(twin.param_groups, groups)
        _refuse_changed_attributes(twin, attributes)
        return self._outcome(recorder, scalars, start, twin)

    def _group(self, index: int, scalars: Scalars) -> dict[str, Any]:
        """A parameter group with fake parameters and traced numbers."""
        group: dict[str, Any] = {}
        for key, item in self.optimizer.param_groups[index].items():
            if key == "params":
                group[key] = [self.fakes[parameter] for parameter in item]
            elif key in _IMPLEMENTATION:
                group[key] = _IMPLEMENTATION[key]
            elif key == "initial_lr":  # a scheduler's note to itself
                group[key] = item
            else:
                group[key] = _traced(item, Slot("group", (index, key)), scalars)
        return group

    def _declare_state(self, recorder: Recorder, scalars: Scalars) -> dict[torch.Tensor, dict[str, Any]]:
        """State entries as inputs of the graph."""
        declared: dict[torch.Tensor, dict[str, Any]] = {}
        for parameter, entries in self.state.items():
            name = self.names[parameter]
            declared[parameter] = {}
            for key, item in entries.items():
                slot = Slot("state", (name, key))
                if isinstance(item, torch.Tensor):
                    recorder.add_input(item, slot, Kind.STATE, f"{name}.{key}")
                    declared[parameter][key] = item
                else:
                    declared[parameter][key] = scalars.root(slot, item, f"{name}.{key}")
        return declared

    def _outcome(
        self, recorder: Recorder, scalars: Scalars, start: dict[torch.Tensor, dict[str, Any]], twin: torch.optim.Optimizer
    ) -> tuple[Update, Shadow]:
        """Compare the state after the step with that before it."""
        assigned: list[tuple[Slot, Value]] = []
        after: dict[torch.Tensor, dict[str, Any]] = {}
        for parameter, fake in self.fakes.items():
            if fake not in twin.state:
                continue
            after[parameter] = {}
            for key, item in twin.state[fake].items():
                before = start.get(parameter, {}).get(key)
                after[parameter][key] = _settled(item)
                if item is not before and item is not None:
                    assigned.append((Slot("state", (self.names[parameter], key)), _assigned_value(item, recorder)))
        following = Shadow(self.optimizer, self.names, self.fakes, after)
        return Update(tuple(assigned), tuple(scalars.guards), sum(map(len, self.state.values()))), following


def _run(twin: torch.optim.Optimizer, scalars: Scalars) -> None:
    """Take the step. The class's own `step`: the instance's may be wrapped by a scheduler that counts calls."""
    import torch._dynamo  # optimizers import it in their step; not while tensors are fake

    with _ItemReader(scalars), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        type(twin).step(twin)


def _traced(item: Any, slot: Slot, scalars: Scalars) -> Any:
    if isinstance(item, (tuple, list)):
        return type(item)(_traced(part, Slot(slot.place, (*slot.path, index)), scalars) for index, part in enumerate(item))
    if isinstance(item, torch.Tensor):
        fake = scalars.recorder.fake_mode.from_tensor(item)
        scalars.recorder.add_input(fake, slot, Kind.STATE, ".".join(map(str, slot.path)))
        return fake
    return scalars.root(slot, item, str(slot.path[1]))


def _settled(item: Any) -> Any:
    """A state entry as the next step finds it: a number by its value here, which the next shadow traces again."""
    return item.actual if isinstance(item, Traced) else item


def _assigned_value(item: Any, recorder: Recorder) -> Value:
    if isinstance(item, torch.Tensor):
        return recorder.value(item)
    if isinstance(item, Traced):
        return item.value
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return recorder.emit_scalar("py.mul", (item, 1))  # a number that every first step starts from, such as a count of 1
    raise CaptureError(f"the optimizer keeps a {type(item).__name__} ({item!r}) in its state; tensors and traced numbers can be captured")


def _fake_state(item: Any, recorder: Recorder, name: str, key: str) -> Any:
    if isinstance(item, torch.Tensor):
        if item.device.type == "meta":
            raise CaptureError(f"the optimizer's state {name}.{key} is on the meta device: create the optimizer anew")
        return recorder.fake_mode.from_tensor(item)
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise CaptureError(f"the optimizer's state {name}.{key} holds a {type(item).__name__}; tensors and numbers can be captured")


def _refuse_what_cannot_be_traced(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CaptureError(
            f"{name} evaluates the model several times a step, as often as the data asks for: it cannot be captured; use a "
            "first-order optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CaptureError(f"{name} works on sparse gradients, which cannot be captured: use Adam, and embeddings with sparse=False")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise CaptureError(f"this {name} has hooks on its step, which a captured step would not run: call them around the step instead")
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise CaptureError(
                    f"parameter {position} of {name}'s group {index}, of shape {tuple(parameter.shape)}, is not a parameter of the model: "
                    "hold all that is trained in one module"
                )


def _refuse_changed_groups(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    for index, (group, old) in enumerate(zip(now, before, strict=True)):
        for key, item in group.items():
            if key not in old or item is not old[key]:
                raise CaptureError(f"the optimizer's step changes its own setting {key!r} in group {index}, which cannot be captured")


def _refuse_changed_attributes(twin: torch.optim.Optimizer, before: dict[str, Any]) -> None:
    for name, item in twin.__dict__.items():
        if name not in before or item is not before[name]:
            raise CaptureError(f"the optimizer's step changes its attribute {name!r}, which a captured step would not: keep it in `state`")


def same_program(one: Recorder, two: Recorder) -> bool:
    """Whether two recordings of a step differ in nothing but their stand-in numbers: then no hyper-parameter escaped the trace."""
    return len(one.nodes) == len(two.nodes) and all(map(_alike, one.nodes, two.nodes)) and _same_constants(one, two)


def _alike(one: Any, two: Any) -> bool:
    return one is two or (
        one.op == two.op and _shape_of(one.args) == _shape_of(two.args) and _shape_of(one.kwargs) == _shape_of(two.kwargs)
    )


def _shape_of(arg: Any) -> Any:
    """An argument with values by name, so that two recordings can be compared; repr tells 0.0 from -0.0 and nan equals itself."""
    if isinstance(arg, Value):
        return arg.name
    return tuple(_shape_of(item) for item in arg) if isinstance(arg, tuple) else repr(arg)


def _same_constants(one: Recorder, two: Recorder) -> bool:
    pairs = zip(one.constants, two.constants, strict=False)
    return len(one.constants) == len(two.constants) and all(a is b or (geometry(a) == geometry(b) and torch.equal(a, b)) for a, b in pairs)
