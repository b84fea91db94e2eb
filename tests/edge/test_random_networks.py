"""Networks at random: read, planned, run in exactly the plan's bytes; what comes out is onnxruntime's to the last bit."""

import numpy as np
import pytest
from onnx import helper

import lowtide
from lowtide.edge.interpret import interpret
from lowtide.edge.onnx import network_of
from lowtide.edge.output import from_json, to_json
from lowtide.edge.plan import Space
from tests.edge_networks import by_onnxruntime, model, random_inputs, random_model, value
from tests.edge_plans import plan_apart, plan_shared


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_computes_what_onnxruntime_computes(seed: int):
    network = random_model(seed)
    inputs = random_inputs(network, seed)
    expected = by_onnxruntime(network, inputs)
    graph = network_of(network)
    shared, apart = plan_shared(graph), plan_apart(graph)
    for plan in (shared, apart):
        results = interpret(plan, inputs)
        assert results.keys() == expected.keys()
        for name, array in results.items():
            np.testing.assert_array_equal(array, expected[name])
    assert max(block.offset_bytes + block.size_bytes for block in shared.blocks) <= sum(block.size_bytes for block in apart.blocks)


@pytest.mark.parametrize("seed", range(20))
def test_parts_that_lie_where_they_belong_are_what_onnxruntime_computes(seed: int):
    """Split and Concat along the outermost axis, in one memory and in two."""
    network = random_model(seed)
    inputs, graph = random_inputs(network, seed), network_of(network, views="slices")
    expected = by_onnxruntime(network, inputs)
    (room,) = lowtide.plan_edge(graph, [Space("ram")]).arena_bytes
    for memories in ([Space("ram")], [Space("fast", room // 2 + 1, 8e9, 8e9), Space("slow", None, 1e9, 1e9)]):
        plan = lowtide.plan_edge(graph, memories, dma=True)
        for name, array in interpret(plan, inputs).items():
            np.testing.assert_array_equal(array, expected[name])
        assert from_json(to_json(plan), graph).blocks == plan.blocks


def _expanding(count: int):
    """Blocks of SqueezeNet: few channels, expanded by two convolutions whose results are concatenated."""
    rng, nodes, constants, now, channels = np.random.default_rng(0), [], {}, "x", 8
    for at in range(count):
        constants[f"s{at}w"] = rng.standard_normal((4, channels, 1, 1)).astype(np.float32) / 4
        nodes.append(helper.make_node("Conv", [now, f"s{at}w"], [f"s{at}"]))
        for kernel in (1, 3):
            name = f"e{at}{kernel}"
            constants[f"{name}w"] = rng.standard_normal((16, 4, kernel, kernel)).astype(np.float32) / 4
            nodes.append(helper.make_node("Conv", [f"s{at}", f"{name}w"], [f"{name}c"], pads=[kernel // 2] * 4))
            nodes.append(helper.make_node("Relu", [f"{name}c"], [name]))
        now, channels = f"o{at}", 32
        nodes.append(helper.make_node("Concat", [f"e{at}1", f"e{at}3"], [now], axis=1))
    return model(nodes, [value("x", (1, 8, 12, 12))], [value(now, None)], constants)


def test_a_concatenation_in_place_takes_half_the_bytes():
    network = _expanding(3)
    inputs = random_inputs(network, 0)
    copies, views = (lowtide.plan_edge(network_of(network, views=views), [Space("ram")]) for views in ("reshape", "slices"))
    whole = 32 * 144 * 4
    assert copies.arena_bytes[0] >= 2 * whole
    assert views.arena_bytes[0] == views.bound == whole + 4 * 144 * 4
    np.testing.assert_array_equal(*interpret(views, inputs).values(), *by_onnxruntime(network, inputs).values())
