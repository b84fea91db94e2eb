"""What looks of results mean: which strides count, and what a line of text may say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.ir.result_specs import ResultSpec, parse, same_strides, to_text


def made(shape, stride, dtype="float32", nbytes=4096):
    return ResultSpec(dtype, tuple(shape), tuple(stride), 0, nbytes, "cpu")


def test_strides_along_extents_of_1_and_of_nothing_do_not_count():
    assert made((3, 1), (1, 1)).is_like(made((3, 1), (1, 7)))
    assert made((0, 3), (3, 1)).is_like(made((0, 3), (1, 9)))
    assert not made((3, 2), (2, 1)).is_like(made((3, 2), (1, 3)))
    assert not made((3,), (1,)).is_like(made((3,), (1,), nbytes=4))
    assert not made((3,), (1,)).is_like(made((3,), (1,), dtype="int32"))


@given(st.lists(st.integers(1, 3), min_size=4, max_size=5), st.randoms(use_true_random=False))
def test_strides_that_count_the_same_lead_convolutions_the_same_way(shape, random):
    """Of images with an extent of 1, torch reads off all strides whether their channels lie last."""
    order = list(range(len(shape)))
    random.shuffle(order)
    one = torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    other = [stride if extent > 1 else random.randint(0, 9) for extent, stride in zip(shape, one.stride(), strict=True)]
    two = torch.empty_strided(shape, other)
    if same_strides(shape, one.stride(), two.stride()):
        assert torch.empty_like(one).stride() == torch.empty_like(two).stride() or _formats(one) == _formats(two)
        assert _suggested(one) == _suggested(two)


def _suggested(x):
    """The memory format that a convolution of x has."""
    conv = torch.nn.functional.conv2d if x.dim() == 4 else torch.nn.functional.conv3d
    weight = torch.ones([2, x.shape[1], *(1 for _ in x.shape[2:])])
    made = conv(x.fill_(1), weight)
    return [stride for stride, extent in zip(made.stride(), made.shape, strict=True) if extent > 1]


def _formats(x):
    return x.is_contiguous(), x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def test_results_come_back_from_text():
    results = (made((2, 3), (3, 1)), None, made((), ()))
    assert parse(to_text(results)) == results


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[1]", '[["float32", [2], [1], 0, 8]]', '[["os", [2], [1], 0, 8, "cpu"]]', '[["float32", [2], [1], 0, 4, "cpu"]]',
        '[["float32", [-2], [1], 0, 8, "cpu"]]', '[["float32", [2.0], [1], 0, 8, "cpu"]]', '[["float32", [2], [1, 1], 0, 8, "cpu"]]',
        '[["float32", [2], [1], 0, 8, "cpu; x"]]', '[["float32", [99999999999999999999], [0], 0, 8, "cpu"]]',
    ],
)  # fmt: skip
def test_a_text_that_says_no_results_is_refused(text):
    with pytest.raises(ValueError, match=r"[Ee]xpect"):
        parse(text)
