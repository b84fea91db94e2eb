"""What is given to `optimize` for several processes, checked: which of them train together, on which module; one plan for all of them.

Rank 0 makes the plan, the others put it on what they have captured themselves.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.capture.ranks.data_parallel import Ranks, group_of, module_of, ranks_of
from lowtide.capture.trace import CapturedStep
from lowtide.errors import CaptureError, FormatError
from lowtide.ir.graph import Graph
from lowtide.ir.text.graph_text import to_text
from lowtide.kernels.parts import WHOLE_OF
from lowtide.plan.plan import Plan
from lowtide.runtime.ranks import ALONE, Peers, SinglePeer, fill, lay_out, peer_failure_as_step_error, put_back

_INSTEAD = (
    "give the plain module, before it is sharded, with lowtide.Parallel(group=..., shard=...), which says what is in shards; a limit "
    "(`memory=`) does the rest"
)
_TRIED_BYTES, _TRIALS = 2**20, 4  # of a gather that tells what the links do
SHARDS = ("optimizer", "gradients", "parameters")  # what may be in shards; each holds those before it


@dataclass(frozen=True)
class ProcessGroupSetup:
    """The processes that train a model together, or the one that does so by itself."""

    model: nn.Module  # the module that is captured
    wrapper: nn.Module | None = None  # around it: what the user's functions are given
    ranks: Ranks | None = None
    peers: SinglePeer = ALONE

    @classmethod
    def of(
        cls, model: Any, group: dist.ProcessGroup | None, shard: str | None, *, trains: bool, varies: bool, policy: str | None
    ) -> ProcessGroupSetup:
        """Raises CaptureError, TypeError or ValueError for what cannot be meant, or cannot be done by several processes."""
        if not isinstance(model, nn.Module):
            return cls(model)
        _check_sharded(model)
        if shard == "parameters" and isinstance(model, DistributedDataParallel):
            raise ValueError(
                "shard: DistributedDataParallel holds all parameters on each rank, and buckets as large as all gradients: give the plain "
                "module with lowtide.Parallel(group=...)"
            )
        processes = group_of(model, group)
        ranks = ranks_of(model, group, shard or "")
        if ranks is None or processes is None:
            if shard is not None:
                raise ValueError("shard: expected several processes: a model in DistributedDataParallel, or Parallel(group=...)")
            return cls(model)
        if not trains:
            raise CaptureError("without a loss each process runs by itself: give the module within (`model.module`), and no `parallel`")
        if varies:
            raise ValueError("dynamic: several processes cannot share a range of shapes yet: leave it out, each shape gets a program")
        if policy == "eager":
            raise ValueError('on_new_shape: "eager" runs on one process by itself: expected "extend" or "error" where several train')
        module = module_of(model)
        return cls(module, None if module is model else model, ranks, Peers.of(processes))

    def links_bytes_per_s(self, device: torch.device) -> float:
        """What a gather of parts moves, tried by all ranks together; 0 where nothing is to be weighed against it.

        A power of two: a plan should not follow from how fast a link was this time.
        """
        if self.ranks is None or self.ranks.shard != "parameters":
            return 0.0
        sent = torch.zeros(_TRIED_BYTES // self.ranks.size, dtype=torch.uint8, device=device)
        with peer_failure_as_step_error():
            least_s = min(_gathered_s(sent, self.ranks) for _ in range(_TRIALS))
        return float(2.0 ** round(math.log2(_TRIED_BYTES / least_s)))

    @contextmanager
    def sharded_during_capture(self, *, runs: bool) -> Iterator[None]:
        """Parameters that are to be in shards are, inside; behind it, all ranks have the numbers of rank 0. A failure leaves all as before.

        A step that never `runs` leaves parameters whole.
        """
        own_data: dict[torch.Tensor, torch.Tensor] = {}
        if self.ranks is not None and self.ranks.shard == "parameters":
            own_data = lay_out(self.model, self.ranks.size, self.ranks.group)
        try:
            yield
            if runs:
                self._broadcast_from_rank_0(own_data)
        finally:
            put_back(own_data)

    def _broadcast_from_rank_0(self, own_data: dict[torch.Tensor, torch.Tensor]) -> None:
        """Give all ranks the numbers of rank 0, where no wrapper did, and parameters that are whole (`own_data`) their parts."""
        if self.wrapper is not None or not isinstance(self.peers, Peers) or self.ranks is None:
            return
        source = dist.get_process_group_ranks(self.peers.group)[0]
        whole = [own_data.get(each, each) for each in self.model.parameters() if each in own_data or each not in WHOLE_OF]
        with torch.no_grad(), peer_failure_as_step_error():
            for tensor in (*whole, *self.model.buffers()):
                dist.broadcast(tensor.detach(), source, group=self.peers.main)
        fill(own_data, self.ranks.size, self.ranks.group)


def _gathered_s(sent: torch.Tensor, ranks: Ranks) -> float:
    """The time of one gather, the first of which may set up a link."""
    begun = time.perf_counter()
    whole = torch.ops.lowtide.load_parts(sent, ranks.size, ranks.group)
    whole[-1].item()  # on a GPU it is there only then
    return time.perf_counter() - begun


def _check_sharded(model: nn.Module) -> None:
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


_GPU = re.compile(r"cuda:\d+")


def compare_programs(peers: SinglePeer, captured: Sequence[CapturedStep]) -> None:
    """Raises CaptureError on all ranks, naming what they read differently or the first operator that differs, unless all have the same."""
    if peers.several:
        read = [each.answer_text for one in captured for each in one.readings]
        peers.compare([_GPU.sub("cuda", to_text(one.graph, sources=False)) for one in captured], read)


def agreed_plans(
    peers: SinglePeer, make: Callable[[], list[Plan]], graphs: Sequence[Graph], put: Callable[[int, Plan], Plan]
) -> list[Plan]:
    """What `make` gives on rank 0; elsewhere each of these as `put` puts it on the graph of this number, which was captured there.

    Raises on all ranks what one of them raises.
    """
    if not peers.several:
        return make()
    plans: list[Plan] = []

    def as_text() -> str:
        plans.extend(make())
        return plans[-1].to_json()

    text = peers.from_leader(as_text)
    return peers.together(lambda: plans or [put(number, plan) for number, plan in enumerate(_read(text, graphs))])


def _read(text: str, graphs: Sequence[Graph]) -> list[Plan]:
    """Rank 0's plans, as they are for this rank's graphs, which differ from its own in the number of the GPU alone."""
    device = next((value.storage.device for graph in graphs for value in graph.inputs if value.storage.device.startswith("cuda")), "")
    last = Plan.from_json(_GPU.sub(device, text) if device else text)
    plans = [*last.first_steps, last]
    if len(plans) != len(graphs):
        raise FormatError(f"expected as many plans as programs, got {len(plans)} for {len(graphs)}")
    return plans
