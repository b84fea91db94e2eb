"""Parts of tensors: which of them a process keeps, and their sums."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.kernels.parts import own_part, sum_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_are_added_in_their_order_and_nothing_is_written(count: int, dtype: torch.dtype):
    torch.manual_seed(0)
    given = torch.randn(count, 1000).to(dtype)
    expected, before = given[0], given.clone()
    for part in given[1:]:
        expected = expected + part
    made = sum_parts(given.view(-1), count)
    assert torch.equal(made, expected)
    assert torch.equal(given, before)
    assert made.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_a_part_is_filled_up_with_zeros():
    assert own_part(torch.ones(5), 2, "no group: the first part").tolist() == [1, 1, 1]
    assert own_part(torch.ones(1), 2, "no group: the first part").tolist() == [1]


def test_fakes_have_the_shapes_of_what_is_made():
    with FakeTensorMode():
        whole = torch.empty(12)
        assert torch.ops.lowtide.sum_parts(whole, 4).shape == (3,)
        assert torch.ops.lowtide.own_part(whole, 5, "").shape == (3,)
