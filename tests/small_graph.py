"""A graph of four nodes, one of them a view, for tests that write sequences over it by hand."""

from __future__ import annotations

from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.remat.entries import Codes


def a_value(name, storage=None, kind=Kind.ACTIVATION, **changes):
    """Four numbers, on a storage of their own unless one is given."""
    return Value(name, storage or Storage(name, 16, "cpu", kind), "float32", (4,), (1,), **changes)


X = a_value("x", kind=Kind.INPUT)
A, B, C = a_value("a"), a_value("b"), a_value("c")
A_VIEW = a_value("a_view", A.storage)
RELU = Node("aten.relu.default", (X,), (A,))
VIEW = Node("aten.view.default", (A, (2, 2)), (A_VIEW,))
SIN = Node("aten.sin.default", (A,), (B,))
MUL = Node("aten.mul.Tensor", (A_VIEW, B), (C,))
GRAPH = Graph((X,), (RELU, VIEW, SIN, MUL), (C,))

# Entries over it, of the storage of `A`.
CODES = Codes(4, 3)
STORE, DROP, LOAD = CODES.store(0), CODES.drop(0), CODES.load(0)
