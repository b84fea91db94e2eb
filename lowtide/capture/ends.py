"""When the running program lets go of its tensors: what holds a fake is what holds a tensor in eager, names, containers and autograd."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from lowtide.capture.blocks import Block, address
from lowtide.ir.graph import Node, Value


class Ends:
    """The last node that was recorded before each storage was let go; where autograd summed gradients, and what is rare."""

    def __init__(self) -> None:
        self.nodes: Sequence[Node] = ()  # what is recorded into now
        self.summed: set[str] = set()  # results of sums of gradients
        self.rare: set[str] = set()  # what eager computes for rare data alone
        self._last: dict[int, Node] = {}
        self._following: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def follow(self, tensor: torch.Tensor) -> None:
        """Notice when the storage that `tensor` lies on is let go. Its wrapper in Python lives for as long as it does."""
        key = address(tensor)
        self._following[key] = weakref.ref(tensor.untyped_storage(), partial(self._note_end, key))

    def _note_end(self, key: int, _: object) -> None:
        self._following.pop(key, None)
        if self.nodes:
            self._last[key] = self.nodes[-1]

    def until(self, blocks: Iterable[tuple[int, Block]], recorded: Sequence[Node], kept: Iterable[Node]) -> dict[str, str]:
        """By storage, the first result of the last of the `kept` nodes that ran before it was let go."""
        index = {node: number for number, node in enumerate(recorded)}
        makers: dict[Value, int] = {value: number for number, node in enumerate(recorded) for value in node.results[:1]}
        names = [(makers[node.results[0]], node.results[0].name) for node in kept if node.results and node.results[0] in makers]
        names.sort()
        numbers = [number for number, _ in names]
        ends: dict[str, int] = {}
        for key, block in blocks:
            last = index.get(self._last[key], -1) if key in self._last else -1
            if not block.owned and (at := bisect_right(numbers, last)):
                ends[block.storage.name] = max(at, ends.get(block.storage.name, 0))  # a write in place is made beside, and let go
        return {name: names[at - 1][1] for name, at in ends.items()}
