"""Tensors that are made of sizes are those that were made like another, to the last bit."""

import pytest
import torch

from lowtide.capture import operators
from lowtide.rewrite.looks import make_of_sizes
from tests.fission_programs import Program

_ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("aten.zeros_like.default", (), {}),
        ("aten.ones_like.default", (), {"dtype": torch.int64, "pin_memory": False}),
        ("aten.full_like.default", (2.5,), {"memory_format": torch.contiguous_format}),
        ("aten.empty_like.default", (), {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_sizes_do_instead_of_a_tensor(op, args, kwargs, dtype):
    program = Program()
    made = program.run(op, program.given(torch.ones(3, 4, dtype=dtype)), *args, **kwargs)
    (node,) = make_of_sizes(program.graph(made)).graph.nodes
    assert node.inputs == ()
    assert node.outputs == (made,)
    given = {name: getattr(torch, atom.name) if atom.kind == "dtype" else torch.device(atom.name) for name, atom in node.kwargs}
    got, expected = operators.resolve(node.op)(*node.args, **given), program.tensors[made]
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert "empty" in op or torch.equal(got, expected)


def test_another_layout_is_left_alone():
    program = Program()
    made = program.run("aten.zeros_like.default", program.given(torch.ones(3, 4).t()))
    graph = program.graph(made)
    assert make_of_sizes(graph).graph.nodes == graph.nodes
