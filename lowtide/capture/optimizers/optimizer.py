"""Capturing an optimizer's step from its own code, whatever the optimizer.

A shadow of the optimizer (same class, same settings, fake parameters and state, traced hyper-parameters) takes a step while the
recorder listens. Nothing is known here of SGD or Adam: what is not traceable in an optimizer is found by tracing it, and what
escapes the trace by tracing it twice with other stand-in numbers and comparing the two programs.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.places import ABSENT
from lowtide.base.skeleton import Keys, Skeleton, copied, leaves, mapped
from lowtide.capture.blocks import address, covers, geometry
from lowtide.capture.data.facts import Reader
from lowtide.capture.draft import Draft
from lowtide.capture.optimizers.changes import Changes, differ, within
from lowtide.capture.optimizers.derived_numbers import UnknownNumberError, content_of
from lowtide.capture.optimizers.own_code import KEPT, attributes, containers_kept, own_attributes, refuse_undeclared, run
from lowtide.capture.optimizers.refusals import containers_in, described, is_beside, refuse_kind, refuse_shared_containers, refuse_strangers
from lowtide.capture.optimizers.scalars import Fact, Guard, Scalars, is_traced
from lowtide.capture.optimizers.wrappers import begin, refuse_unknown_step
from lowtide.errors import CaptureError
from lowtide.ir.graph import Kind, Slot, Value
from lowtide.kernels.optimizers import Optimizers, each_of

# Attributes that some step of an optimizer changes, in the order in which that was seen.
_moving: WeakKeyDictionary[torch.optim.Optimizer, dict[str, None]] = WeakKeyDictionary()
LEAST_BYTES = 2**16  # state that is smaller stays on the device between steps, whatever is asked for


Early: TypeAlias = "tuple[Slot, int | None, Any]"  # a slot, and which of what is assigned goes there, or else this constant


@dataclass(frozen=True)
class Update:
    """What an optimizer's step leaves behind: new state to be put into slots, and the guards under which its program is right."""

    assigned: tuple[tuple[Slot, Value], ...] = ()
    constants: tuple[tuple[int, Slot, Any], ...] = ()  # flags, None and texts for slots, and how many of `assigned` come before
    guards: tuple[Fact, ...] = ()
    state_entries: int = 0  # before the step, of all parameters together
    early: tuple[Early, ...] | None = None  # what goes into slots where the step ends early; None where it does not


