"""The package without onnx: it imports, and what needs onnx says which extra brings it."""

import subprocess
import sys
import textwrap

import pytest

WITHOUT = """
    import sys
    for name in ("onnx", "onnxruntime", "ml_dtypes"):
        sys.modules[name] = None  # as if it were not installed
    import numpy as np
    import lowtide
    from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
    from lowtide.edge.interpret import interpret
    from lowtide.edge.plan import EdgeBlock, EdgePlan, Space
"""


def run(code: str) -> str:
    source = textwrap.dedent(WITHOUT) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("call", ['lowtide.network("a.onnx")', "lowtide.interpret(plan, [np.zeros(2, np.float32)])"])
def test_what_needs_onnx_names_the_extra(call: str):
    printed = run(f"""
        tensors = (EdgeTensor("x", (2,), "float32", 8), EdgeTensor("y", (2,), "float32", 8))
        graph = EdgeGraph("net", tensors, (EdgeNode("relu", "Relu", "", (0,), (1,)),), (0,), (1,), opsets={{"": 17}})
        plan = EdgePlan(graph, (Space("sram"),), (0,), (EdgeBlock((0,), 0, 0, 8, 0, 1), EdgeBlock((1,), 0, 8, 8, 0, 1)))
        try:
            {call}
        except ImportError as error:
            print(error)
    """)
    assert "needs onnx, which is not installed: pip install 'lowtide[edge]'" in printed


def test_a_plan_runs_on_the_callers_own_functions():
    printed = run("""
        tensors = (EdgeTensor("x", (2,), "int8", 2), EdgeTensor("y", (2,), "int8", 2))
        graph = EdgeGraph("net", tensors, (EdgeNode("double", "Double", "my.own", (0,), (1,), in_place=((0, 0),)),), (0,), (1,))
        plan = EdgePlan(graph, (Space("sram", 2),), (0,), (EdgeBlock((0, 1), 0, 0, 2, 0, 1),))
        print(interpret(plan, {"x": np.array([3, -4], np.int8)}, functions={"Double": lambda _, x: x * np.int8(2)})["y"])
    """)
    assert printed == "[ 6 -8]\n"
