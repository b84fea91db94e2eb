"""Fused kernels for inference on a CPU: a graph's operators become generated C++ (AGO).

`Fusion` in `ir.operators.row` says what an operator is to a generator: complex, simple, or nothing it knows, which torch runs.
"""