@dataclass(frozen=True)
class Shadow:
    """The state of an optimizer in fake tensors: what its next step starts from."""

    optimizer: torch.optim.Optimizer
    names: Mapping[torch.Tensor, str]  # of the real parameters
    fakes: Mapping[torch.Tensor, torch.Tensor]  # of the real parameters
    state: Mapping[torch.Tensor, Mapping[str, Any]]  # by real parameter; fake tensors and numbers
    own: Mapping[Slot, Any]  # what is kept for no parameter, by where: state under a text, or an attribute that steps change
    settings: Mapping[tuple[int, str], Any]  # by group and key; those that a step before has changed
    contents: Mapping[int, Any]  # by id of a fake tensor of one element: the number in it, where that is known
    beside: int = 0  # entries of parameters that are none of the model's, which stay as they are
    single_tensor: bool = False  # whether `foreach` and `fused` are left aside: each parameter by the formulas of one tensor
    sample: frozenset[torch.Tensor] | None = None  # the only parameters that it updates; all where None

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        fakes: Mapping[torch.Tensor, torch.Tensor],
        draft: Draft,
        *,
        between_steps: bool = False,
    ) -> Shadow:
        """With `between_steps`, what lies on the host is taken to be where its parameter is."""
        for each in each_of(optimizer):
            begin(each)
            refuse_unknown_step(each)
            refuse_kind(each)
        refuse_strangers(optimizer, names)
        state: dict[torch.Tensor, dict[str, Any]] = {}
        own: dict[Slot, Any] = {}
        contents: dict[int, Any] = {}
        beside = 0
        refuse_shared_containers(optimizer)

        def faked(entries: Any, slot: Slot, device: torch.device | None) -> Any:
            fake = mapped(lambda path, leaf: _fake_state(leaf, draft, within(slot, path), device), entries)
            pairs = zip(leaves(fake), leaves(entries), strict=True)
            contents.update({id(one): item for (_, one), (_, item) in pairs if isinstance(item, torch.Tensor)})
            return fake

        for number, each in enumerate(each_of(optimizer)):
            for key, entries in each.state.items():
                if is_beside(key, names):
                    beside += len(entries)
                elif isinstance(key, str):
                    slot = Slot("optimizer", (number, "state", key))
                    own[slot] = faked(entries, slot, None)
                else:
                    device = fakes[key].device if between_steps else None
                    state[key] = faked(dict(entries), Slot("state", (names[key],)), device)
            for name, item in own_attributes(each).items():
                if type(item) is torch.Tensor and item not in names:  # it may be written where it lies
                    slot = Slot("optimizer", (number, name))
                    own[slot] = faked(item, slot, None)
        shadow = cls(optimizer, names, fakes, state, own, {}, contents, beside)
        return shadow.with_attributes(moving(optimizer), draft)

    @property
    def is_of_torch(self) -> bool:
        return all(f"{type(each).__module__}.".startswith("torch.optim.") for each in each_of(self.optimizer))

    def kinds(self) -> dict[Any, torch.Tensor] | None:
        """A parameter of each kind, where the optimizer is torch's own, which treats all of a kind alike; else None."""
        if not self.is_of_torch:
            return None
        kinds: dict[Any, torch.Tensor] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if not is_beside(parameter, self.names):
                    kinds.setdefault((index, *self._kind(parameter)), parameter)
        return kinds

    def _kind(self, parameter: torch.Tensor) -> Iterator[Any]:
        """What torch's optimizers look at before they decide."""
        fake = self.fakes[parameter]
        yield from (fake.dtype, fake.device, fake.layout, fake.dim(), min(fake.numel(), 2), fake.requires_grad, fake.grad is None)
        for key, item in self.state.get(parameter, {}).items():
            yield key, type(item), item.dtype if isinstance(item, torch.Tensor) else None
            with suppress(UnknownNumberError):
                yield content_of(self.contents.get(id(item), item))

    def manner(self) -> tuple[Any, ...]:
        """What decides beside that: the classes, and what is set."""
        groups = ({**group, **self.settings_of(index)} for index, group in enumerate(self.optimizer.param_groups))
        settings = tuple(tuple((key, _content(item)) for key, item in group.items() if key != "params") for group in groups)
        classes = tuple((type(each), type(each).step) for each in each_of(self.optimizer))
        return classes, self.single_tensor, torch.get_default_dtype(), settings

    def settings_of(self, index: int) -> dict[str, Any]:
        """What a step before has changed in a group."""
        return {key: item for (where, key), item in self.settings.items() if where == index}

    def sampled(self, sample: frozenset[torch.Tensor]) -> Shadow:
        """One that updates these parameters alone."""
        return replace(self, sample=sample, state={each: entries for each, entries in self.state.items() if each in sample})

    def keys_of_looks(self, draft: Draft) -> dict[torch.Tensor, tuple[int, Any]]:
        """The group of each parameter and what torch's own optimizers see of it, in their order; nothing where more than that counts."""
        keys: dict[torch.Tensor, tuple[int, Any]] = {}
        tensors: list[torch.Tensor] = []
        for index, group in enumerate(self.optimizer.param_groups if self.is_of_torch else ()):
            for parameter in group["params"]:
                if not is_beside(parameter, self.names):
                    fake = self.fakes[parameter]
                    mine = [item for item in (fake, fake.grad) if item is not None]
                    roots = [draft.content(each) for each in mine]
                    if None in roots:
                        return {}
                    memory = [(root.storage.kind, root.dtype, root.shape, root.stride, root.version) for root in roots if root is not None]
                    mine += [item for item in self.state.get(parameter, {}).values() if isinstance(item, torch.Tensor)]
                    lie = [(geometry(each), each.device) for each in mine]
                    keys[parameter] = (index, (type(parameter), *self._kind(parameter), *memory, *lie))
                    tensors += mine
        return keys if len(set(map(address, tensors))) == len(tensors) and all(map(covers, tensors)) else {}

    def attributes(self, number: int) -> dict[str, Slot]:
        """Those of one of the optimizers that a step is given."""
        return {str(slot.path[1]): slot for slot in self.own if slot.path[0] == number and len(slot.path) == 2}

    def with_attributes(self, slots: Iterable[Slot], draft: Draft) -> Shadow:
        """One whose steps are given these attributes of its optimizer."""
        own = dict(self.own)
        for slot in (slot for slot in slots if slot not in self.own):
            optimizer, name = each_of(self.optimizer)[int(slot.path[0])], slot.path[1]
            _moving.setdefault(optimizer, {})[str(name)] = None
            item = own_attributes(optimizer).get(str(name), getattr(type(optimizer), str(name), ABSENT))
            own[slot] = item if item is ABSENT else mapped(partial(_faked_at, draft, slot), item)
        changed = replace(self, own=own)
        refuse_shared_containers(self.optimizer, changed.attributes)
        return changed

    def begin(self, draft: Draft, seed: int, reader: Reader | None = None, assumed: bool | None = None) -> Stepping:
        """`reader` and `assumed` as for Scalars."""
        scalars = Scalars(draft, seed, reader, assumed, of_torch=self.is_of_torch)
        shown = [self._group(index, scalars) for index in range(len(self.optimizer.param_groups))]
        start = {each: self._declared(entries, Slot("state", (self.names[each],)), draft, scalars) for each, entries in self.state.items()}
        own = {slot: self._declared(item, slot, draft, scalars) for slot, item in self.own.items() if item is not ABSENT}
        groups = [copied(group) for group in shown]
        twins = Optimizers([self._twin(number, shown, start, own) for number in range(len(each_of(self.optimizer)))])
        return Stepping(self, draft, scalars, start, own, groups, twins)

    def refuse_shared(self, index: int, key: str) -> None:
        """Raise CaptureError where groups have one list together, which the step has changed: each group's own would not be the others'."""
        mine = {*containers_in(self.optimizer.param_groups[index].get(key))}
        settings = [(other, name, item) for other, group in enumerate(self.optimizer.param_groups) for name, item in group.items()]
        others = (item for other, name, item in settings if name != "params" and (other, name) != (index, key))
        if any(not mine.isdisjoint(containers_in(item)) for item in others):
            raise CaptureError(f"the optimizer's step changes the list {key!r}, which its groups share: give each group one of its own")

    def _twin(
        self, number: int, shown: list[dict[str, Any]], start: Mapping[torch.Tensor, Mapping[str, Any]], own: Mapping[Slot, Any]
    ) -> torch.optim.Optimizer:
        """One of the optimizers with the first of the groups, which are taken from the list, and the state of their parameters."""
        optimizer = each_of(self.optimizer)[number]
        twin = object.__new__(type(optimizer))  # copy.copy would leave out what a class of the user's own keeps
        own_attributes(twin).update(own_attributes(optimizer))
        twin.param_groups = [shown.pop(0) for _ in optimizer.param_groups]
        twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        others = {
            id(item) for each in each_of(self.optimizer) if each is not optimizer for group in each.param_groups for item in group["params"]
        }
        mine = {parameter: entries for parameter, entries in start.items() if id(parameter) not in others}
        of_texts = [slot for slot in own if slot.path[0] == number and len(slot.path) == 3]
        twin.state = defaultdict(dict, {self.fakes[parameter]: copied(entries) for parameter, entries in mine.items()})
        twin.state.update({slot.path[2]: copied(own[slot]) for slot in of_texts})  # type: ignore[misc]  # no tensor is the key
        own_attributes(twin).update({name: copied(own[slot]) for name, slot in self.attributes(number).items() if slot in own})
        return twin

    def _group(self, index: int, scalars: Scalars) -> dict[str, Any]:
        """A parameter group with fake parameters and traced numbers."""
        group: dict[str, Any] = {}
        for key, item in {**self.optimizer.param_groups[index], **self.settings_of(index)}.items():
            if key == "params":
                updated = item if self.sample is None else filter(self.sample.__contains__, item)
                group[key] = [self.fakes[parameter] for parameter in updated if not is_beside(parameter, self.names)]
            elif self.single_tensor and key in ("foreach", "fused"):
                group[key] = False
            elif key == "initial_lr":  # a scheduler's note to itself
                group[key] = item
            else:
                group[key] = _traced(item, Slot("group", (index, key)), scalars)
        return group

    def _declared(self, entries: Any, slot: Slot, draft: Draft, scalars: Scalars) -> Any:
        """State as inputs of the program: the same containers around fake tensors and traced numbers."""

        def declared(path: Keys, leaf: Any) -> Any:
            place = within(slot, path)
            name = ".".join(map(str, place.path))
            if not isinstance(leaf, torch.Tensor):
                return scalars.root(place, leaf, name)
            scalars.learn(draft.add_input(leaf, place, Kind.STATE, name), self.contents.get(id(leaf)))
            return leaf

        for key, item in entries.items() if slot.table == "state" else ():
            scalars.hold(within(slot, (key,)), item)
        if slot.table != "state":
            scalars.hold(slot, entries)
        return mapped(declared, entries)

    def after(self, stepping: Stepping, changes: Changes) -> tuple[dict[Any, Any], dict[Slot, Any]]:
        """State after the step, by real parameter, in the order in which the optimizer made it: `state_dict` shows it; and its own."""
        real = {fake: parameter for parameter, fake in self.fakes.items()}
        state: dict[Any, Any] = {}
        own: dict[Slot, Any] = {}
        there = {id(key) if isinstance(key, torch.Tensor) else key for twin in stepping.twins.within for key in twin.state}
        gone = [self.names[each] for each in stepping.start if id(self.fakes[each]) not in there]
        gone += [str(slot.path[2]) for slot in stepping.own if len(slot.path) == 3 and slot.path[2] not in there]
        if gone:
            raise CaptureError(f"the optimizer removes its state of {gone[0]}, which cannot be captured: set its entries to None")
        for number, twin in enumerate(stepping.twins.within):
            for name, slot in self.attributes(number).items():
                own[slot] = changes.of_own(slot, stepping.own.get(slot, ABSENT), own_attributes(twin).get(name, ABSENT))
            for key, entries in twin.state.items():
                if isinstance(key, str):
                    slot = Slot("optimizer", (number, "state", key))
                    own[slot] = changes.of_own(slot, stepping.own.get(slot, ABSENT), entries)
                elif (parameter := real.get(key)) is None:
                    raise CaptureError(
                        f"the optimizer keeps state under {described(key)}, which is no parameter of the model: keep it under the "
                        "parameters, or under a text"
                    )
                else:
                    slot = Slot("state", (self.names[parameter],))
                    state[parameter] = changes.of_state(slot, stepping.start.get(parameter, {}), entries)
        return state, own


