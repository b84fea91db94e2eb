"""Constants of generated kernels: whatever becomes of a tensor is seen."""

from collections.abc import Callable

import pytest
import torch

from lowtide.cpu.executable import Constants


def _written(tensor: torch.Tensor) -> None:
    tensor[1, 1] = 7.0


def _elsewhere(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(4, 3)


def _further_on(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(8, 3)[4:]


def _within_its_storage(tensor: torch.Tensor) -> None:
    tensor.data = torch.as_strided(tensor.data, (3, 3), (3, 1), 3)


def _grown(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(4096)


def _turned(tensor: torch.Tensor) -> None:
    tensor.data = torch.as_strided(tensor.data, (4, 3), (1, 4))


def _shortened(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data[:2]


@pytest.mark.parametrize("change", [_written, _elsewhere, _further_on, _within_its_storage, _grown, _turned, _shortened])
def test_a_change_is_seen(change: Callable[[torch.Tensor], None]):
    tensors = [torch.zeros(4, 3) for _ in range(3)]
    held = Constants(tensors)
    assert held.same(tensors)
    change(tensors[1])
    assert not held.same(tensors)


def test_another_tensor_is_seen():
    tensors = [torch.zeros(4, 3), torch.zeros(4, 3)]
    held = Constants(tensors)
    assert not held.same([tensors[0], tensors[1].clone()])
    assert not held.same(tensors[:1])


def test_a_gradient_is_no_change():
    tensors = list(torch.nn.Linear(3, 4).parameters())
    held = Constants(tensors)
    torch.stack([each.sum() for each in tensors]).sum().backward()
    assert held.same(tensors)
