"""Capturing a whole program: a training step, or an inference call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.capture.blocks import dtype_name
from lowtide.capture.fakes import FakeModel, Places, fake_batch_leaf, fake_model, swapped, untouched_randomness
from lowtide.capture.optimizer import Shadow, Update, same_program
from lowtide.capture.recorder import Recorder
from lowtide.capture.scalars import Guard
from lowtide.capture.sources import Sources
from lowtide.errors import BatchError, CaptureError
from lowtide.ir import tree
from lowtide.ir.graph import Graph, Kind, Value
from lowtide.ir.slots import Slot


@dataclass(frozen=True)
class Captured:
    """A program as a graph, and how it is tied to the caller's objects.

    graph.outputs are the tensors of the result, then what is assigned to slots.
    """

    graph: Graph
    slots: tuple[Slot, ...]  # of graph.inputs
    assigned: tuple[Slot, ...]  # of the last graph.outputs
    guards: tuple[Guard, ...]  # what must hold of the caller's numbers
    constants: tuple[torch.Tensor, ...]  # what "constant" slots refer to
    gradients: tuple[Value, ...]  # what eager PyTorch would leave in the parameters' `.grad`
    state_entries: int  # of the optimizer, all parameters together, that the program starts from
    result: Callable[[Sequence[Any]], Any]  # the tensors of the result -> what the program returns


@dataclass(frozen=True)
class TrainingProgram:
    """What the user wrote: `loss(model, *batch)`, a backward pass, perhaps a hook on the gradients, the optimizer's step."""

    model: nn.Module
    loss: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    after_backward: Callable[[nn.Module], Any] | None = None
    accumulate: int = 1  # micro-batches


def positional_and_keyword(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is passed on:

    a tuple or list as positional arguments, a mapping as keyword arguments, anything else as the one argument.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return tuple(batch), {}
    return (batch,), {}


def capture_inference(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Captured:
    """Capture `model(*args, **kwargs)` without gradients. Raises CaptureError; the model is as before, whatever happens."""
    with _tracing(model, device) as trace, torch.no_grad():
        fake_args, fake_kwargs = trace.declare_batch(args, kwargs)
        with trace.recording():
            result = model(*fake_args, **fake_kwargs)
        return trace.finish(trace.recorder, result, Update((), (), 0))


def capture_training(program: TrainingProgram, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Captured, ...]:
    """Capture a training step as the optimizer's state is now, and as it is from the next step on if that differs.

    The first steps of most optimizers make their state, the later ones update it: two programs, which share forward and backward.
    Raises CaptureError; model, optimizer and generators are as before, whatever happens.
    """
    with _tracing(program.model, device) as trace, torch.enable_grad():
        fake_args, fake_kwargs = trace.declare_batch(args, kwargs)
        shadow = Shadow.of(program.optimizer, trace.fakes.names, trace.fakes.parameters, trace.recorder)
        result = _forward_and_backward(trace, program, fake_args, fake_kwargs)
        first, following = _optimizer_step(trace, shadow, result)
        if not any(slot.place == "state" for slot in first.assigned):
            return (first,)
        second, _ = _optimizer_step(trace, following, result)
        return first, second


def _forward_and_backward(trace: _Trace, program: TrainingProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record everything up to the optimizer; gradients are left on the fake parameters, as eager would."""
    results, recorder = [], trace.recorder
    with trace.recording(), torch.autograd.set_multithreading_enabled(False):
        for micro_args, micro_kwargs in _micro_batches(args, kwargs, program.accumulate):
            recorder.kind = Kind.ACTIVATION
            result = program.loss(program.model, *micro_args, **micro_kwargs)
            loss = _checked_loss(result)
            scaled = loss / program.accumulate if program.accumulate > 1 else loss
            recorder.kind = Kind.GRADIENT
            scaled.backward()
            results.append(_with_loss(result, scaled))
        _refuse_sparse(trace.fakes)
        recorder.kind = Kind.GRADIENT
        if program.after_backward is not None:
            with torch.no_grad():
                program.after_backward(program.model)
        return results[0] if program.accumulate == 1 else _summed(results)


def _optimizer_step(trace: _Trace, shadow: Shadow, result: Any) -> tuple[Captured, Shadow]:
    """Record the optimizer's step on a continuation of the recording; twice, to see that no number escapes."""
    tails = []
    for seed in (1, 2):
        tail = trace.recorder.fork()
        tail.kind = Kind.TEMPORARY
        with trace.recording(tail):
            tails.append((tail, *shadow.step(tail, seed)))
    (tail, update, following), (other, _, _) = tails
    if not same_program(tail, other):
        name = type(shadow.optimizer).__name__
        raise CaptureError(
            f"{name} turns a hyper-parameter into a constant (through `math`, `torch.tensor` or the like), so later changes "
            "of it would go unseen: it cannot be captured"
        )
    return trace.finish(tail, result, update), following


class _Trace:
    """One capture under way."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.sources = Sources()
        self.recorder = Recorder(self.mode, self.sources)
        self.fakes = fake_model(model, self.mode, device)
        self.places = Places(())  # of the model's tensors, once fakes are in them
        for place, kind, table in (
            ("parameter", Kind.PARAMETER, self.fakes.parameters),
            ("buffer", Kind.BUFFER, self.fakes.buffers),
            ("attribute", Kind.BUFFER, self.fakes.attributes),
        ):
            for real, fake in table.items():
                name = self.fakes.names[real]
                self.recorder.add_input(fake, Slot(place, (name,)), kind, name)

    @contextmanager
    def recording(self, recorder: Recorder | None = None) -> Iterator[None]:
        """What runs inside is recorded."""
        with self.mode, recorder or self.recorder:
            yield

    def declare_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch with fakes for its tensors; other leaves are taken as they are."""
        leaves, rebuild = tree.flatten((args, kwargs))
        fakes = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf.value, torch.Tensor):
                _refuse_batch_leaf(leaf)
                fake = fake_batch_leaf(leaf.value, self.mode, self.device)
                self.recorder.add_input(fake, Slot("batch", (index,)), Kind.INPUT, f"batch_{index}")
                fakes.append(fake)
            else:
                fakes.append(leaf.value)
        built: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, fakes)
        return built

    def finish(self, recorder: Recorder, result: Any, update: Update) -> Captured:
        """The graph of what was recorded."""
        leaves, rebuild = tree.flatten(result)
        at = [index for index, leaf in enumerate(leaves) if isinstance(leaf.value, torch.Tensor)]
        with self.recording(recorder):
            outputs = [recorder.value(leaves[index].value) for index in at]
            gradients = tuple(recorder.value(fake.grad) for fake in self.fakes.parameters.values() if fake.grad is not None)
            rebound = [(slot, recorder.value(tensor)) for slot, tensor in self.places.rebound()]
        assigned = (*rebound, *update.assigned)
        graph, slots = recorder.graph([*outputs, *(value for _, value in assigned)])

        def put(tensors: Sequence[Any]) -> Any:
            filled: list[Any] = [leaf.value for leaf in leaves]
            for index, tensor in zip(at, tensors, strict=True):
                filled[index] = tensor
            return tree.unflatten(rebuild, filled)

        for index in at:
            leaves[index] = tree.Leaf(leaves[index].where, None)  # no fake tensor outlives the capture
        return Captured(
            graph,
            slots,
            tuple(slot for slot, _ in assigned),
            update.guards,
            tuple(recorder.constants),
            gradients,
            update.state_entries,
            put,
        )


@contextmanager
def _tracing(model: nn.Module, device: torch.device) -> Iterator[_Trace]:
    trace = _Trace(model, device)
    with untouched_randomness(), swapped(model, trace.fakes) as trace.places, trace.sources.following(model):
        yield trace


def _refuse_batch_leaf(leaf: tree.Leaf) -> None:
    tensor: torch.Tensor = leaf.value
    if tensor.requires_grad:
        raise CaptureError(f"batch{leaf.where} requires gradients, which a captured step does not return: pass it detached")
    if tensor.layout is not torch.strided:
        raise CaptureError(f"batch{leaf.where} has layout {tensor.layout}: dense tensors can be captured")


def _refuse_sparse(fakes: FakeModel) -> None:
    for real, fake in fakes.parameters.items():
        if fake.grad is not None and fake.grad.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {fakes.names[real]} is sparse ({fake.grad.layout}), which cannot be captured: use sparse=False"
            )


