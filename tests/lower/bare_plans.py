"""Plans written by hand, node by node."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn

import lowtide
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.sizes import contiguous_stride
from lowtide.plan.plan import Plan


def tensor(name: str, kind: Kind = Kind.ACTIVATION, dtype: str = "float32", shape: tuple[int, ...] = (3,)) -> Value:
    """Numbers of four bytes on a storage of their own, row by row."""
    return Value(name, Storage(name, 4 * math.prod(shape), "cpu", kind), dtype, shape, contiguous_stride(shape))


def plan(*nodes: Node, inputs: tuple[Value, ...], outputs: tuple[Value, ...], in_place: bool = False) -> Plan:
    """A plan of these nodes in their order, made of an existing one; `in_place` where each takes over the first memory that it may."""
    existing = lowtide.optimize(nn.Linear(1, 1), torch.ones(1, 1), planning=lowtide.Planning(workspaces=False)).plan
    count = len(nodes)
    reuses = tuple(0 if in_place and node.inplace else -1 for node in nodes)
    return dataclasses.replace(
        existing, graph=Graph(inputs, nodes, outputs), order=tuple(range(count)), reuses=reuses, workspace_bytes=(0,) * count
    )
