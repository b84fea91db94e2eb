"""The parameters of a model in shards: between steps each rank holds its part of every parameter, flat, in the parameter's own place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lowtide.errors import CaptureError
from lowtide.kernels.parts import WHOLE_OF, WholeLayout, own_part
from lowtide.runtime.ranks.peers import peer_failure_as_step_error


def lay_out(model: nn.Module, size: int, group: str) -> dict[torch.Tensor, torch.Tensor]:
    """Put room for this rank's part into each parameter that is whole; what was there, by parameter.

    Raises CaptureError for parameters that share memory, which parts would not.
    """
    whole = {name: each for name, each in model.named_parameters() if each not in WHOLE_OF and each.numel()}
    first: dict[int, str] = {}
    for name, each in whole.items():
        if not each.is_meta and (other := first.setdefault(each.data_ptr(), name)) != name:
            raise CaptureError(f"{name} shares its memory with {other}, which parts of them would not: make them one parameter")
    held: dict[torch.Tensor, torch.Tensor] = {each: each.data for each in whole.values()}
    for parameter, data in held.items():
        WHOLE_OF[parameter] = WholeLayout(data.shape, data.stride(), group)
        parameter.grad = None
        parameter.data = data.new_empty(-(-data.numel() // size))
    return held


def put_back(held: Mapping[torch.Tensor, torch.Tensor]) -> None:
    for parameter, data in held.items():
        parameter.data = data
        WHOLE_OF.pop(parameter, None)


def fill(held: dict[torch.Tensor, torch.Tensor], size: int, group: str) -> None:
    """Each parameter gets its part of what was there, which is let go."""
    while held:
        parameter, data = held.popitem()
        parameter.data.copy_(own_part(data, size, group))


@contextmanager
def gathered(model: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Parameters are whole inside, on all ranks, which all come here; of what was written to them there each rank keeps its part."""
    parts = {each: each.data for each in model.parameters() if each in WHOLE_OF}
    looks = {each: WHOLE_OF[each] for each in parts}
    try:
        with peer_failure_as_step_error():
            for parameter, part in parts.items():
                parameter.data = _whole(part, looks[parameter], group)
                del WHOLE_OF[parameter]
        yield
    finally:
        for parameter in [each for each in parts if each not in WHOLE_OF]:
            parts[parameter].copy_(own_part(parameter.data, group.size(), group.group_name))
            parameter.grad = None
            parameter.data = parts[parameter]
            WHOLE_OF[parameter] = looks[parameter]


def _whole(part: torch.Tensor, look: WholeLayout, group: dist.ProcessGroup) -> torch.Tensor:
    flat = part.new_empty(len(part) * group.size())
    dist.all_gather(list(flat.view(group.size(), -1)), part, group=group)
    found = flat[: look.shape.numel()].view(look.shape)
    return found if found.stride() == look.stride else part.new_empty_strided(look.shape, look.stride).copy_(found)
