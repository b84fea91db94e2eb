"""Loops as Python: how they read, and that they take what was promised."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import takewhile

import pytest
import torch
from torch import optim
from torch.nn import functional as F

from lowtide.cost.profiler import measure_memory
from lowtide.lower.python import lower, positions
from lowtide.plan.plan import Plan
from lowtide.plan.promises import untrue_promise
from lowtide.planning.planner import checked as checked_plan
from lowtide.rewrite.base import replace_nodes
from lowtide.rewrite.losses import make_anew, sum_losses
from lowtide.runtime.program import Program
from lowtide.split.rewrite import with_ordered_body
from tests.loops import captured, made, nodes_of, planned
from tests.splits import along, split

LOGITS = ("mm", "_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")


def logits_in_parts(parts: int):
    """A step whose logits, loss and gradients are made part by part, and its plan."""
    torch.manual_seed(0)
    x, labels, table = torch.randn(50, 64), torch.randint(0, 1000, (50,)), torch.randn(1000, 64)
    program = captured(lambda x, labels, table: F.cross_entropy(x @ table.t(), labels), (x, labels), (table,), partial(optim.SGD, lr=0.1))
    graph = sum_losses(make_anew(program.graph).graph).graph
    nodes = sorted([*nodes_of(graph, *LOGITS), nodes_of(graph, "t")[-1]], key=graph.nodes.index)
    done = split(graph, along(nodes, made(graph, "mm"), 0), parts)
    loop = done.forward[nodes[0]][0]
    return program, planned(program.plan, replace_nodes(done.graph, {loop: (with_ordered_body(loop),)}).graph)


def test_the_program_of_a_loop(golden):
    _, plan = logits_in_parts(4)
    golden("loop.txt", lower(plan))
    assert len(positions(plan)) == len(lower(plan).split("\n"))


@pytest.mark.parametrize("parts", [2, 4, 7, 50])
def test_a_loop_takes_what_is_promised(parts):
    """To the byte: operators' own workspaces apart, which these hardly have."""
    program, plan = logits_in_parts(parts)
    run, given = Program(lower(plan)), [each.clone() if isinstance(each, torch.Tensor) else each for each in program.inputs]
    run(given)
    measured = measure_memory(lambda: run(given))
    assert measured.above_bytes == pytest.approx(plan.peak_bytes - plan.resident_bytes, rel=0.01)
    if parts > 2:
        assert plan.peak_bytes < planned(program.plan, program.graph).peak_bytes * 0.9


def test_a_plan_with_a_loop_is_saved_and_read():
    _, plan = logits_in_parts(4)
    assert untrue_promise(plan) == ""
    less = tuple(max(0, size - 1) for size in plan.workspace_bytes)
    assert "which its body makes" in untrue_promise(dataclasses.replace(plan, workspace_bytes=less))
    again = Plan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    assert lower(again) == lower(plan)
    assert checked_plan(plan) is plan


def test_what_a_part_makes_is_let_go_at_its_end():
    """Views of what the loop is given, too: they would hold it."""
    torch.manual_seed(0)
    x, table = torch.randn(50, 64), torch.randn(1000, 64)
    program = captured(lambda x, table: (x @ table.t()).tanh().square().sum(), (x,), (table,), partial(optim.SGD, lr=0.1))
    last = [node for node in program.graph.nodes if node.op == "aten.mm.default"][-1]
    view = next(node for node in program.graph.nodes if last.args[0] in node.outputs)
    assert view.op == "aten.t.default"
    graph = split(program.graph, along([view, last], made(program.graph, "mm", -1), 0), 4).graph
    text = lower(planned(program.plan, graph)).split("\n")
    (start,) = (place for place, line in enumerate(text) if " for " in line)
    body = list(takewhile(lambda line: line.startswith(" " * 8), text[start + 1 :]))
    bound = {line.split(" = ")[0].strip() for line in body if " = " in line}
    gone = {name.strip() for line in body if line.strip().startswith("del ") for name in line.split("#")[0].strip()[4:].split(",")}
    assert bound - gone == {"part"}
