"""Networks at random: read, planned, run in exactly the plan's bytes; what comes out is onnxruntime's to the last bit."""

import numpy as np
import pytest

from lowtide.edge.interpret import interpret
from lowtide.edge.onnx import network_of
from tests.edge_networks import by_onnxruntime, random_inputs, random_model
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
