"""What a step watches is as it was, or is said not to be, whatever kind of container changed."""

from collections import OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from lowtide.runtime.unchanged.watch import Watch

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
