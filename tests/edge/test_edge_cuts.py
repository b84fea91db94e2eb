"""Runs of operators that work slice by slice: what they compute, in which bytes, and that none of their kind takes fewer."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lowtide
from bench.deeploy import FUNCTIONS, read_deeploy
from lowtide.cli.commands import app
from lowtide.edge.check import check
from lowtide.edge.check_cuts import check_cut
from lowtide.edge.cut_search import CutSearch
from lowtide.edge.cuts import Cut, cut_body, with_cuts
from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
from lowtide.edge.interpret import interpret
from lowtide.edge.onnx import network_of
from lowtide.edge.output import from_json, to_header, to_json
from lowtide.edge.plan import Space
from lowtide.edge.problem import EdgeProblem
from lowtide.edge.rings import Ring
from lowtide.edge.solve import EdgeEffort, EdgeRequest, solve_cut, with_cut_parts
from lowtide.errors import BudgetError, CheckError, FormatError
from lowtide.problems.status import Status
from tests.edge_brute import Brute
from tests.edge_chains import Chain, random_chain
from tests.edge_networks import by_onnxruntime

RAM = Space("ram")
KEYWORDS = Path(__file__).parents[1] / "data" / "onnx" / "mlperf-KeywordSpotting.onnx"


def _all_cuts(graph: EdgeGraph, bands: bool = True) -> Iterator[Cut]:
    """Every cut that the network allows, by trying."""
    for first in range(len(graph.nodes)):
        for last in range(first, len(graph.nodes)):
            shape = graph.tensors[graph.nodes[last].outputs[0]].shape
            for axis in (2, 3):
                other = 5 - axis
                for cut in (
                    Cut(first, last, axis),
                    Cut(first, last, axis, staged=True),
                    *(Cut(first, last, axis, other, band) for band in range(1, shape[other] if bands else 1)),
                ):
                    try:
                        with_cuts(graph, [cut])
                    except FormatError:
                        continue
                    yield cut


def _inputs(graph: EdgeGraph, seed: int) -> dict[str, np.ndarray]:
    tensor = graph.tensors[graph.inputs[0]]
    return {"x": np.random.default_rng(seed).integers(-100, 100, tensor.shape).astype(np.int8)}


@pytest.mark.parametrize("seed", range(24))
def test_a_cut_computes_what_onnxruntime_computes_to_the_last_bit(seed: int):
    model = random_chain(seed, qdq=seed % 4 == 0)
    graph = network_of(model)
    x = _inputs(graph, seed)
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
    x = _inputs(graph, seed)
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
    whole, x = lowtide.plan_edge(graph, [RAM]).arena_bytes[0], _inputs(graph, seed)
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
    graph, x = network_of(model), _inputs(network_of(model), seed)
    nbytes = lowtide.plan_edge(graph, [RAM]).arena_bytes[0]
    memories, flash = [Space("fast", nbytes // 2, 8e9, 8e9), Space("slow", nbytes, 1e9, 1e9)], Space("flash", None, 5e7)
    whole, cut = (lowtide.plan_edge(graph, memories, constants=flash, macs_per_s=1e9, cut=each) for each in (False, True))
    assert cut.value <= whole.value
    weights = [block.space for block in cut.blocks if any(cut.graph.tensors[at].constant for at in block.tensors)]
    assert {*weights} != {2}
    np.testing.assert_array_equal(*interpret(cut, x).values(), *by_onnxruntime(model, x).values())
    assert from_json(to_json(cut), graph).blocks == cut.blocks


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
    x = _inputs(graph, 0)
    ((name, expected),) = by_onnxruntime(model, x).items()
    np.testing.assert_array_equal(interpret(plan, x)[name], expected)


def test_inputs_that_stay_with_the_caller_take_no_bytes():
    model = random_chain(3)
    graph = network_of(model)
    x = _inputs(graph, 3)
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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cut": "yes"}, "cut: expected True or False"),
        ({"cut": True, "inputs_outside": 1}, "inputs_outside: expected True or False"),
        ({"cut": True, "extra_macs": True}, "extra_macs: expected a share"),
        ({"extra_macs": 0.5}, "extra_macs: expected it together with cut=True"),
        ({"extra_macs": None}, "extra_macs: expected it together with cut=True"),
    ],
)
def test_odd_options_are_refused(options: dict[str, Any], sentence: str):
    with pytest.raises(FormatError, match=sentence):
        lowtide.plan_edge(_cut_chain(), [lowtide.Space("ram")], **options)


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


def _cut_chain() -> EdgeGraph:
    chain = Chain(1, 12, 12)
    chain.conv(4, 3, pads=(1, 1, 1, 1))
    chain.conv(4, 3, pads=(1, 1, 1, 1))
    return with_cuts(network_of(chain.model()), [Cut(0, 1, 2, 3, 5)])


def test_the_check_finds_what_is_wrong_with_a_cut():
    graph = _cut_chain()
    (node,) = graph.nodes
    ring = node.attributes["rings"][0]
    check_cut(graph, node)
    for change, text in (
        ({"rings": (replace(ring, slots=2),)}, "which its ring has lost"),
        ({"rings": (replace(ring, slot_bytes=ring.slot_bytes - 1),)}, "larger than a slot"),
        ({"rings": (replace(ring, offset_bytes=1),)}, "lies outside of its"),
        ({"rings": ()}, "expected a ring for each"),
        ({"cut": replace(node.attributes["cut"], band=2)}, "multiplications"),
        ({"cut": replace(node.attributes["cut"], axis=1)}, "cannot be cut along"),
    ):
        with pytest.raises(CheckError, match=text):
            check_cut(graph, replace(node, attributes={**node.attributes, **change}))
    with pytest.raises(CheckError, match="multiplications"):
        check_cut(graph, replace(node, macs=node.macs - 1))


def test_the_check_finds_a_result_over_an_input_that_is_still_read():
    chain = Chain(1, 12, 12)
    chain.conv(3, 3, pads=(1, 1, 1, 1))
    graph = with_cuts(network_of(chain.model()), [Cut(0, 0, 2)])
    node = graph.nodes[0]
    assert node.in_place == ()
    with pytest.raises(CheckError, match="still read"):
        check_cut(graph, replace(node, in_place=((0, 0),)))
    plan = lowtide.plan_edge(graph, [RAM])
    over = replace(plan, graph=replace(graph, nodes=(replace(node, in_place=((0, 0),)),)))
    block = replace(plan.blocks[0], tensors=(graph.inputs[0], graph.outputs[0]), start=0, end=1, offset_bytes=0)
    with pytest.raises(CheckError, match="written over"):
        interpret(replace(over, blocks=(block,)), _inputs(graph, 0))


def test_running_finds_a_ring_that_is_too_short():
    graph = _cut_chain()
    plan = lowtide.plan_edge(graph, [RAM])
    (node,) = graph.nodes
    ring = node.attributes["rings"][0]
    short = replace(node, attributes={**node.attributes, "rings": (Ring(ring.offset_bytes, 2, ring.slot_bytes),)})
    with pytest.raises(CheckError, match="expected slice 0 of"):
        interpret(replace(plan, graph=replace(graph, nodes=(short,))), _inputs(graph, 0))


def test_what_cannot_be_cut_is_told_so():
    graph = network_of(random_chain(0))
    for cuts in ([Cut(0, 99, 2)], [Cut(0, 0, 1)], [Cut(0, 0, 2, 2, 1)], [Cut(0, 0, 2, 3, 0)], [Cut(0, 1, 2), Cut(1, 1, 2)], [Cut(0, 0, 9)]):
        with pytest.raises(FormatError, match="cuts: "):
            with_cuts(graph, cuts)
    for share in (-0.1, math.nan, "10%"):
        with pytest.raises(FormatError, match="extra_macs"):
            lowtide.plan_edge(graph, [RAM], cut=True, extra_macs=share)


def test_a_header_has_the_rings_of_each_cut():
    text = to_header(lowtide.plan_edge(_cut_chain(), [RAM]))
    assert "#define PLAN_CUT_0 {0, 1, 2, 3, 5, 0}" in text
    assert "#define PLAN_CUT_0_RINGS {{0, 3, " in text


def test_a_cut_of_a_file_that_is_none_is_refused():
    plan = lowtide.plan_edge(network_of(random_chain(5)), [RAM], cut=True)
    text = to_json(plan)
    assert '"cuts": [' in text
    broken = text.replace('"cuts": [', '"cuts": [[0, 1],')
    broken = broken.replace("[[0, 1],]", "[[0, 1]]")
    with pytest.raises(FormatError, match="a cut: expected"):
        from_json(broken, network_of(random_chain(5)))


def test_the_command_line_cuts(tmp_path: Path):
    onnx.save(random_chain(5), str(tmp_path / "net.onnx"))
    out = tmp_path / "plan.json"
    arguments = ["edge", str(tmp_path / "net.onnx"), "--memory", "sram=any", "--cut", "--extra-macs", "10%", "--json", str(out)]
    shown = CliRunner().invoke(app, [*arguments, "--inputs-outside"])
    assert shown.exit_code == 0, shown.output
    assert "of multiplications done again" in shown.output
    assert "of multiplications done again" not in CliRunner().invoke(app, arguments[:4]).output
    odd = CliRunner().invoke(app, [*arguments[:4], "--flash", "50MB/s", "--constants", "flash=any@50MB/s"])
    assert "--constants: expected it without --flash" in odd.output
    plan = from_json(out.read_text(), network_of(random_chain(5)))
    assert plan.cuts
    assert plan.extra_macs <= 0.1
    refused = CliRunner().invoke(app, [*arguments[:-3], "much"])
    assert "--extra-macs: expected a share such as 10%, got 'much'" in refused.output


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