@dataclass(frozen=True)
class Stepping:
    """A step of an optimizer that is being recorded."""

    shadow: Shadow
    draft: Draft
    scalars: Scalars
    start: Mapping[torch.Tensor, Mapping[str, Any]]  # by real parameter: its state before the step, in fake tensors and traced numbers
    own: Mapping[Slot, Any]  # the same of state that is no parameter's
    groups: list[dict[str, Any]]
    twins: Optimizers

    def run(self) -> Stepping:
        for number, twin in enumerate(self.twins.within):
            before = attributes(twin)
            with containers_kept(each_of(self.shadow.optimizer)[number]):
                run(twin, self.scalars)
                refuse_undeclared(number, twin, before, self.shadow.own)
        return self

    def end(self, facts: Iterable[Fact] = ()) -> tuple[Update, Shadow]:
        """What the step has come to. `facts`: on which it rests beside those that it was recorded with."""
        gradients = {address(fake.grad) for fake in self.shadow.fakes.values() if fake.grad is not None}
        shadow, changes = self.shadow, Changes(self.draft, self.scalars, gradients)
        refuse_shared_containers(self.twins)
        state, own = shadow.after(self, changes)
        settings = {(index, key): item for index, key, item in changes.of_settings(self.groups, self.twins.param_groups)}
        for index, key in settings:
            shadow.refuse_shared(index, key)
        facts = dict.fromkeys((*facts, *self.scalars.facts))
        guards = (*facts, *(Guard(slot, "absent", None, True) for slot in changes.added))
        entries = shadow.beside + sum(map(len, shadow.state.values())) + sum(len(slot.path) == 3 for slot in shadow.own)
        update = Update(tuple(changes.assigned), tuple(changes.constants), guards, entries)
        return update, replace(shadow, state=state, own=own, settings={**shadow.settings, **settings}, contents=changes.contents)

    def parameters(self) -> Iterator[torch.Tensor]:
        """The real ones, in the optimizer's order."""
        real = {id(fake): parameter for parameter, fake in self.shadow.fakes.items()}
        for group in self.twins.param_groups:
            yield from (real[id(fake)] for fake in group["params"])

    def given(self, parameter: torch.Tensor) -> list[Any]:
        """A parameter, its gradient and its state before the step: fake tensors and traced numbers."""
        fake = self.shadow.fakes[parameter]
        items = (fake, fake.grad, *self.start.get(parameter, {}).values())
        return [item for item in items if isinstance(item, torch.Tensor) or is_traced(item)]

    def changes_settings(self) -> bool:
        """Whether it has changed what is set for a group."""
        return any(differ(old, new) for old, new in zip(self.groups, self.twins.param_groups, strict=True))


