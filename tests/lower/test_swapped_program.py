"""What a program that sends tensors to the host and back says."""

from __future__ import annotations

import pytest
import torch

from lowtide.errors import FormatError
from lowtide.ir.graph import Kind, Node
from lowtide.lower.python import lower
from lowtide.remat.write_out import rematerialise
from lowtide.runtime.copies import DirectMemory
from lowtide.runtime.program import Program
from tests.lower.bare_plans import plan, tensor
from tests.small_graph import DROP, GRAPH, LOAD, STORE


def program(entries):
    graph = rematerialise(GRAPH, entries).graph
    return lower(plan(*graph.nodes, inputs=graph.inputs, outputs=graph.outputs))


def body(source):
    """The lines of the step, without their comments."""
    return [line.split("  #")[0].strip() for line in source.splitlines()[source.splitlines().index("def step(inputs, host):") + 1 :]]


def test_a_tensor_is_let_go_after_its_drop_and_waited_for_before_its_first_reader():
    source = program([0, STORE, 2, DROP, LOAD, 3])
    assert body(source) == [
        "(x, ) = inputs",
        "a = x.relu()",
        "a_host = host.store(a)",
        "b = a.sin()",
        "host.drop(a, a_host)",
        "del a",
        "a_back = host.load(a_host)",
        "del a_host",
        "a_view_again = a_back.view([2, 2])",
        "host.arrived(a_back)",
        "c = a_view_again.mul(b)",
        "del b, a_back, a_view_again",
        "return [c]",
    ]
    assert "a_host = host.store(a)  # 16 B to the host" in source
    assert "del a  # frees 16 B" in source
    assert "del a_host\n" in source  # none of the device's
    assert "host = ops" not in source


def test_a_tensor_that_nobody_reads_is_waited_for_all_the_same():
    lines = body(program([0, STORE, 2, 3, DROP, LOAD]))
    assert lines[-4:] == ["a_back = host.load(a_host)", "host.arrived(a_back)", "del a_host, a_back", "return [c]"]


def test_a_drop_is_a_reader():
    lines = body(program([0, STORE, DROP, LOAD, DROP, LOAD, 2, 3]))
    again = lines.index("host.drop(a_back, a_host)")
    assert lines[again - 1] == "host.arrived(a_back)"
    assert lines.count("host.arrived(a_back)") == 1
    assert lines.count("host.arrived(a_back2)") == 1


def test_it_computes_the_same():
    x = torch.randn(2, 2)
    (expected,) = Program(program([0, 2, 3]))([x])
    (found,) = Program(program([0, STORE, DROP, LOAD, 2, 3]), host=DirectMemory())([x])
    assert torch.equal(expected, found)


def test_a_program_without_copies_asks_for_no_host():
    assert "def step(inputs):" in program([0, 2, 0, 3])


def test_a_value_of_that_name_gets_a_variable_of_its_own():
    x, host = tensor("x", Kind.INPUT), tensor("host")
    assert "host_ = x.relu()" in lower(plan(Node("aten.relu.default", (x,), (host,)), inputs=(x,), outputs=(host,)))


@pytest.mark.parametrize("op", ["host.eval", "host.__init__"])
def test_what_is_no_word_of_the_hosts_is_refused(op):
    x, y = tensor("x", Kind.INPUT), tensor("y")
    with pytest.raises(FormatError, match="expected an operator's name"):
        lower(plan(Node(op, (x,), (y,)), inputs=(x,), outputs=(y,)))
