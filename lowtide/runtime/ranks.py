"""The processes that train together, seen from one of them: they do what they do in one order, or all of them end with an error.

What is told travels as pickled objects of lowtide's own between the processes of one job, over the group that it trains by: on a GPU over
one beside it on the host, so that nothing waits for kernels. No message waits longer than the group's time limit.

Parameters in shards: between steps each rank holds its part of every parameter, flat, in the parameter's own place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from lowtide.errors import CaptureError, LowtideError, StepError
from lowtide.kernels.parts import RANK_OF, WHOLE_OF, WholeLayout, own_part

T = TypeVar("T")

UNANSWERED = (
    "another rank does not answer: it has ended, hangs, or makes other calls to its group, or took longer than the group's time limit "
    "(`init_process_group(timeout=...)`, which has to be longer than rank 0 plans); its own log tells which"
)


class SinglePeer:
    """One process by itself: it leads, and there is nobody to agree with."""

    leads = True
    several = False

    def together(self, run: Callable[[], T]) -> T:
        return run()

    def compare(self, texts: Sequence[str], read: Sequence[str] = ()) -> None:
        """Nobody has another text."""

    def from_leader(self, run: Callable[[], str]) -> str:
        return run()

    def meet(self, doing: str, read: Callable[[], str] = str) -> None:
        """Nobody does anything else."""

    def refuse(self, error: Exception) -> None:
        """Nobody waits."""

    @contextmanager
    def in_step(self) -> Iterator[None]:
        yield


ALONE = SinglePeer()


@dataclass(frozen=True)
class Peers(SinglePeer):
    main: dist.ProcessGroup  # by which they train
    group: dist.ProcessGroup  # over which they tell one another
    several = True

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Peers:
        """The processes of a group; all of them have to come here."""
        RANK_OF[group.group_name] = group.rank()
        if dist.get_backend(group) == dist.Backend.GLOO:
            return cls(group, group)
        limit: timedelta = group._get_backend(torch.device("cuda"))._timeout  # type: ignore[attr-defined]
        ranks = dist.get_process_group_ranks(group)
        return cls(group, dist.new_group(ranks, limit, backend="gloo", use_local_synchronization=True))

    @property
    def leads(self) -> bool:  # type: ignore[override]
        return self.group.rank() == 0

    def together(self, run: Callable[[], T]) -> T:
        """What `run` gives here. Where it raises on one rank, all of them raise."""
        try:
            result = run()
        except Exception as error:
            self._all(_said(error))
            raise
        self._check(self._all(None))
        return result

    def compare(self, texts: Sequence[str], read: Sequence[str] = ()) -> None:
        """Raises CaptureError on all ranks, naming the first line that differs, unless these texts are the same on all of them.

        What each has `read` from its data may differ; where texts do, it is told first.
        """
        digests = self._all(tuple(_digest(text) for text in texts))
        if all(each == digests[0] for each in digests):
            return
        other = next(rank for rank, each in enumerate(digests) if each != digests[0])
        lines = [text.splitlines() for text in texts]
        (first_read, first), (other_read, second) = (self._of_rank(rank, (list(read), lines)) for rank in (0, other))
        if unlike := next(((one, two) for one, two in zip(first_read, other_read, strict=False) if one != two), None):
            raise CaptureError(
                f"the program is not the same on all ranks, as they read other data: on rank 0 {unlike[0]}, on rank {other} {unlike[1]}. "
                f"{_READ_ALIKE}"
            )
        raise CaptureError(f"the program is not the same on all ranks: {_first_difference(first, second, other)}")

    def from_leader(self, run: Callable[[], str]) -> str:
        """What `run` gives on rank 0, which alone runs it. Where it raises there, all raise."""
        if not self.leads:
            heard = self._of_rank(0, None)
            if isinstance(heard, Exception):
                raise heard
            return str(heard)
        try:
            text = run()
        except Exception as error:
            self._of_rank(0, _sent(error))
            raise
        return str(self._of_rank(0, text))

    def meet(self, doing: str, read: Callable[[], str] = str) -> None:
        """Go on where all ranks are about to do the same; else StepError on all, saying what each of two would do, and what it has read.

        One message of two numbers: all have the same one where its greatest is its least.
        """
        if not self._are_one(doing):
            self._differ(doing, read())

    def refuse(self, error: Exception) -> None:
        """Tell the others, who meet, that this rank cannot go on."""
        if not self._are_one(f"{_UNLIKE}{self.group.rank()}"):
            self._all(_said(error))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A step runs, which all ranks are in. Where it ends with an error here, this one does not meet the others again: they wait for it
        within the step, and would take its next message for what the step was to send.
        """
        try:
            yield
        except BaseException as error:  # an interrupt, too
            if str(error).startswith(UNANSWERED):  # what was sent has failed: the group itself will say so, or all ranks have the same
                raise
            _LEFT[self.main] = f"{type(error).__name__}: {error}"
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note("The other ranks wait for this one within the step, until the group's time limit: end this process.")
            raise

    def _check_in_step(self) -> None:
        """Raises StepError where this rank has left a step that the others wait in."""
        if self.main in _LEFT:
            raise StepError(
                f"this rank failed within an earlier step, in which the others wait for it ({_LEFT[self.main]}), and cannot meet them "
                "again in this group: end all processes, and begin anew from a checkpoint"
            )

    def _are_one(self, doing: str) -> bool:
        self._check_in_step()
        number = int(_digest(doing)[:15], 16)
        both = torch.tensor([number, -number])
        with peer_failure_as_step_error():
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
        return int(both[0]) == -int(both[1])

    def _differ(self, doing: str, read: str) -> None:
        doings = self._all([doing, read])
        self._check([each if isinstance(each, tuple) else None for each in doings])
        other = next(rank for rank, each in enumerate(doings) if each[0] != doings[0][0])
        advice = f" {_READ_ALIKE}" if doings[0][1] or doings[other][1] else ""
        raise StepError(
            f"ranks do not do the same: rank 0 is about to run {''.join(doings[0])}, rank {other} {''.join(doings[other])}. All ranks run "
            "the same program at each step: give all of them batches of one shape (a loader with drop_last=True) and take the same "
            f"decisions on all.{advice}"
        )

    def _check(self, failures: Sequence[tuple[str, str] | None]) -> None:
        """Raises what another rank has failed of."""
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind, text = failure
                raise StepError(f"rank {rank} failed, so this one cannot go on: {kind}: {text}")

    def _of_rank(self, rank: int, item: Any) -> Any:
        """What one rank tells all others; `item` is what this one would."""
        self._check_in_step()
        source = dist.get_process_group_ranks(self.group)[rank]
        items = [item]
        with peer_failure_as_step_error():
            dist.broadcast_object_list(items, src=source, group=self.group)
        return items[0]

    def _all(self, item: Any) -> list[Any]:
        self._check_in_step()
        messages: list[Any] = [None] * self.group.size()
        with peer_failure_as_step_error():
            dist.all_gather_object(messages, item, group=self.group)
        return messages


