"""The shapes that are told of operators are those that torch gives, and what torch refuses is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.cpu.checks import check_generated
from lowtide.errors import FormatError
from lowtide.ir.graph import Kind, Node, Storage, Value

SIZES = st.integers(1, 6)
DIMS = st.integers(-5, 5)
FEW = st.sampled_from([1, 1, 1, 1, 2, 2, 3, 0, -1])


def images() -> st.SearchStrategy[list[int]]:
    return st.lists(SIZES, min_size=4, max_size=4)


def shapes(least: int = 1, most: int = 4) -> st.SearchStrategy[list[int]]:
    return st.lists(SIZES, min_size=least, max_size=most)


def pairs(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(numbers, min_size=1, max_size=2).map(tuple)


def ints(most: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(DIMS, max_size=most).map(tuple)


def convolutions(draw: st.DrawFn) -> list[Any]:
    a, groups = draw(images()), draw(st.sampled_from([1, 1, 1, 2, 3, 0]))
    columns = draw(SIZES)
    inner = draw(st.sampled_from([a[1], a[1] // max(groups, 1), 1, 2]))
    weight = torch.zeros(columns, max(1, inner), *draw(st.tuples(SIZES, SIZES)))
    bias = draw(st.sampled_from([None, None, torch.zeros(columns), torch.zeros(columns + 1), torch.zeros(1)]))
    return [torch.zeros(a), weight, bias, draw(pairs(FEW)), draw(pairs(FEW)), draw(pairs(FEW)), False, (0, 0), groups]


def pools(draw: st.DrawFn, average: bool) -> list[Any]:
    around = [torch.zeros(draw(images())), draw(pairs(FEW)), draw(st.one_of(st.just(()), pairs(FEW))), draw(pairs(FEW))]
    if average:
        return [*around, draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([None, 0, 3]))]
    return [*around, draw(pairs(FEW)), draw(st.booleans())]


def vectors(draw: st.DrawFn, size: int) -> Tensor:
    return torch.zeros(draw(st.sampled_from([size, size, size, size + 1, 1])))


def norms(draw: st.DrawFn) -> list[Any]:
    a = draw(shapes(2))
    given = [vectors(draw, a[1]) for _ in range(4)]
    return [torch.zeros(a), *given, False, 0.1, 1e-5]


def layer_norms(draw: st.DrawFn) -> list[Any]:
    a = draw(shapes())
    said = draw(st.sampled_from([a[-1], a[-1], a[-1] + 1]))
    return [torch.zeros(a), (said,), vectors(draw, a[-1]), draw(st.sampled_from([None, torch.zeros(a[-1])])), 1e-5]


def attentions(draw: st.DrawFn) -> list[Any]:
    b, h, q, k, d = (draw(st.integers(1, 3)) for _ in range(5))
    made = [torch.zeros(b, h, q, d), torch.zeros(b, h, k, d), torch.zeros(b, h, k, d)]
    at = draw(st.integers(0, 5))
    if at < 3:
        sizes = list(made[at].shape)
        sizes[draw(st.integers(0, 3))] += 1
        made[at] = torch.zeros(sizes)
    return made


def slices(draw: st.DrawFn) -> list[Any]:
    ends = st.one_of(st.none(), DIMS, st.just(2**63 - 1))
    return [torch.zeros(draw(shapes())), draw(DIMS), draw(ends), draw(ends), draw(FEW)]


def joined(draw: st.DrawFn) -> list[Any]:
    a, dim = draw(shapes()), draw(DIMS)
    others = []
    for _ in range(draw(st.integers(0, 2))):
        other = list(a)
        other[draw(st.integers(0, len(a) - 1))] = draw(SIZES)
        others.append(torch.zeros(other))
    return [(torch.zeros(a), *others), dim]


def viewed(draw: st.DrawFn) -> list[Any]:
    a = torch.zeros(draw(shapes()))
    return [a, tuple(draw(st.permutations(list(a.shape)))) if draw(st.booleans()) else (*draw(shapes(0, 2)), draw(FEW))]


def products(draw: st.DrawFn) -> list[Any]:
    rows, k, columns = draw(SIZES), draw(SIZES), draw(SIZES)
    return [torch.zeros(rows, k), torch.zeros(draw(st.sampled_from([k, k, k + 1])), columns)]


def with_bias(draw: st.DrawFn) -> list[Any]:
    a, weight = products(draw)
    return [vectors(draw, weight.shape[1]), a, weight]


def batches(draw: st.DrawFn) -> list[Any]:
    a, other = products(draw)
    return [a.expand(2, *a.shape), other.expand(draw(st.integers(1, 2)), *other.shape)]


def two(draw: st.DrawFn) -> list[Any]:
    a = draw(shapes())
    other = [draw(st.sampled_from([size, 1, 2])) for size in a][draw(st.integers(0, len(a) - 1)) :]
    return [torch.zeros(a), torch.zeros(other)] if draw(st.booleans()) else [torch.zeros(other), torch.zeros(a)]


def one_with(*rest: st.SearchStrategy[Any], least: int = 1, most: int = 4) -> Callable[[st.DrawFn], list[Any]]:
    return lambda draw: [torch.zeros(draw(shapes(least, most))), *map(draw, rest)]


CALLS: dict[str, Callable[[st.DrawFn], list[Any]]] = {
    "convolution.default": convolutions, "mm.default": products, "addmm.default": with_bias, "bmm.default": batches,
    "max_pool2d_with_indices.default": lambda draw: pools(draw, average=False),
    "avg_pool2d.default": lambda draw: pools(draw, average=True),
    "native_batch_norm.default": norms, "native_layer_norm.default": layer_norms, "slice.Tensor": slices, "cat.default": joined,
    "_scaled_dot_product_flash_attention_for_cpu.default": attentions, "view.default": viewed, "reshape.default": viewed,
    "add.Tensor": two, "mul.Tensor": two, "maximum.default": two, "relu.default": one_with(), "gelu.default": one_with(),
    "mean.dim": one_with(ints(3), st.booleans()), "_softmax.default": one_with(DIMS, st.just(False)),
    "permute.default": one_with(ints()), "transpose.int": one_with(DIMS, DIMS), "t.default": one_with(most=3),
    "unsqueeze.default": one_with(DIMS), "squeeze.default": one_with(), "squeeze.dim": one_with(DIMS), "squeeze.dims": one_with(ints(2)),
    "expand.default": one_with(ints()), "select.int": one_with(DIMS, DIMS), "split.Tensor": one_with(FEW, DIMS),
    "split_with_sizes.default": one_with(st.lists(FEW, max_size=3).map(tuple), DIMS), "unbind.int": one_with(DIMS),
    "_adaptive_avg_pool2d.default": one_with(st.sampled_from([(1, 1), (2, 1)]), least=4),
}  # fmt: skip


def value(name: str, tensor: Tensor) -> Value:
    shape = tuple(tensor.shape)
    return Value(name, Storage(name, 4 * tensor.numel(), "cpu", Kind.ARGUMENT), "float32", shape, torch.empty(shape).stride())


def node(op: str, args: list[Any], made: list[Any]) -> tuple[Node, set[Value]]:
    """A call as a node, and which of its arguments may be constants: all but the first."""
    known: dict[int, Value] = {}

    def said(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return known.setdefault(id(arg), value(f"x{len(known)}", arg))
        return tuple(map(said, arg)) if isinstance(arg, tuple) else arg

    first = 1 if op.startswith("addmm") else 0
    given = tuple(map(said, args))
    fixed = {arg for at, arg in enumerate(given) if isinstance(arg, Value) and at != first}
    several = op.split(".")[0] in ("split", "split_with_sizes", "unbind")
    outputs = tuple(value(f"y{at}", each) if several or at == 0 else None for at, each in enumerate(made))
    alone = op.startswith(("bmm", "cat", "_scaled", "add.", "mul", "maximum"))
    return Node(f"aten.{op}", given, outputs), set() if alone else fixed


def run(op: str, args: list[Any]) -> list[Any] | None:
    """What torch gives; None where it refuses."""
    name, overload = op.split(".")
    if "attention" in name and not _fit(*args):  # which torch looks at before it calls the operator: this ends the process
        return None
    try:
        found = getattr(getattr(torch.ops.aten, name), overload)(*args)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    made = list(found) if isinstance(found, (tuple, list)) else [found]
    return None if any(size < 0 for each in made for size in each.shape) else made  # torch expands an extent to -2


def _fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return key.shape == value.shape and (*query.shape[:2], query.shape[3]) == (*key.shape[:2], key.shape[3])


@pytest.mark.parametrize("op", CALLS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_is_told_is_what_torch_gives(op: str, data: st.DataObject) -> None:
    args = CALLS[op](data.draw)
    made = run(op, args)
    call, fixed = node(op, args, [torch.zeros(2, 3)] if made is None else made)
    is_right = made is not None and all(isinstance(each, Tensor) and each.numel() for each in made[: len(call.results)])
    try:
        check_generated(call, fixed)
    except FormatError:
        return
    assert is_right


@pytest.mark.parametrize("op", CALLS)
def test_what_torch_gives_is_told(op: str) -> None:
    """Not only refused: of each operator some call is told, and none with results of another shape."""
    told = 0

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(data=st.data())
    def look(data: st.DataObject) -> None:
        nonlocal told
        args = CALLS[op](data.draw)
        made = run(op, args)
        if made is None:
            return
        call, fixed = node(op, args, made)
        try:
            check_generated(call, fixed)
        except FormatError:
            return
        told += 1
        other, _ = node(op, args, [torch.zeros(*each.shape, 2) for each in made])
        with pytest.raises(FormatError):
            check_generated(other, fixed)

    look()
    assert told
