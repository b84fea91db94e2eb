"""When the running program lets go of its tensors: what holds a fake is what holds a tensor in eager, names, containers and autograd."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch

from lowtide.capture.blocks import Block, address
from lowtide.ir.graph import Node, Value


class Ends:
    """The last node that was recorded before each storage was let go."""

    def __init__(self) -> None:
        self.nodes: Sequence[Node] = ()  # what is recorded into now
        self._last: dict[int, Node] = {}
        self._following: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def follow(self, tensor: torch.Tensor) -> None:
        """Notice when the storage that `tensor` lies on is let go. Its wrapper in Python lives for as long as it does."""
        key = address(tensor)
        self._following[key] = weakref.ref(tensor.untyped_storage(), lambda _: self._note(key))

    def _note(self, key: int) -> None:
        self._following.pop(key, None)
        if self.nodes:
            self._last[key] = self.nodes[-1]

    def until(self, blocks: Iterable[tuple[int, Block]], recorded: Sequence[Node], kept: Iterable[Node]) -> dict[str, str]:
        """By storage, the first result of the last of the `kept` nodes that ran before it was let go."""
        index = {node: number for number, node in enumerate(recorded)}
        made: dict[Value, int] = {value: number for number, node in enumerate(recorded) for value in node.results[:1]}
        names = [(made[node.results[0]], node.results[0].name) for node in kept if node.results and node.results[0] in made]
        names.sort()
        numbers = [number for number, _ in names]
        found: dict[str, str] = {}
        for key, block in blocks:
            last = index.get(self._last[key], -1) if key in self._last else -1
            if not block.owned and (at := bisect_right(numbers, last)):
                found[block.storage.name] = names[at - 1][1]
        return found
