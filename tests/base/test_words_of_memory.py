"""Words of memory: what they tell of Python's objects, and that nothing goes unseen."""

from collections import ChainMap, OrderedDict, deque
from types import MappingProxyType
from typing import Any

import pytest

from lowtide.base.identity import Held
from lowtide.base.words import Words, dictionary_of, length_of, python_is_known, tag_of, tags_are_known, type_of

pytestmark = pytest.mark.skipif(not python_is_known(), reason="this Python keeps its objects otherwise")


@pytest.mark.parametrize("container", [{}, OrderedDict(), [], deque(), set()], ids=lambda each: type(each).__name__)
def test_what_is_put_into_a_container_is_seen(container: Any):
    words = Words([length_of(container)])
    assert words.same()
    fill = next(getattr(container, name) for name in ("append", "add", "update") if hasattr(container, name))
    fill({1: 2} if isinstance(container, dict) else 1)
    assert not words.same()
    words.renew()
    assert words.same()
    container.clear()
    assert not words.same()


def test_another_class_is_seen():
    class One: ...

    class Two: ...

    thing = One()
    words = Words([type_of(thing)])
    assert words.same()
    thing.__class__ = Two  # type: ignore[assignment]
    assert not words.same()


@pytest.mark.skipif(not tags_are_known(), reason="dictionaries of this Python do not number their changes")
def test_each_change_of_a_dictionary_has_a_number():
    held = {"a": 1.5, "b": 2.5}
    words = Words([tag_of(held)])
    held.get("a"), held["b"], list(held)
    assert words.same()
    for change in (lambda: held.update(a=3.5), lambda: held.pop("b"), lambda: held.setdefault("c", 1), held.clear):
        change()
        assert not words.same()
        words.renew()


@pytest.mark.skipif(not tags_are_known(), reason="dictionaries of this Python do not number their changes")
def test_a_change_of_a_class_is_seen():
    class Thing:
        size = 1

    held = Held([vars(Thing)])
    assert held.same()
    Thing.size = 2
    assert not held.same()
    Thing.size = 1
    assert held.same()
    Thing.other = 3  # type: ignore[attr-defined]
    assert not held.same()


def test_a_view_of_something_else_is_none():
    assert dictionary_of(MappingProxyType(ChainMap())) == 0
