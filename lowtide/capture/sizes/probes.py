"""The results of an operator whose fake kernel takes symbolic sizes for numbers, or none at all: found by asking at several points.

Each extent of a result has to be one of the sizes that the call was given, the larger half of one, or a number: that one which it is at all
points that were asked.
Strides are those of a dense tensor whose dimensions lie in the order that was seen. What follows neither way is refused.

Here are the strides of symbolic extents, too, as torch gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.capture.sizes.symbols import Extent, Symbols, size_of
from lowtide.errors import ShapeError
from lowtide.ir.result_specs import same_strides
from lowtide.ir.shapes.dimension import Dimension


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of a tensor of numbers, the innermost first."""
    return list(reversed(range(tensor.dim()))) if tensor.is_contiguous() else by_stride(tensor)


def by_stride(tensor: torch.Tensor) -> list[int]:
    """The same of one whose strides count along extents of 1, too."""
    return sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor of numbers lies in memory without gaps, in some order of its dimensions."""
    return same_strides(tensor.shape, dense_stride(tensor.shape, memory_order(tensor)), tensor.stride())


def dense_stride(shape: Sequence[Extent], order: Sequence[int]) -> list[Any]:
    """The strides of a dense tensor whose dimensions lie in this order, the innermost first."""
    stride: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in order:
        stride[dim], step = step, step * shape[dim]
    return stride


def strides_of_view(shape: Sequence[Extent], stride: Sequence[Extent], wanted: Sequence[Extent]) -> list[Any]:
    """The strides of a view of other extents, as ATen makes them (TensorUtils.cpp, computeStride): there is such a view, and no 0.

    Runs of dimensions that lie one within the other are cut anew, the innermost first.
    """
    strides: list[Any] = [1] * len(wanted)
    at, step = len(wanted) - 1, stride[-1] if stride else 1
    given: Any = 1
    taken: Any = 1
    for dim in reversed(range(len(shape))):
        given = given * shape[dim]
        if dim and (size_of(shape[dim - 1]) == 1 or size_of(stride[dim - 1]) == size_of(given * step)):
            continue
        while at >= 0 and (size_of(taken) != size_of(given) or size_of(wanted[at]) == 1):
            strides[at], taken, at = taken * step, taken * wanted[at], at - 1
        if dim:
            step, given, taken = stride[dim - 1], 1, 1
    return strides


_WANTED, _TRIED = 4, 24  # points at least, and at most
_WITHIN = 4  # points at which bytes are asked for beside the corners
_PAGES = 8 * 4096  # bytes: what oneDNN leaves consists of seven parts


class UnprobedError(Exception):
    """What an operator gives is not known for all batches."""


def probed(
    symbols: Symbols, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], ask: Callable[[dict[str, int]], Any] | None = None
) -> Any:
    """What the operator gives, over symbolic sizes; the fake mode is on. Raises UnprobedError where that is not known.

    `ask` says what it gives at a point; None has the fake kernel asked.
    """

    def answer_at(point: dict[str, int]) -> Any:
        return func(*_at(args, symbols, point), **_at(kwargs, symbols, point)) if ask is None else ask(point)

    returns = func._schema.returns
    if any(result.alias_info is not None or "Tensor" not in str(result.type) for result in returns):
        raise UnprobedError
    seen, answers = _Seen(list({size_of(each): each for each in _extents((args, kwargs))}.values()), []), []
    for point in symbols.points(_TRIED):
        try:
            answers.append(answer_at(point))
        except ShapeError:  # a size that is no whole number there
            continue
        seen.points.append([symbols.at(extent, point) for extent in seen.pool])
        if seen.tells_apart:
            break
    if not seen.tells_apart:
        raise UnprobedError
    if isinstance(answers[0], torch.Tensor):
        return seen.result(answers)
    if not all(isinstance(expr, torch.Tensor) for answer in answers for expr in answer):
        raise UnprobedError
    return type(answers[0])(seen.result(exprs) for exprs in zip(*answers, strict=True))


def bytes_left(symbols: Symbols, ask: Callable[[dict[str, int]], int]) -> Extent:
    """As many bytes as an operator leaves for another one to read, or somewhat more; `ask` says how many those are at a point.

    They grow evenly along each dimension, but for parts that are rounded up: they are at most what lies evenly between the range's corners,
    and some pages.
    """
    varied = [each for each in symbols.dimensions if each.least < each.most]
    corners = [frozenset(above) for count in range(len(varied) + 1) for above in combinations(varied, count)]
    at = {above: ask({each.name: each.most if each in above else each.least for each in symbols.dimensions}) for above in corners}
    spans = {each: each.extent(each.most) - each.extent(each.least) for each in varied}

    def evenly(extents: Mapping[Dimension, Any]) -> Any:
        """What the corners say of what lies between them."""
        sides = {each: extents[each] - each.extent(each.least) for each in varied}
        total: Any = 0
        for above in corners:
            more = sum((-1) ** (len(above) - len(below)) * at[below] for below in corners if below <= above)
            total = total + max(more, 0) * prod(sides[each] if each in above else span for each, span in spans.items())
        return total // prod(spans.values())

    above = [ask(point) - evenly({each: each.extent(point[each.name]) for each in varied}) for point in symbols.points(_WITHIN)]
    bound: Extent = evenly({each: symbols.extent(each.extent_name) for each in varied}) + max(_PAGES, *(2 * each for each in above))
    return bound


@dataclass(frozen=True)
class _Seen:
    """The sizes that a call was given, and what they are at each point."""

    pool: list[Extent]
    points: list[list[int]]

    @property
    def tells_apart(self) -> bool:
        """Whether no two of the sizes are alike at all points that were asked, and none is one number at all of them."""
        columns = list(zip(*self.points, strict=True))
        return len(self.points) >= _WANTED and len(set(columns)) == len(self.pool) and all(len(set(column)) > 1 for column in columns)

    def result(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """A fake over symbolic sizes that looks at each point as these do."""
        shape = [self._extent([each.shape[dim] for each in results]) for dim in range(results[0].dim())]
        whole = all(each.untyped_storage().nbytes() == each.numel() * each.element_size() for each in results)
        for order in (order(each) for each in results for order in (memory_order, by_stride)):  # of extents of 1 there are several
            if whole and all(list(each.stride()) == dense_stride(each.shape, order) for each in results):
                return torch.empty_strided(shape, dense_stride(shape, order), dtype=results[0].dtype, device=results[0].device)
        raise UnprobedError

    def _extent(self, numbers: list[int]) -> Extent:
        if len(set(numbers)) == 1:
            return numbers[0]
        for position, extent in enumerate(self.pool):
            if [point[position] for point in self.points] == numbers:
                return extent
            if [point[position] // 2 + 1 for point in self.points] == numbers:  # what a Fourier transform of real numbers keeps
                return extent // 2 + 1
        raise UnprobedError


def _extents(tree: Any) -> Iterator[Extent]:
    """The symbolic sizes of a call: those of its tensors, then those among its arguments."""
    if isinstance(tree, torch.Tensor):
        yield from (extent for extent in tree.shape if isinstance(extent, torch.SymInt))
    elif isinstance(tree, torch.SymInt):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _extents(item)


def _at(tree: Any, symbols: Symbols, point: dict[str, int]) -> Any:
    if isinstance(tree, FakeTensor):
        shape, stride = ([symbols.at(each, point) for each in sizes] for sizes in (tree.shape, tree.stride()))
        return torch.empty_strided(shape, stride, dtype=tree.dtype, device=tree.device)
    if isinstance(tree, torch.SymInt):
        return symbols.at(tree, point)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_at(item, symbols, point) for item in tree)
    return {key: _at(item, symbols, point) for key, item in tree.items()} if isinstance(tree, dict) else tree
