"""Tensors of which each rank holds a part, while a program is recorded that computes with the whole (ZeRO, stages 2 and 3).

    takes   fakes of whole tensors and of their parts; the recorder asks before each operator
    leaves  a load before the first read in each pass; what is written to a gradient, written to its part

A pass is the forward or the backward one of a micro-batch. Where it ends, all that was gathered is let go but the last bucket, which the
backward pass begins with: what is read behind that is gathered again. What a whole tensor is in the graph changes with each gather, as
if that had been written into it; tensors that autograd has saved are read as what is there then. Nothing is gathered ahead here: a plan
begins a gather as early as its peak lets it.

The buckets are made in the order in which the model holds its parameters, so that they hold what is read together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from lowtide.capture import calls
from lowtide.capture.blocks import address, covers
from lowtide.capture.calls import targets_of, tensors_in
from lowtide.capture.draft import Draft
from lowtide.capture.ranks.data_parallel import Ranks, buckets
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

RecordingContext: TypeAlias = AbstractContextManager[Any]  # what runs inside is recorded

TOGETHER_BYTES = 2**18  # tensors below travel together: a larger one needs no copy to be whole

_FOREACH = "aten._foreach_"


class WholeTensors:
    def __init__(self, ranks: Ranks) -> None:
        self.parts: dict[torch.Tensor, torch.Tensor] = {}  # by whole
        self._ranks = ranks
        self._bucket_of: dict[int, list[torch.Tensor]] = {}  # by address
        self._writable: dict[int, torch.Tensor] = {}  # by address
        self._there: set[int] = set()  # addresses of what this pass has gathered
        self._last: list[torch.Tensor] = []

    def add(self, parts: Mapping[torch.Tensor, torch.Tensor], *, writable: bool) -> None:
        """Further ones, `parts` by whole tensor; what is `writable` may be written element by element."""
        self.parts |= parts
        for bucket in buckets(parts, {whole: whole for whole in parts}, TOGETHER_BYTES):
            self._bucket_of |= {address(whole): bucket for whole in bucket}
        if writable:
            self._writable |= {address(whole): whole for whole in parts}

    def put(self, whole: torch.Tensor, gathered: torch.Tensor, draft: Draft) -> None:
        """One is there already: what was `gathered`, which lies on a storage of its own."""
        draft.renew(whole, draft.value(gathered))
        self._there.add(address(whole))

    def end_pass(self) -> None:
        """Let go of what was gathered, but for the last bucket."""
        self._there = {address(whole) for whole in self._last}

    def forget(self) -> None:
        for table in (self.parts, self._bucket_of, self._writable):
            table.clear()
        self._last = []

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], draft: Draft, recording: RecordingContext) -> bool:
        """See to it that what an operator reads is there. Whether it was run on parts, in place of what it would have written."""
        if not self._bucket_of:
            return False
        written = calls.with_defaults(func, args) if func._schema.is_mutable else args
        targets = targets_of(calls.written_positions(func, written), written, kwargs) if func._schema.is_mutable else []
        if not any(map(self._holds, targets)):
            self.read((*args, *kwargs.values()), draft, recording)
            return False
        name = calls.name_of(func)
        single = calls.resolve(name.replace(_FOREACH, "aten.")) if name.startswith(_FOREACH) and len(args) == 2 else func
        with recording, torch.no_grad():
            for target in targets:
                self._write(single, target, (target, *args[1:]), kwargs)
        return True

    def read(self, items: Any, draft: Draft, recording: RecordingContext) -> None:
        """The program is about to read these, or gives them back: gather those that are not there, with what travels beside them."""
        for tensor in tensors_in(items):
            if not self._holds(tensor) or address(tensor) in self._there:
                continue
            bucket = self._bucket_of[address(tensor)]
            with recording, torch.no_grad():
                for whole, gathered in zip(bucket, self._gathered(bucket), strict=True):
                    draft.renew(whole, draft.value(gathered))
            self._last = bucket
            self._there |= {address(whole) for whole in bucket}

    def _holds(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and address(tensor) in self._bucket_of

    def _write(self, func: OpOverload, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The operator on a part, in place of the whole: the same numbers, where each element is computed by itself."""
        whole, form = self._writable.get(address(target)), calls.functional_form(func)
        elementwise = form is not None and (torch.Tag.pointwise in form.tags or calls.row(form).elementwise)
        others = [each for each in tensors_in((*args[1:], *kwargs.values())) if each.dim()]
        if whole is None or form is None or not elementwise or not covers(target) or others or calls.is_random(func, args, kwargs):
            raise CaptureError(
                f"operator {calls.name_of(func)} at {users_line()} writes a tensor of which each rank holds a part: with this `shard`, "
                "after_backward may write gradients, by numbers that are the same for all elements (`grad.mul_(factor)`), and no "
                'parameters; say shard="optimizer" for what goes beyond that'
            )
        self.parts[whole] = form(self.parts[whole], *args[1:], **kwargs)
        self._there.discard(address(whole))

    def _gathered(self, bucket: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        """What the ranks hold of a bucket, put together: each laid out as the whole tensor is."""
        parts = [self.parts[whole] for whole in bucket]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        rows = torch.ops.lowtide.load_parts(sent, self._ranks.size, self._ranks.group).view(self._ranks.size, -1)
        for whole, piece in zip(bucket, rows.split([len(part) for part in parts], 1), strict=True):
            gathered = piece.reshape(-1)[: whole.numel()].view(whole.shape)
            layouts = [(each.stride(), each.storage_offset()) for each in (gathered, whole)]  # others also of a view of one element
            yield gathered if layouts[0] == layouts[1] else gathered.new_empty_strided(whole.shape, whole.stride()).copy_(gathered)
