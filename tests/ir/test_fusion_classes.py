"""Which operators are complex, simple, or unknown to a generator of kernels."""

import pytest

from lowtide.ir.operators.nodes import row_of
from lowtide.ir.operators.row import Fusion


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten.convolution.default", Fusion.COMPLEX),
        ("aten.addmm.default", Fusion.COMPLEX),
        ("aten.relu_.default", Fusion.ELEMENTWISE),
        ("aten.mul.Tensor", Fusion.ELEMENTWISE),
        ("aten.mean.dim", Fusion.SIMPLE),
        ("aten._softmax.default", Fusion.SIMPLE),
        ("aten.cumsum.default", Fusion.NONE),
        ("fission.loop", Fusion.NONE),
        ("other.relu.default", Fusion.NONE),
    ],
)
def test_what_an_operator_is(op: str, expected: Fusion):
    assert row_of(op).fusion is expected
