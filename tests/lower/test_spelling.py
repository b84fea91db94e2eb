"""Each operator that is called by a method or function of torch's is the one that `torch.ops` would call, with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.cost.operators import operator
from lowtide.ir.graph import Atom, Kind, Value
from lowtide.lower import statements
from lowtide.lower.statements import call, text_of
from tests.lower.bare_plans import tensor

A, B, C = (tensor(name, Kind.INPUT) for name in "abc")
TENSORS = {A: torch.rand(4, 4) + 0.5, B: torch.rand(4, 4) + 0.5, C: torch.rand(4, 4) + 0.5}
NAMES = {A: "a", B: "b", C: "c"}
MASK, WHERE, FLAT, IMAGE, WEIGHT = (tensor(name, Kind.INPUT) for name in ("mask", "where", "flat", "image", "weight"))
TENSORS |= {MASK: torch.eye(4) > 0, WHERE: torch.tensor([[0, 1, 2, 3]]), FLAT: torch.rand(4), IMAGE: torch.rand(2, 4, 4, 4)}
TENSORS |= {WEIGHT: torch.rand(4, 4, 3, 3)}
CUBE, INDEX = tensor("cube", Kind.INPUT), tensor("index", Kind.INPUT)
TENSORS |= {CUBE: torch.rand(2, 4, 4), INDEX: torch.tensor([1, 0])}
NAMES |= {INDEX: "index"} | {MASK: "mask", WHERE: "where", FLAT: "flat", IMAGE: "image", WEIGHT: "weight", CUBE: "cube"}

MADE = {"dtype": Atom("dtype", "float64"), "layout": Atom("layout", "strided"), "device": Atom("device", "cpu"), "pin_memory": False}
PLACED = {"device": Atom("device", "cpu")}
ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {  # all others take as many tensors as their schema has
    "amax.default": [(A, (0,), True), (A,)],
    "amin.default": [(A, (1,), False)],
    "as_strided.default": [(A, (2, 2), (4, 1), 1), (A, (2, 2), (4, 1))],
    "baddbmm.default": [(CUBE, CUBE, CUBE)],
    "bmm.default": [(CUBE, CUBE)],
    "cumsum.default": [(A, 1)],
    **{f"{name}.Scalar": [(A, 2), (A, 2.5), (A, True)] for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "expand.default": [(FLAT, (3, 4)), (FLAT, (3, -1))],
    "fill_.Scalar": [(A, 1), (A, 0.5), (A, float("inf"))],
    "gather.default": [(A, 0, WHERE)],
    "index_select.default": [(A, -1, INDEX)],
    "lerp.Scalar": [(A, B, 0.1)],
    "lerp_.Scalar": [(A, B, 0.1)],
    "lerp.Scalar_out": [(A, B, 0.1, {"out": C})],
    "masked_fill.Scalar": [(A, MASK, float("-inf")), (A, MASK, 0)],
    "mean.dim": [(A, (0, 1), True), (A, (-1,))],
    "permute.default": [(A, (1, 0))],
    "pow.Tensor_Scalar": [(A, 2), (A, 0.5), (A, -1.0)],
    "pow_.Scalar": [(A, 2)],
    "pow.Tensor_Scalar_out": [(A, 2, {"out": B})],
    "select.int": [(A, 0, 1), (A, -1, -1)],
    "squeeze.dim": [(A, 0)],
    "sum.dim_IntList": [(A, (0,), True), (A, (0, 1)), (A, ())],
    "transpose.int": [(A, 0, 1), (A, -2, -1)],
    "tril.default": [(A,), (A, -1)],
    "triu.default": [(A, 1)],
    "unbind.int": [(A,), (A, 1)],
    "unsqueeze.default": [(A, -1)],
    "view.default": [(A, (16,)), (A, (2, -1))],
    "_log_softmax.default": [(A, -1, False)],
    "_softmax.default": [(A, 1, False)],
    "cat.default": [((A, B), 1), ((A, B),)],
    "stack.default": [((A, B), -1)],
    "constant_pad_nd.default": [(A, (0, 1), 0), (A, (1, 0, 0, 1), 0.5)],
    "convolution.default": [(IMAGE, WEIGHT, bias, (1, 1), (1, 1), (1, 1), False, (0, 0), 1) for bias in (None, FLAT)],
    "embedding.default": [(A, WHERE), (A, WHERE, 0, False, False)],
    "empty_strided.default": [((2, 3), (1, 2), MADE), ((2, 3), (3, 1), MADE)],
    "arange.start_step": [(0, 7, 2, MADE), (0.5, 7.0, 1, PLACED)],
    "full.default": [((2, 3), 0.5, MADE), ((), 1, PLACED)],
    "full_like.default": [(A, 0.5, {}), (A, 1, MADE)],
    "ones.default": [((2, 3), MADE), ((), PLACED)],
    "ones_like.default": [(A,), (A, {"memory_format": Atom("memory_format", "preserve_format")})],
    "scalar_tensor.default": [(0.1, MADE), (True, PLACED)],
    "zeros.default": [((2, 3), MADE), ((), PLACED)],
    "zeros_like.default": [(A,), (A, MADE)],
    "native_batch_norm.default": [(IMAGE, FLAT, FLAT, FLAT, FLAT, True, 0.1, 1e-5), (IMAGE, None, None, None, None, True, 0.1, 1e-5)],
    "native_group_norm.default": [(IMAGE, None, None, 2, 4, 16, 2, 1e-5)],
    "native_layer_norm.default": [(A, (4,), FLAT, None, 1e-5)],
    "var_mean.correction": [(A, (1,), {"correction": 0, "keepdim": True}), (A,)],
    "where.self": [(MASK, A, B)],
    "_log_softmax_backward_data.default": [(A, B, 1, torch.float32)],
    "_softmax_backward_data.default": [(A, B, 1, torch.float32)],
}
FORMS = sorted(statements.SPELLED)


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def arguments_of(form: str) -> list[tuple[Any, ...]]:
    if form in ARGUMENTS:
        return ARGUMENTS[form]
    schema = operator(f"aten.{form}")._schema
    wanted = [each for each in schema.arguments if str(each.type) == "Tensor" and not each.kwarg_only]
    outs = {each.name: C for each in schema.arguments if each.kwarg_only and each.alias_info is not None}
    alphas = [{}, {"alpha": -0.25}] if any(each.name == "alpha" for each in schema.arguments) else [{}]
    alphas += [{"value": -2.0}] if any(each.name == "value" and each.kwarg_only for each in schema.arguments) else []
    numbers = [(A, 2), (A, -0.5), (A, float("nan")), (A, 3, {"alpha": 2})] if form.split(".")[0] in ("add", "add_", "sub", "sub_") else []
    numbers += [(A, 2), (A, -0.5)] if form in ("mul.Tensor", "mul_.Tensor", "div.Tensor", "div_.Tensor") else []
    numbers = [] if form.endswith(".out") else numbers
    return [*numbers] + [(*(A, B, C)[: len(wanted)], {**outs, **more}) for more in alphas]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return (type(one) is type(other) and repr(one) == repr(other)) or {one, other} == {None, False}  # whether memory is pinned


def whole(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """By argument of the schema, what is given or stands there by default."""
    positional = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
    return [{**positional, **kwargs}.get(each.name, each.default_value) for each in func._schema.arguments]


def run(text: str) -> tuple[Any, list[Any]]:
    variables = {NAMES[value]: held.clone() for value, held in TENSORS.items()}
    kept = {id(held): name for name, held in variables.items()}
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), _Calls() as calls:
        eval(text, {"torch": torch, "device": torch.device, "aten": torch.ops.aten, "inf": float("inf"), "nan": float("nan"), **variables})
    ((func, args, kwargs),) = calls.seen
    return func, [_named(each, kept) for each in whole(func, args, kwargs)]


def _named(arg: Any, kept: dict[int, str]) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_named(each, kept) for each in arg]
    return kept[id(arg)] if isinstance(arg, Tensor) else arg


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_same_call(form):
    for args in arguments_of(form):
        given, kwargs = (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})
        if form.endswith("backward_data.default"):
            texts = [f"aten.{form}(a, b, 1, torch.float32)", f"torch.{form.split('.')[0]}(a, b, 1, torch.float32)"]
        else:
            text = call(f"aten.{form}", given, tuple(kwargs.items()), NAMES)
            assert not text.startswith("aten.")
            shown = ", ".join(_text(each) for each in given) + "".join(f", {key}={_text(each)}" for key, each in kwargs.items())
            texts = [f"aten.{form}({shown})", text]
        (func, mine), (other, its) = map(run, texts)
        assert func is other is operator(f"aten.{form}")
        assert is_same(mine, its)


def _text(arg: Any) -> str:
    if isinstance(arg, Atom):
        return text_of(arg, NAMES)
    if isinstance(arg, tuple):
        return f"[{', '.join(map(_text, arg))}]"
    return NAMES[arg] if isinstance(arg, Value) else repr(arg)


@pytest.mark.parametrize(
    ("op", "args"),
    [("aten.eq.Tensor", (A, 2.0)), ("aten.add.Tensor", (2, A)), ("aten.add.Scalar", (A, 2)), ("aten.ones.default", ((2, 3),))],
)
def test_what_python_would_read_otherwise_goes_to_the_operator_itself(op, args):
    assert call(op, args, (), NAMES).startswith(op)
