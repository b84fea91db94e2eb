"""Regions: legal by brute force, and their parts make the whole, on random programs."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.ir.graph import Kind, Value
from lowtide.ir.operators.nodes import is_view
from lowtide.split.dimensions import DimensionGraph
from lowtide.split.sets import Regions
from tests.fission_programs import Program, wrong_results

_UNARY = ("aten.relu.default", "aten.neg.default", "aten.exp.default")


def random_program(rng: random.Random, length: int) -> Program:
    """Operators of all sorts over tensors of [4, 6, 8] and what follows from them."""
    program = Program()
    values = [program.given(torch.rand(4, 6, 8, dtype=torch.float64)), program.given(torch.rand(4, 6, 8, dtype=torch.float64))]
    weights = [program.given(torch.rand(8, 8, dtype=torch.float64) / 8, Kind.PARAMETER) for _ in range(2)]
    for _ in range(length):
        value = rng.choice(values[-4:])
        made = _step(program, rng, value, values, weights)
        if made is not None and made.shape and max(made.shape) > 1:
            values.append(made)
    return program


def _step(program: Program, rng: random.Random, value: Value, values: list[Value], weights: list[Value]) -> Value | None:
    rank = len(value.shape)
    kind = rng.randrange(9)
    alike = [other for other in values if other.shape == value.shape]
    if kind == 0:
        return program.run(rng.choice(_UNARY), value)
    if kind == 1:
        return program.run("aten.mul.Tensor", value, rng.choice(alike))
    if kind == 2:
        return program.run("aten._softmax.default", value, rng.randrange(rank), False)
    if kind == 3:
        return program.run("aten.sum.dim_IntList", value, [rng.randrange(rank)], rng.random() < 0.5)
    if kind == 4 and rank > 1:
        return program.run("aten.transpose.int", value, 0, rng.randrange(1, rank))
    if kind == 5 and rank == 3 and value.stride == (value.shape[1] * value.shape[2], value.shape[2], 1):
        return program.run("aten.view.default", value, [value.shape[0] * value.shape[1], value.shape[2]])
    if kind == 6 and rank == 2 and value.shape[1] == 8:
        return program.run("aten.mm.default", value, rng.choice(weights))
    if kind == 7 and rank == 2:
        other = program.run("aten.t.default", rng.choice([each for each in values if len(each.shape) == 2]))
        return program.run("aten.mm.default", value, other) if value.shape[1] == other.shape[0] else None
    if kind == 8 and rank == 3:
        return program.run("aten.cat.default", [value, rng.choice(alike)], rng.randrange(rank))
    return None


def regions_of(program: Program, rng: random.Random):
    """Some regions of a program whose last values are outputs."""
    made = [value for node in program.nodes for value in node.results]
    graph = program.graph(*made[-1:])
    regions = Regions(DimensionGraph.of(graph))
    for value in rng.sample(made, min(6, len(made))):
        wanted = (
            sorted(rng.sample(range(len(graph.nodes)), rng.randint(1, len(graph.nodes)))) if rng.random() < 0.5 else range(len(graph.nodes))
        )
        for dim in range(len(value.shape)):
            region = regions.around(value, dim, list(wanted))
            if region is not None:
                yield graph, regions, region


@given(st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_parts_of_a_region_make_the_whole(seed):
    rng = random.Random(seed)
    program = random_program(rng, 16)
    for graph, _, region in regions_of(program, rng):
        assert wrong_results(program.tensors, graph, region, seed) == []


@given(st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_regions_are_convex_and_connected(seed):
    rng = random.Random(seed)
    program = random_program(rng, 20)
    for graph, regions, region in regions_of(program, rng):
        assert not all(is_view(graph.nodes[place]) for place in region.axes)
        assert _convex(regions.before, region.places)
        assert _connected(graph, region)
        made = {value for place in region.axes for value in graph.nodes[place].results}
        given_values = {value for place in region.axes for value in graph.nodes[place].inputs} - made
        assert {*region.sliced, *region.shared} == given_values
        outside = {value for place, node in enumerate(graph.nodes) if place not in region.axes for value in node.inputs} | set(
            graph.outputs
        )
        assert {*region.written, *region.accumulated} == made & outside
        inside = {value for place in region.axes for value in graph.nodes[place].inputs}
        assert not inside & region.accumulated.keys()


def _convex(before, places) -> bool:
    """By following every path that leaves."""
    left: set[int] = set()
    for place in range(len(before)):
        reached = any(other in left for other in before[place])
        if place in places and reached:
            return False
        if place not in places and (reached or any(other in places for other in before[place])):
            left.add(place)
    return True


def _connected(graph, region) -> bool:
    cut = {**region.sliced, **region.written}
    found, pending = set(), [min(region.axes)]
    while pending:
        place = pending.pop()
        if place in found:
            continue
        found.add(place)
        node = graph.nodes[place]
        for other in region.axes:
            theirs = graph.nodes[other]
            together = {*node.inputs, *node.results} & {*theirs.inputs, *theirs.results}
            if any(value in cut or value not in region.shared for value in together):
                pending.append(other)
    return found == set(region.axes)


def test_a_path_that_leaves_and_comes_back_is_left_out():
    """What reads the normalised result cannot run in the parts of what was normalised."""
    program = Program()
    x = program.given(torch.rand(4, 6))
    a = program.run("aten.exp.default", x)
    b = program.run("aten._softmax.default", a, 1, False)
    c = program.run("aten.mul.Tensor", a, b)
    graph = program.graph(c)
    regions = Regions(DimensionGraph.of(graph))
    assert regions.around(a, 1, [0, 1, 2]).places == {0}
    assert regions.around(a, 0, [0, 1, 2]).places == {0, 1, 2}
    assert regions.around(c, 1, [0, 1, 2]).places == {2}


def test_queries_are_cut_and_keys_stay_whole():
    """Scores of all tokens with all tokens: two dimensions are one part, of which one is cut."""
    program = Program()
    x, w = program.given(torch.rand(6, 4)), program.given(torch.rand(4, 4), Kind.PARAMETER)
    q = program.run("aten.mm.default", x, w)
    k = program.run("aten.t.default", program.run("aten.mm.default", x, w))
    scores = program.run("aten.mm.default", q, k)
    weights = program.run("aten._softmax.default", scores, 1, False)
    graph = program.graph(program.run("aten.mm.default", weights, x))
    dimensions = DimensionGraph.of(graph)
    assert dimensions.component(scores, 0) == dimensions.component(scores, 1)
    region = Regions(dimensions).around(weights, 0, range(6))
    assert region.places == {3, 4, 5}
    assert k in region.shared
    assert x in region.shared
    assert wrong_results(program.tensors, graph, region) == []
