"""Runs of operators that work slice by slice: what they compute, in which bytes, and that none of their kind takes fewer."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import lowtide
from bench.deeploy import FUNCTIONS, read_deeploy
from lowtide.edge.check import check
from lowtide.edge.cut_search import CutSearch
from lowtide.edge.cuts import Cut, cut_body, with_cuts
from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
from lowtide.edge.interpret import interpret
from lowtide.edge.onnx import network_of
from lowtide.edge.output import from_json, to_json
from lowtide.edge.plan import Space
from lowtide.edge.problem import EdgeProblem
from lowtide.edge.solve import EdgeEffort, EdgeRequest, solve_cut, with_cut_parts
from lowtide.errors import BudgetError, FormatError
from lowtide.problems import Status
from tests.edge_brute import Brute
from tests.edge_chains import Chain, inputs_of, random_chain
from tests.edge_networks import by_onnxruntime, random_inputs, random_model

RAM = Space("ram")
KEYWORDS = Path(__file__).parents[1] / "data" / "onnx" / "mlperf-KeywordSpotting.onnx"


def _all_cuts(graph: EdgeGraph, bands: bool = True) -> Iterator[Cut]:
    """Every cut that the network allows, by trying."""
    for first in range(len(graph.nodes)):
        for last in range(first, len(graph.nodes)):
            shape = graph.tensors[graph.nodes[last].outputs[0]].shape
            for axis, other in ((1, -1), (2, 3), (3, 2)) if len(shape) == 4 else ():
                for cut in (
                    Cut(first, last, axis),
                    Cut(first, last, axis, staged=True),
                    *(Cut(first, last, axis, other, band) for band in range(1, shape[other] if bands and other > 0 else 1)),
                ):
                    try:
                        with_cuts(graph, [cut])
                    except FormatError:
                        continue
                    yield cut


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_computes_what_onnxruntime_computes_to_the_last_bit(seed: int):
    model = random_chain(seed, qdq=seed % 4 == 0)
    graph = network_of(model)
    x = inputs_of(graph, seed)
    ((name, expected),) = by_onnxruntime(model, x).items()
    cuts = list(_all_cuts(graph))
    assert cuts
    chosen = [cuts[at] for at in np.random.default_rng(seed).permutation(len(cuts))[:6]]
    for cut in chosen:
        plan = lowtide.plan_edge(with_cuts(graph, [cut], 4), [RAM])
        np.testing.assert_array_equal(interpret(plan, x)[name], expected, err_msg=str(cut))


@pytest.mark.parametrize("seed", range(12))
def test_the_best_cuts_run_in_exactly_their_bytes_and_survive_json(seed: int):
    model = random_chain(seed + 100)
    graph = network_of(model)
    x = inputs_of(graph, seed)
    ((name, expected),) = by_onnxruntime(model, x).items()
    whole = lowtide.plan_edge(graph, [RAM])
    before = whole.arena_bytes[0]
    for extra in (0.0, 0.2, 2.0):
        plan = lowtide.plan_edge(graph, [RAM], cut=True, extra_macs=extra)
        assert plan.arena_bytes[0] <= before
        assert plan.extra_macs <= extra + 1e-9
        assert plan.bound <= plan.arena_bytes[0]
        before = plan.arena_bytes[0]
        np.testing.assert_array_equal(interpret(plan, x)[name], expected)
        again = from_json(to_json(plan), graph)
        assert (again.blocks, again.cuts, again.order, again.bound) == (plan.blocks, plan.cuts, plan.order, plan.bound)
        check(again)


@pytest.mark.parametrize("seed", range(6))
def test_no_partition_takes_less_than_is_proven(seed: int):
    """Many partitions of small networks into operators and cuts, each planned."""
    graph = network_of(random_chain(seed, most=3, smallest=5))
    search = CutSearch(graph, EdgeProblem.of(graph, [RAM]))
    cuts = list(_all_cuts(graph))
    cheapest: dict[int, int] = {}  # by bytes the fewest multiplications
    for partition in _partitions(cuts):
        cut = with_cuts(graph, partition)
        plan = lowtide.plan_edge(cut, [RAM])
        macs = sum(node.macs for node in cut.nodes)
        nbytes = plan.arena_bytes[0]
        cheapest[nbytes] = min(macs, cheapest.get(nbytes, macs))
    for extra in (0.0, 0.1, 0.5, 3.0):
        most = int(search.macs * (1 + extra))
        least = min(nbytes for nbytes, macs in cheapest.items() if macs <= most)
        assert search.bound_bytes(most) <= least
        found = lowtide.plan_edge(graph, [RAM], cut=True, extra_macs=extra)
        if found.status is Status.OPTIMAL:
            assert found.arena_bytes[0] <= least


def _partitions(cuts: list[Cut]) -> Iterator[list[Cut]]:
    """Many sets of at most two cuts that do not overlap."""
    yield []
    yield from ([one] for one in cuts)
    yield from ([one, other] for at, one in enumerate(cuts) for other in cuts[at::97] if other.first > one.last)


def _some_partitions(cuts: list[Cut], count: int, seed: int) -> Iterator[list[Cut]]:
    """No cut, each alone where there are few, and sets of cuts at random."""
    rng = np.random.default_rng(seed)
    yield []
    yield from ([cuts[at]] for at in rng.permutation(len(cuts))[:20])
    for _ in range(10):
        partition, at = [], 0
        while at < count:
            here = [cut for cut in cuts if cut.first == at]
            if here and rng.random() < 0.7:
                partition.append(here[rng.integers(len(here))])
            at = partition[-1].last + 1 if partition and partition[-1].first == at else at + 1
        yield partition


@pytest.mark.parametrize("seed", range(12))
def test_no_cuts_and_places_take_less_time_than_is_proven(seed: int):
    """In two memories: rings in one of them, inputs and results where they lie, moves; each partition by trying all of it."""
    model = random_chain(seed + 30, most=2, smallest=5)
    graph = network_of(model)
    whole, x = lowtide.plan_edge(graph, [RAM]).arena_bytes[0], inputs_of(graph, seed)
    spaces = [Space("fast", whole * (2 + seed % 3) // 5, 8.0, 8.0), Space("slow", None if seed % 2 else whole * 2 // 3, 2.0, 1.0)]
    dma, moves, extra, once = seed % 4 < 2, seed % 3 == 0, (0.0, None, 0.3)[seed % 3], sum(node.macs for node in graph.nodes)
    request = EdgeRequest.of(graph, spaces, macs_per_s=300.0, dma=dma, effort=EdgeEffort(moves=moves))
    answer = solve_cut(with_cut_parts(request, extra), extra)
    least = math.inf
    for partition in _some_partitions(list(_all_cuts(graph)), len(graph.nodes), seed):
        cut = with_cuts(graph, partition)
        again = sum(max(0, node.macs - sum(each.macs for each in body.graph.nodes)) for node in cut.nodes if (body := cut_body(node)))
        if extra is None or again <= int(once * extra):
            least = min(least, Brute(cut, request.problem.spaces, macs_per_s=300.0, dma=dma, moves=moves).least_ps(least))
    assert answer.bound <= least
    assert answer.plan is not None or least == math.inf
    if answer.plan is not None:
        assert answer.plan.value <= least or answer.status is Status.FEASIBLE
        np.testing.assert_array_equal(*interpret(answer.plan, x).values(), *by_onnxruntime(model, x).values())
        assert from_json(to_json(answer.plan), graph).blocks == answer.plan.blocks


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_weights_lie_where_they_save_time_beside_cuts(seed: int):
    model = random_chain(seed, qdq=seed == 0)
    graph, x = network_of(model), inputs_of(network_of(model), seed)
    nbytes = lowtide.plan_edge(graph, [RAM]).arena_bytes[0]
    memories, flash = [Space("fast", nbytes // 2, 8e9, 8e9), Space("slow", nbytes, 1e9, 1e9)], Space("flash", None, 5e7)
    whole, cut = (lowtide.plan_edge(graph, memories, constants=flash, macs_per_s=1e9, cut=each) for each in (False, True))
    assert cut.value <= whole.value
    weights = [block.space for block in cut.blocks if any(cut.graph.tensors[at].constant for at in block.tensors)]
    assert {*weights} != {2} or any(each.axis == 1 for each in cut.cuts)  # of which each slice reads its own, once
    np.testing.assert_array_equal(*interpret(cut, x).values(), *by_onnxruntime(model, x).values())
    assert from_json(to_json(cut), graph).blocks == cut.blocks


@pytest.mark.parametrize("views", ["reshape", "slices"])
def test_no_cuts_of_a_network_with_parts_take_less_than_is_proven(views: str):
    """Cuts of one operator beside longer ones, results that are parts of a whole and are read as parts, in any order."""
    better = 0
    for seed in (19, 0, 41):
        model = random_model(seed)
        graph, x, rng = network_of(model, views=views), random_inputs(model, seed), np.random.default_rng(seed)
        cuts = [cut for cut in _all_cuts(graph) if cut.first < cut.last]
        fast = lowtide.plan_edge(graph, [RAM]).arena_bytes[0] // 2 + 1
        for memories in ([RAM], [Space("fast", fast, 8e9, 8e9), Space("slow", None, 1e9, 1e9)]):
            found = lowtide.plan_edge(graph, memories, macs_per_s=1e9, dma=True, cut=True, extra_macs=1e6)
            for at in rng.permutation(len(cuts))[:8]:
                others = [cut for cut in cuts if cut.first > cuts[at].last][:1]
                plan = lowtide.plan_edge(with_cuts(graph, [cuts[at], *others]), memories, macs_per_s=1e9, dma=True)
                assert found.bound <= plan.value
            better += bool(found.cuts)
            for name, array in by_onnxruntime(model, x).items():
                np.testing.assert_allclose(interpret(found, x)[name], array, rtol=1e-4, atol=1e-5)
            assert from_json(to_json(found), graph).blocks == found.blocks
    assert better >= 3


def test_the_least_bytes_of_a_fast_memory_within_a_time_are_less_with_cuts():
    chain = Chain(0, 16, 16)
    for channels in (24, 24, 4):
        chain.conv(channels, 3, pads=(1, 1, 1, 1))
    graph, spaces = network_of(chain.model()), [Space("fast", None, 8e9, 8e9), Space("slow", None, 1e9, 1e9)]
    whole = lowtide.plan_edge(graph, spaces, least="fast", within_us=5.0)
    cut = lowtide.plan_edge(graph, spaces, cut=True, least="fast", within_us=5.0)
    assert cut.time_us is not None
    assert cut.time_us <= 5.0
    assert cut.cuts
    assert cut.bound <= cut.arena_bytes[0] < whole.arena_bytes[0] / 3


def test_a_chain_without_branches_is_proven_to_be_least():
    chain = Chain(0, 24, 24)
    for channels in (8, 8, 16):
        chain.conv(channels, 3, pads=(1, 1, 1, 1))
        chain.conv(channels * 2, 1)
    graph = network_of(chain.model())
    whole, cut = lowtide.plan_edge(graph, [RAM]), lowtide.plan_edge(graph, [RAM], cut=True)
    assert cut.status is Status.OPTIMAL
    assert cut.extra_macs == 0
    assert cut.arena_bytes[0] < whole.arena_bytes[0] * 0.85


def test_channels_of_a_block_are_made_one_by_one_with_weights_of_their_own():
    """An expansion and the operators behind it: no row of them is kept, and each weight is read once."""
    chain = Chain(0, 9, 9)
    chain.conv(12, 1)
    chain.conv(12, 7, pads=(3, 3, 3, 3), group=12)
    model = chain.model()
    graph = network_of(model)
    cut = with_cuts(graph, [Cut(0, 1, 1)])
    assert cut.nodes[0].workspace_bytes == 9 * 9
    nbytes = dict(zip(cut.nodes[0].inputs, cut.nodes[0].attributes["traffic"].read_bytes, strict=True))
    assert all(nbytes[at] == tensor.size_bytes for at, tensor in enumerate(cut.tensors) if tensor.constant and tensor.size_bytes > 4)
    spaces = [Space("fast", 1400, 8e9, 8e9), Space("slow", None, 1e9, 1e9)]
    plan = lowtide.plan_edge(graph, spaces, cut=True, constants_bytes_per_s=5e7)
    assert [each.axis for each in plan.cuts] == [1]
    x = inputs_of(graph, 0)
    np.testing.assert_array_equal(*interpret(plan, x).values(), *by_onnxruntime(model, x).values())


def test_the_skip_of_a_residual_block_waits_in_a_ring():
    """The addition reads a slice that a convolution two slices ahead has read already."""
    chain = Chain(0, 16, 16)
    chain.conv(4, 1)
    skip = chain.now
    chain.conv(4, 5, pads=(2, 2, 2, 2))
    chain.add(skip)
    graph = network_of(chain.model())
    cut = with_cuts(graph, [Cut(0, 2, 2)])
    body = cut_body(cut.nodes[0])
    assert body is not None
    assert [ring.slots for ring in body.rings] == [5, 1]
    assert body.rings[0].slot_bytes == 4 * 16


def test_a_convolution_goes_over_its_own_input_behind_a_ring():
    chain = Chain(0, 16, 16)
    chain.conv(3, 3, pads=(1, 1, 1, 1))
    model = chain.model()
    graph = network_of(model)
    plan = lowtide.plan_edge(graph, [RAM], cut=True)
    assert plan.cuts == (Cut(0, 0, 2, staged=True),)
    assert plan.arena_bytes == (3 * 16 * 16 + 3 * 3 * 16,)
    x = inputs_of(graph, 0)
    ((name, expected),) = by_onnxruntime(model, x).items()
    np.testing.assert_array_equal(interpret(plan, x)[name], expected)


def test_no_ring_holds_an_input_of_a_single_slice():
    chain = Chain(0, 1, 16)
    chain.conv(3, 3, pads=(2, 1, 2, 1))
    graph = network_of(chain.model())
    with pytest.raises(FormatError, match="cut"):
        with_cuts(graph, [Cut(0, 0, 2, staged=True)])
    lowtide.plan_edge(with_cuts(graph, [Cut(0, 0, 2)]), [RAM])


def test_inputs_that_stay_with_the_caller_take_no_bytes():
    model = random_chain(3)
    graph = network_of(model)
    x = inputs_of(graph, 3)
    ((name, expected),) = by_onnxruntime(model, x).items()
    plan = lowtide.plan_edge(graph, [RAM], cut=True, inputs_outside=True)
    assert not any(graph.tensors[at].name == "x" for block in plan.blocks for at in block.tensors)
    np.testing.assert_array_equal(interpret(plan, x)[name], expected)
    assert from_json(to_json(plan), graph).blocks == plan.blocks


def test_a_size_is_kept_with_as_few_multiplications_as_it_asks_for():
    graph = network_of(random_chain(7))
    least = lowtide.plan_edge(graph, [RAM], cut=True, extra_macs=9.0)
    whole = lowtide.plan_edge(graph, [RAM])
    sizes = np.linspace(least.arena_bytes[0], whole.arena_bytes[0], 5).astype(int)
    extras = [lowtide.plan_edge(graph, [Space("ram", int(size))], cut=True, extra_macs=None).extra_macs for size in sizes]
    assert extras == sorted(extras, reverse=True)
    assert extras[-1] == 0
    with pytest.raises(BudgetError):
        lowtide.plan_edge(graph, [Space("ram", least.arena_bytes[0] - 1)], cut=True, extra_macs=None)


def test_a_pytorch_model_is_cut():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=2, dilation=2),
        nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Hardswish(), nn.AvgPool2d(2), nn.Conv2d(16, 4, 1),
    ).eval()  # fmt: skip
    x = torch.randn(1, 3, 33, 40)
    graph = lowtide.network(model, (x,))
    for cuts in ([Cut(0, 0, 1)], [Cut(3, 11, 1)], [Cut(3, 4, 1), Cut(5, 10, 1)]):
        (result,) = interpret(lowtide.plan_edge(with_cuts(graph, cuts), [RAM]), [x.numpy()]).values()
        np.testing.assert_allclose(result, model(x).detach().numpy(), atol=1e-5)
    for extra in (0.0, 1.0):
        plan = lowtide.plan_edge(graph, [RAM], cut=True, extra_macs=extra)
        assert plan.arena_bytes[0] < lowtide.plan_edge(graph, [RAM]).arena_bytes[0] * 0.85
        ((_, result),) = interpret(plan, [x.numpy()]).items()
        np.testing.assert_allclose(result, model(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(("kernel", "padding"), [(1, 1), (3, 4), (1, (2, 0)), ((1, 3), (1, 1))])
def test_what_would_make_a_slice_of_padding_alone_is_not_cut(kernel: Any, padding: Any):
    """Nothing is read for such rows, so that nothing would be in a ring."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, kernel, padding=padding), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)]
    model, image = nn.Sequential(*layers).eval(), torch.randn(1, 3, 16, 16)
    graph = lowtide.network(model, (image,))
    for outside in (False, True):
        plan = lowtide.plan_edge(graph, [lowtide.Space("ram")], cut=True, extra_macs=0.3, inputs_outside=outside)
        (found,) = lowtide.interpret(plan, [image.numpy()]).values()
        np.testing.assert_allclose(found, model(image).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_published_network_is_cut_with_its_groups():
    """Convolutions with the rescaling behind them; what the caller keeps is a group's input, too."""
    graph = read_deeploy(KEYWORDS)
    x = [np.random.default_rng(0).integers(-100, 100, graph.tensors[at].shape).astype(np.float32) for at in graph.inputs]
    whole = lowtide.plan_edge(graph, [RAM], inputs_outside=True)
    ((name, expected),) = interpret(whole, x, functions=FUNCTIONS).items()
    cut = lowtide.plan_edge(graph, [RAM], cut=True, inputs_outside=True)
    assert cut.arena_bytes[0] < whole.arena_bytes[0] * 0.6
    np.testing.assert_array_equal(interpret(cut, x, functions=FUNCTIONS)[name], expected)


def test_an_addition_over_its_second_input_counts_for_the_bound():
    """The first input is read later on: only the second one dies."""
    tensors = [EdgeTensor(name, (1, 1, 9, 9), "int8", 81) for name in "xabc"] + [EdgeTensor("y", (1,), "int8", 1)]
    nodes = (
        EdgeNode("one", "Relu", "", (0,), (1,), in_place=()),
        EdgeNode("sum", "Add", "", (0, 1), (2,), in_place=((0, 0), (0, 1))),
        EdgeNode("last", "Op", "", (0, 2), (4,)),
    )
    graph = EdgeGraph("sum", tuple(tensors), nodes, (0,), (4,))
    plan = lowtide.plan_edge(graph, [RAM])
    assert plan.arena_bytes == (163,)
    assert CutSearch(graph, EdgeProblem.of(graph, [RAM])).bound_bytes(0) <= 163


def test_rows_of_a_product_with_weights_are_slices():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Softmax(-1)).eval()
    x = torch.randn(32, 16)
    plan = lowtide.plan_edge(lowtide.network(model, (x,)), [RAM], cut=True)
    assert plan.cuts
    assert plan.arena_bytes[0] < 4 * (2 * 32 * 16 + 3 * 64)
    ((_, result),) = interpret(plan, [x.numpy()]).items()
    np.testing.assert_allclose(result, model(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(("kind", "view"), [("Sub", "Identity"), ("Add", "Dropout")])
def test_no_cut_goes_over_bytes_that_it_reads_as_another_tensor(kind: str, view: str):
    """The view and its source are one storage, of which the operator reads both."""
    make, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    nodes = [make("Relu", ["x"], ["r"]), make(view, ["r"], ["v"]), make(kind, ["v", "r"], ["y"])]
    ends = ([value(name, onnx.TensorProto.FLOAT, [1, 4, 4, 4])] for name in "xy")
    graph = network_of(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", *ends), opset_imports=[onnx.helper.make_opsetid("", 17)]))
    spaces = [Space("fast", 512, 8e9, 8e9), Space("slow", None, 1e9, 1e9)]
    for memories in (spaces, [RAM]):
        whole, cut = (lowtide.plan_edge(graph, memories, cut=each) for each in (False, True))
        assert cut.value <= whole.value


@pytest.mark.parametrize(
    ("seed", "cut", "extra", "moves", "fast", "slow"),
    [
        (1268, Cut(0, 2, 2, 3, 4), 0.3, False, 279, 232),  # in bands of which the last is much smaller
        (20, Cut(1, 3, 3, staged=True), 0.3, False, 254, 212),  # the result may be written over another input
        (105, Cut(0, 3, 2, staged=True), 0.0, True, 201, None),  # and over none, but its input is read once
    ],
)
def test_what_is_optimal_takes_no_longer_than_any_cut(seed: int, cut: Cut, extra: float, moves: bool, fast: int, slow: int | None):
    graph, spaces = network_of(random_chain(seed + 30, most=2, smallest=5)), [Space("fast", fast, 8.0, 8.0), Space("slow", slow, 2.0, 1.0)]
    options = {"macs_per_s": 300.0, "dma": True, "effort": EdgeEffort(moves=moves)}
    found = lowtide.plan_edge(graph, spaces, cut=True, extra_macs=extra, **options)
    assert found.bound <= lowtide.plan_edge(with_cuts(graph, [cut]), spaces, **options).value
