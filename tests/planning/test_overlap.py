"""Collectives run beside computation, at no higher peak."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.capture.program import TrainingProgram, capture_training
from lowtide.capture.ranks import wholes
from lowtide.capture.ranks.data_parallel import Ranks
from lowtide.capture.trace import CapturedStep, Given
from lowtide.cost.memory import order_problem, simulate
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Kind
from lowtide.ir.operators.nodes import begins_collective, is_collective, loads_parts
from lowtide.plan.plan import Plan
from lowtide.planning.candidate import Candidate
from lowtide.planning.exchange import holding, overlapped
from lowtide.planning.planner import checked
from lowtide.planning.replan import as_saved
from lowtide.planning.request import Budget, Effort, Request
from lowtide.remat.cost import price_of
from lowtide.runtime.ranks import lay_out
from lowtide.schedule import Auto
from tests.planned import PROVENANCE, plan


def captured(
    shard: str = "", accumulate: int = 1, rows: int = 256, *, over_gloo: bool = False, hook: Callable[[nn.Module], object] | None = None
) -> CapturedStep:
    """A step of two ranks; no other is needed to capture it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    ranks = Ranks("none", 2, 10_000, broadcasts_buffers=True, shard=shard, over_gloo=over_gloo)
    if shard == "parameters":
        lay_out(model, ranks.size, ranks.group)
    loss = lambda model, x: model(x).square().sum()  # noqa: E731
    program = TrainingProgram(model, loss, optimizer, after_backward=hook, accumulate=accumulate, ranks=ranks)
    return capture_training(program, Given((torch.ones(rows, 64),), {}, torch.device("cpu")))[-1]


def waits_and_begins(plan: Plan) -> list[tuple[int, int]]:
    """Of each collective the steps at which it begins and is waited for, in the order in which they begin."""
    nodes, step = plan.graph.nodes, {plan.graph.nodes[index]: position for position, index in enumerate(plan.order)}
    ends = {value: node for node in nodes if is_collective(node) and not begins_collective(node) for value in node.inputs}
    return sorted((step[node], step[ends[node.results[0]]]) for node in nodes if begins_collective(node))


def planned(graph: CapturedStep, memory_bytes: int | None = None) -> Plan:
    nodes = graph.graph.nodes
    budget = Budget() if memory_bytes is None else Budget(memory_bytes)
    return plan([Candidate(graph.graph, (0,) * len(nodes), (1.0,) * len(nodes))], Request(PROVENANCE, budget, sweeps=Effort.QUICK.sweeps))


@pytest.mark.parametrize("share", [None, 0.9])
def test_sums_begin_as_gradients_exist_and_are_waited_for_late(share: float | None):
    step = captured()
    found = planned(step)
    if share is not None:
        found = planned(step, int(share * found.peak_bytes))
        assert found.cost_report is not None
        assert found.cost_report.evictions
    spans = waits_and_begins(found)
    assert len(spans) == 7
    assert [wait for _, wait in spans] == sorted(wait for _, wait in spans), "they arrive in the order in which they are sent"
    assert spans[0][1] - spans[0][0] > 10
    assert Plan.from_json(found.to_json()).order == found.order


def test_no_order_peaks_higher_than_the_one_before():
    step = captured()
    candidate = Candidate(step.graph, (0,) * len(step.graph.nodes))
    problem, found = candidate.order_problem(1), planned(step)
    again = overlapped(found, found.peak_bytes)
    assert checked(again).peak_bytes <= found.peak_bytes == simulate(problem, found.order).peak_bytes


def test_what_gloo_holds_beside_is_waited_for_at_once():
    step = captured("optimizer")
    nodes = step.graph.nodes
    sizes = tuple(512 if is_collective(node) and not begins_collective(node) else 0 for node in nodes)
    found = plan([Candidate(step.graph, sizes)], Request(PROVENANCE))
    assert overlapped(found, found.peak_bytes).order == found.order


def test_what_gloo_holds_beside_counts_from_its_begin_to_its_wait():
    step = captured("gradients")
    nodes = step.graph.nodes
    sizes = tuple(512 if is_collective(node) else 0 for node in nodes)
    found = plan([Candidate(step.graph, sizes)], Request(PROVENANCE))
    spans = waits_and_begins(found)
    problem = order_problem(step.graph, sizes)
    waits = {found.order[wait]: found.order[begin] for begin, wait in spans}
    assert simulate(holding(problem, waits), found.order).peak_bytes == found.peak_bytes
    assert any(wait - begin > 1 for begin, wait in spans)


@pytest.mark.parametrize(
    ("shard", "op", "count"), [("", "all_reduce", 7), ("optimizer", "all_gather", 7), ("gradients", "reduce_scatter", 7)]
)
def test_gradients_travel_once_however_many_micro_batches_there_are(shard: str, op: str, count: int):
    assert sum(op in node.op for node in captured(shard, accumulate=4).graph.nodes) == count


def count(graph: CapturedStep, op: str) -> int:
    """How many of a program's operators have such a name."""
    return sum(op in node.op for node in graph.graph.nodes)


def clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)