@contextmanager
def peer_failure_as_step_error() -> Iterator[None]:
    """Something is sent to all: where that fails, the others are not there, and StepError says so."""
    try:
        yield
    except RuntimeError as error:
        raise StepError(f"{UNANSWERED}. What failed: {error}") from error


_UNLIKE = "failed on rank "
_READ_ALIKE = (
    "What Python reads from the data (whether a mask is all ones) has to come out alike on all ranks: pad all batches, or none, or compute "
    "with tensors instead (torch.where)."
)
# By group: what the step ended with here that the others are still in.
_LEFT: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _said(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _sent(error: Exception) -> Exception:
    return error if isinstance(error, LowtideError) else StepError(f"rank 0 failed: {type(error).__name__}: {error}")


def _first_difference(first: Sequence[Sequence[str]], other: Sequence[Sequence[str]], rank: int) -> str:
    for mine, theirs in zip(first, other, strict=False):
        for one, two in zip(mine, theirs, strict=False):
            if one != two:
                return f"rank 0 has {one.strip()!r} where rank {rank} has {two.strip()!r}"
        if len(mine) != len(theirs):
            return f"rank 0 has {len(mine)} lines, rank {rank} {len(theirs)}"
    return f"rank 0 has {len(first)} programs, rank {rank} {len(other)}"


def lay_out(model: nn.Module, size: int, group: str) -> dict[torch.Tensor, torch.Tensor]:
    """Put room for this rank's part into each parameter that is whole; what was there, by parameter.

    Raises CaptureError for parameters that share memory, which parts would not.
    """
    whole = {name: each for name, each in model.named_parameters() if each not in WHOLE_OF and each.numel()}
    first: dict[int, str] = {}
    for name, each in whole.items():
        if not each.is_meta and (other := first.setdefault(each.data_ptr(), name)) != name:
            raise CaptureError(f"{name} shares its memory with {other}, which parts of them would not: make them one parameter")
    own_data: dict[torch.Tensor, torch.Tensor] = {each: each.data for each in whole.values()}
    for parameter, data in own_data.items():
        WHOLE_OF[parameter] = WholeLayout(data.shape, data.stride(), group)
        parameter.grad = None
        parameter.data = data.new_empty(-(-data.numel() // size))
    return own_data


def put_back(own_data: Mapping[torch.Tensor, torch.Tensor]) -> None:
    for parameter, data in own_data.items():
        parameter.data = data
        WHOLE_OF.pop(parameter, None)


def fill(own_data: dict[torch.Tensor, torch.Tensor], size: int, group: str) -> None:
    """Each parameter gets its part of what was there, which is let go."""
    while own_data:
        parameter, data = own_data.popitem()
        parameter.data.copy_(own_part(data, size, group))


@contextmanager
def gathered(model: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Parameters are whole inside, on all ranks, which all come here; of what was written to them there each rank keeps its part."""
    parts = {each: each.data for each in model.parameters() if each in WHOLE_OF}
    layouts = {each: WHOLE_OF[each] for each in parts}
    try:
        with peer_failure_as_step_error():
            for parameter, part in parts.items():
                parameter.data = _whole(part, layouts[parameter], group)
                del WHOLE_OF[parameter]
        yield
    finally:
        for parameter in [each for each in parts if each not in WHOLE_OF]:
            parts[parameter].copy_(own_part(parameter.data, group.size(), group.group_name))
            parameter.grad = None
            parameter.data = parts[parameter]
            WHOLE_OF[parameter] = layouts[parameter]


def _whole(part: torch.Tensor, layout: WholeLayout, group: dist.ProcessGroup) -> torch.Tensor:
    flat = part.new_empty(len(part) * group.size())
    dist.all_gather(list(flat.view(group.size(), -1)), part, group=group)
    whole = flat[: layout.shape.numel()].view(layout.shape)
    return whole if whole.stride() == layout.stride else part.new_empty_strided(layout.shape, layout.stride).copy_(whole)
