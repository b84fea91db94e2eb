"""The step of an optimizer for all its parameters, as that for a few was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.capture.draft import Draft
from lowtide.capture.looks import another
from lowtide.capture.optimizers.alike import Few, NodeCopies, NotAlikeError, SampleGraph
from lowtide.capture.optimizers.optimizer import Shadow, Stepping, Update
from lowtide.capture.optimizers.scalars import is_traced
from lowtide.ir.graph import Value


@dataclass(frozen=True)
class Sample:
    """The step of a few parameters, as it was recorded."""

    few: Few
    stepping: Stepping
    since: int  # the first of its nodes
    bound: Mapping[torch.Tensor, Sequence[Value]]

    @classmethod
    def of(cls, few: Few, shadow: Shadow, draft: Draft, seed: int) -> Sample:
        """Record it in this draft. Raises NotAlikeError."""
        since, begun = len(draft.nodes), shadow.sampled(few.recorded).begin(draft, seed)
        bound = _bound(begun)
        return cls(few, begun.run(), since, bound)


def copied(sample: Sample, begun: Stepping) -> tuple[Update, Shadow]:
    """End a step of all parameters, which has begun, in the way of that for a few. Raises NotAlikeError."""
    few, recorded = sample.few, sample.stepping
    if not recorded.draft.is_as_plain_as(begun.draft) or recorded.changes_settings():
        raise NotAlikeError
    new_values = _made(recorded)
    kept = {value: parameter for (parameter, _), value in new_values.items()}
    recording = SampleGraph(few, recorded.draft, sample.since, sample.bound, kept)
    copies = NodeCopies(recording, begun.draft, _bound(begun), _by_slot(recorded.draft, begun.draft))
    for parameter, first in few.first.items():
        values, pairs = copies.of(parameter), [*zip(recorded.given(first), begun.given(parameter), strict=True)]
        for one, other in pairs:
            if isinstance(one, torch.Tensor):
                _renew(one, other, values, recorded.draft, begun.draft)
        mine = {id(one): other for one, other in pairs}
        for twin, its in zip(begun.twins.within, recorded.twins.within, strict=True):
            entries: Mapping[str, Any] | None = its.state.get(recorded.shadow.fakes[first])
            if entries is not None:
                twin.state[begun.shadow.fakes[parameter]] = {
                    key: mine.get(id(item), item) if (value := new_values.get((first, key))) is None else _entry(item, values[value], begun)
                    for key, item in entries.items()
                }
    return begun.end(few.facts(recorded.scalars.facts, begun.shadow.names))


def _bound(stepping: Stepping) -> dict[torch.Tensor, list[Value]]:
    return {each: [value for item in stepping.given(each) for value in _values(item, stepping.draft)] for each in stepping.parameters()}


def _values(item: Any, draft: Draft) -> Iterator[Value]:
    if not isinstance(item, torch.Tensor):
        yield item.value
    elif (content := draft.content(item)) is None:
        raise NotAlikeError
    else:
        yield from (draft.value(item), content)


def _made(recorded: Stepping) -> dict[tuple[torch.Tensor, str], Value]:
    """New state by parameter and key, where it is a tensor or a traced number."""
    new_values: dict[tuple[torch.Tensor, str], Value] = {}
    for parameter in recorded.parameters():
        known = {*map(id, recorded.given(parameter))}
        for twin in recorded.twins.within:
            for key, item in twin.state.get(recorded.shadow.fakes[parameter], {}).items():
                if is_traced(item) and id(item) not in known:
                    new_values[parameter, key] = item.value
                elif isinstance(item, torch.Tensor) and id(item) not in known:
                    if recorded.draft.owns(item) or recorded.draft.content(item) is not (value := recorded.draft.value(item)):
                        raise NotAlikeError
                    new_values[parameter, key] = value
    if len({*new_values.values()}) < len(new_values):  # one in two places
        raise NotAlikeError
    return new_values


def _renew(one: torch.Tensor, other: torch.Tensor, values: Mapping[Value, Value], recorded: Draft, draft: Draft) -> None:
    """What was written is what it has become."""
    content = recorded.content(one)
    if content is None or content not in values:
        raise NotAlikeError
    if values[content] is not draft.content(other):
        draft.renew(other, values[content])


def _entry(item: Any, value: Value, begun: Stepping) -> Any:
    if is_traced(item):
        return begun.scalars.traced(value)
    begun.draft.keep(tensor := another(item), value)
    return tensor


def _by_slot(one: Draft, other: Draft) -> dict[Value, Value]:
    """The values of an optimizer's settings in one draft, by those in another."""
    mine = {slot: value for slot, value in zip(other.slots, other.inputs, strict=True) if slot.table == "group"}
    return {value: mine[slot] for slot, value in zip(one.slots, one.inputs, strict=True) if slot.table == "group"}
