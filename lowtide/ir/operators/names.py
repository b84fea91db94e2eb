"""Operators that lowtide itself writes into graphs, by name."""

from __future__ import annotations

# Copies to the host's memory and back, see `ir.graph`.
STORE, DROP, LOAD = "host.store", "host.drop", "host.load"

# Runs its body once for each part of an extent, see `ir.bodies`.
LOOP = "fission.loop"

# Runs its body by generated kernels, see `ir.bodies`.
REGION = "fuse.region"

# Arithmetic on Python numbers starts with this: "py.mul".
ARITHMETIC = "py."

# Functions of Python's `math` that arithmetic on numbers may call, as "py.math_sqrt".
MATH_FUNCTIONS = frozenset({
    "atan", "ceil", "cos", "exp", "expm1", "fabs", "floor", "log", "log10", "log1p", "log2", "pow", "sin", "sqrt", "tan", "tanh",
})  # fmt: skip

# Ends the program if its first argument, a number, is not zero; its further arguments are what the program returns.
STOP = "py.stop_if"

# Makes a Python number of a tensor of one element.
ITEM = "aten._local_scalar_dense.default"

# A part of a tensor, seen and written over.
AS_STRIDED, SCATTER = "aten.as_strided.default", "aten.as_strided_scatter.default"

CLONE, COPY = "aten.clone.default", "aten.copy_.default"
