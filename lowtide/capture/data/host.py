"""What reads tensors on the host without asking an operator, answered from the example for as long as a program is recorded.

Some functions take a tensor's memory and look: `tolist`, `numpy`, `tensor_split` by a tensor, the padding of packed sequences. Others build
a tensor from Python numbers in C++, which a fake tensor has no memory for (`ctc_loss`). Neither reaches the dispatcher: they are replaced
here, by what eager PyTorch does with the numbers once it has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.calls import why_unread
from lowtide.capture.data.reader import UnreadableError
from lowtide.errors import CaptureError

if TYPE_CHECKING:
    from lowtide.capture.recorder import Recorder

_MISSING = object()
_MEAN = 1  # a reduction, as operators number them


@contextmanager
def reading(recorder: Recorder) -> Iterator[None]:
    """While this lasts, functions that read tensors on the host read the example."""
    host = _Host(recorder)
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (FakeTensor, "tolist", host.tolist),
        (FakeTensor, "numpy", host.numpy),
        (FakeTensor, "__array__", host.array),
        (FakeTensor, "__format__", host.text),
        (FakeTensor, "tensor_split", host.over(torch.Tensor.tensor_split, host.tensor_split)),
        (torch, "tensor_split", host.over(torch.tensor_split, host.tensor_split)),
        (torch, "ctc_loss", host.over(torch.ctc_loss, host.ctc_loss)),
        (torch._VF, "_pad_packed_sequence", host.over(torch._VF._pad_packed_sequence, host.pad_packed_sequence)),
    ]
    if (library := sys.modules.get("transformers.utils.import_utils")) is not None and hasattr(library, "is_fake_tensor"):
        replacements.append((library, "is_fake_tensor", lambda tensor: False))  # else it leaves out questions that eager asks
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(_replaced(owner, name, replacement))
        yield


@contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


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
            raise CaptureError(why_unread(asked_by, str(why))) from None

    def over(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        """`replacement`, which is given `original` first, wherever an argument is fake."""

        def call(*args: Any, **kwargs: Any) -> Any:
            mode = self.recorder.draft.fake_mode
            fake = any(isinstance(each, FakeTensor) and each.fake_mode is mode for each in (*args, *kwargs.values()))
            return replacement(original, *args, **kwargs) if fake else original(*args, **kwargs)

        return call

    @property
    def tolist(self) -> Callable[[torch.Tensor], Any]:
        """For `tensor.tolist()`: one question for all its numbers."""
        return lambda tensor: self.values(tensor, "Tensor.tolist").tolist()

    @property
    def numpy(self) -> Callable[..., Any]:
        """For `tensor.numpy()`."""
        return lambda tensor, *args, **kwargs: _plainly(self.values(tensor, "Tensor.numpy").numpy, *args, **kwargs)

    @property
    def array(self) -> Callable[..., Any]:
        """For `numpy.asarray(tensor)`."""
        return lambda tensor, dtype=None, copy=None: _plainly(self.values(tensor, "Tensor.__array__").__array__, dtype)

    @property
    def text(self) -> Callable[[torch.Tensor, str], str]:
        """For f"{tensor:.3f}"."""
        return lambda tensor, spec: _plainly(format, self.values(tensor, "Tensor.__format__"), spec) if spec else repr(tensor)

    def tensor_split(self, original: Callable[..., Any], tensor: Any, indices_or_sections: Any = None, dim: int = 0, **kwargs: Any) -> Any:
        """By the numbers of a tensor: as a list of them."""
        name = next((key for key in ("tensor_indices_or_sections", "indices", "sections") if key in kwargs), None)
        by = indices_or_sections if name is None else kwargs[name]
        countable = isinstance(by, FakeTensor) and by.dtype == torch.int64 and by.dim() <= 1  # for others the original has a word
        return original(tensor, self.values(by, "tensor_split").tolist() if countable else by, kwargs.get("dim", dim))

    def ctc_loss(
        self, original: Callable[..., Any], log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any,
        blank: int = 0, reduction: int = _MEAN, zero_infinity: bool = False,
    ) -> Any:  # fmt: skip
        """Where lengths are Python numbers, the mean divides by a tensor of them, which is made in C++."""
        if isinstance(target_lengths, torch.Tensor) or reduction != _MEAN:
            return original(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        each = original(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
        return (each / torch.tensor(target_lengths, dtype=each.dtype, device=each.device).clamp_min(1)).mean()

    def pad_packed_sequence(
        self, original: Callable[..., Any], data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of `data`, `batch_sizes[i]` of them for step i, as a padded tensor, and how long each sequence is."""
        sizes: Sequence[int] = self.values(batch_sizes, "pad_packed_sequence").tolist()
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
