"""Listing 1 of BladeDISC++ as a graph: elements of one byte, `arg0` and `arg1` the caller's, the reshape a copy as in the paper."""

from __future__ import annotations

from lowtide.ir.graph import Graph
from lowtide.ir.text.graph_text import parse

TEXT = """\
def graph(  # S0 in 12..49152, S1 in 1..4096
    arg0,  # uint8[S0] S0 B input cpu
    arg1,  # uint8[12, 11008] 129.00 KiB parameter cpu
):
    v1 = aten.repeat.default(arg0, (4096, 1))  # uint8[4096, S0] 4096*S0 B activation cpu
    v2 = aten.reshape.default(arg0, (size("S1"), 12))  # uint8[S1, 12] 12*S1 B activation cpu
    v3 = aten.mm.default(v2, arg1)  # uint8[S1, 11008] 11008*S1 B activation cpu
    v4 = aten.sum.dim_IntList(v3, (1,))  # uint8[S1] S1 B activation cpu
    v1084 = aten.repeat.default(v4, (11008, 1))  # uint8[11008, S1] 11008*S1 B activation cpu
    v1085 = aten.repeat.default(arg0, (1024, 1))  # uint8[1024, S0] 1024*S0 B activation cpu
    return (v1, v1084, v1085)
"""


def listing() -> Graph:
    """The graph, its two dimensions not yet compared."""
    return parse(TEXT)
