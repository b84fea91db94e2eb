"""The table: one row an operator, and the rules that make rows.

1. What an overload's row leaves out is said by the operator's.
2. The in-place form of x is x_, and what is not said of x_ is said of x.
3. Other operators of aten, arithmetic on numbers, copies to the host, loops and lowtide's own do nothing that a column knows of;
   of other people's operators it is not known whether they draw random numbers.
4. An operator whose name speaks of linear algebra may fail for some matrices.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace

from lowtide.ir.operators import attention, convolutions, draws, elementwise, layers, lookups, memory, own, products, reductions, views
from lowtide.ir.operators.collectives import rows as collectives
from lowtide.ir.operators.row import Draws, Operator

_FAMILIES = (elementwise, products, convolutions, attention, reductions, layers, lookups, memory, views, draws, own, collectives)
ROWS: dict[str, Operator] = {row.name: row for family in _FAMILIES for row in family.ROWS}

_OWN = ("aten", "py", "host", "fission", "fuse", "lowtide")


_NOTHING = {each.name: each.default for each in fields(Operator) if each.name != "name"}


@functools.cache
def row_of(op: str) -> Operator:
    """What is known of the operator of a node: "aten.add.Tensor"."""
    base, written = _base(op), functional_base(op)
    names = dict.fromkeys((op, f"{written}.{op.rpartition('.')[2]}", base, written))
    rows = [ROWS[name] for name in names if name in ROWS]
    unknown = Operator(name=base, draws=Draws.NEVER if op.split(".")[0] in _OWN else Draws.UNKNOWN)
    found = functools.reduce(_completed, rows) if rows else unknown
    return replace(found, factorises=True) if _is_linear_algebra(base.rpartition(".")[2]) else found


def forms_of(op: str) -> Operator:
    """The row of this very overload, which names its other forms: one in place has none of these."""
    return ROWS.get(op) or Operator(name=op)


def _completed(row: Operator, by: Operator) -> Operator:
    """A row with what it leaves out as another one says."""
    return replace(row, **{name: getattr(by, name) for name, default in _NOTHING.items() if getattr(row, name) == default})


def functional_base(op: str) -> str:
    """The name of the operator that computes what `op` does and writes nothing, by torch's naming; its own where it is none in place.

    "aten.relu" of "aten.relu_.default", "aten.__or__" of "aten.__ior__.Tensor" and of "aten.__or__.Tensor".
    """
    namespace, _, name = _base(op).partition(".")
    if name.startswith("__") and name.endswith("__"):
        return f"{namespace}.__{name[3:]}" if name.startswith("__i") else f"{namespace}.{name}"
    return f"{namespace}.{name.removesuffix('_')}"


def writes_in_place(op: str) -> bool:
    """Whether an operator writes in place by torch's naming: "aten.relu_.default", "aten.__ior__.Tensor", but not "aten.__or__.Tensor"."""
    return functional_base(op) != _base(op)


def _is_linear_algebra(name: str) -> bool:
    return "linalg" in name or "cholesky" in name or name.startswith(("lu_", "_lu_"))


def _base(op: str) -> str:
    """The operator's name without its overload: "aten.add"."""
    return ".".join(op.split(".")[:2])
