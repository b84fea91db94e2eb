"""Operators that nobody should run: one crashes, one hangs, one prints, one reads, one wants what another made. Importing defines them."""

from __future__ import annotations

import ctypes
import os
import time

import torch
from torch import Tensor


@torch.library.custom_op("lowtide_tests::crash", mutates_args=())
def crash(x: Tensor) -> Tensor:
    """Crashes the process, unless x begins with a 7."""
    if x.numel() and float(x.flatten()[0]) != 7.0:
        ctypes.string_at(0)
    return x.clone()


@torch.library.custom_op("lowtide_tests::hang", mutates_args=())
def hang(x: Tensor) -> Tensor:
    """Never comes back, unless x begins with a 7."""
    while x.numel() and float(x.flatten()[0]) != 7.0:
        time.sleep(0.01)
    return x.clone()


@torch.library.custom_op("lowtide_tests::chatter", mutates_args=())
def chatter(x: Tensor) -> Tensor:
    """Prints, also past Python, and reads what it is given."""
    print("hello")
    os.write(1, b'{"level_bytes": 1, "results": []}\n')
    os.write(2, b"x" * 200_000)
    os.read(0, 1)
    return x.clone()


@torch.library.custom_op("lowtide_tests::pack", mutates_args=())
def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """A result, and floats that only `unpack` understands; the fake knows nothing of their number."""
    secret = torch.full((x.numel() + 3,), 42.0)
    return x * 2, secret


@torch.library.custom_op("lowtide_tests::unpack", mutates_args=())
def unpack(grad: Tensor, secret: Tensor) -> Tensor:
    """Crashes on what `pack` has not made."""
    if float(secret[0]) != 42.0 or secret.numel() != grad.numel() + 3:
        ctypes.string_at(0)
    return grad * 2


@torch.library.custom_op("lowtide_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Its results lie column by column, which its fake does not say."""
    return (x + 1).t().contiguous().t()


for plain in (crash, hang, chatter, unpack, turned):
    plain.register_fake(lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format))
pack.register_fake(lambda x: (torch.empty_like(x), x.new_empty(0)))


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])


pack.register_autograd(lambda ctx, grad, _: unpack(grad, ctx.saved_tensors[0]), setup_context=_keep)
for smooth in (crash, hang, chatter, turned):
    smooth.register_autograd(lambda ctx, grad: grad)
