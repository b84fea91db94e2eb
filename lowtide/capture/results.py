"""What a captured call hands back: the loss, and the rest of what the program gives.

Beside the loss, `after_backward` gives tensors, and numbers read from tensors, known only when the step runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from lowtide.capture.blocks import dtype_name
from lowtide.capture.care.instances import PACKAGE_FOLDER
from lowtide.capture.draft import Draft
from lowtide.capture.effects.stand_ins import LeavingError
from lowtide.capture.sizes.symbols import is_size
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.ir.graph import Value
from lowtide.ir.operators.row import ITEM


def checked_loss(result: Any) -> torch.Tensor:
    loss = loss_of(result)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            "loss() must return a scalar tensor, a tuple that starts with one, or an object or dict with a `loss`; it returned a "
            f"{type(result).__name__}"
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"loss() must return a scalar; it returned a tensor of shape {tuple(loss.shape)}: reduce it, for instance with .mean()"
        )
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss ({dtype_name(loss.dtype)}) does not depend on any parameter that requires gradients: nothing could be trained"
        )
    return loss


def loss_of(result: Any) -> Any:
    """What is differentiated of what a loss function returns; None where that is nothing."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    if hasattr(result, "loss"):
        return result.loss
    return result[0] if isinstance(result, (tuple, list)) and result else None


def with_loss(result: Any, loss: torch.Tensor, own: tree.Own = lambda item: None) -> Any:
    """The user's result, detached, with the loss that was differentiated. Containers that hold nothing of it stay what they are."""
    if isinstance(result, torch.Tensor):
        return loss.detach()
    user_loss = loss_of(result)
    changes = lambda item: isinstance(item, torch.Tensor) and (item is user_loss or item.requires_grad)  # noqa: E731
    is_own = lambda item: own(item) is not None  # noqa: E731
    as_it_is = lambda item: None if isinstance(item, torch.Tensor) or tree.holds(item, changes, is_own) else lambda: item  # noqa: E731
    leaves, rebuild = tree.flatten(result, tree.Sharing(as_it_is))
    return tree.unflatten(rebuild, [_detached(loss if leaf.value is user_loss else leaf.value) for leaf in leaves], {})


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, torch.Tensor) else item


def share_of(loss: torch.Tensor, accumulate: int | str) -> torch.Tensor:
    """What is differentiated of a micro-batch's loss: its share of their mean, or all of it where micro-batches are given."""
    return loss / accumulate if isinstance(accumulate, int) and accumulate > 1 else loss


def joined(results: list[Any], accumulate: int | str) -> Any:
    """What a call returns of its micro-batches: what each has given where they are given, else the loss of the whole batch.

    Other results of parts that were cut would need a rule for joining them, which only the user knows.
    """
    if isinstance(accumulate, str):
        return results
    if len(results) == 1:
        return results[0]
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise CaptureError(
            "with accumulate > 1, loss() must return the loss alone: results of several micro-batches cannot be joined for you"
        )
    total: torch.Tensor = results[0]
    for result in results[1:]:
        total = total + result
    return total


DEPENDS = "control flow depends on data: "


