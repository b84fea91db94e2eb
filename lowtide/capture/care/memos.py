"""Tables that a forward fills: what follows from the model alone is computed again by each call that finds a table without it.

A captured call leaves the table as it is. So each one finds what the captured one found, and gives what eager PyTorch gives from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.capture.draft import Draft
from lowtide.ir.graph import Kind, Value
from lowtide.ir.operators.nodes import is_random

OfCall: TypeAlias = Callable[[torch.Tensor], bool]  # whether a tensor follows from more than the model


def of_call(draft: Draft) -> OfCall:
    """Whether a tensor of the program follows from the batch, from a draw, or from what was written on the way."""
    varying: set[Value] = {value for value in draft.inputs if value.storage.kind is Kind.INPUT}
    for node in draft.nodes:
        if is_random(node) or node.writes or any(value in varying for value in node.inputs):
            varying.update(node.results)
            varying.update(after for _, after in node.writes)
    return lambda tensor: draft.value(tensor) in varying


def is_memo(before: Any, now: Any, follows: OfCall) -> bool:
    """Whether a table has gained entries alone, tensors that follow from the model."""
    if type(before) is not dict or any(now.get(key, now) is not item for key, item in before.items()):
        return False
    return all(isinstance(item, FakeTensor) and not follows(item) for key, item in now.items() if key not in before)
