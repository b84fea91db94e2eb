"""A model that shows fake tensors in the places of its own to the thread that captures, for as long as that lasts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from lowtide.base.skeleton import Keys, mapped
from lowtide.capture.care.reads import AttributeReads, refusal
from lowtide.capture.care.snapshots import ModuleSnapshot, OfCall
from lowtide.capture.care.turns import ModuleViews, Replacing, all_replaced, during, undoing
from lowtide.capture.effects.code import real_of
from lowtide.capture.effects.stand_ins import LeavingError
from lowtide.capture.looks import PLAIN_TENSORS, is_made_of_tensors
from lowtide.capture.sizes.probes import dense_stride, is_dense, memory_order
from lowtide.capture.sizes.symbols import Extent
from lowtide.errors import CaptureError
from lowtide.ir.graph import Slot
from lowtide.ir.tree import Leaf
from lowtide.kernels.parts import WHOLE_OF


@dataclass(frozen=True)
class FakeModel:
    """The fake of each tensor that a model holds, by the real one, and their names. Tied tensors have one entry, under their first name."""

    parameters: dict[torch.Tensor, torch.Tensor]
    buffers: dict[torch.Tensor, torch.Tensor]
    attributes: dict[torch.Tensor, torch.Tensor]  # plain tensors that modules keep beside
    names: dict[torch.Tensor, str]
    parts: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)  # of parameters of which the caller holds a part: that
    composed: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)  # of tensors that are made of others: the same around fakes
    within: dict[torch.Tensor, tuple[torch.Tensor, Slot]] = field(default_factory=dict)  # of those others, and where they are

    @property
    def all(self) -> dict[torch.Tensor, torch.Tensor]:
        within = {real: fake for real, (fake, _) in self.within.items()}
        return {**self.parameters, **self.buffers, **self.attributes, **self.composed, **within}


def fake_model(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> FakeModel:
    """Fakes of all that a model owns. What lies on the meta device is taken to lie on `device`."""
    fakes = FakeModel({}, {}, {}, {})
    for table, stand_ins in ((model.named_parameters(), fakes.parameters), (model.named_buffers(), fakes.buffers)):
        for name, tensor in table:
            if is_made_of_tensors(type(tensor)) and not tensor.requires_grad:
                slot = Slot("parameter" if stand_ins is fakes.parameters else "buffer", (name,))
                fakes.names[tensor], fakes.composed[tensor] = name, mapped(partial(_fake_within, fakes, slot, mode, device), tensor)
                continue
            _refuse(name, tensor)
            fakes.names[tensor], stand_ins[tensor] = name, fake_of(tensor, mode, device)
            if tensor in WHOLE_OF:
                fakes.parts[tensor], stand_ins[tensor] = stand_ins[tensor], _whole(tensor, stand_ins[tensor], mode)
    for name, tensor in _attributes(model):
        if tensor not in fakes.names:
            fakes.names[tensor], fakes.attributes[tensor] = name, fake_of(tensor, mode, device)
    return fakes


def _fake_within(fakes: FakeModel, slot: Slot, mode: FakeTensorMode, device: torch.device, path: Keys, tensor: Any) -> torch.Tensor:
    place = Slot(slot.table, (*slot.path, *path))
    _refuse(".".join(map(str, place.path)), tensor)
    fake = fake_of(tensor, mode, device)
    fakes.names[tensor], fakes.within[tensor] = ".".join(map(str, place.path)), (fake, place)
    return fake


def fake_of(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    if tensor.device.type != "meta":
        fake = mode.from_tensor(tensor)
        if type(tensor) not in PLAIN_TENSORS:
            fake.__class__ = _fake_class(type(tensor))
        return fake
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _whole(real: torch.Tensor, part: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    whole = WHOLE_OF[real]
    with mode:
        return nn.Parameter(torch.empty_strided(whole.shape, whole.stride, dtype=part.dtype, device=part.device), real.requires_grad)


def fake_batch_leaf(leaf: Leaf, mode: FakeTensorMode, device: torch.device, extents: Mapping[int, Extent]) -> torch.Tensor:
    """A fake like a tensor of the batch, on a storage of its own: two arguments that are one tensor today need not be tomorrow.

    `extents` stand in the places of its own, by dimension. Raises CaptureError where its strides do not follow from them.
    """
    tensor: torch.Tensor = leaf.value
    target = device if tensor.device.type == "meta" else tensor.device
    shape = [extents.get(dim, extent) for dim, extent in enumerate(tensor.shape)]
    stride = _stride_of(leaf, shape) if extents else tensor.stride()
    with mode:
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=target)


def _stride_of(leaf: Leaf, shape: Sequence[Extent]) -> list[Extent]:
    """Strides of another shape in the order of the leaf's own."""
    tensor: torch.Tensor = leaf.value
    if not is_dense(tensor):
        raise CaptureError(
            f"batch{leaf.where} has dimensions that vary, and is a part of another tensor (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}): pass it with .contiguous()"
        )
    return dense_stride(shape, memory_order(tensor))


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain tensors in the attributes of modules. One within a graph is what a forward pass left behind: it would be none to start from."""
    for path, module in model.named_modules():
        for name, item in module.__dict__.items():
            if type(item) is torch.Tensor and item.layout is torch.strided and not item.requires_grad:
                yield f"{path}.{name}" if path else name, item


def _lies_in_plain_memory(kind: Any) -> bool:
    """Whether operators see a tensor of this class as any other, whatever attributes and methods it has (weights in 4 bits have some)."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


