"""Storages of the running program and the values seen on them: how aliases are told apart, and when the program lets go of its tensors.

What holds a fake is what holds a tensor in eager: names, containers and autograd.
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache, partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.capture.sizes.symbols import hint, size_of, sizes_of
from lowtide.ir.graph import Node, Storage, Value
from lowtide.ir.result_specs import is_gapless
from lowtide.ir.shapes.polynomial import normal
from lowtide.ir.sizes import Size, product

Geometry = tuple[str, tuple[Size, ...], tuple[Size, ...], Size, bool, bool]  # dtype, shape, stride, offset, lazily conjugate, negative


class Block:
    """What is known of one torch storage: which storage of the graph it is now, and the values seen on it."""

    __slots__ = ("former", "owned", "ref", "root", "storage", "version", "views")

    def __init__(self, tensor: torch.Tensor, root: Value, owned: bool, former: bool = False) -> None:
        self.former = former  # what a tensor of the caller's lay on until the program put its data elsewhere
        self.ref = StorageWeakRef(tensor.untyped_storage())  # keeps the address from being given to another storage
        self.owned = owned  # by the caller
        self.renew(root)

    def renew(self, root: Value) -> None:
        """The block's content is now what `root` says, from which every view of it can be made."""
        self.root, self.storage, self.version = root, root.storage, root.version
        self.views: dict[Geometry, Value] = {geometry_of_value(root): root}

    def fork(self) -> Block:
        twin = copy.copy(self)
        twin.views = dict(self.views)
        return twin


class Names:
    """Gives out identifiers, each once: relu, relu_1, relu_2."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def fork(self) -> Names:
        twin = Names()
        twin._counts = dict(self._counts)
        return twin

    def unique(self, name: str) -> str:
        """An identifier like `name` that was not given out yet."""
        stem = "".join(letter if letter.isalnum() else "_" for letter in name)
        stem = stem if stem[:1].isidentifier() else f"_{stem}"
        while True:
            count = self._counts.get(stem, 0)
            self._counts[stem] = count + 1
            unused = f"{stem}_{count}" if count else stem
            if unused == stem or unused not in self._counts:
                self._counts.setdefault(unused, 1)
                return unused


def address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def geometry(tensor: torch.Tensor) -> Geometry:
    """What tells two tensors on one storage apart."""
    laid_out = dtype_name(tensor.dtype), sizes_of(tensor.shape), sizes_of(tensor.stride()), size_of(tensor.storage_offset())
    return *laid_out, tensor.is_conj(), tensor.is_neg()


def geometry_of_value(value: Value) -> Geometry:
    """The same of a value, which is taken to mean the bytes as they lie in memory."""
    return value.dtype, value.shape, value.stride, value.offset, False, False


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for the conjugates or the negatives of the bytes that it lies on."""
    return tensor.is_conj() or tensor.is_neg()


def covers(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, each byte once."""
    _, shape, stride, _, _, _ = geometry(tensor)
    whole = size_of(tensor.untyped_storage().nbytes())
    return is_gapless(shape, stride) and normal(product(shape) * tensor.element_size()) == whole


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements of an expanded tensor are one in memory; eager PyTorch refuses to write to it."""
    _, shape, stride, _, _, _ = geometry(tensor)
    return any(step == 0 and extent not in (0, 1) for step, extent in zip(stride, shape, strict=True))


def same_layout(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have one dtype and lie alike, so that a kernel goes through both in the same way."""
    return one.dtype == two.dtype and _steps(one) == _steps(two)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor with its dimensions permuted so that it is contiguous."""
    strides = tuple(map(hint, tensor.stride()))
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _steps(tensor: torch.Tensor) -> list[tuple[Size, Size]]:
    """Extents with their strides, which mean nothing where the extent is 1."""
    _, shape, stride, _, _, _ = geometry(tensor)
    return [(extent, step if extent != 1 else 0) for extent, step in zip(shape, stride, strict=True)]


class Ends:
    """The last node that was recorded before each storage was let go; where autograd summed gradients, and what is rare."""

    def __init__(self) -> None:
        self.nodes: Sequence[Node] = ()  # what is recorded into now
        self.summed: set[str] = set()  # results of sums of gradients
        self.rare: set[str] = set()  # what eager computes for rare data alone
        self._last: dict[int, Node] = {}
        self._noted: dict[Storage, Node] = {}  # the same of storages that no tensor lies on here
        self._following: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def follow(self, tensor: torch.Tensor) -> None:
        """Notice when the storage that `tensor` lies on is let go. Its wrapper in Python lives for as long as it does."""
        key = address(tensor)
        self._following[key] = weakref.ref(tensor.untyped_storage(), partial(self._note_end, key))

    def _note_end(self, key: int, _: object) -> None:
        self._following.pop(key, None)
        if self.nodes:
            self._last[key] = self.nodes[-1]

    def note(self, storage: Storage, last: Node) -> None:
        self._noted[storage] = last

    def last_nodes(self, blocks: Iterable[tuple[int, Block]], recorded: Sequence[Node]) -> dict[Storage, Node]:
        """By storage, of those that were let go; those of the caller are left out."""
        index = {node: number for number, node in enumerate(recorded)}
        mine = [(block.storage, self._last[key]) for key, block in blocks if key in self._last and not block.owned]
        mine.sort(key=lambda pair: index.get(pair[1], -1))  # a write in place is made beside, and let go
        return dict(mine)

    def until(self, blocks: Iterable[tuple[int, Block]], recorded: Sequence[Node], kept: Iterable[Node]) -> dict[str, str]:
        """By storage, the first result of the last of the `kept` nodes that ran before it was let go."""
        index = {node: number for number, node in enumerate(recorded)}
        makers: dict[Value, int] = {value: number for number, node in enumerate(recorded) for value in node.results[:1]}
        names = [(makers[node.results[0]], node.results[0].name) for node in kept if node.results and node.results[0] in makers]
        names.sort()
        numbers = [number for number, _ in names]
        ends: dict[str, int] = {}
        mine = ((block.storage, self._last[key]) for key, block in blocks if key in self._last and not block.owned)
        for storage, last in (*mine, *self._noted.items()):
            if at := bisect_right(numbers, index.get(last, -1)):
                ends[storage.name] = max(at, ends.get(storage.name, 0))  # a write in place is made beside, and let go
        return {name: names[at - 1][1] for name, at in ends.items()}
