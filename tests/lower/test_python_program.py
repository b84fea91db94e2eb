"""A plan as a Python program: what it says, what it keeps alive, and what it refuses to say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

import lowtide
from lowtide.cost.profiler import measure_memory
from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Kind, Node, Source
from lowtide.lower.python import lower
from lowtide.runtime.program import Program
from lowtide.schedule import ProgramOrder
from tests.lower import small_net
from tests.lower.bare_plans import plan, tensor
from tests.programs import RandomOrder


def test_the_program_of_a_training_step(golden):
    model = small_net.SmallNet()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = lowtide.optimize(
        model,
        small_net.batch(),
        loss=small_net.loss,
        optimizer=optimizer,
        planning=lowtide.Planning(solver=ProgramOrder(), workspaces=False),
    )
    golden("program.txt", step.source)


def test_the_program_can_be_saved_and_read(tmp_path):
    step = lowtide.optimize(nn.Linear(2, 2), torch.ones(1, 2), planning=lowtide.Planning(workspaces=False))
    step.export(tmp_path / "program.py")
    assert (tmp_path / "program.py").read_text() == step.source
    assert ".addmm(" in step.source


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 1000))
def test_whatever_the_order_the_program_takes_what_the_plan_says(seed):
    """Every storage is let go right after its last use: the allocator's peak is the plan's, to the byte."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 32))
    optimizer = optim.Adam(model.parameters())
    batch = torch.ones(16, 64)
    step = lowtide.optimize(
        model,
        batch,
        loss=lambda model, x: model(x).square().mean(),
        optimizer=optimizer,
        planning=lowtide.Planning(solver=RandomOrder(seed)),
    )
    step(batch)
    measured = step.measure(batch)
    assert measured.peak_bytes == step.plan.peak_bytes
    assert measured.end_bytes == 4  # the loss


@pytest.mark.parametrize(
    "name", ["import", "aten", "torch", "inputs", "inf", "None", "ops", "device", "_", "x; import os", "a.b", "é", "", "__import__"]
)
def test_values_of_any_name_get_variables_of_their_own(name):
    x, y, z = tensor(name, Kind.INPUT), tensor(f"{name} "), tensor("v")
    node, last = Node("aten.mul.Tensor", (x, 2.0), (y,)), Node("aten.add.Tensor", (y, x), (z,))
    source = lower(plan(node, last, inputs=(x,), outputs=(z,)))
    assert "os" not in source.replace("ops", "")
    assert Program(source)([torch.ones(3)])[0].tolist() == [3.0] * 3


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0c", "\u2028", "\0"])
def test_where_a_node_comes_from_is_a_comment_whatever_it_says(end):
    """Files of plans hold that, and nothing that binds them to a program is over it."""
    x, y = tensor("x", Kind.INPUT), tensor("y")
    source = Source("net.py", 7, f"head{end}    raise SystemExit{end}    #")
    program = Program(lower(plan(Node("aten.mul.Tensor", (x, 2.0), (y,), source=source), inputs=(x,), outputs=(y,))))
    assert program([torch.ones(3)])[0].tolist() == [2.0] * 3
    assert len([line for line in program.source.splitlines() if "SystemExit" in line and "x.mul(" in line]) == 1


@pytest.mark.parametrize(
    "op",
    [
        "os.system", "os.system.x", "aten.add.Tensor; import os", "aten.add.Tensor(1)", "aten.add", "aten..Tensor", "aten.add.Tensor\n",
        "py.eval", "py.__import__", "__import__('os').a.b", "",
    ],
)  # fmt: skip
def test_what_is_no_operator_is_refused(op):
    x, y = tensor("x", Kind.INPUT), tensor("y")
    with pytest.raises(FormatError, match="expected"):
        Program(lower(plan(Node(op, (x, x), (y,)), inputs=(x,), outputs=(y,))))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((Atom("dtype", "float32; import os"),), ()),
        ((Atom("memory_format", "__class__.__base__"),), ()),
        ((1,), (("alpha=1, **globals()", 2),)),
        ((1,), (("a b", 2),)),
    ],
)
def test_arguments_that_are_no_literals_are_refused(args: tuple[Arg, ...], kwargs):
    x, y = tensor("x", Kind.INPUT), tensor("y")
    with pytest.raises(FormatError, match="expected an identifier"):
        lower(plan(Node("aten.add.Tensor", (x, *args), (y,), kwargs), inputs=(x,), outputs=(y,)))


@pytest.mark.parametrize("literal", ['\'"\\\n"""); import os', -0.0, float("nan"), float("-inf"), 1e-320, -(2**62), True, None, 1.5 - 2j])
def test_literals_read_back_as_they_were(literal):
    x, y = tensor("x", Kind.INPUT), tensor("y")
    source = lower(plan(Node("aten.add.Tensor", (x, x), (y,), (("alpha", literal),)), inputs=(x,), outputs=(y,)))
    line = next(line for line in source.splitlines() if ".add(" in line)
    read = eval(line.split("alpha=")[1].rsplit(")", 1)[0].split("  #")[0], {"nan": float("nan"), "inf": float("inf")})
    assert repr(read) == repr(literal)


def test_peak_of_a_call_that_makes_nothing_is_nothing():
    x = tensor("x", Kind.INPUT)
    program = Program(lower(plan(inputs=(x,), outputs=(x,))))
    given = torch.ones(3)
    assert program([given])[0] is given
    assert measure_memory(lambda: program([given])).above_bytes == 0
