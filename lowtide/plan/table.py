"""All storages of a plan, the largest first: what each is, and over which steps it lives; and those that are alike, put together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowtide.base.messages import bytes_text, op_text
from lowtide.plan.contents import Contents
from lowtide.plan.promises import lives
from lowtide.plan.snapshot import LiveTensor, source_text, storage_specs

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
    by_key: defaultdict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        tensor = tensor_of(item)
        by_key[tensor.op, pattern(tensor.module if tensor.op else tensor.name), key(tensor, item)].append(item)
    groups = [AlikeItems(tuple(members), tuple(map(tensor_of, members))) for members in by_key.values()]
    return sorted(groups, key=lambda group: -group.nbytes)


def pattern(path: str) -> str:
    """A path with its numbers left open: "blocks.*.mlp" of "blocks.3.mlp"; one of numbers alone stays as it is."""
    return _NUMBER.sub("*", path) if re.search(r"[^\d._]", path) else path


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST + 3 :]}"


def live_tensors(plan: Contents) -> list[LiveTensor]:
    """Every storage that has bytes, by bytes, of equal ones the earliest; what is resident lives from the first step to the last."""
    spans, seen = lives(plan), storage_specs(plan.graph)
    tensors = [LiveTensor.of(seen[storage], nbytes, start, end) for storage, (nbytes, start, end) in spans.items() if nbytes]
    return sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.start, tensor.end, tensor.name))


def table(plan: Contents, most: int | None = None) -> str:
    """The first `most` of them, all where that is None, a line each: bytes, name, dtype and shape, kind, steps, and what makes it."""
    tensors = live_tensors(plan)
    rows = [("bytes", "name", "tensor", "kind", "steps", "made by"), *map(_row, tensors[:most])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{row[0]:>{widths[0]}}  " + "  ".join(map(str.ljust, row[1:], widths[1:])) for row in rows]
    rest = tensors[most:] if most is not None else []
    if rest:
        lines.append(f"{bytes_text(sum(tensor.nbytes for tensor in rest)):>{widths[0]}}  in {len(rest)} more")
    return "\n".join(line.rstrip() for line in lines)


def _row(tensor: LiveTensor) -> tuple[str, ...]:
    where = source_text(tensor.source)
    made_by = f"{op_text(tensor.op)}{f' of {where}' if where else ''}" if tensor.op else "the caller"
    shape = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    return bytes_text(tensor.nbytes), tensor.name, shape, tensor.kind.value, f"{tensor.start} to {tensor.end}", made_by
