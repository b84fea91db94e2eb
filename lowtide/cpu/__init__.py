"""Fused kernels for inference on a CPU: a graph's operators become generated C++ (AGO).

`Fusion` in `ir.operators.row` says what an operator is to a generator: complex, simple, or nothing it knows. A *cluster* is a tuple of
nodes of a graph, convex, and all clusters of a partition together have no cycle. Of what no cluster has, torch runs the operator.
"""
