"""What a step watches is as it was, or is said not to be, whatever kind of container changed."""

from collections import OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowtide.runtime.tokens import Watch

_BEHIND = {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("container", "change"),
    [
        ({"a": 1, "b": 2}, lambda each: each.update(a=3)),
        (OrderedDict(a=1, b=2), lambda each: each.update(a=3)),
        (OrderedDict(a=1, b=2), lambda each: each.move_to_end("a")),
        ([1, 2], lambda each: each.reverse()),
        (deque([1, 2]), lambda each: each.rotate()),
        (MappingProxyType(_BEHIND), lambda _: _BEHIND.update(b=5)),
        ({}, lambda each: each.update(a=3)),
    ],
    ids=["put", "put in order", "moved", "list", "deque", "proxy", "empty"],
)
def test_a_change_of_a_container_is_seen(container: Any, change: Callable[[Any], Any]) -> None:
    watch = Watch()
    watch.container(container)
    watch.container([0])
    watch.sealed()
    assert watch.same()
    change(container)
    assert not watch.same()


def _watch(*containers: Any) -> Watch:
    watch = Watch()
    for each in containers:
        watch.container(each)
    return watch.sealed()


class _Touchy:
    """An object that may not be compared or counted."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = object.__hash__


@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers(), max_size=5), max_size=5), st.data())
def test_any_change_is_seen(dictionaries: list[dict[str, Any]], data: st.DataObject) -> None:
    watch = _watch(*dictionaries)
    assert watch.same()
    if not dictionaries:
        return
    changed = data.draw(st.sampled_from(dictionaries))
    was = dict(changed)
    change = data.draw(st.sampled_from(["put", "add", "take", "turn"]))
    if change == "put" and changed:
        changed[data.draw(st.sampled_from(sorted(changed)))] = object()
    elif change == "take" and changed:
        del changed[data.draw(st.sampled_from(sorted(changed)))]
    elif change == "turn" and len(changed) > 1:
        first = next(iter(changed))
        changed[first] = changed.pop(first)
    else:
        changed["some more"] = None
    assert not watch.same()
    changed.clear()
    changed.update(was)
    assert watch.same()


def test_equal_is_not_the_same() -> None:
    each = {"scale": 1.0, "touchy": _Touchy()}
    watch = _watch(each, OrderedDict(a=1))
    assert watch.same()
    each["scale"] = 1
    assert not watch.same()
    each["touchy"] = _Touchy()
    assert not watch.same()


def test_another_name_for_the_same_is_seen() -> None:
    each: dict[str, Any] = {"one": None}
    watch = _watch(each)
    each["two"] = each.pop("one")
    assert not watch.same()


def test_an_entry_of_one_dictionary_does_not_stand_for_one_of_the_next() -> None:
    one: dict[str, int] = {"a": 1}
    two: dict[str, int] = {}
    watch = _watch(one, two)
    two["a"] = one.pop("a")
    assert not watch.same()


def test_another_class_of_a_module_and_another_attribute_of_a_class_are_seen() -> None:
    class One(nn.Module):
        size = 1

    class Two(nn.Module): ...

    module = One()
    watch = Watch()
    watch.module(module)
    watch.container(vars(One))
    assert watch.sealed().same()
    One.size = 2
    assert not watch.same()
    One.size = 1
    assert watch.same()
    module.__class__ = Two  # type: ignore[assignment]
    assert not watch.same()
