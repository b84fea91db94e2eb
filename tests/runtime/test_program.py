"""A compiled program: the modes it runs under, and what it leaves of them."""

from __future__ import annotations

import gc
import linecache
import traceback

import pytest
import torch

from lowtide.runtime.program import Program

TEXT = """import torch

def step(inputs):
    (x, ) = inputs
    y = torch.ops.aten.mul.Tensor(x, 2)
    return [y, torch.ops.aten.mm.default(y, y)]
"""


def test_it_runs_beneath_autograd_and_without_autocast():
    x = torch.eye(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        doubled, product = Program(TEXT)([x])
        assert torch.is_autocast_enabled("cpu")
        assert (x @ x).dtype is torch.bfloat16
    assert product.dtype is torch.float32
    assert not doubled.requires_grad
    assert torch.equal(product, 4 * torch.eye(2))


def test_an_error_shows_its_line_and_leaves_the_modes_as_they_were():
    program = Program(TEXT, gradients=False)
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        program([torch.ones(2, 3)])
    assert "return [y, torch.ops.aten.mm.default(y, y)]" in "".join(traceback.format_exception(caught.value))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_programs_that_are_gone_leave_no_lines_behind():
    before = set(linecache.cache)
    program = Program(TEXT)
    assert set(linecache.cache) != before
    del program
    gc.collect()
    assert set(linecache.cache) <= before
