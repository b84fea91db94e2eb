"""What dictionaries hold is compared by identity: every change is seen, and nothing that is held is asked anything."""

from collections import OrderedDict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lowtide.base.identity import Held


class _Touchy:
    """An object that may not be compared or counted."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = object.__hash__


@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers(), max_size=5), max_size=5), st.data())
def test_any_change_is_seen(dictionaries: list[dict[str, Any]], data: st.DataObject) -> None:
    held = Held(dictionaries)
    assert held.same()
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
    assert not held.same()
    changed.clear()
    changed.update(was)
    assert held.same()


def test_equal_is_not_the_same() -> None:
    each = {"scale": 1.0, "touchy": _Touchy()}
    held = Held([each, OrderedDict(a=1)])
    assert held.same()
    each["scale"] = 1
    assert not held.same()
    each["touchy"] = _Touchy()
    assert not held.same()


def test_an_entry_of_one_dictionary_does_not_stand_for_one_of_the_next() -> None:
    one: dict[str, int] = {"a": 1}
    two: dict[str, int] = {}
    held = Held([one, two])
    two["a"] = one.pop("a")
    assert not held.same()
