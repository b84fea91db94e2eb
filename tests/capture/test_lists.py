"""Operators over lists of tensors are recorded tensor by tensor, with the bits that they have together."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture.lists import OF_ONE
from tests.training import differences

ODD = [0.0, -0.0, 1.5, -2.25, 1e-40, 3e38, float("inf"), float("-inf"), float("nan"), 0.1, -0.3, 7.0]
DTYPES = (torch.float32, torch.bfloat16)


class Calls(nn.Module):
    """Calls one operator on copies of what it is given, and returns what it gives or writes."""

    def __init__(self, op, args):
        super().__init__()
        self.op, self.args, self.writes = op, args, op._schema.is_mutable

    def forward(self, *tensors):
        given = iter(tensors)
        args = [[next(given) + 0 for _ in arg] if arg == LIST else arg for arg in self.args]
        results = self.op(*args)
        return args[[arg == LIST for arg in self.args].index(True)] if self.writes else results


LIST = ["", "", ""]


def calls(op):
    """Arguments that an operator takes, lists of three tensors among them."""
    choices = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            choices.append([LIST])
        elif "List[" in kind:
            choices.append([[0.1, 3, -0.0]])
        elif kind == "Tensor":
            choices.append([torch.tensor(0.3)])
        elif kind == "number" and not argument.kwarg_only:
            choices.append([2, 0.1])
    return itertools.product(*choices)


def overloads():
    for name in sorted(OF_ONE | {"norm"}):
        for suffix in ("", "_"):
            packet = getattr(torch.ops.aten, f"_foreach_{name}{suffix}", None)
            yield from () if packet is None else (getattr(packet, each) for each in packet.overloads() if not each.endswith("out"))


@pytest.mark.parametrize("op", list(overloads()), ids=lambda op: op._schema.name.removeprefix("aten::_foreach_") + "." + op._overloadname)
def test_bits_are_those_of_torchs_loop(op):
    for dtype, args in itertools.product(DTYPES, calls(op)):
        torch.manual_seed(0)
        odd = torch.tensor(ODD).to(dtype)
        lists = sum(arg == LIST for arg in args)
        tensors = [odd[torch.randperm(len(ODD))] if at % 3 else torch.randn(5, 3, dtype=dtype) for at in range(3 * lists)]
        program = Calls(op, args)
        try:
            theirs = program(*tensors)
        except (RuntimeError, NotImplementedError):
            continue  # eager has none of this dtype
        ours = lowtide.optimize(program, tuple(tensors), planning=lowtide.Planning(workspaces=False))
        assert not differences(list(theirs), list(ours(*tensors)))
        assert "_foreach_" not in ours.source
