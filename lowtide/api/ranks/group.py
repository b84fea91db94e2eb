"""What is given to `optimize` for several processes, checked: which of them train together, and the module that they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.capture.ranks.ranks import Ranks
from lowtide.capture.ranks.wrapped import group_of, module_of, ranks_of
from lowtide.errors import CaptureError
from lowtide.runtime.ranks.peers import ALONE, Alone, Peers, heard

_INSTEAD = (
    "give the plain module with `process_group=`, before it is sharded, and say what is to be in shards by `shard=`; a limit (`memory=`) "
    "does the rest"
)
_WHOLE = (
    'shard: each rank of a step holds all parameters, so that "parameters" (ZeRO 3) is not there yet: say "gradients", which leaves a rank '
    "its part of gradients and optimizer state, with a limit (`memory=`) for what it holds beside parameters; where parameters alone do "
    "not fit on a rank, train by fully_shard in a plain loop"
)
SHARDS = ("optimizer", "gradients")  # what may be in shards; the second holds the first


@dataclass(frozen=True)
class Trainers:
    """The processes that train a model together, or the one that does so by itself."""

    model: nn.Module  # the module that is captured
    wrapper: nn.Module | None = None  # around it: what the user's functions are given
    ranks: Ranks | None = None
    peers: Alone = ALONE

    @classmethod
    def of(
        cls, model: Any, group: dist.ProcessGroup | None, shard: str | None, *, trains: bool, varies: bool, policy: str | None
    ) -> Trainers:
        """Raises CaptureError, TypeError or ValueError for what cannot be meant, or cannot be done by several processes."""
        if not isinstance(model, nn.Module):
            return cls(model)
        _check_sharded(model)
        if shard == "parameters":
            raise ValueError(_WHOLE)
        if shard not in (None, *SHARDS):
            raise ValueError(f"shard: expected {' or '.join(map(repr, SHARDS))}, or None, got {shard!r}")
        ranks, found = ranks_of(model, group, shard or ""), group_of(model, group)
        if ranks is None or found is None:
            if shard is not None:
                raise ValueError("shard: expected several processes: a model in DistributedDataParallel, or `process_group`")
            return cls(model)
        if not trains:
            raise CaptureError("without a loss each process runs by itself: give the module within (`model.module`), and no process_group")
        if varies:
            raise ValueError("dynamic: several processes cannot share a range of shapes yet: leave it out, each shape gets a program")
        if policy == "eager":
            raise ValueError('on_new_shape: "eager" runs on one process by itself: expected "extend" or "error" where several train')
        module = module_of(model)
        return cls(module, None if module is model else model, ranks, Peers.of(found))

    def begin(self) -> None:
        """Give all ranks the numbers of rank 0, where no wrapper did when it was made."""
        if self.wrapper is not None or not isinstance(self.peers, Peers) or self.ranks is None:
            return
        source = dist.get_process_group_ranks(self.peers.group)[0]
        with torch.no_grad(), heard():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor.detach(), source, group=self.peers.main)


def check_shards(shard: str | None, after_backward: object, scaler: object) -> None:
    """Refuse what would look at whole gradients where nobody has them."""
    for name, given in (("after_backward", after_backward), ("scaler", scaler)):
        if shard == "gradients" and given is not None:
            raise ValueError(f'{name}: expected none with shard="gradients", where no rank has a whole gradient; say shard="optimizer"')


def _check_sharded(model: nn.Module) -> None:
    """Refuse parameters that are spread over devices."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":  # importing it takes two seconds
            raise CaptureError(
                f"{name or 'the model'} is a FullyShardedDataParallel, which speaks with other processes on its own: {_INSTEAD}"
            )
    name = next((name for name, parameter in model.named_parameters() if hasattr(parameter, "device_mesh")), None)
    if name is not None:
        raise CaptureError(
            f"{name} is a DTensor, spread over devices by fully_shard or parallelize_module, which a step cannot hold: {_INSTEAD}"
        )
