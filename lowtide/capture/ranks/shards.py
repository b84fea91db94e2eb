"""Training in parts (ZeRO): each rank has a part of optimizer state, of gradients and perhaps parameters, while a step is recorded.

Optimizer state: each rank updates its own part of every parameter, and all gather what came of it.

ZeRO (Rajbhandari et al., SC 2020), section 5: stage 1 sums whole gradients, so that whoever looks at them finds what
DistributedDataParallel has; stage 2 leaves each rank its part of the sums alone, in half the traffic. Every parameter is cut into as many
equal parts as there are ranks, the last one filled up with zeros: the program is the same on all ranks, and so is what they hold. An
optimizer that computes each element by itself gives the same numbers part by part; any other is refused.

Stage 2 sums by `reduce_scatter`; over gloo ranks exchange parts, which their keepers add.

gloo has no `reduce_scatter` of its own: PyTorch sums all on every rank, in a copy, and cuts the part out, which moves each byte twice. An
exchange moves it once. Terms are added in the order of ranks, one by one: of two there is one order, so that sums are
DistributedDataParallel's; of more, it is an order among several.

These collectives work from one tensor into another, in two nodes. Between them they read the first, which nobody may write or let go.

Models whose gradients, and perhaps parameters, each rank has a part of are stages 2 and 3.

Gradients leave in parts, as they come to exist: in the backward pass that completes them, between its gathers.

The order is that of their coming to exist, which is the same on all ranks; each message is as long as DistributedDataParallel's would be.

Where a hook will look at gradients, they would be gathered for that right away. To sum parts and to gather the sums moves what a sum of the
whole does, and over gloo takes longer: they are summed whole, in messages as long, and lie by themselves after that. Each rank keeps its
part, and a plan lets go of the whole behind what the hook reads of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed._functional_collectives
from torch._C._distributed_c10d import _register_work, _resolve_process_group
from torch.utils._python_dispatch import _disable_current_modes

import lowtide.kernels.operators  # noqa: F401  (defines the operators of lowtide's own)
from lowtide.base.skeleton import leaves
from lowtide.capture import calls
from lowtide.capture.draft import Draft
from lowtide.capture.fakes import FakeModel
from lowtide.capture.optimizers.optimizer import Shadow
from lowtide.capture.ranks.data_parallel import MESSAGE_BYTES, Ranks, average, buckets, refuse_complex
from lowtide.capture.ranks.wholes import WholeTensors
from lowtide.capture.sizes.probes import is_dense
from lowtide.errors import CaptureError
from lowtide.ir.graph import Node
from lowtide.kernels.library import LIBRARY, define
from lowtide.kernels.parts import WHOLE_OF

_TAG = 16_909  # of messages between ranks: those of one tag come in the order in which they were sent


def all_gather(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """[ranks * n] begins to gather what each rank of a group has sent, n elements each.

    On a CPU every rank sends its part to each other one, straight into its place of the whole there. gloo's own gather fills a second block
    as large, and copies that; two `all_gather_into_tensor` at a time have corrupted the heap (torch 2.13: once in some 20,000); and each
    of its collectives is carried out by a thread that has to be woken, which a message is not: a step has dozens of gathers.
    """
    if sent.device.type != "cpu":
        begun: torch.Tensor = _COLLECTIVES.all_gather_into_tensor(sent, ranks, group)
        return begun
    whole = sent.new_empty(ranks * sent.numel())
    places, peers = whole.view(ranks, -1).unbind(), _resolve_process_group(group)  # type: ignore[arg-type]
    rank = peers.rank()
    for distance in range(1, ranks):
        source = (rank - distance) % ranks
        _register_work(whole, peers.recv([places[source]], source, _TAG))
    for distance in range(1, ranks):
        _register_work(whole, peers.send([sent], (rank + distance) % ranks, _TAG))
    places[rank].copy_(sent)
    return whole


def _all_gather(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return sent.new_empty(ranks * sent.numel())


def load_parts(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return wait_for(all_gather(sent, ranks, group), sent)


def wait_for(begun: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """What was begun, once it is whole: the same memory. `sent` is what it was made of."""
    whole: torch.Tensor = _COLLECTIVES.wait_tensor(begun)
    return whole


define("all_gather(Tensor sent, int ranks, str group) -> Tensor", all_gather)
define("load_parts(Tensor sent, int ranks, str group) -> Tensor", load_parts)
define("wait_for(Tensor begun, Tensor sent) -> Tensor", wait_for)
torch.library.register_fake("lowtide::all_gather", _all_gather, lib=LIBRARY)
torch.library.register_fake("lowtide::load_parts", _all_gather, lib=LIBRARY)
torch.library.register_fake("lowtide::wait_for", lambda begun, sent: torch.empty_like(begun), lib=LIBRARY)


_COLLECTIVES = torch.ops._c10d_functional


def reduced_parts(terms: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """[n] this rank's part of the sum of what all ranks have, [size * n] each, their parts one behind the other."""
    if terms.device.type != "cpu" or not ranks.over_gloo:
        begun = _COLLECTIVES.reduce_scatter_tensor(terms, "sum", ranks.size, ranks.group)
        part: torch.Tensor = torch.ops.lowtide.wait_for(begun, terms)
        return part
    received = torch.ops.lowtide.wait_for(torch.ops.lowtide.exchange(terms, ranks.size, ranks.group), terms)
    total: torch.Tensor = torch.ops.lowtide.sum_parts(received, ranks.size)
    return total


