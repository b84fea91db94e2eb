"""BladeDISC++'s run-time eviction: what was run is right, takes what the one definition of memory says, and evicts nothing without need."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide.planning.machine as machine
from lowtide.cost.device import Device
from lowtide.cost.memory import order_problem, simulate
from lowtide.ir.check.graph_check import check_graph, check_order
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.points import at
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.write_out import rematerialise
from lowtide.schedule import ProgramOrder
from research.eviction.compile_time import compiled
from research.eviction.run_time import executed, problem_at
from research.shapes.shape_graph import simplified
from tests.graphs import graphs
from tests.listing import listing
from tests.training import check

unhurried = settings(deadline=None, max_examples=80)
HOST = Device("host", {"float32": 1e12}, 1e12, 0.0, 1e9, 1e9)
S = Dimension("s", 1, 64)


def layers(count, *, width=4, dimensions=(S,)):
    """A chain of layers, each a product and a rectifier; the way back reads what every layer made."""
    s = dimensions[0].symbol if dimensions else 8
    inputs = [tensor("x", s, width, Kind.INPUT), tensor("w", width, width, Kind.PARAMETER)]
    nodes, acts = [], [inputs[0]]
    for layer in range(count):
        product, rectified = tensor(f"p{layer}", s, width), tensor(f"a{layer}", s, width)
        nodes += [Node("aten.mm.default", (acts[-1], inputs[1]), (product,)), Node("aten.relu.default", (product,), (rectified,))]
        acts.append(rectified)
    grad = acts[-1]
    for layer in reversed(range(count)):
        masked, down = tensor(f"m{layer}", s, width), tensor(f"g{layer}", s, width)
        nodes += [
            Node("aten.threshold_backward.default", (grad, acts[layer + 1], 0), (masked,)),
            Node("aten.mm.default", (masked, inputs[1]), (down,)),
        ]
        grad = down
    return Graph(tuple(inputs), tuple(nodes), (grad,), tuple(dimensions))


def tensor(name, rows, columns, kind=Kind.ACTIVATION):
    return Value(name, Storage(name, 4 * rows * columns, "cpu", kind), "float32", (rows, columns), (columns, 1))


def run(program, point, share, *, swap=None, extra=0):
    """A run within a share of the way from the least that any node needs to what the order takes; what it ran, the problem, the limit."""
    nodes = program.graph.nodes
    cost_us = [1.0 + index % 3 for index in range(len(nodes))]
    workspaces = [0 if is_view(node) else index % 2 * extra for index, node in enumerate(nodes)]
    problem = problem_at(program, point, cost_us, workspaces, swap=swap)
    peak = cost_of(problem, problem.sequence_of(program.order)).peak_bytes
    limit = int(problem.problem.resident_bytes + share * (peak - problem.problem.resident_bytes))
    return executed(program, point, cost_us, workspaces, limit, swap=swap), problem, limit


def check_run(program, point, done, problem, limit):
    """Right by the checker, its peak by the definition, within the limit or said not to be."""
    assert first_wrong(problem, done.sequence) == -1
    numbers = at(program.graph, point)
    written = rematerialise(numbers, done.sequence.tolist())
    check_graph(written.graph)
    check_order(written.graph, range(len(written.graph.nodes)))
    spaces = written.of_origins(problem.problem.workspace_bytes.tolist(), 0)
    known = simulate(order_problem(written.graph, spaces), range(len(written.graph.nodes)))
    assert known.peak_bytes <= done.peak_bytes <= done.held_bytes
    if program.order and not program.graph.dimensions:
        assert known.peak_bytes == done.peak_bytes
    assert done.time_us == cost_of(problem, done.sequence).time_us
    assert (done.misfit is None) == (done.held_bytes <= limit)


def without_control_by_views(graph):
    """Views are taken where they are read: nobody can wait for one."""
    became = {}
    for node in graph.nodes:
        became[node] = replace(node, after=tuple(became[other] for other in node.after if not is_view(other)))
    return replace(graph, nodes=tuple(became.values()))


@unhurried
@given(graphs(bodies=False), st.floats(0, 1), st.booleans(), st.sampled_from([0, 5]))
def test_whatever_was_run_is_right(graph, share, swaps, extra):
    assume(not any(node.op == "aten.view.default" and not is_view(node) for node in graph.nodes))  # of a Python number: there is no such
    program = compiled(without_control_by_views(graph), range(len(graph.nodes)))
    done, problem, limit = run(program, {}, share, swap=HOST if swaps else None, extra=extra)
    check_run(program, {}, done, problem, limit)
    plain = cost_of(problem, problem.sequence_of(program.order))
    if program.order and plain.peak_bytes <= limit:
        assert (done.sequence.tolist(), done.evictions, done.peak_bytes) == (list(program.order), 0, plain.peak_bytes)


@unhurried
@given(st.integers(1, 9), st.integers(1, 64), st.floats(0, 1), st.booleans(), st.sampled_from([0, 5]))
def test_layers_of_any_size_fit_into_little(count, s, share, swaps, extra):
    program = compiled(layers(count))
    done, problem, limit = run(program, {"s": s}, share, swap=HOST if swaps else None, extra=extra)
    check_run(program, {"s": s}, done, problem, limit)
    if share == 1:
        assert done.evictions == 0


def test_without_a_limit_nothing_is_evicted():
    program = compiled(layers(6))
    done, _, _ = run(program, {"s": 64}, 1)
    assert (done.evictions, done.misfit, done.sequence.tolist()) == (0, None, list(program.order))


@pytest.mark.parametrize("swap", [None, HOST])
def test_half_is_kept_by_running_some_nodes_again(swap):
    """Without links by recomputation alone; over a link that costs nothing, by it."""
    program = compiled(layers(12))
    free = replace(swap, to_host_bytes_per_s=1e18, from_host_bytes_per_s=1e18) if swap else None
    done, problem, limit = run(program, {"s": 64}, 0.5, swap=free)
    check_run(program, {"s": 64}, done, problem, limit)
    assert done.misfit is None
    assert done.evictions > 0
    assert (max(done.sequence) >= len(program.graph.nodes)) == (swap is not None)
    assert len(done.sequence) > len(program.order)


def test_what_does_not_fit_is_said():
    program = compiled(layers(3))
    done, _, limit = run(program, {"s": 64}, 0.01)
    assert done.misfit is not None
    assert f"expected at most {limit:,} bytes" in str(done.misfit)
    assert "raise the limit" in str(done.misfit)


def test_the_tensor_of_the_listing_comes_back_by_its_subgraph():
    """Only the subgraph of reduce, product and reshape saves memory: it is the one that was found, and it is used."""
    graph = simplified(listing())
    program = compiled(graph, range(6))
    (found,) = program.regenerations[3, 0]
    assert found.nodes == (1, 2, 3)
    assert found.reads == ()


def test_what_is_written_over_is_not_read_again():
    """After the update of its weight a product cannot be repeated: what it made is kept from there on."""
    graph = layers(1)
    w = graph.inputs[1]
    after = replace(w, name="w_1", version=1)
    late = tensor("late", S.symbol, 4)
    product = graph.nodes[0].outputs[0]
    update = Node("aten.mul_.Tensor", (w, 2.0), (), writes=((w, after),))
    nodes = (*graph.nodes, update, Node("aten.sin.default", (product,), (late,)))
    program = compiled(replace(graph, nodes=nodes, outputs=(*graph.outputs, late)), range(6))
    assert all(each.until == 4 for each in program.regenerations[0, 0])
    done, problem, limit = run(program, {"s": 64}, 0.4)
    check_run(program, {"s": 64}, done, problem, limit)


class _Net(nn.Module):
    """Normalisation, dropout, a residual, attention."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean((1, 2))


def _make():
    torch.manual_seed(3)
    model = _Net()
    batch = torch.randn(4, 24, 16), torch.randn(4)
    return model, batch, lambda model, x, y: nn.functional.mse_loss(model(x), y), torch.optim.AdamW(model.parameters())


def test_training_by_what_was_run_is_bit_equal_to_eager(monkeypatch):
    again = []

    def evicting(graph):
        program = compiled(graph, range(len(graph.nodes)))
        done, _, _ = run(program, {}, 0.6)
        written = rematerialise(graph, done.sequence.tolist())
        again.append(len(written.recomputed))
        return (written.graph,)

    monkeypatch.setattr(machine, "equal_graphs", evicting)
    check(_make, options={"solver": ProgramOrder()})
    assert min(again) > 3
