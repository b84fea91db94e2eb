"""Other forms of operators, that write where they are told, add to what lies there, or take sizes for a tensor; where arguments stand."""

from __future__ import annotations

# The form with `out=`, of what has none for elements.
OUT = {f"aten.{name}.default": f"aten.{name}.out" for name in ("mm", "bmm", "addmm", "baddbmm")}

# The form that adds its result to its first argument.
ADDING = {"aten.mm.default": "aten.addmm_.default", "aten.bmm.default": "aten.baddbmm_.default"}

# The operator that adds its product to its first argument, and gives the sum.
ADDED = {"aten.mm.default": "aten.addmm.default", "aten.bmm.default": "aten.baddbmm.default"}

# Products of rows by a weight: where the weight stands, behind the rows, and before those the bias where there is one.
WEIGHT_OF_ROWS = {"aten.mm.default": 1, "aten.addmm.default": 2}

# The form that takes sizes in the place of a tensor of these sizes.
OF_SIZES = {
    "aten.empty_like.default": "aten.empty.memory_format", "aten.zeros_like.default": "aten.zeros.default",
    "aten.ones_like.default": "aten.ones.default",
}  # fmt: skip
EMPTY_LIKE, EMPTY_STRIDED = "aten.empty_like.default", "aten.empty_strided.default"

# Where the epsilon of a batch norm stands among its arguments, of those that may have statistics given.
EPSILON_OF_NORMS = {"aten.native_batch_norm.default": 7, "aten._native_batch_norm_legit_no_training.default": 6}