@cache
def _fake_class(kind: type) -> type:
    """Fake tensors that are of a class of parameters, too: the program asks for that, and uses what the class has."""
    own = {"__torch_function__": next(vars(each)["__torch_function__"] for each in kind.__mro__ if "__torch_function__" in vars(each))}
    return type(kind.__name__, (FakeTensor, kind), {**own, "__class__": property(lambda fake: kind)})


def _refuse(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise CaptureError(f"{name} is not initialised yet: run one batch through the model first")
    if type(tensor) not in PLAIN_TENSORS and not (isinstance(tensor, nn.Parameter) and _lies_in_plain_memory(type(tensor))):
        frozen = ", and frozen ones that are made of such" if is_made_of_tensors(type(tensor)) else ""
        raise CaptureError(f"{name} is a {type(tensor).__name__}; plain tensors and parameters can be captured{frozen}")
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name} has layout {tensor.layout}; dense tensors can be captured: keep its indices and "
            "values as buffers, and compute with index_select and index_add; or keep it dense (.to_dense())"
        )
    if getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise CaptureError(
            f"{name} has a hook that runs after its gradient is accumulated, which a captured step would not: leave it out if it updates "
            "the parameter, as a step does so anyway once the gradient exists (pass that optimizer); else use after_backward"
        )


@contextmanager
def swapped(
    model: nn.Module, fakes: FakeModel, views: ModuleViews, reads: AttributeReads, following: Callable[[], OfCall] | None = None
) -> Iterator[list[ModuleSnapshot]]:
    """Run with fakes in the model's places, for this thread. `following` tells afterwards, where it can, what follows from more than it.

    Raises CaptureError if the model keeps count in Python numbers or containers, or changes what it has read, which no graph could follow.
    """
    snapshots = [ModuleSnapshot(path, module) for path, module in model.named_modules()]
    replace = fakes.all
    with undoing() as undo:
        for each in snapshots:
            undo(each.restore)
        for module, own in [(each.module, _with_fakes(each.module, replace)) for each in snapshots]:
            views.show(module, own)
        reads.begin([each.module for each in snapshots])
        for each in snapshots:
            each.begin()
        yield snapshots
        for each in snapshots:
            each.refuse_changes(reads, following)
            if past := views.set_past(each.module):
                raise LeavingError(refusal(each.name, past[0][0]))


_OF_GRADIENTS = tuple(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad"))


class OwnParameters(TorchFunctionMode):
    """A parameter that the program has from elsewhere (a list, a variable, an optimizer's groups) is its fake, whatever it is used for.

    Autograd takes the two for two tensors: a flag or a gradient of one would not be the other's.
    """

    def __init__(self, fakes: FakeModel) -> None:
        super().__init__()
        self.looked_at = set[int]()  # the fakes, by id, of which the program asks for the flag or the gradient
        self._fakes = {id(real): fake for real, fake in (*fakes.parameters.items(), *fakes.composed.items())}
        self._real = {id(fake): real for real, fake in fakes.all.items()}

    @contextmanager
    def are_the_same(self) -> Iterator[None]:
        """While this lasts, dictionaries and sets take a tensor and its fake for one; so do `id` and `is` in the user's functions."""
        real = self._real

        def own(item: Any) -> Any:
            return real.get(id(item), item)

        same: list[tuple[Any, str, Replacing]] = [
            (torch.Tensor, "__hash__", lambda plain: lambda item: id(real[id(item)]) if id(item) in real else plain(item)),
            (torch.Tensor, "__eq__", lambda plain: lambda one, two: (one is not two and own(one) is own(two)) or plain(one, two)),
        ]
        with all_replaced(same), during(real_of, own):
            yield

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The same call with fakes in the places of parameters, in lists and tuples as well."""
        if func in _OF_GRADIENTS:
            self.looked_at.add(id(args[0]))
        return func(*map(self._shown, args), **{name: self._shown(item) for name, item in (kwargs or {}).items()})

    def _shown(self, item: Any) -> Any:
        if type(item) is list or type(item) is tuple:
            pieces = [self._shown(each) for each in item]
            return type(item)(pieces) if any(new is not old for new, old in zip(pieces, item, strict=True)) else item
        return self._fakes.get(id(item), item)


def _with_fakes(module: nn.Module, replace: dict[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """A module's attributes with fakes for its tensors, also in lists of them, or of weak references to them (as recurrent layers keep)."""
    own: dict[str, Any] = {**module.__dict__, "_modules": dict(module._modules)}
    for table in ("_parameters", "_buffers"):
        own[table] = {name: None if tensor is None else replace[tensor] for name, tensor in own[table].items()}
    for name, item in own.items():
        if isinstance(item, list):
            pieces = [_swapped_piece(piece, replace) for piece in item]
            item = pieces if any(new is not old for new, old in zip(pieces, item, strict=True)) else item
        own[name] = _swapped_piece(item, replace) if isinstance(item, torch.Tensor) else item
    return own


def _swapped_piece(piece: Any, replace: dict[torch.Tensor, torch.Tensor]) -> Any:
    """The fake for a tensor, a weak reference to it for one to a tensor; anything else as it is."""
    if isinstance(piece, weakref.ref):
        piece_now = piece()
        return weakref.ref(replace[piece_now]) if isinstance(piece_now, torch.Tensor) and piece_now in replace else piece
    return replace.get(piece, piece) if isinstance(piece, torch.Tensor) else piece
