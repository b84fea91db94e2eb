"""Calls of operators made up from their schemas, for those that torch's test database does not name.

Operators that are composite, or that autocast handles, are what eager takes apart before a capture sees it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

_KEYS = ("CompositeImplicitAutograd", "AutocastCPU", "AutocastCUDA")
_NOT_COMPUTED = (  # other layouts, weights of other libraries, questions to a tensor, and torch's tests
    "sparse", "fbgemm", "quantiz", "qparams", "mkldnn", "cufft", "cudnn", "_test", "_nested", "nested_", "xla", "pin_memory",
    "set_data", "vulkan", "_batch_dim", "_pad_enum", "_debug", "unsafe", "dense", "sspaddmm", "smm", "_backward", "retain",
    "requires_grad", "_coalesce", "coalesce", "_rowwise", "_saturate", "from_file", "_version", "is_leaf", "lstm", "output_nr", "hspmm",
    "_unpack_dual", "_make_dual", "_shape_check", "_assert", "_print", "_is_", "get_gradients", "record_stream",
    "_reshape_from_tensor", "_sobol_engine", "_to_cpu", "compatible_shallow",
)  # fmt: skip
_SHAPES = ((3, 3), (2, 3, 8, 8), (2, 3, 6), (4,), (2, 3, 4, 4, 4))


@dataclass(frozen=True)
class Call:
    """Arguments, as the database's samples hold them."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class MadeUp:
    """An operator as the database describes one, as far as the sweep asks."""

    name: str
    overload: OpOverload
    variant_test_name: str = ""
    supports_autograd: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    @property
    def op(self) -> Callable[..., Any]:
        """The call on copies: what the operator writes may be a parameter."""

        def called(*args: Any, **kwargs: Any) -> Any:
            copied = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
            return self.overload(*copied[0], **copied[1])

        return called

    def supported_backward_dtypes(self, device: str) -> tuple[torch.dtype, ...]:
        """Those of a training step."""
        return self.dtypes

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> list[Call]:
        """At most four calls that eager accepts, of as many shapes as can be had."""
        found: dict[Any, Call] = {}
        for shape, others, number, length in itertools.product(_SHAPES, (None, torch.int64, torch.bool), (1, 0, 2), (2, 1, 3, 4)):
            if (shape, others) in found or len(found) == 4:
                continue
            torch.manual_seed(0)
            call = self._call(_Values(dtype, shape, others, number, length, requires_grad))
            if call is not None and (made := self._made(call)) is not None:
                # what the call writes into gets the size of what it makes: to resize it is deprecated
                outs = [argument.name for argument in self.overload._schema.arguments if argument.is_out]
                results = made if isinstance(made, (tuple, list)) else (made,)
                kwargs = call.kwargs | {name: torch.zeros_like(result) for name, result in zip(outs, results, strict=False)}
                found[shape, others] = Call(call.input, call.args, kwargs)
        return list(found.values())

    def _call(self, values: _Values) -> Call | None:
        args, kwargs = [], {}
        for argument in self.overload._schema.arguments:
            if argument.has_default_value() and not argument.is_out:
                continue
            try:
                value = values.of(str(argument.type))
            except KeyError:
                return None
            if argument.kwarg_only or kwargs:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return Call(args[0], tuple(args[1:]), kwargs) if args else None

    def _made(self, call: Call) -> Any:
        try:
            return self.op(call.input, *call.args, **call.kwargs)
        except Exception:  # whatever it is: it is eager's
            return None


class _Values:
    """What one try gives an argument of each type; tensors after the first may be of another dtype."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], others: Any, number: int, length: int, requires_grad: bool) -> None:
        self.dtype, self.shape, self.others, self.requires_grad = dtype, shape, others, requires_grad
        self.tensors = 0
        numbers = [number if number > 0 else 1] * length
        self.made: dict[str, Any] = {
            "int": number, "number": 1.5, "float": 0.5, "bool": False, "str": "mean", "List[int]": numbers, "Optional[int]": number,
            "Optional[number]": 1.5, "Optional[float]": 0.5, "Optional[List[int]]": numbers, "List[float]": [0.5] * length,
            "Optional[List[float]]": [0.5] * length, "Optional[bool]": False, "Optional[str]": None, "Optional[Generator]": None,
            "Optional[Device]": None, "Optional[Layout]": None, "List[bool]": [True] * length, "Layout": torch.strided,
        }  # fmt: skip

    def of(self, kind: str) -> Any:
        """A value; KeyError for a type that has none."""
        kind = kind.replace("SymInt", "int")
        if kind in ("Tensor", "Optional[Tensor]"):
            return self._tensor()
        if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            return [self._tensor(), self._tensor()]
        return self.made[kind]

    def _tensor(self) -> torch.Tensor:
        self.tensors += 1
        if self.tensors > 1 and self.others is not None:
            return torch.randint(0, 2, self.shape).to(self.others)
        return torch.randn(self.shape, dtype=self.dtype).requires_grad_(self.requires_grad)


def made_up() -> Iterator[MadeUp]:
    """All operators of ATen that are composite or known to autocast, by overload."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in sorted(each for each in torch._C._dispatch_get_all_op_names() if each.startswith("aten::")):
        base, _, overload = name.removeprefix("aten::").partition(".")
        if any(part in base for part in _NOT_COMPUTED) or not any(has(name, key) for key in _KEYS):
            continue
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is not None and any("Tensor" in str(each.type) for each in op._schema.returns):
            yield MadeUp(f"aten.{base}.{overload or 'default'}", op)
