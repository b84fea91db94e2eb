"""Placers as text: the same grammar as that of schedulers, with placers of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lowtide.cli.solvers import PLACERS, parse_placer
from lowtide.errors import FormatError
from lowtide.placement.auto import Auto
from lowtide.placement.base import Placer, limited
from lowtide.placement.exact import Exact
from lowtide.placement.greedy import Greedy, Portfolio


@pytest.mark.parametrize(
    ("text", "placer"),
    [
        ("auto", Auto()),
        ("exact{max_nodes=1000,max_seconds=2.5}", Exact(max_nodes=1000, max_seconds=2.5)),
        ("greedy{order=start,fit=best}", Greedy("start", "best")),
        ("portfolio{max_moves=0}", Portfolio(max_moves=0)),
    ],
)
def test_what_is_read(text: str, placer: Placer) -> None:
    assert parse_placer(text, PLACERS) == placer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exat", "expected one of auto, exact, greedy, portfolio; got 'exat'"),
        ("exact{", r"got the end: write it like exact\{max_nodes=1000,max_seconds=2\.5\}"),
        ("exact{max_states=3}", "solver exact: expected settings among max_nodes, .*, got 'max_states'"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_placer(text, PLACERS)


@pytest.mark.parametrize("name", PLACERS)
def test_every_placer_can_be_named_and_its_settings_given_as_text(name: str) -> None:
    assert isinstance(parse_placer(name, PLACERS), PLACERS[name])
    with pytest.raises(FormatError, match=f"solver {name}: expected settings"):
        parse_placer(f"{name}{{no_such_setting=1}}", PLACERS)


def test_limits_replace_settings_where_there_are_such() -> None:
    assert limited(Exact(), max_nodes=5, max_seconds=0.5) == Exact(max_nodes=5, max_seconds=0.5)
    assert limited(Auto(), max_nodes=5) == Auto(max_nodes=5)
    assert limited(Greedy()) == Greedy()


@pytest.mark.parametrize(
    ("placer", "limits", "message"),
    [
        (Greedy(), {"max_nodes": 5}, "Greedy: expected a solver that can be limited by max_nodes, got .* settings among order, fit"),
        (Exact(), {"max_nodes": 0}, "expected max_nodes to be more than 0, got 0"),
        (Auto(), {"max_seconds": math.nan}, "expected max_seconds to be more than 0, got nan"),
    ],
)
def test_limits_that_a_placer_cannot_have(placer: Placer, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        limited(placer, **limits)
