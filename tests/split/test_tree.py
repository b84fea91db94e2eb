"""Which sets may be split together."""

import pytest

from lowtide.errors import CheckError
from lowtide.ir.operators.axes import Axis
from lowtide.split.sets import FissionTree, SplitSet

_AXIS = Axis(8, (), ())


def region(*places: int, part: int = 0, units: int = 8) -> SplitSet:
    return SplitSet(part, dict.fromkeys(places, _AXIS), units, {}, (), {}, {})


def test_sets_are_split_that_lie_apart_and_have_the_units():
    tree = FissionTree.of([region(3, 4), region(2, part=1), region(0, 1, 2, 3)])
    assert [len(each.axes) for each in tree.regions] == [4, 2, 1]
    one = tree.enable(1, 4)
    assert (one.parts, one.split) == ((1, 4, 1), (1,))
    assert one.enable(2).split == (1, 2)
    with pytest.raises(CheckError, match="candidate 0 of 4 nodes cannot be enabled: expected nothing that is split to touch it"):
        one.enable(0)
    with pytest.raises(CheckError, match="cannot be enabled"):
        one.enable(1, 2)
    for parts in (1, 9):
        with pytest.raises(CheckError, match=f"cannot be split into {parts}: expected 2 to 8 parts"):
            tree.enable(0, parts)