def _micro_batches(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The batch cut along the first dimension of its tensors into `count` equal parts; what has no such dimension goes to every part."""
    if count == 1:
        yield args, kwargs
        return
    leaves, rebuild = tree.flatten((args, kwargs))
    parts = [_cut(leaf, count) for leaf in leaves]
    for index in range(count):
        yield tree.unflatten(rebuild, [part[index] for part in parts])


def _cut(leaf: tree.Leaf, count: int) -> Sequence[Any]:
    if not isinstance(leaf.value, torch.Tensor) or leaf.value.dim() == 0:
        return [leaf.value] * count
    if leaf.value.shape[0] % count:
        raise BatchError(f"batch{leaf.where} has {leaf.value.shape[0]} rows, which {count} micro-batches cannot share equally")
    return leaf.value.chunk(count)


def _checked_loss(result: Any) -> torch.Tensor:
    """The loss within what the loss function returned."""
    loss = _loss_of(result)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            "loss() must return a scalar tensor, a tuple that starts with one, or an object with a `.loss`; it returned a "
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


def _loss_of(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result
    if hasattr(result, "loss"):
        return result.loss
    return result[0] if isinstance(result, (tuple, list)) and result else None


def _with_loss(result: Any, loss: torch.Tensor) -> Any:
    """The user's result, detached, with the loss that was differentiated."""
    if isinstance(result, torch.Tensor):
        return loss.detach()
    leaves, rebuild = tree.flatten(result)
    user_loss = _loss_of(result)
    return tree.unflatten(rebuild, [_detached(loss if leaf.value is user_loss else leaf.value) for leaf in leaves])


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, torch.Tensor) else item


def _summed(results: list[Any]) -> torch.Tensor:
    """The loss of the whole batch. Other results of micro-batches would need a rule for joining them, which only the user knows."""
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise CaptureError(
            "with accumulate > 1, loss() must return the loss alone: results of several micro-batches cannot be joined for you"
        )
    total: torch.Tensor = results[0]
    for result in results[1:]:
        total = total + result
    return total
