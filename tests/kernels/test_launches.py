"""The rows of lowtide's own operators say what these are composed of: how many kernels, how many bytes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.ir.graph import Kind, Node, Storage, Value
from lowtide.ir.operators.own import ROWS
from lowtide.ir.operators.row import Collective
from lowtide.kernels import bits, layers, parts

COUNT = 4 * bits._BLOCK
_MADE = ("empty", "new_empty", "empty_like", "empty_strided", "zeros", "ones", "tensor", "detach", "arange", "_local_scalar_dense")


class Counted(TorchDispatchMode):
    """What runs on tensors of many elements, and the bytes of those."""

    launches = moved_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name, tensors = func._schema.name.split("::")[1], torch.utils._pytree.tree_leaves((args, kwargs, made))
        large = {id(each): each for each in tensors if isinstance(each, torch.Tensor) and each.numel() >= COUNT // 8}
        is_view = any(returned.alias_info is not None and not returned.alias_info.is_write for returned in func._schema.returns)
        if large and name not in _MADE and not is_view:
            self.launches += 1
            self.moved_bytes += sum(each.numel() * each.element_size() for each in large.values() if 0 not in each.stride())
        return made


X, DRAWN = torch.randn(COUNT), torch.empty(COUNT).bernoulli_(0.5)
PACKED = bits.pack_bits(DRAWN)
POOLED, INDICES = torch.nn.functional.max_pool2d(X.view(16, -1, 64, 64), 2, return_indices=True)
PLACES = layers.pool_places(INDICES, [64, 64], [2, 2], [0, 0], torch.uint8)
CALLS = {
    "pack_bits": (bits.pack_bits, (DRAWN,)),
    "pack_positive": (bits.pack_positive, (X,)),
    "unpack_bits": (bits.unpack_bits, (PACKED, [COUNT], [1])),
    "masked": (bits.masked, (X, PACKED)),
    "masked_mul": (bits.masked_mul, (X, PACKED, 0.5)),
    "pool_places": (layers.pool_places, (INDICES, [64, 64], [2, 2], [0, 0], torch.uint8)),
    "layer_norm_backward": (layers.layer_norm_backward, (X.view(-1, 64), X.view(-1, 64), X[::64].contiguous().view(-1, 1))),
    "cross_entropy_backward": (
        layers.cross_entropy_backward,
        (X[0], X.view(-1, 64), torch.zeros(COUNT // 64, dtype=torch.int64), None, 1, -100, X[1]),
    ),
    "add_rows": (parts.add_rows, (X.view(-1, 64), torch.arange(COUNT // 64), torch.arange(8), X.view(-1, 64)[:8])),
    "own_part": (parts.own_part, (X, 2, "")),
    "max_pool2d_backward": (layers.max_pool2d_backward, (POOLED, PLACES, [64, 64], [2, 2], [2, 2], [0, 0], [1, 1], False)),
}


def value(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Value("x", Storage("x", tensor.nbytes, "cuda", Kind.ACTIVATION), dtype, tuple(tensor.shape), tensor.stride())


@pytest.mark.parametrize("row", [row for row in ROWS if row.collective is Collective.NONE], ids=lambda row: row.name)
def test_a_row_is_what_it_does(row, monkeypatch):
    function, args = CALLS[row.name.removeprefix("lowtide.")]
    for module in (bits, layers, layers):
        monkeypatch.setattr(module, "SWITCHED_OFF", True)
    monkeypatch.setattr(bits, "_at_once", lambda x: COUNT)
    monkeypatch.setattr(layers, "_AT_ONCE", COUNT)
    monkeypatch.setattr(layers, "_AT_ONCE", COUNT)
    monkeypatch.setattr(layers, "_TURNS", 1)
    with Counted() as counted:
        made = function(*args)
    given = tuple(value(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    assert counted.launches == row.launches
    assert row.moved_bytes(Node(row.name, given, (value(made),))) == pytest.approx(counted.moved_bytes, rel=0.05)
