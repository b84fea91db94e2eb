"""A step that fails at a check of the program's own: what it has changed by then is put back, and the caller's own loop runs instead.

So all is done that comes before the check (counts, lists, prints), what is raised is the program's own, and it may catch that itself.
Parameters and optimizer state are not written by then (`capture/care/harm.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lowtide.api.variant import Variant
from lowtide.kernels.data_shapes import CHECK

_MOST_BYTES = 2**20  # of buffers: more is not copied in each call for a check that may never fail
_TRAINING = ("parameter", "state", "group", "scaler")


def undoing(variant: Variant, inputs: Sequence[Any]) -> Callable[[], None] | None:
    """What puts back all that a call changes until a check fails; None for a program that checks nothing, or writes too much."""
    if not variant.checks:
        return None
    written = {before.storage for node in variant.captured.graph.nodes for before, _ in node.writes}
    places = zip(variant.captured.slots, variant.captured.graph.inputs, inputs, strict=True)
    tensors = [item for slot, value, item in places if value.storage in written and slot.table not in _TRAINING]
    if sum(each.nbytes for each in tensors) > _MOST_BYTES:
        return None
    copies = [(each, each.clone()) for each in tensors]
    states: list[tuple[Callable[[torch.Tensor], object], torch.Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    for device in {each.device for each in inputs if isinstance(each, torch.Tensor) and each.is_cuda}:
        states.append((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    states.extend((each.set_state, each.get_state()) for each in variant.captured.constants if isinstance(each, torch.Generator))

    def undo() -> None:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
        for put, state in states:
            put(state)
        variant.captured.outputs.draws.go_back()

    return undo


def is_of_check(error: BaseException) -> bool:
    """Whether `lowtide.require` has raised it."""
    return getattr(error, CHECK, False)
