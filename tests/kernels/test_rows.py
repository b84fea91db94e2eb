"""Rows added to a table by number, of which a part may be at hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.kernels import parts


@given(st.lists(st.integers(0, 19), max_size=30), st.integers(0, 19), st.integers(1, 20), st.sampled_from([torch.int32, torch.int64]))
def test_parts_are_what_the_whole_is(index, begin, count, dtype):
    table, where = torch.randn(20, 3, dtype=torch.float64), torch.tensor(index, dtype=torch.int64)
    added = torch.randn(len(index), 3, dtype=torch.float64)
    part, numbers = slice(begin, min(begin + count, 20)), torch.arange(20, dtype=dtype)
    expected = table.index_add(0, where, added)
    assert torch.equal(torch.ops.lowtide.add_rows(table, numbers, where, added), expected)
    assert torch.equal(torch.ops.lowtide.add_rows(table[part], numbers[part], where, added), expected[part])
    torch.ops.lowtide.add_rows_(table[part], numbers[part], where, added)
    assert torch.equal(table[part], expected[part])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_where_nothing_may_wait_what_is_left_out_adds_zeros(dtype, monkeypatch):
    class Elsewhere:
        type = "cuda"

    index, added = torch.tensor([3, 0, 7, 3]), torch.randn(4, 2).to(dtype)
    monkeypatch.setattr(torch.Tensor, "device", Elsewhere())
    place, given_rows = parts._at_hand(torch.arange(2, 5), index, added)
    assert place.tolist() == [1, 0, 2, 1]
    assert torch.equal(given_rows, torch.stack([added[0], torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype), added[3]]))
