"""What defines an operator that is not torch's own, so that another process can import it too."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton

from lowtide.cost.lab.operators import operator
from lowtide.errors import FormatError

_OWN = frozenset({"aten", "prims", "prim", "quantized", "mkldnn", "onednn", "inductor"})  # a bare torch has them


def definers(ops: list[str]) -> list[dict[str, Any]]:
    """Of each operator among these that is not torch's own: its schema, and the modules and libraries that may define it."""
    return [_definer(op) for op in dict.fromkeys(ops) if op.split(".")[0] not in _OWN]


def _definer(op: str) -> dict[str, Any]:
    try:
        schema = str(operator(op)._schema)
    except FormatError as error:
        schema = str(error)
    return {"op": op, "schema": schema, "modules": _modules(op), "libraries": sorted(torch.ops.loaded_libraries)}


def _modules(op: str) -> list[str]:
    """Modules that can be imported by name: where `torch.library` says that the operator comes from, or named as its namespace."""
    namespace, base, *_ = op.split(".")
    name = f"{namespace}::{base}"
    found = []
    if (defined := OPDEFS.get(name)) is not None:
        found.append(defined._init_fn.__module__)
    if (fake := singleton.find(name).fake_impl.kernel) is not None:
        found += _module_of(fake.source.rpartition(":")[0])
    found += [name for name in (namespace,) if name in sys.modules]
    return [name for name in dict.fromkeys(found) if name != "__main__"]


@lru_cache(maxsize=256)
def _module_of(file: str) -> tuple[str, ...]:
    return tuple(name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == file)
