"""A compiled body's results are compared with torch's as torch.allclose compares them, block by block and without wide copies."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.regions import compilation

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
NUMBERS = (0.0, 1.0, -1.0, 1.004, 1.02, 5e4, -6e4, 1e-3, inf, -inf, nan)  # differences of the large ones are beyond float16


def by_torch(one: torch.Tensor, two: torch.Tensor) -> bool:
    if two.dtype is torch.bool:
        return torch.equal(one, two)
    finite = two[two.isfinite()].abs()
    most = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(one.double(), two.double(), rtol=compilation._NEAR, atol=compilation._NEAR * most, equal_nan=True)


@given(st.data())
def test_near_is_what_torch_calls_close(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    numbers = st.sampled_from(NUMBERS if dtype.is_floating_point else NUMBERS[:3])
    rows, columns = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    drawn = st.lists(numbers, min_size=rows * columns, max_size=rows * columns)
    two = torch.tensor(data.draw(drawn), dtype=torch.float64).to(dtype).reshape(rows, columns)
    one = two.clone() if data.draw(st.booleans()) else torch.tensor(data.draw(drawn), dtype=torch.float64).to(dtype).reshape(rows, columns)
    if one.numel() and data.draw(st.booleans()):
        one[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))] = data.draw(numbers)
    if data.draw(st.booleans()):
        one, two = one.t(), two.t()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "_BLOCK", data.draw(st.sampled_from([1, 2, 2**18])))
        assert compilation._near(one, two) == by_torch(one, two)
