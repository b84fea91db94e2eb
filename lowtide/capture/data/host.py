"""What reads tensors on the host without asking an operator, answered from the example for as long as a program is recorded.

Some functions take a tensor's memory and look: `tolist`, `numpy`, `tensor_split` by a tensor, the padding of packed sequences. Others build
a tensor from Python numbers in C++, which a fake tensor has no memory for (`ctc_loss`). Neither reaches the recorder: they are replaced
here, on the thread that records, by what eager PyTorch does with the numbers once it has them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

import lowtide.kernels.operators  # noqa: F401  (defines lowtide::truncated_normal)
from lowtide.capture.calls import why_unread
from lowtide.capture.care.turns import all_replaced, listed, replaced
from lowtide.capture.data.batch_counts import is_count_of_batches
from lowtide.capture.data.facts import UnreadableError
from lowtide.capture.effects.stand_ins import SHOWS_A_TENSOR, LeavingError
from lowtide.capture.effects.sums import Term
from lowtide.capture.formulas.dispatch import formula
from lowtide.capture.sources import is_called_by_user
from lowtide.ir.operators.row import ITEM

if TYPE_CHECKING:
    from lowtide.capture.recorder import Recorder

_aten, _own = torch.ops.aten, torch.ops.lowtide
_MEAN = 1  # a reduction, as operators number them
_hosts: list[_Host] = []  # of what is recorded, the innermost last


@contextmanager
def reading(recorder: Recorder) -> Iterator[None]:
    """While this lasts, functions that read tensors on the host read the example."""
    host = _Host(recorder)
    own: dict[str, Callable[..., Any]] = {"tolist": host.tolist, "numpy": host.numpy, "__array__": host.array}
    own |= {"__format__": host.text, "__repr__": host.representation}
    if recorder.numbers is not None:
        own["item"] = host.item
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [(FakeTensor, name, function) for name, function in own.items()]
    if (library := sys.modules.get("transformers.utils.import_utils")) is not None and hasattr(library, "is_fake_tensor"):
        replacements.append((library, "is_fake_tensor", lambda tensor: False))  # else it leaves out questions that eager asks
    functions = ((owner, name, partial(lambda replacement, _: replacement, replacement)) for owner, name, replacement in replacements)
    with listed(_hosts, host), replaced(torch.nn.init, "_no_grad_trunc_normal_", _truncated_normal), all_replaced(functions):
        yield


def _truncated_normal(before: Callable[..., Any]) -> Callable[..., Any]:
    """For `trunc_normal_`, which draws until it has looked at all that it drew: one operator."""

    def truncated(tensor: torch.Tensor, *settings: float, generator: torch.Generator | None = None) -> Any:
        numbers, drawn_by = settings[:4], settings[4] if len(settings) > 4 else generator
        if not isinstance(tensor, FakeTensor) or not tensor.is_contiguous():
            return before(tensor, *numbers, drawn_by)
        with torch.no_grad():
            return tensor.copy_(_own.truncated_normal(tensor, *numbers, generator=drawn_by))

    return truncated


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """On real tensors, as without a capture."""
    with _disable_current_modes():
        return function(*args, **kwargs)


@dataclass(frozen=True)
class _Host:
    """What stands in for functions that read on the host."""

    recorder: Recorder

    def values(self, tensor: torch.Tensor, asked_by: str) -> torch.Tensor:
        """The real tensor that a fake one stands for. Raises CaptureError where only the running step knows."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        try:
            return self.recorder.reader.values(self.recorder.draft, asked_by, self.recorder.draft.value(tensor))
        except UnreadableError as why:
            raise LeavingError(why_unread(asked_by, str(why))) from None

    def tolist(self, tensor: torch.Tensor) -> Any:
        """For `tensor.tolist()`: one question for all its numbers; those that nobody knows yet one by one, where that may be."""
        try:
            return self.values(tensor, "Tensor.tolist").tolist()
        except LeavingError:
            if self.recorder.numbers is None:
                raise
        with torch.no_grad():
            return [self.tolist(each) for each in tensor.unbind()] if tensor.dim() else self.item(tensor)

    def item(self, tensor: torch.Tensor) -> Any:
        """For `tensor.item()`: what nobody knows before the step runs is a number that can be put somewhere, and no more."""
        draft, op = self.recorder.draft, _aten._local_scalar_dense.default
        if tensor.numel() != 1 or tensor.is_complex():
            return op(tensor.reshape(())) if tensor.numel() == 1 else torch.Tensor.item(tensor)
        if draft.read_number is not None or (is_count_of_batches(tensor) and draft.owns(tensor)):
            return op(tensor)
        known, compare = None, None
        with suppress(UnreadableError):
            known, compare = self.recorder.reader.later(draft, draft.value(tensor))
        value = draft.emit_scalar(ITEM, (draft.value(tensor),))
        kind = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
        number = Term(value, kind, self.recorder.refusals, known, compare if tensor.dtype == torch.int64 else None)
        assert self.recorder.numbers is not None, "this is called for such recorders only"
        self.recorder.numbers.append(weakref.ref(number))
        return number

    def numpy(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _plainly(self.values(tensor, "Tensor.numpy").numpy, *args, **kwargs)

    def array(self, tensor: torch.Tensor, dtype: Any = None, copy: Any = None) -> Any:
        return _plainly(self.values(tensor, "Tensor.__array__").__array__, dtype)

    def text(self, tensor: torch.Tensor, spec: str) -> str:
        if not spec or tensor.dim() or isinstance(tensor, torch.nn.Parameter):
            return _shown(tensor, sys._getframe(2))
        if self.recorder.numbers is not None:
            return self.item(tensor).__format__(spec)  # type: ignore[no-any-return]  # `format` itself may be another by now
        return _plainly(format, self.values(tensor, "Tensor.__format__"), spec)  # type: ignore[no-any-return]

    def representation(self, tensor: torch.Tensor) -> str:
        return _shown(tensor, sys._getframe(2))


def _shown(tensor: torch.Tensor, frame: FrameType) -> str:
    """A text for torch and lowtide: the user's own code would put it somewhere, or decide by it. `frame`: what asks for it."""
    if is_called_by_user(frame):
        raise LeavingError(SHOWS_A_TENSOR, converts=True)
    return str(torch.Tensor.__repr__(tensor))  # type: ignore[no-untyped-call]


@formula(_aten.tensor_split.tensor_indices_or_sections)
def _tensor_split(op: OpOverload, tensor: torch.Tensor, by: torch.Tensor, dim: int = 0) -> Any:
    """By the numbers of a tensor: as a list of them."""
    if by.dtype != torch.int64 or by.dim() > 1:  # of which torch has a word to say
        return op(tensor, by, dim)
    return torch.tensor_split(tensor, _hosts[-1].values(by, "tensor_split").tolist(), dim)


@formula(_aten.one_hot.default)
def _one_hot(op: OpOverload, classes: torch.Tensor, count: int = -1) -> Any:
    """Eager looks at classes that lie on the host, and raises; it does not at fake ones, so that each step has to.

    Nor does it within `torch.vmap`.
    """
    on_host = classes.device.type == "cpu" and not torch._C._functorch.is_batchedtensor(classes)
    if classes.dtype == torch.int64 and on_host and classes.numel():
        _require(classes.min() >= 0, "Class values must be non-negative.")
        if count > 0:
            _require(classes.max() < count, "Class values must be smaller than num_classes.")
    return op(classes, count)


def _require(flag: torch.Tensor, text: str) -> None:
    torch.ops.lowtide.require.default(flag, True, "RuntimeError", text)


@formula(_aten.ctc_loss.IntList)
def _ctc_loss(
    op: OpOverload, log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: list[int], target_lengths: list[int],
    blank: int = 0, reduction: int = _MEAN, zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """Where lengths are Python numbers, the mean divides by a tensor of them, which is made in C++."""
    each = partial(op, log_probs, targets, input_lengths, target_lengths, blank)
    if reduction != _MEAN:
        return each(reduction, zero_infinity)
    losses = each(0, zero_infinity)
    return (losses / torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device).clamp_min(1)).mean()


@formula(_aten.ctc_loss.Tensor)
def _ctc_loss_of_tensors(
    op: OpOverload, log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor,
    *settings: Any,
) -> Any:  # fmt: skip
    """Lengths that lie on the host beside a device's data: eager makes numbers of them wherever they lie, a fake kernel does not."""
    return op(log_probs, targets, input_lengths.to(log_probs.device), target_lengths.to(log_probs.device), *settings)


@formula(_aten._pad_packed_sequence.default)
def _pad_packed_sequence(
    op: OpOverload, data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of `data`, `batch_sizes[i]` of them for step i, as a padded tensor, and how long each sequence is."""
    sizes: Sequence[int] = _hosts[-1].values(batch_sizes, "pad_packed_sequence").tolist()
    if 0 < total < len(sizes):
        raise RuntimeError(f"Expected total_length to be at least the length of the longest sequence in input, got {total}")
    padded = torch.full((max(total, len(sizes)), sizes[0], *data.shape[1:]), padding, dtype=data.dtype, device=data.device)
    begin = offset = 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or sizes[end] != sizes[begin]:
            rows = sizes[begin] * (end - begin)
            block = data.narrow(0, offset, rows).view(end - begin, sizes[begin], *data.shape[1:])
            padded[begin:end, : sizes[begin]].copy_(block)
            begin, offset = end, offset + rows
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
    return (padded.transpose(0, 1) if batch_first else padded), lengths
