"""Other kernels for operators of torch's own: in effect for as long as a program is recorded, and on its tensors only."""

import threading
from contextlib import ExitStack

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.capture.data.stand_ins import standing_in

OP = torch.ops.aten.tensor_split.tensor_indices_or_sections
AT = torch.tensor([1, 3])


def registered() -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(OP.name(), f"Autograd{device}") for device in ("CPU", "CUDA"))


def answering(answer: int):
    return {OP: lambda own, *args, **kwargs: [torch.full((), answer)]}


def fake(mode: FakeTensorMode) -> torch.Tensor:
    return mode.from_tensor(torch.ones(4))


def test_on_tensors_of_the_mode_only():
    mode, other, x = FakeTensorMode(), FakeTensorMode(), torch.arange(4.0, requires_grad=True)
    with standing_in(mode, answering(7)):
        assert torch.tensor_split(fake(mode), AT)[0].item() == 7
        assert fake(mode).tensor_split(tensor_indices_or_sections=AT)[0].item() == 7
        assert [part.tolist() for part in torch.tensor_split(x, AT)] == [[0.0], [1.0, 2.0], [3.0]]
        torch.tensor_split(x, AT)[1].sum().backward()
        with pytest.raises(RuntimeError):
            torch.tensor_split(fake(other), other.from_tensor(AT))
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 0]


def test_entered_again():
    mode = FakeTensorMode()
    assert not registered()
    with standing_in(mode, answering(1)):
        with standing_in(mode, answering(2)):
            assert torch.tensor_split(fake(mode), AT)[0].item() == 2
        assert torch.tensor_split(fake(mode), AT)[0].item() == 1
        assert registered()
    assert not registered()


def test_left_by_an_error():
    with pytest.raises(ZeroDivisionError), standing_in(FakeTensorMode(), answering(1)):
        raise ZeroDivisionError
    assert not registered()


def test_two_threads():
    """Each has its own kernels; the one that ends first takes nothing from the other."""
    one, two, found = FakeTensorMode(), FakeTensorMode(), []
    with ExitStack() as first:
        first.enter_context(standing_in(one, answering(1)))

        def elsewhere() -> None:
            with standing_in(two, answering(2)):
                found.append(torch.tensor_split(fake(two), AT)[0].item())
                first.close()
                found.append(torch.tensor_split(fake(two), AT)[0].item())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [2, 2]
    assert not registered()
