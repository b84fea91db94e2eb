"""Tensors that are alike, put together: what repeated blocks make at the same place of each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowtide.base.units import op_text
from lowtide.plan.snapshot import LiveTensor
from lowtide.plan.where import source_text

Item = TypeVar("Item")

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")  # a whole part of a path or name
_LONGEST = 56  # of a name on a line


@dataclass(frozen=True)
class AlikeItems(Generic[Item]):
    """Some that are alike, and the tensors that they are of."""

    members: tuple[Item, ...]
    tensors: tuple[LiveTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def spec(self) -> str:
        """Dtype and shape, "float32[4, 32]", with the count of several: "12 x float32[4, 32]"."""
        texts = {f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]" for tensor in self.tensors}
        if len(texts) > 1:
            return f"{len(self.tensors)} of several shapes"
        return texts.pop() if len(self.tensors) == 1 else f"{len(self.tensors)} x {texts.pop()}"

    @property
    def origin(self) -> str:
        """What makes it and where, "gelu of blocks.*.mlp, model.py:12"; an input's name."""
        first = self.tensors[0]
        if not first.op:
            return _shortened(self._common([tensor.name for tensor in self.tensors]))
        module = self._common([tensor.module for tensor in self.tensors])
        line = source_text(first.source).removeprefix(f"{first.module}, ")
        return " of ".join(filter(None, (op_text(first.op), ", ".join(filter(None, (_shortened(module), line))))))

    def _common(self, texts: list[str]) -> str:
        return texts[0] if len(set(texts)) == 1 else pattern(texts[0])


def alike(
    items: Iterable[Item], tensor_of: Callable[[Item], LiveTensor], key: Callable[[LiveTensor, Item], Hashable]
) -> list[AlikeItems[Item]]:
    """The groups of those of one operator, at one place of repeated blocks, and of one `key`; the most bytes first."""
    found: defaultdict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        tensor = tensor_of(item)
        found[tensor.op, pattern(tensor.module if tensor.op else tensor.name), key(tensor, item)].append(item)
    groups = [AlikeItems(tuple(members), tuple(map(tensor_of, members))) for members in found.values()]
    return sorted(groups, key=lambda group: -group.nbytes)


def pattern(path: str) -> str:
    """A path with its numbers left open: "blocks.*.mlp" of "blocks.3.mlp"; one of numbers alone stays as it is."""
    return _NUMBER.sub("*", path) if re.search(r"[^\d._]", path) else path


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST + 3 :]}"
