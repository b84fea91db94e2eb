"""Calls of operators with real arguments, by the names of their rows."""

import torch

torch.manual_seed(0)


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    """Other contents: not a number where there is such a thing."""
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor + 1


_X, _Y, _G = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6)
_IMAGE, _CLIP = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8, 8)
_TARGETS, _PIXELS = torch.tensor([1, 0, 3, 2]), torch.randint(0, 3, (2, 8, 8))
_TOTAL, _ROWS = torch.tensor(4.0), _X[..., None]


def _pooled(name: str, image: torch.Tensor, *args):
    made = getattr(torch.ops.aten, name)(image, *args)
    return made if isinstance(made, tuple) else (made,)


def _max_pool(name: str, image: torch.Tensor, dims: int, adaptive: bool = False):
    size = [2] * dims
    if adaptive:
        out, indices = _pooled(name, image, [4] * dims)
        return (torch.randn_like(out), image, indices)
    out, indices = _pooled(name, image, size, size, [0] * dims, [1] * dims, False)
    return (torch.randn_like(out), image, size, size, [0] * dims, [1] * dims, False, indices)


def _average(dims: int, image: torch.Tensor):
    (out,) = _pooled(f"avg_pool{dims}d", image, [2] * dims, [2] * dims, [0] * dims, False, True, None)
    return (torch.randn_like(out), image, [2] * dims, [2] * dims, [0] * dims, False, True, None)


_CTC = torch.randn(5, 2, 4).log_softmax(-1)

CALLS = {
    # element-wise gradients
    "aten.hardtanh_backward.default": [(_G, _X, -1.0, 1.0)],
    "aten.leaky_relu_backward.default": [(_G, _X, 0.1, False)],
    "aten.elu_backward.default": [(_G, 1.0, 1.0, 1.0, False, _X)],
    "aten.softplus_backward.default": [(_G, _X, 1.0, 20.0)],
    # what asks for data: the first call, and others whose answers differ
    "aten._nested_tensor_from_mask_left_aligned.default": [
        (torch.zeros(1, 2, 3), torch.tensor([[True, False]])),
        (torch.zeros(1, 2, 3), torch.tensor([[False, True]])),
    ],
    "aten.masked_select.default": [(_X, _X > 0), (_X, _X > 9)],
    "aten._ctc_loss.default": [(_CTC, torch.tensor([[1, 2], [3, 1]]), [5, 5], [2, 2])],
    "aten._ctc_loss.Tensor": [
        (_CTC, torch.tensor([[1, 2], [3, 1]]), torch.tensor([5, 5]), torch.tensor([2, 2])),
        (_CTC, torch.tensor([[1, 2], [3, 1]]), torch.tensor([5, 5]), torch.tensor([1, 1])),
    ],
    "aten._pack_padded_sequence.default": [
        (_ROWS, torch.tensor([6, 4, 4, 1]), True),
        (_ROWS, torch.tensor([6, 5, 4, 1]), True),
    ],
    # what only gets memory
    "aten.empty": [([2, 3],)],
    "aten.empty_like": [(_X,)],
    "aten.empty_strided": [([2, 3], [3, 1])],
    "aten.new_empty": [(_X, [3])],
    "aten.new_empty_strided": [(_X, [2, 3], [3, 1])],
    # what leaves an argument unread
    **{
        f"aten.{name}": [(_X,)]
        for name in ("zeros_like", "ones_like", "rand_like", "randn_like", "zero", "exponential", "uniform", "random")
    },
    "lowtide.truncated_normal": [(_X, 0.0, 1.0, -2.0, 2.0)],
    "aten.full_like": [(_X, 2.0)],
    "aten.randint_like": [(_X, 9)],
    "aten.new_zeros": [(_X, [3])],
    "aten.new_ones": [(_X, [3])],
    "aten.new_full": [(_X, [3], 2.0)],
    "aten.copy": [(_X, _Y)],
    "aten.fill": [(_X, 2.0)],
    "aten.normal_.default": [(_X,)],
    "aten.normal_functional": [(_X,)],
    "aten.bernoulli_": [(_X, 0.5), (_X, _Y.sigmoid())],
    "aten.bernoulli_.float": [(_X, 0.5)],
    "aten.bernoulli.p": [(_X, 0.5)],
    "aten.bernoulli.Tensor": [(_X, _Y.sigmoid())],
    "aten.nll_loss_backward": [(torch.tensor(1.0), _X, _TARGETS, None, 1, -100, _TOTAL)],
    "aten.nll_loss2d_backward": [(torch.tensor(1.0), _IMAGE, _PIXELS, None, 1, -100, torch.tensor(128.0))],
    "aten.max_pool2d_with_indices_backward": [_max_pool("max_pool2d_with_indices", _IMAGE, 2)],
    "aten.max_pool3d_with_indices_backward": [_max_pool("max_pool3d_with_indices", _CLIP, 3)],
    "aten.adaptive_max_pool2d_backward": [_max_pool("adaptive_max_pool2d", _IMAGE, 2, adaptive=True)],
    "aten.adaptive_max_pool3d_backward": [_max_pool("adaptive_max_pool3d", _CLIP, 3, adaptive=True)],
    "aten.avg_pool2d_backward": [_average(2, _IMAGE)],
    "aten.avg_pool3d_backward": [_average(3, _CLIP)],
    "aten._adaptive_avg_pool2d_backward": [(torch.randn(2, 3, 4, 4), _IMAGE)],
    "aten._adaptive_avg_pool3d_backward": [(torch.randn(2, 3, 4, 4, 4), _CLIP)],
}
