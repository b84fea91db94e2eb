"""What these tests look at is generated, however fast it is on the machine that runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.api.networks import made


@pytest.fixture(scope="package", autouse=True)
def always_generated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "is_faster", lambda *_: True)
        yield
