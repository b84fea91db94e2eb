"""The search over graphs: what it finds computes the same, always alike, and is made again from a saved plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import optim
from torch.nn import functional as F

from lowtide.cost.presets import preset
from lowtide.errors import CheckError
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Graph, Kind
from lowtide.ir.text.graph_text import to_text
from lowtide.planning.candidate import Candidate
from lowtide.planning.replan import found_like, split_as
from lowtide.rewrite.rewritings import Rewriting, rewritings
from lowtide.split.judge import Judge, Prices
from lowtide.split.parts import Split
from lowtide.split.rewrite import Loops, looped, with_loops
from lowtide.split.search import (
    FissionSearch,
    MeasuredGraph,
    Root,
    SearchWidth,
    found_graphs,
    groups_of,
    loss_in_parts,
    prepared,
    worth_parting,
)
from tests.loops import Captured, captured, checked, nodes_of
from tests.splits import candidates, split

SGD = partial(optim.SGD, lr=0.1)
DEVICE = replace(preset("rtx3090"), launch_us=0.001)  # so that small parts are not dear
BLOCKS = 3


def network(x: torch.Tensor, labels: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Feed-forward layers, one after another, and a loss over words."""
    *blocks, table = weights
    for wide, narrow in zip(blocks[::2], blocks[1::2], strict=True):
        x = x + F.gelu(x @ wide) @ narrow
    return F.cross_entropy((x @ table.t()).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def program() -> Captured:
    torch.manual_seed(0)
    shapes = [(16, 64), (64, 16)] * BLOCKS + [(400, 16)]
    weights = [torch.randn(shape, dtype=torch.float64) / 4 for shape in shapes]
    return captured(network, (torch.randn(6, 8, 16, dtype=torch.float64), torch.randint(0, 400, (6, 8))), weights, SGD)


@pytest.fixture(scope="module")
def base(program) -> Graph:
    return prepared(program.graph)


def measured(graph: Graph, *, splits: bool = True) -> MeasuredGraph:
    return MeasuredGraph(graph, DEVICE.graph_us(graph), (0,) * len(graph.nodes), splits)


def same(program: Captured, graph: Graph) -> None:
    for got, expected in zip(program.run(graph), program.run(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_what_is_found_computes_the_same_and_takes_less(program, base):
    found = found_graphs([measured(program.graph, splits=False), measured(base)], DEVICE, 1, None)
    graphs = [each.graph for each in found if any(is_loop(node) for node in each.graph.nodes)]
    assert graphs
    for graph in graphs:
        same(program, checked(graph))
        again = split_as(base, graph)
        assert again is not None
        assert to_text(again, sources=False) == to_text(graph, sources=False), "a saved plan's splits are made again"
    assert split_as(base, base) is base


def gated(x: torch.Tensor, labels: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Layers of two halves that read the same: its gradient is the sum of two products."""
    *blocks, table = weights
    for one, two, narrow in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True):
        x = x + (torch.tanh(x @ one) * (x @ two)) @ narrow
    return F.cross_entropy((x @ table.t()).flatten(0, 1), labels.flatten())


def test_rules_that_round_otherwise_hold_in_parts_too():
    torch.manual_seed(0)
    shapes = [(16, 64), (16, 64), (64, 16)] * 2 + [(400, 16)]
    weights = [torch.randn(shape, dtype=torch.float64) / 4 for shape in shapes]
    program = captured(gated, (torch.randn(6, 8, 16, dtype=torch.float64), torch.randint(0, 400, (6, 8))), weights, SGD)
    ruled = rewritings(program.graph, lambda nodes, _: [DEVICE.node_us(node) for node in nodes], exact=False)
    *others, rounded = worth_parting([Rewriting(program.graph, (), exact=True), *ruled])
    assert others[0].graph is program.graph
    assert not rounded.exact

    found = found_graphs([measured(program.graph, splits=False), measured(prepared(rounded.graph))], DEVICE, 1, None)
    loops = {each.graph: [node for node in each.graph.nodes if is_loop(node)] for each in found}
    inside = {graph: [inner.op for node in made for inner in Loop.of(node).body.nodes] for graph, made in loops.items()}
    assert any("aten.addmm.default" in ops for ops in inside.values()), "sums of products are made as they are added, part by part"
    for graph in (graph for graph, made in loops.items() if made):
        same(program, checked(graph))


def test_the_same_graph_gives_the_same_graphs(base):
    one, two = ([to_text(each.graph) for each in found_graphs([measured(base)], DEVICE, 1, None)] for _ in range(2))
    assert one == two


def searched(graph: Graph, outer: SearchWidth) -> FissionSearch:
    prices = Prices(graph, DEVICE.graph_us(graph), (0,) * len(graph.nodes), DEVICE)
    search = FissionSearch([Root(graph, prices, Loops(graph))], Judge(1, None), outer)
    search.run()
    return search


def test_more_states_are_never_worse(base):
    few, many = (searched(base, SearchWidth(states=states)).best for states in (6, 40))
    assert (many <= few).all()
    assert np.isfinite(many).sum() > np.isfinite(searched(base, SearchWidth(states=1)).best).sum(), "splits go below what evictions can"


def test_no_more_states_are_judged_than_asked(base):
    assert len(searched(base, SearchWidth(states=7)).states) <= 7


def test_the_fastest_graph_is_chosen_however_few_are(base):
    search = searched(base, SearchWidth(chosen=1))
    chosen = search.chosen()
    assert len(chosen) == 2, "one loses least over all limits, another is the fastest without any"
    assert chosen[0].splits
    assert chosen[1].us[0] == search.best[0] < chosen[0].us[0]


def test_repeated_blocks_are_split_together(base):
    groups = [group for group in groups_of(base, candidates(base)) if len(group.regions) == BLOCKS]
    assert groups
    for group in groups:
        assert len({tuple(base.nodes[place].op for place in region.axes) for region in group.regions}) == 1
        assert group.bits.bit_count() == sum(len(region.axes) for region in group.regions), "they lie apart"


def test_several_loops_at_once_are_one_after_another(program, base):
    group = next(group for group in groups_of(base, candidates(base)) if len(group.regions) == BLOCKS)
    wanted = [Split({base.nodes[place]: axis for place, axis in region.axes.items()}) for region in group.regions]
    at_once = with_loops(base, [looped(base, each, 3) for each in wanted]).graph
    in_turn = base
    for each in wanted:
        in_turn = split(in_turn, each, 3).graph
    assert [node.op for node in at_once.nodes] == [node.op for node in in_turn.nodes]
    same(program, checked(at_once))


def test_feed_forward_layers_over_tokens(program, base):
    """Both products of a block, and what is between them, forward."""
    wide = next(node for node in base.nodes if node.op.split(".")[1] == "mm").outputs[0]
    last = [place for place, node in enumerate(base.nodes) if node.op.split(".")[1] == "mm"][1]
    region = Loops(base).regions.around(wide, 0, range(last + 1))
    assert region is not None
    assert _ops(base, region).count("mm") == 2
    assert "gelu" in _ops(base, region)
    same(program, checked(Loops(base).graph_of({region: 5})))


def test_micro_batches_of_a_segment_accumulate_gradients(program, base):
    """Forward and backward of several blocks, loss included, over the batch: its weights' gradients are summed over parts."""
    regions = [each.region for each in candidates(base) if each.region.units == 6]
    region = max(regions, key=lambda each: len(each.axes))
    kinds = {value.storage.kind for place in region.axes for value in base.nodes[place].results}
    assert {Kind.ACTIVATION, Kind.GRADIENT} <= kinds
    assert sum(len(value.shape) == 2 for value in region.accumulated) >= 2 * (BLOCKS - 1)
    graph = checked(Loops(base).graph_of({region: 4}))
    loop = Loop.of(next(node for node in graph.nodes if is_loop(node)))
    assert [count for _, count in loop.sizes] == [3]
    same(program, graph)


def _ops(graph: Graph, region) -> list[str]:
    return [graph.nodes[place].op.split(".")[1] for place in region.axes]


def test_sets_that_touch_are_not_split_together(base):
    regions = sorted((each.region for each in candidates(base)), key=lambda each: -len(each.axes))
    other = next(each for each in regions[1:] if each.bits & regions[0].bits)
    with pytest.raises(CheckError, match="expected sets that lie apart"):
        Loops(base).graph_of({regions[0]: 2, other: 2})


def test_a_price_of_a_loop_is_that_of_its_parts(base):
    prices = Prices(base, DEVICE.graph_us(base), (0,) * len(base.nodes), DEVICE)
    region = max((each.region for each in candidates(base)), key=lambda each: len(each.axes))
    graph = Loops(base).graph_of({region: 3})
    for node, us in zip(graph.nodes, prices.us(graph), strict=True):
        assert us == pytest.approx(DEVICE.node_us(node), rel=1e-9)


def test_the_loss_alone_in_parts(program):
    found = loss_in_parts(program.graph)
    assert found is not None
    assert found.over == "tokens"
    same(program, checked(found.graph))
    loop = next(node for node in found.graph.nodes if is_loop(node))
    assert {"nll_loss_forward", "nll_loss_backward", "mm"} <= {node.op.split(".")[1] for node in loop.body.nodes}
    assert loss_in_parts(found.graph) is None
    assert not nodes_of(program.graph, "loop")


def test_the_other_programs_of_a_step_run_the_same_in_parts(base):
    """As an optimizer's first step: what was found for the program that most steps run is done to it, and nothing is searched."""
    graphs = [base, prepared(base)]
    like = [
        Candidate(base, ()),
        *(Candidate(each.graph, (), exact=False, root=1) for each in found_graphs([measured(base)], DEVICE, 1, None)),
    ]
    again = found_like(graphs, like)
    assert [to_text(each.graph) for each in again] == [to_text(each.graph) for each in like[1:]]
    assert found_like(graphs, [like[0], replace(like[-1], root=2)]) == [], "of another number of graphs"
    assert found_like(graphs, ()) == []
