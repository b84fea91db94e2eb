"""What is remembered of fake kernels is what they say: of torch's own samples of operators, and of what has made trouble before."""

from __future__ import annotations

import functools
import itertools
import os
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowtide
from lowtide.capture.program import capture_inference
from lowtide.capture.real import remembered
from lowtide.capture.trace import Given
from lowtide.errors import CaptureError

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)
PARTS = int(os.environ.get("LOWTIDE_LOOKS_PARTS", "16"))  # one of them is tried; all operators where a bench asks for 1


class Compared(TorchDispatchMode):
    """Has each operator run as it is and, twice, as it is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.different: list[Any] = []
        self.compared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = func._schema.is_mutable
        first = _tried(remembered, func, args, kwargs, func)
        if isinstance(first, Exception):
            raise first
        if not written and func.namespace == "aten":
            self.compared += 1
            again, plain = _tried(remembered, func, args, kwargs, func), _tried(functools.partial(func, **kwargs), *args)
            if not _look(again, args) == _look(plain, args) == _look(first, args):
                self.different.append((func, [_look(each, args) for each in (first, again, plain)]))
        return first


def _tried(run: Any, *args: Any) -> Any:
    try:
        return run(*args)
    except Exception as error:
        return error


def _look(out: Any, args: Any) -> list[Any]:
    """How results look, and which of the arguments they lie on."""
    given = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    return [
        (
            type(each),
            each.dtype,
            each.device,
            tuple(each.shape),
            each.stride(),
            each.storage_offset(),
            each.untyped_storage().nbytes(),
            each.is_conj(),
            each.is_neg(),
            [each.untyped_storage()._cdata == other.untyped_storage()._cdata for other in given],
        )
        if isinstance(each, torch.Tensor) and each.layout is torch.strided
        else type(each)
        for each in tree_leaves(out)
    ]


def _operators() -> list[Any]:
    flags = torch.backends
    before = flags.__allow_nonbracketed_mutation_flag  # which torch's own tests switch off for good
    from torch.testing._internal.common_methods_invocations import op_db

    flags.__allow_nonbracketed_mutation_flag = before
    names = sorted({each.name for each in op_db})
    chosen = {*random.Random(0).sample(names, len(names) // PARTS)}
    return [each for each in op_db if each.name in chosen]


@pytest.mark.filterwarnings("ignore")  # of torch's samples
def test_samples_of_torchs_operators():
    count = 0
    for op in _operators():
        for dtype in DTYPES:
            if not op.supports_dtype(dtype, "cpu"):
                continue
            for sample, _ in zip(op.sample_inputs("cpu", dtype), range(3), strict=False):
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    given, args, kwargs = torch.utils._pytree.tree_map_only(
                        torch.Tensor, mode.from_tensor, (sample.input, sample.args, sample.kwargs)
                    )
                    with Compared() as compared, torch.no_grad():
                        _tried(lambda op, args, kwargs: op(*args, **kwargs), op, (given, *args), kwargs)
                    assert compared.different == []
                    count += compared.compared
    assert count > 100


def _called(func: Any, *args: Any) -> Any:
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, list(args))
        for _ in range(2):
            out = remembered(func, tuple(fakes), {}, func)
        return out, fakes


def test_what_is_written_is_what_is_returned():
    out, fakes = _called(torch.ops.aten.add_.Tensor, torch.ones(2, 3), torch.ones(3))
    assert out is fakes[0]


def test_lists_are_remembered_tensor_by_tensor_and_numbers_do_not_count():
    mul, asked = torch.ops.aten._foreach_mul.Scalar, []

    def ask(*args: Any) -> Any:
        asked.append(args)
        return mul(*args)

    with FakeTensorMode() as mode:
        lists = [[mode.from_tensor(torch.ones(rows, 3, dtype=dtype)) for rows in (2, 5)] for dtype in (torch.float32, torch.int64)]
        for given, number in itertools.product(lists, (0.5, 0.25, 2)):
            before, out = len(asked), remembered(mul, (given, number), {}, ask)
            assert type(out) is list
            assert [_look(each, given) for each in out] == [_look(each, given) for each in mul(given, number)]
            assert len(asked) - before == (number != 0.25)  # a number of another kind is asked for, another number is not


def test_lists_that_are_written_give_nothing_back():
    out, fakes = _called(torch.ops.aten._foreach_add_.Scalar, [torch.ones(2, 3), torch.ones(3)], 1.5)
    assert out is None
    assert [each.shape for each in fakes[0]] == [(2, 3), (3,)]


def test_what_a_tensor_is_known_to_hold_is_computed_with():
    add, add_, mul_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor
    for start in (1.0, 2.0):
        reals = torch.tensor(start), torch.tensor(1.0), torch.tensor(9.0)
        with FakeTensorMode() as mode:
            convert = mode.fake_tensor_converter.from_real_tensor
            count, one, unknown = (convert(mode, each, make_constant=each is not reals[2]) for each in reals)
            later = remembered(add, (count, one), {}, add)
            assert later.item() == start + 1
            assert later.untyped_storage()._cdata != count.untyped_storage()._cdata
            assert remembered(add_, (count, one), {}, add_) is count
            assert count.item() == start + 1
            remembered(mul_, (later, unknown), {}, mul_)
            assert later.constant is None
            assert remembered(add, (count, unknown), {}, add).constant is None


def test_views_of_what_is_known_to_be_held_lie_on_it_each_time():
    cumsum, part = torch.ops.aten.cumsum.default, torch.ops.aten.slice.Tensor
    for real in torch.tensor([3]), torch.tensor([3]):
        with FakeTensorMode() as mode:
            count = mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)
            total = remembered(cumsum, (count, 0), {}, cumsum)
            view = remembered(part, (total, 0, 0, 1), {}, part)
            assert view.item() == total.item() == 3
            assert view.untyped_storage()._cdata == total.untyped_storage()._cdata != count.untyped_storage()._cdata


class Widened(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.bitwise_xor_(b)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_is_written_must_fit_each_time():
    """The fake kernel gives it the size of the result, where the real one raises."""
    given = Given((torch.ones(5, 1, dtype=torch.int64), torch.ones(5, dtype=torch.int64)), {}, torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"another size|the broadcast shape"):
            capture_inference(Widened(), given)


def test_an_offset_from_where_the_storage_begins_is_no_offset_from_a_view():
    as_strided = torch.ops.aten.as_strided.default
    with FakeTensorMode() as mode:
        whole = mode.from_tensor(torch.ones(8))
        out = [remembered(as_strided, (whole[at : at + 2], [2], [1], 1), {}, as_strided) for at in (0, 2, 4)]
    assert [each.storage_offset() for each in out] == [1, 1, 1]


class Written(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x * 1
        for at in (0, 2, 4):
            whole[at : at + 2].as_strided((2,), (1,), 1).add_(1)
        return whole


def test_what_is_written_by_such_a_view_lies_where_eager_has_it():
    model, x = Written(), torch.arange(8.0)
    with torch.no_grad():
        step = lowtide.optimize(model, x, planning=lowtide.Planning(workspaces=False))
        assert torch.equal(step(x), model(x))


def test_what_cannot_be_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(RuntimeError):
            _called(torch.ops.aten.add_.Tensor, torch.ones(3), torch.ones(2, 3))


def test_what_decides_beside_the_shape():
    """Types of numbers, the default dtype, strides, which argument is which."""
    mul, whole = torch.ops.aten.mul.Tensor, torch.ones(2, 3, dtype=torch.int64)
    assert _called(mul, whole, 2)[0].dtype is torch.int64
    assert _called(mul, whole, 2.0)[0].dtype is torch.float32
    assert _called(mul, whole, True)[0].dtype is torch.int64
    assert _called(torch.ops.aten.sum.dim_IntList, torch.ones(2, 3), [0])[0].shape == (3,)
    assert _called(torch.ops.aten.sum.dim_IntList, torch.ones(2, 3), [1])[0].shape == (2,)
    assert _called(torch.ops.aten.clone.default, torch.ones(2, 3).t())[0].stride() == (1, 3)
    torch.set_default_dtype(torch.float64)
    try:
        assert _called(mul, whole, 2.0)[0].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(_called(mul, whole, 2)[0], FakeTensor)


def test_a_view_is_a_view():
    out, fakes = _called(torch.ops.aten.view.default, torch.ones(2, 3), [6])
    assert out.untyped_storage()._cdata == fakes[0].untyped_storage()._cdata


def test_a_view_of_a_part_begins_where_that_begins():
    for start in (0, 2):
        with FakeTensorMode() as mode:
            part = mode.from_tensor(torch.ones(6, 3))[start:]
            out = remembered(torch.ops.aten.select.int, (part, 0, 1), {}, torch.ops.aten.select.int)
            assert out.storage_offset() == 3 * (start + 1)
