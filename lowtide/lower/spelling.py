"""How Python calls an operator quickest: by the method or function that torch generates for it, not through `torch.ops`.

Both end in the same call of the dispatcher, to the argument. `torch.ops` reads each argument by its type in the schema, lists of numbers
worst of all: 7 us for `aten.as_strided.default(x, [16, 64], [192, 1], 0)`, where `x.as_strided([16, 64], [192, 1], 0)` takes 3.
Operators stand here by name where that is so for all that a graph may hold; `tests/lower/test_spelling.py` holds each to torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.ir.graph import Arg, Value

_METHODS = {  # by overload
    "default": (
        "abs addcdiv addcdiv_ addcmul addcmul_ addmm amax amin as_strided baddbmm bmm clone copy_ cos cumsum detach erf "
        "exp exp_ expand floor gather index_select log log1p logical_and logical_not maximum mean minimum mm neg neg_ "
        "permute reciprocal reciprocal_ relu relu_ rsqrt sigmoid sigmoid_ sign sin sqrt sqrt_ sum t tanh tanh_ tril triu "
        "unsqueeze view zero_"
    ),
    "Tensor": "add add_ div div_ eq ge gt le lt mul mul_ ne sub sub_",
    "Scalar": "eq fill_ ge gt le lerp lerp_ lt masked_fill ne pow_",
    "int": "select transpose unbind",
    "dim": "mean squeeze",
    "Tensor_Scalar": "pow",
    "dim_IntList": "sum",
}
_FUNCTIONS = {
    "default": (
        "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data cat constant_pad_nd convolution "
        "embedding empty_strided full full_like native_batch_norm native_group_norm native_layer_norm ones ones_like "
        "scalar_tensor stack zeros zeros_like"
    ),
    "out": "add addcdiv addcmul div exp log maximum minimum mul neg reciprocal rsqrt sigmoid sqrt sub tanh",
    "start_step": "arange",
    "Scalar_out": "lerp",
    "Tensor_Scalar_out": "pow",
    "correction": "var_mean",
    "self": "where",
}
_TAKE_NUMBERS = {"add", "add_", "div", "div_", "mul", "mul_", "sub", "sub_"}  # `Tensor` is called with a number, too
_MAKE = {"arange", "empty_strided", "full", "ones", "scalar_tensor", "zeros"}  # where `torch.set_default_device` says, if nothing else does
SPELLED = {
    f"{base}.{overload}": is_method
    for is_method, table in ((True, _METHODS), (False, _FUNCTIONS))
    for overload, bases in table.items()
    for base in bases.split()
}


def spelled(op: str, args: Sequence[Arg], given: Sequence[str]) -> str | None:
    """The text of a call, given that of its arguments; None where only `torch.ops` has the operator, or would read numbers otherwise."""
    namespace, base, overload = op.split(".")
    form = f"{base}.{overload}"
    tensors = args[: 1 if base in _TAKE_NUMBERS and overload == "Tensor" else 2] if overload in ("Tensor", "out") else ()
    if namespace != "aten" or form not in SPELLED or not all(map(_is_tensor, tensors)):
        return None  # a number where a tensor may stand would have another overload called
    if SPELLED[form]:
        return f"{given[0]}.{base}({', '.join(given[1:])})" if _is_tensor(args[0]) else None
    placed = base not in _MAKE or any(text.startswith("device=") for text in given)
    return f"torch.{base}({', '.join(given)})" if placed else None


def _is_tensor(arg: Arg) -> bool:
    return isinstance(arg, Value) and arg.dtype != "scalar"