def moving(optimizer: torch.optim.Optimizer) -> list[Slot]:
    """Attributes that a step of it was seen to change."""
    return [Slot("optimizer", (number, name)) for number, each in enumerate(each_of(optimizer)) for name in _moving.get(each, ())]


def _content(item: Any) -> Any:
    if isinstance(item, (tuple, list)):
        return tuple(map(_content, item))
    with suppress(UnknownNumberError):
        return type(item), content_of(item)
    return (item.dtype, item.device, item.dim()) if isinstance(item, torch.Tensor) else repr(item)


def _traced(item: Any, slot: Slot, scalars: Scalars) -> Any:
    skeleton = Skeleton.of(item)
    if skeleton is not None:
        if skeleton.kind is not tuple and len(slot.path) == 2:
            scalars.hold(slot, item)
        return skeleton.filled([_traced(each, within(slot, (key,)), scalars) for key, each in skeleton.entries(item)])
    if isinstance(item, torch.Tensor):
        fake = item if isinstance(item, FakeTensor) else scalars.draft.fake_mode.from_tensor(item)
        scalars.learn(scalars.draft.add_input(fake, slot, Kind.STATE, ".".join(map(str, slot.path))), item)
        return fake
    return scalars.root(slot, item, str(slot.path[1]))


def _faked_at(draft: Draft, slot: Slot, path: Keys, item: Any) -> Any:
    return _fake_state(item, draft, within(slot, path), None)


def _fake_state(item: Any, draft: Draft, slot: Slot, device: torch.device | None) -> Any:
    if isinstance(item, torch.Tensor):
        if item.device.type == "meta":
            raise CaptureError(f"the optimizer's {slot} is on the meta device: create the optimizer anew")
        if device is not None and item.is_cpu and item.untyped_storage().nbytes() >= LEAST_BYTES:  # it goes there within a step
            with draft.fake_mode:
                return torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device=device)
        return draft.fake_mode.from_tensor(item)
    if isinstance(item, KEPT):
        return item
    raise CaptureError(
        f"the optimizer's {slot} holds a {type(item).__name__}; tensors and numbers can be captured, and lists and dictionaries of them"
    )
