"""Which operators are complex, simple, or unknown to a generator of kernels."""

import pytest
import torch

from lowtide.ir.operators import fusion
from lowtide.ir.operators.fusion import Fusion, fusion_of, is_elementwise


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten.convolution.default", Fusion.COMPLEX),
        ("aten.addmm.default", Fusion.COMPLEX),
        ("aten.relu_.default", Fusion.SIMPLE),
        ("aten._softmax.default", Fusion.SIMPLE),
        ("aten.cumsum.default", Fusion.NONE),
        ("fission.loop", Fusion.NONE),
        ("other.relu.default", Fusion.NONE),
    ],
)
def test_what_an_operator_is(op: str, expected: Fusion):
    assert fusion_of(op) is expected


def test_every_name_is_an_operator_of_torch():
    names = fusion._COMPLEX | fusion._SIMPLE
    assert [name for name in sorted(names) if not hasattr(torch.ops.aten, name)] == []


def test_elementwise_ones_map_each_element():
    assert is_elementwise("aten.mul.Tensor")
    assert not is_elementwise("aten.mean.dim")
