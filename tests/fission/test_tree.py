"""Trees of fission stay legal under every mutation."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import CheckError
from lowtide.fission.regions import Region
from lowtide.fission.tree import FissionTree
from lowtide.ir.operators.axes.axis import Axis

_AXIS = Axis(8, (), ())


def region(*places: int, part: int = 0, units: int = 8) -> Region:
    return Region(part, dict.fromkeys(places, _AXIS), units, {}, (), {}, {})


@given(st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_mutations_keep_a_tree_legal(seed):
    rng = random.Random(seed)
    regions = [
        region(*range(first := rng.randrange(8), rng.randint(first + 1, 9)), part=rng.randrange(2), units=rng.choice([2, 5, 8]))
        for _ in range(7)
    ]
    tree = FissionTree.of(regions)
    for _ in range(8):
        _check(tree)
        ways = list(tree.mutations())
        if not ways:
            break
        name, number, after = rng.choice(ways)
        changed = {each for each, (old, new) in enumerate(zip(tree.parts, after.parts, strict=True)) if old != new}
        assert changed == ({number, tree.parents[number]} if name == "lift" else {number})
        tree = after


def _check(tree: FissionTree) -> None:
    """By all pairs."""
    for number in tree.split:
        mine = tree.regions[number]
        total = tree.parts[number]
        for other in tree.split:
            theirs = tree.regions[other]
            if other != number:
                assert not mine.places & theirs.places or mine.places <= theirs.places or theirs.places <= mine.places
                inside = mine.places < theirs.places or (mine.places == theirs.places and other < number)
                total *= tree.parts[other] if inside and mine.component == theirs.component else 1
        assert 1 < total <= mine.units


def test_each_mutation():
    tree = FissionTree.of([region(0, 1, 2, 3), region(1, 2), region(3, 4), region(2, part=1)])
    assert tree.parents == (-1, 0, -1, 1)
    one = tree.enable(1)
    assert one.parts == (1, 2, 1, 1)
    with pytest.raises(CheckError, match="cannot be enabled: expected nothing that is split to touch it"):
        one.enable(0)
    assert one.nest(3).parts == (1, 2, 1, 2)
    assert one.nest(3).disable(3).parts == one.parts
    with pytest.raises(CheckError, match="no split one within"):
        one.nest(3).disable(1)
    assert one.lift(1).parts == (2, 1, 1, 1)
    with pytest.raises(CheckError, match="cannot be lifted"):
        one.lift(1).lift(0)
    with pytest.raises(CheckError, match="lie apart or within one another"):
        tree.enable(0)._with(2, 2)
    assert one.divide(1, 8).parts == (1, 8, 1, 1)
    with pytest.raises(CheckError, match="2 to 8 parts"):
        one.divide(1, 9)
    with pytest.raises(CheckError, match="split into 16"):
        one.divide(1, 4).nest(0, 4)