class Number:
    """What `tensor.item()` gives under capture: it can be returned or put somewhere, and nothing else, as nobody knows it yet."""

    __slots__ = ("__weakref__", "kind", "refusals", "value")
    origin = "a number read from a tensor"

    def __init__(self, value: Value | None, kind: type = float, refusals: list[Any] | None = None) -> None:
        """`refusals` are told of one, which the program may catch. `value` is None of one that is computed from others."""
        self.value, self.kind, self.refusals = value, kind, refusals

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What `isinstance` asks. C looks at the type itself, and asks for the number, which is refused. lowtide itself finds no tuple."""
        kind, frame = object.__getattribute__(self, "kind"), sys._getframe(1)
        while kind is tuple and frame.f_code.co_name in ("__getattribute__", "method"):
            frame = frame.f_back  # type: ignore[assignment]
        return type(self) if kind is tuple and frame.f_code.co_filename.startswith(PACKAGE_FOLDER) else kind

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        number: Number = next(leaf.value for leaf in tree.flatten((args, kwargs or {}))[0] if issubclass(type(leaf.value), Number))
        number.refuse()

    def __getattribute__(self, name: str) -> Any:
        """Others than lowtide find what a number has, and no more."""
        if name.startswith("__") or sys._getframe(1).f_code.co_filename.startswith(PACKAGE_FOLDER):
            return object.__getattribute__(self, name)
        return self.__getattr__(name)

    def __setattr__(self, name: str, item: Any) -> None:
        if not sys._getframe(1).f_code.co_filename.startswith(PACKAGE_FOLDER):
            raise AttributeError(f"{self.kind.__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, item)

    def __getattr__(self, name: str) -> Any:
        """What any number has is refused, so that `hasattr` finds it, and what numpy would make an array of."""
        if name != "__array__" and (name.startswith("__") or not hasattr(self.kind, name)):
            raise AttributeError(f"{self.kind.__name__!r} object has no attribute {name!r}")
        use = "is made an array of NumPy's" if name == "__array__" else f"is asked for its {name!r}"
        self.refuse(use=use, instead="compute with the tensor itself, or with functions of math and statistics")

    def __copy__(self, *memo: Any) -> Number:
        return self

    __deepcopy__ = __copy__

    def refuse(self, *_: Any, use: str = "is used", instead: str = "compute with the tensor itself (torch.where, clamp)") -> NoReturn:
        """What happens to whoever looks at it, or computes with it. `use` says how, `instead` what to do."""
        text = f"{self.origin} {use} at {users_line()}; return it, or {instead}"
        error = LeavingError(f"{DEPENDS}{text}", converts=True)
        if self.refusals is not None:
            self.refusals.append(error)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


for _name in (
    "bool", "float", "int", "index", "complex", "hash", "eq", "ne", "lt", "le", "gt", "ge", "format", "str", "repr", "reduce_ex",
    "neg", "pos", "abs", "round",
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
):  # fmt: skip
    setattr(Number, f"__{_name}__", Number.refuse)


class NumbersLater(TorchFunctionMode):
    """Lets `tensor.item()` give a number that can be returned, and `torch.tensor` put such numbers together, as hooks do to log norms."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft = draft

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """`item` of a tensor with one element is a node, a tensor of tensors without dimensions their stack; all else is as it is."""
        if func is torch.Tensor.item and args[0].numel() == 1:
            return Number(self.draft.emit_scalar(ITEM, (self.draft.value(args[0]),)))
        if func is torch.tensor and len(args) == 1 and not kwargs and _are_scalars(args[0]):
            return torch.stack(list(args[0]))
        return func(*args, **(kwargs or {}))


def _are_scalars(given: Any) -> bool:
    """Whether `torch.tensor` of it is their stack, to the last bit: it would lie on the CPU, wherever they do."""
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(each, torch.Tensor) and not each.dim() for each in given):
        return False
    return len({each.dtype for each in given}) == 1 and all(each.device.type == "cpu" for each in given)


_COMPUTED = (Number, FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_number(item: Any) -> bool:
    """Whether it stands for a number that only the running step knows, whatever it says that it is."""
    return issubclass(type(item), Number)


def is_result(item: Any) -> bool:
    """Whether a leaf is computed by the program."""
    return isinstance(item, (torch.Tensor, Number)) or is_size(item)


def holds_fakes(item: Any, but: tuple[type, ...] = ()) -> bool:
    """Whether there is something that the program has computed in an object, or in what it holds, but for what is of these classes."""
    return tree.holds(item, lambda piece: issubclass(type(piece), _COMPUTED) and type(piece) not in but)


def beside(result: Any, returned: Any) -> Any:
    """What a call returns: the result of loss(), and what `after_backward` returned, if there are tensors or numbers in it."""
    leaves, _ = tree.flatten(returned)
    if not any(is_result(leaf.value) or isinstance(leaf.value, (int, float)) for leaf in leaves):
        return result
    return result, returned