def test_parts_of_gradients_are_exchanged_over_gloo_and_added_by_who_keeps_them():
    step = captured("gradients", accumulate=2, over_gloo=True)
    assert [count(step, op) for op in ("exchange", "sum_parts", "reduce")] == [7, 7, 0]
    assert len(waits_and_begins(planned(step))) == 7 + 7, "and parameters are gathered"


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_what_a_hook_reads_of_gradients_is_summed_whole_over_gloo_and_not_gathered_after(shard: str):
    step, unread = (captured(shard, accumulate=2, over_gloo=True, hook=hook) for hook in (clip, lambda model: None))
    assert count(step, "all_reduce") == count(unread, "all_reduce") == 6 + 1, "in messages of DistributedDataParallel's length"
    assert count(step, "exchange") == 0
    assert count(step, "load_parts") == count(unread, "load_parts"), "parameters alone"


def test_parameters_in_shards_are_gathered_in_each_pass_and_let_go_in_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wholes, "TOGETHER_BYTES", 10_000)
    layer_bytes, step = 4 * (64 * 64 + 64), captured("parameters", accumulate=2, rows=4)
    gathers = [node for node in step.graph.nodes if loads_parts(node)]
    of_micro_batch = 6 + 4 + 1  # the first layer's gradient needs no weight, the last one's has it still; biases go together
    assert len(gathers) == of_micro_batch + of_micro_batch - 1, "what was gathered last is kept"
    found = planned(step)
    assert found.peak_bytes - found.resident_bytes < 6 * layer_bytes + 3 * layer_bytes, "gradients of a micro-batch, and few weights"
    found = planned(captured("parameters", rows=4))
    assert found.peak_bytes - found.resident_bytes < 3 * layer_bytes + 3 * layer_bytes, "parts of gradients, and few weights"


def test_a_part_is_updated_once_nobody_gathers_it_any_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wholes, "TOGETHER_BYTES", 10_000)
    graph = captured("parameters").graph
    nodes, before = graph.nodes, predecessors(graph)
    waits = {index: {value.storage for value in node.inputs} for index, node in enumerate(nodes) if loads_parts(node)}
    gathered = 0
    for index, node in enumerate(nodes):
        written = {value.storage for value, _ in node.writes if value.storage.kind is Kind.PARAMETER and value.version == 0}
        reading = {wait for wait, read in waits.items() if read & written}
        assert reading <= set(before[index])
        gathered += len(reading)
    assert gathered == 6 + 4, "weights of six layers in the forward pass, of four of them in the backward one"


def begun(found: Plan) -> int:
    """How many gathers a plan begins."""
    return sum(begins_collective(node) and "all_gather" in node.op for node in found.graph.nodes)


def test_what_was_loaded_is_held_where_there_is_room_and_loaded_again_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wholes, "TOGETHER_BYTES", 10_000)
    step = captured("parameters", rows=64)
    loads = sum(map(loads_parts, step.graph.nodes))
    by_order, roomy = planned(step), planned(step, 10**9)
    assert begun(by_order) <= loads
    assert begun(roomy) == 6 + 1, "each weight once, and all biases together"
    assert roomy.cost_report is not None
    assert roomy.cost_report.time_us == roomy.cost_report.order_us - (loads - 7)
    least = planned(step, by_order.cost_report.frontier[0][0] if by_order.cost_report else roomy.cost_report.frontier[0][0])
    assert least.peak_bytes < 0.9 * by_order.peak_bytes
    assert begun(least) > loads, "what is computed again loads again what it reads"
    for found in (by_order, roomy, least):
        again = as_saved(Plan.from_json(found.to_json()), captured("parameters", rows=64).graph, exact=True)
        assert (again.order, again.peak_bytes) == (found.order, found.peak_bytes)


@pytest.mark.parametrize("share", [0.85, 0.95])
def test_what_is_computed_again_for_a_limit_leaves_room_to_hold_loads(share: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wholes, "TOGETHER_BYTES", 10_000)
    step = captured("parameters", accumulate=2, rows=64)
    limit_bytes = int(share * planned(step).peak_bytes)
    found = planned(step, limit_bytes)
    assert found.peak_bytes <= limit_bytes
    assert found.cost_report is not None
    assert found.cost_report.recomputed
    assert begun(found) < sum(map(loads_parts, step.graph.nodes))
    again = as_saved(Plan.from_json(found.to_json()), step.graph, exact=True)
    assert (again.order, again.peak_bytes) == (found.order, found.peak_bytes)


@pytest.mark.parametrize("shard", ["", "optimizer", "gradients", "parameters"])
def test_a_search_begins_where_gradients_leave_at_once(shard: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wholes, "TOGETHER_BYTES", 10_000)
    graph = captured(shard, rows=4).graph
    candidate = Candidate(graph, (0,) * len(graph.nodes), (1.0,) * len(graph.nodes))
    problem = candidate.remat_problem(1)
    gradients_bytes = 6 * (64 * 64 + 64) * 4
    written = candidate.orders(problem, Auto(), 1)[0]
    assert price_of(problem, written)[0] - problem.problem.resident_bytes < gradients_bytes