def exchange(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """[ranks * n] begins to collect what each rank of a group has for this one: of what it sends, its part of as many."""
    count = sent.numel() // ranks
    begun: torch.Tensor = _COLLECTIVES.all_to_all_single(sent, [count] * ranks, [count] * ranks, group)
    return begun


define("exchange(Tensor sent, int ranks, str group) -> Tensor", exchange)
torch.library.register_fake("lowtide::exchange", lambda sent, ranks, group: torch.empty_like(sent), lib=LIBRARY)


Shards: TypeAlias = Mapping[torch.Tensor, torch.Tensor]  # by fake parameter: this rank's part, with its gradient

_MAKING = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "clone", "copy", "fill", "zero", "detach", "alias", "view"})


def own_shards(parameters: Iterable[torch.Tensor], ranks: Ranks) -> Shards:
    """This rank's parts, of parameters whose gradients are the means over all ranks."""
    shards = {}
    for each in parameters:
        if each.grad is not None and each.grad.numel():
            shards[each] = shard_of(each, ranks)
            shards[each].grad = own(each.grad, ranks)
    return shards


def shard_of(parameter: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's part of a parameter that all of them hold."""
    return own(parameter.detach(), ranks)


def own(whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's part of a tensor that all of them hold."""
    part: torch.Tensor = torch.ops.lowtide.own_part(whole, ranks.size, ranks.group)
    return part


def scatter(gradients: Sequence[torch.Tensor], ranks: Ranks) -> Sequence[torch.Tensor]:
    """One message: this rank's part of the mean of each."""
    rows = [_rows(each, ranks.size) for each in gradients]
    share = (rows[0] if len(rows) == 1 else torch.cat(rows, 1)).view(-1) * (1.0 / ranks.size)
    pieces: Sequence[torch.Tensor] = reduced_parts(share, ranks).split([row.shape[1] for row in rows])
    return pieces


def gather(shards: Shards, ranks: Ranks) -> None:
    """Write what all ranks have made of their parts over the parameters."""
    for bucket in buckets(shards, {each: each for each in shards}, ranks.bucket_bytes):
        parts = [shards[each] for each in bucket]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        for parameter, part in zip(bucket, gathered(sent, ranks).split([each.numel() for each in parts], 1), strict=True):
            _write(parameter, part)


def _write(parameter: torch.Tensor, rows: torch.Tensor) -> None:
    """Put the parts of all ranks, one a row, into a parameter: straight from where they lie, where it is cut without a rest."""
    if parameter.is_contiguous() and parameter.numel() == rows.numel():
        parameter.view(rows.shape).copy_(rows)
    else:
        parameter.copy_(rows.reshape(-1)[: parameter.numel()].view(parameter.shape))


def gathered(sent: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """[ranks, n] what all ranks have sent, n elements each."""
    whole: torch.Tensor = torch.ops.lowtide.wait_for(torch.ops.lowtide.all_gather(sent, ranks.size, ranks.group), sent)
    return whole.view(ranks.size, -1)


def refuse_whole_state(shadow: Shadow, ranks: Ranks) -> None:
    """Raise CaptureError for state that is not in shards."""
    for parameter, entries in shadow.optimizer.state.items():
        numel = 0 if isinstance(parameter, str) else shadow.fakes[parameter].numel()
        for path, item in leaves(entries):
            if isinstance(item, torch.Tensor) and item.dim() and item.shape != (-(-numel // ranks.size),):
                owner = shadow.names.get(parameter, "a parameter")
                raise CaptureError(
                    f"the optimizer's {'.'.join(map(str, path))} of {owner} is not in {ranks.size} shards: its shape is "
                    f"{tuple(item.shape)}; give `shard` an optimizer without state, or load shards into it"
                )


def refuse_mixing(optimizer: torch.optim.Optimizer, nodes: Iterable[Node]) -> None:
    """Raise CaptureError for an optimizer that lets elements of a parameter know of one another."""
    for node in nodes:
        if any(prod(value.shape) > 1 for value in node.inputs) and not _is_elementwise(node):
            raise CaptureError(
                f"{type(optimizer).__name__} computes with whole parameters ({node.op}), of which each rank has a part: `shard` needs an "
                "optimizer that updates each element by itself, as SGD and AdamW do"
            )


def _is_elementwise(node: Node) -> bool:
    if not node.op.startswith("aten."):
        return False
    op: Any = calls.resolve(node.op)
    base = node.op.split(".")[1].removesuffix("_")
    return torch.Tag.pointwise in op.tags or calls.row(op).elementwise or calls.row(op).view or base in _MAKING


def _rows(gradient: torch.Tensor, size: int) -> torch.Tensor:
    """[size, ceil(n / size)] all parts of a gradient, one a row."""
    refuse_complex(gradient)
    flat, missing = gradient.reshape(-1), -gradient.numel() % size
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(size, -1)


class GradientSends:
    """What of the gradients was sent, and what waits for others to travel with."""

    def __init__(self, ranks: Ranks) -> None:
        self.complete = False  # whether this backward pass is the last: what comes to exist now is whole
        self.sent: dict[torch.Tensor, torch.Tensor] = {}  # this rank's part of each gradient's mean, by parameter
        self.strides: dict[torch.Tensor, tuple[int, ...]] = {}  # of the gradients when they were whole, by parameter; in no order: ()
        self.whole: dict[torch.Tensor, torch.Tensor] = {}  # the mean of each gradient, where it was summed whole, by parameter
        self.shown = False  # whether a hook will look at them
        self._ranks, self._most_bytes = ranks, min(ranks.bucket_bytes, MESSAGE_BYTES)
        self._waiting: list[torch.Tensor] = []

    def arrived(self, parameter: torch.Tensor) -> None:
        if self.complete and parameter.grad is not None and parameter.grad.layout is torch.strided and parameter.grad.numel():
            self._waiting.append(parameter)
            self._send(only_full=True)

    def rest(self, parameters: Iterable[torch.Tensor]) -> None:
        """Nothing more comes: send what waits, and what the last pass has not added to."""
        waiting = set(self._waiting)
        self._waiting += [each for each in parameters if each.grad is not None and each.grad.numel() and each not in waiting]
        self._send(only_full=False)

    def forget(self) -> None:
        for table in (self.sent, self.strides, self.whole, self._waiting):
            table.clear()

    def _send(self, *, only_full: bool) -> None:
        gradients = {each: each.grad for each in self._waiting if each.grad is not None}
        sums_whole = self.shown and self._ranks.over_gloo and all(each.device.type == "cpu" for each in gradients)
        for bucket in buckets(self._waiting, gradients, self._most_bytes):
            sent = [gradients[each] for each in bucket]
            if only_full and sum(each.nbytes for each in sent) < self._most_bytes:
                continue
            with torch.no_grad():
                self.sent |= zip(bucket, self._means(bucket) if sums_whole else scatter(sent, self._ranks), strict=True)
            for each, gradient in zip(bucket, sent, strict=True):
                self.strides[each] = gradient.stride() if is_dense(gradient) else ()
                each.grad = None
        self._waiting = [each for each in self._waiting if each.grad is not None]

    def _means(self, bucket: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """One message: this rank's part of the mean of each, which is whole, too."""
        average(bucket, self._ranks)
        for each in bucket:
            assert each.grad is not None, "only those that have a gradient are sent"
            self.whole[each] = each.grad if len(bucket) == 1 else each.grad.clone()  # by itself, where it is looked for
            yield own(self.whole[each], self._ranks)


def in_parts(fakes: FakeModel, ranks: Ranks | None) -> InParts | None:
    """The parts of a model; None where all is whole. Raises CaptureError for parameters that are in shards and should not be, or should."""
    sharded = ranks is not None and ranks.shard == "parameters"
    for real, whole in fakes.parameters.items():
        group = WHOLE_OF[real].group if real in fakes.parts else None
        if group is not None and (ranks is None or not sharded or group != ranks.group):
            raise CaptureError(
                f'{fakes.names[real]} is in shards of a step with shard="parameters": say so here, too, with the same group, or do this '
                "within `with step.gathered():` of that step"
            )
        if sharded and group is None and whole.numel():
            raise CaptureError(
                f"{fakes.names[real]} is whole, and the step is for parameters in shards: call it outside of `step.gathered()`, and call "
                "lowtide.optimize again where a parameter was replaced"
            )
    return None if ranks is None or ranks.shard not in ("gradients", "parameters") else InParts(fakes, ranks)


class InParts:
    def __init__(self, fakes: FakeModel, ranks: Ranks) -> None:
        self.wholes, self._sending, self._ranks = WholeTensors(ranks), GradientSends(ranks), ranks
        self._parts = {fakes.parameters[real]: part for real, part in fakes.parts.items()}
        self._shown: dict[torch.Tensor, torch.Tensor] = {}  # by parameter: the whole gradient that a hook is given
        self.wholes.add(self._parts, writable=False)
        for whole in fakes.parameters.values():
            if whole.requires_grad:
                whole.register_post_accumulate_grad_hook(self._sending.arrived)

    def begin_backward(self, *, completes: bool, shown: bool) -> None:
        """A forward pass is over; `completes` says that gradients are whole, and may leave, where the backward one adds to them.

        They are `shown` to a hook later on.
        """
        self._sending.complete, self._sending.shown = completes, shown
        self.wholes.end_pass()

    def end_backward(self) -> None:
        self._sending.complete = False
        self.wholes.end_pass()

    def send_rest(self, parameters: Iterable[torch.Tensor]) -> None:
        """All backward passes are over: send what has not left yet."""
        self._sending.rest(parameters)

    def show(self, draft: Draft) -> None:
        """Put whole gradients before a hook: they are gathered where it reads them, and what it writes is written to parts."""
        for parameter, stride in self._sending.strides.items():
            with _disable_current_modes(), draft.fake_mode:  # making a fake is no part of the program
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                self._shown[parameter] = empty.new_empty_strided(empty.shape, stride) if stride else empty
            parameter.grad = self._shown[parameter]
        self.wholes.add({whole: self._sending.sent[parameter] for parameter, whole in self._shown.items()}, writable=True)
        for parameter, mean in self._sending.whole.items():
            self.wholes.put(self._shown[parameter], mean, draft)

    def shards(self, parameters: Iterable[torch.Tensor]) -> Shards:
        """This rank's part of each parameter that has a gradient, with its part of that; of those that the caller holds in parts all."""
        parts = dict(self._parts)
        for parameter in parameters:
            gradient = self._gradient(parameter)
            if gradient is not None:
                parts[parameter] = self._parts[parameter] if parameter in self._parts else shard_of(parameter, self._ranks)
                parts[parameter].grad = gradient
                parameter.grad = None
        for parameter in self._shown:  # of one that the optimizer does not know, too
            parameter.grad = None
        return parts

    def forget(self) -> None:
        self.wholes.forget()
        self._sending.forget()
        self._parts.clear()
        self._shown.clear()

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the gradient, as a hook has left it."""
        if parameter.grad is None:
            return None if parameter in self._shown else self._sending.sent.get(parameter)
        if not parameter.grad.numel():
            return None
        return self.wholes.parts[parameter.grad] if parameter.grad in self.wholes.parts else own(parameter.grad, self._ranks)
