"""Kernels are generated, and run by as many threads as are asked for, however fast that is on the machine that runs the tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from lowtide.cpu.build import networks as made
from lowtide.cpu.build.executable import NetworkCalls
from lowtide.cpu.choice import Joins, chosen


@pytest.fixture(scope="package", autouse=True)
def always_generated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "is_faster", lambda *_: True)
        patch.setattr(made, "tuned", lambda bare, *_: chosen(bare.stages, bare.body, bare.known, Joins.BEST))
        patch.setattr(made, "NetworkCalls", partial(NetworkCalls, always=True))
        yield
