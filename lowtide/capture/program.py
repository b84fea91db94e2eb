"""Capturing a whole program: a training step, or an inference call.

Kinds of containers that torch has been told of: what `torch.utils._pytree` can open, `ir.tree` can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from types import CellType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowtide.base.places import Position
from lowtide.base.process import set_aside
from lowtide.capture.batches import micro_batches, objects_in
from lowtide.capture.between_steps import on_the_host
from lowtide.capture.care.failures import raised_in
from lowtide.capture.care.follower import following
from lowtide.capture.care.hooks import hooks_beside, none_left_on, refuse_strangers
from lowtide.capture.care.leaks import LeakWatch
from lowtide.capture.care.surroundings import (
    functions_of,
    methods_of,
    objects_of,
    objects_of_tensors_unchanged,
    put_back_on_failure,
    settings_unchanged,
)
from lowtide.capture.care.turns import one_at_a_time
from lowtide.capture.control import Scripts
from lowtide.capture.effects.attempts import with_leaving
from lowtide.capture.effects.calls import shown_later
from lowtide.capture.effects.flags import FlagRecorder
from lowtide.capture.effects.outputs import OutputRecorder
from lowtide.capture.effects.stand_ins import LeavingError
from lowtide.capture.effects.sums import EarlierNumber
from lowtide.capture.fakes import FakeModel
from lowtide.capture.optimizers.optimizer import Shadow, Update, moving
from lowtide.capture.optimizers.refusals import refuse_idle
from lowtide.capture.optimizers.scalars import Guard, UndecidedError
from lowtide.capture.optimizers.wrappers import ScalerTrace, stop_if
from lowtide.capture.ranks.data_parallel import Ranks, average_gradients, broadcast_buffers, passing_on
from lowtide.capture.ranks.shards import own_shards, refuse_whole_state
from lowtide.capture.results import NumbersLater, beside, checked_loss, holds_fakes, joined, share_of, with_loss
from lowtide.capture.trace import CapturedStep, Given, Trace, tracing
from lowtide.capture.updates import optimizer_step
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.ir.graph import Kind
from lowtide.kernels.optimizers import each_of


@tree.open_with
def registered(item: Any) -> tree.OpenedContainer | None:
    """An object whose class is in torch's registry, opened as its owner has said there."""
    if type(item) not in pytree.SUPPORTED_NODES:
        return None
    children, spec = pytree.tree_flatten(item, is_leaf=lambda piece: piece is not item)
    return tree.OpenedContainer(
        [(f"[{index}]", piece) for index, piece in enumerate(children)], lambda items: pytree.tree_unflatten(items, spec)
    )


@dataclass(frozen=True)
class TrainingProgram:
    """What the user wrote: `loss(model, *batch)`, a backward pass, perhaps a hook on the gradients, the optimizer's step."""

    model: nn.Module
    loss: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    after_backward: Callable[[nn.Module], Any] | None = None
    accumulate: int | str = 1  # micro-batches into which the batch is cut; BATCHES where it consists of them
    scaler: torch.amp.GradScaler | None = None
    ranks: Ranks | None = None  # where several processes train it together
    wrapper: nn.Module | None = None  # around the model, where there is one: what the user's functions are given
    counters: tuple[Callable[[], None], ...] = ()  # called after each step, for the wrappers around the optimizer
    single_tensor: bool = False  # whether the optimizer's `foreach` and `fused` are left aside
    between_steps: bool = False  # whether the optimizer's state lies on the host then

    @property
    def given(self) -> nn.Module:
        return self.wrapper or self.model

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, and gradients are looked at to unscale them."""
        return self.scaler is not None and self.scaler.is_enabled()


@one_at_a_time
def capture_inference(
    model: nn.Module, given: Given, *, put_back: bool = False, leaves: bool = False, numbers: Sequence[Position] = ()
) -> CapturedStep:
    """Capture `model(*args, **kwargs)` without gradients. Raises CaptureError; the model is as before, whatever happens.

    `put_back`: what the program changes beside the model is as before, too, as far as that is seen. `leaves`: it is known to put something
    into places of the caller's. `numbers`: places where another one lies in each step.
    """
    record = partial(_recorded_inference, model, given)
    return _captured(record, (model,), tuple(hooks_beside(())), given, put_back=put_back, leaves=leaves, numbers=numbers)[0]


def _captured(
    record: Callable[[LeakWatch, OutputRecorder | None], tuple[CapturedStep, ...]],
    models: tuple[nn.Module, ...],
    functions: tuple[Any, ...],
    given: Given,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    put_back: bool,
    leaves: bool,
    numbers: Sequence[Position],
) -> tuple[CapturedStep, ...]:
    """What is recorded, with what was seen beside the model, the first of the `models`; nothing of the capture is left."""

    def capture(leaving: OutputRecorder | None, names: bool, closer: str = "") -> tuple[CapturedStep, ...]:
        watch, kept = LeakWatch(names), list[Callable[[], object]]()
        with (
            _shown_on_failure(kept) if leaving is None else nullcontext(),
            set_aside(),
            put_back_on_failure(
                (*functions, *methods_of(models), *(each for cls in type(optimizer).__mro__ for each in functions_of(cls))),
                [*objects_in(given.args, given.kwargs), *objects_of(models)],
                models=models,
                always=put_back,
                classes=True,
            ),
            objects_of_tensors_unchanged(models),
            following(models, functions, optimizer) as follower,
        ):
            captured = record(watch, leaving)
            follower.refuse_moved()
            beside, memos = follower.places(), follower.memos(() if leaving is None else leaving.followed_places)
            if leaving is not None:
                beside, going_on = leaving.end(follower, beside, captured[-1].constants)
                going_on.refuse_uses(captured[-1].readings, captured[-1].graph, captured[-1].slots)
                captured = tuple(replace(each, constants=going_on.found_in(each.constants)) for each in captured)
            objects = follower.objects_in(models[0], captured[-1].read)
            captured = tuple(replace(each, read=each.read - objects.keys()) for each in captured)
            beside = replace(beside, places=(*beside.places, *objects.values()))
            refilled, replaced = follower.refilled(), follower.replaced()
            if leaving is not None:
                leaving.forget()
            if put_back:
                follower.put_back()
            else:
                follower.take_back()
            follower.turn_back()
            FlagRecorder(memos).put_back()
            follower.forget()
            given_it = _given_attributes(captured, optimizer)
            places = (each for each in beside.places if not _is_of_program(each) and (id(each.holder), each.name) not in given_it)
            beside = replace(beside, places=tuple(places))
            summed = next((str(memo) for memo in (*memos, *captured[-1].flags.memos) if memo.may_be_sum), "")
            if kept:  # which holds what it shows
                raise LeavingError(refilled or summed or "the program prints or logs")
            watch.refuse_survivors()
            if leaving is not None:
                leaving.refuse_survivors()
            if (refilled or summed) and (leaving is not None or not names):
                raise LeavingError(refilled or summed)
            flags = FlagRecorder((*captured[-1].flags.memos, *memos), closer=closer)
            return tuple(replace(each, beside=beside, counted=refilled or replaced, flags=flags) for each in captured)

    captures = partial(with_leaving, capture, (*functions, *models), sizes=bool(given.varying), numbers=numbers)
    captured = captures(at_once=leaves)
    if not any(each.outputs.are_unsure for each in captured):
        return captured
    before, captured = captured, captures(at_once=leaves)
    pairs = zip_longest(captured, before[: len(captured)], fillvalue=before[-1])
    return tuple(replace(each, outputs=each.outputs.resolved(old.outputs)) for each, old in pairs)


def _given_attributes(captured: Sequence[CapturedStep], optimizer: torch.optim.Optimizer | None) -> set[tuple[int, Any]]:
    """Attributes of optimizers that all of the programs have as inputs, or ask for: by holder and name."""
    within = () if optimizer is None else each_of(optimizer)
    asked_for = [[*each.slots, *(guard.slot for guard in each.guards if isinstance(guard, Guard))] for each in captured]
    names = [{(id(within[int(slot.path[0])]), slot.path[1]) for slot in slots if slot.table == "optimizer"} for slots in asked_for]
    return set.intersection(*names)


def _is_of_program(place: Position) -> bool:
    """Whether a variable is of a function that the program makes, as hooks that a forward adds: it holds what was computed.

    What stands for a number in an object of the caller's does so still.
    """
    item = place.now() if isinstance(place.holder, CellType) else place.name
    return type(item) is EarlierNumber or holds_fakes(item, but=(EarlierNumber,))


@contextmanager
def _shown_on_failure(kept: list[Callable[[], object]]) -> Iterator[None]:
    """What the user's code shows is kept, and shown where the capture fails for good."""
    try:
        with shown_later(kept):
            yield
    except LeavingError:
        raise
    except CaptureError:
        for show in kept:
            show()
        raise


def _recorded_inference(model: nn.Module, given: Given, watch: LeakWatch, leaving: OutputRecorder | None) -> tuple[CapturedStep, ...]:
    # in inference mode torch would hand over whole operators that it takes apart elsewhere
    with torch.inference_mode(False), tracing(watch, model, given, False, leaving=leaving) as trace, passing_on(None), torch.no_grad():
        fake_args, fake_kwargs = trace.declare_batch(given.args, given.kwargs)
        with trace.recording(), raised_in(f"{type(model).__name__}()"), trace.leaving_followed():
            result = model(*fake_args, **fake_kwargs)
            trace.close_leaving(result)
        return (trace.finish(trace.recorder, result, Update()),)


@one_at_a_time
def capture_training(
    program: TrainingProgram, given: Given, *, put_back: bool = False, leaves: bool = False, numbers: Sequence[Position] = (),
    latest: bool = False,
) -> tuple[CapturedStep, ...]:  # fmt: skip
    """Capture a training step as the optimizer's state is now, and as it is from the next step on if that differs.

    The first steps of most optimizers make their state, the later ones update it: two programs, which share forward and backward.
    Raises CaptureError; model, optimizer and generators are as before, whatever happens. `put_back`, `leaves` and `numbers` as
    for inference. What is put back is captured to be compared with what was captured before: the first of the programs alone.
    `latest`: the last of the programs alone, which takes less.
    """
    models = (program.model,) if program.wrapper is None else (program.model, program.wrapper)
    functions = program.loss, program.after_backward, *hooks_beside(models)

    record = partial(_recorded_training, program, given, put_back, latest)
    return _captured(record, models, functions, given, program.optimizer, put_back=put_back, leaves=leaves, numbers=numbers)


def _recorded_training(
    program: TrainingProgram, given: Given, compared: bool, latest: bool, watch: LeakWatch, leaving: OutputRecorder | None
) -> tuple[CapturedStep, ...]:
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise CaptureError("torch's anomaly detection is on, which looks at the values of all gradients: switch it off for the capture")
    with (
        torch.inference_mode(False),
        tracing(watch, program.model, given, True, program.ranks, leaving) as trace,
        passing_on(program.wrapper),
        torch.enable_grad(),
    ):
        trace.recorder.scripts = Scripts()
        fake_args, fake_kwargs = trace.declare_batch(given.args, given.kwargs)
        fakes = trace.fakes
        shadow = Shadow.of(program.optimizer, fakes.names, fakes.parameters, trace.recorder.draft, between_steps=program.between_steps)
        shadow = replace(shadow, single_tensor=program.single_tensor)
        if program.scaler is not None and program.scales:
            trace.scaler = ScalerTrace.of(program.scaler, trace.recorder.draft, trace.mode, given.device)
        with settings_unchanged(program.optimizer), trace.leaving_followed():
            result = _forward_and_backward(trace, program, fake_args, fake_kwargs)
        if program.ranks is not None and program.ranks.shard:
            shadow = _sharded(trace, shadow, program.ranks)
        while True:
            known = moving(program.optimizer)
            first, following = optimizer_step(trace, shadow, result, checked=not (compared or latest))
            slots = *first.assigned, *(slot for _, slot, _ in first.constants_assigned)
            has_later = not compared and any(slot.table in ("state", "optimizer", "group") for slot in slots)
            later: CapturedStep | None = None
            with suppress(UndecidedError):  # it can be known only then, as the optimizer decides on the state that it has made
                later = optimizer_step(trace, following, result)[0] if has_later else None
            if known == moving(program.optimizer):
                break
            shadow = shadow.with_attributes(moving(program.optimizer), trace.recorder.draft)  # all programs are given them
        if latest and later is None:
            first, _ = optimizer_step(trace, shadow, result)
        if has_later and later is None:
            return (first if not program.between_steps else on_the_host(first),)
        captured: tuple[CapturedStep, ...] = (first,) if later is None else (later,) if latest else (first, later)
        if program.between_steps:
            captured = tuple(map(on_the_host, captured))
        if not any(slot.table == "data" for slot in first.assigned):
            guards, assigned = [each.guards for each in captured], [each.assigned for each in captured]
            refuse_idle(program.optimizer, [each.graph for each in captured], sum(guards, ()), sum(assigned, ()))
        return captured


def _forward_and_backward(trace: Trace, program: TrainingProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record everything up to the optimizer; gradients are left on the fake parameters, as eager would."""
    results, recorder = [], trace.recorder
    with none_left_on(recorder.draft.constants), trace.recording(), torch.autograd.set_multithreading_enabled(False):
        if program.ranks is not None and program.ranks.broadcasts_buffers:
            with torch.no_grad():
                broadcast_buffers(trace.fakes.buffers.values(), program.ranks)
        parts = list(micro_batches(args, kwargs, program.accumulate))
        for number, (micro_args, micro_kwargs) in enumerate(parts, 1):
            recorder.draft.kind = Kind.ACTIVATION
            with raised_in("loss(model, ...)"):
                result = program.loss(program.given, *micro_args, **micro_kwargs)
            loss = checked_loss(result)
            scaled = share_of(loss, program.accumulate)
            recorder.note_loss()
            refuse_strangers(loss, trace.sources)
            if trace.in_parts is not None:
                completes = number == len(parts) and not program.scales
                trace.in_parts.begin_backward(completes=completes, shown=program.after_backward is not None)
            recorder.draft.kind = Kind.GRADIENT
            with raised_in("the backward pass"):
                (scaled if trace.scaler is None else scaled * trace.scaler.scale).backward()
            results.append(with_loss(result, scaled, trace.handed_on()))
            if trace.in_parts is not None:
                trace.in_parts.end_backward()
        _refuse_sparse(trace.fakes)
        if program.ranks is not None:
            _refuse_written(trace, program.ranks)
            with torch.no_grad():
                _exchange(trace, program, program.ranks)
        infinite = None if trace.scaler is None else trace.scaler.unscale(_trained(program.optimizer, trace.fakes))
        returned = None
        if program.after_backward is not None:
            with torch.no_grad(), raised_in("after_backward(model)"), NumbersLater(recorder.draft):
                returned = program.after_backward(program.given)
                if trace.in_parts is not None:
                    trace.in_parts.wholes.read([leaf.value for leaf in tree.flatten(returned)[0]], recorder.draft, nullcontext())
        result = beside(joined(results, program.accumulate), returned)
        trace.close_leaving(result)
        if trace.scaler is not None and infinite is not None:
            trace.scaler.update(infinite)
            recorder.stop = stop_if(infinite, trace.values_of(result), recorder.draft)
        return result


def _refuse_written(trace: Trace, ranks: Ranks) -> None:
    """Raise CaptureError for a parameter that each rank has written for its own batch, where parts of all ranks are put together."""
    for real, fake in trace.fakes.parameters.items():
        if ranks.shard and fake.requires_grad and fake.numel() and trace.recorder.draft.value(fake).version:
            raise CaptureError(
                f"the forward pass writes {trace.fakes.names[real]} (as an embedding with max_norm does), each rank for its own batch, and "
                "`shard` puts its parts together from all ranks, which would mix them: leave `shard` out, or the writes"
            )


def _exchange(trace: Trace, program: TrainingProgram, ranks: Ranks) -> None:
    """What happens to gradients before anybody looks at them: a scaler and all that is not in parts has whole means."""
    parameters = list(trace.fakes.parameters.values())
    if trace.in_parts is None or program.scales:
        average_gradients(parameters, ranks, trace.recorder.draft.age())
        return
    trace.in_parts.send_rest(parameters)
    if program.after_backward is not None:
        trace.in_parts.show(trace.recorder.draft)


def _sharded(trace: Trace, shadow: Shadow, ranks: Ranks) -> Shadow:
    """The shadow of an optimizer that updates this rank's part of each parameter."""
    refuse_whole_state(shadow, ranks)
    fakes = list(shadow.fakes.values())
    with trace.recording(), torch.no_grad():
        shards = own_shards(fakes, ranks) if trace.in_parts is None else trace.in_parts.shards(fakes)
    trace.sharded = shards, ranks
    fakes_of = {real: shards.get(fake, fake) for real, fake in shadow.fakes.items()}
    return replace(shadow, fakes=fakes_of, single_tensor=True)  # fused kernels may round the last elements of a part otherwise


def _trained(optimizer: torch.optim.Optimizer, fakes: FakeModel) -> Iterator[torch.Tensor]:
    """The fakes of the optimizer's parameters, in its order."""
    for group in optimizer.param_groups:
        yield from (fakes.parameters[parameter] for parameter in group["params"] if parameter in fakes.parameters)


def _refuse_sparse(fakes: FakeModel) -> None:
    for real, fake in fakes.parameters.items():
        if fake.grad is not None and fake.grad.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {fakes.names[real]} is sparse ({fake.grad.layout}), which cannot be captured: use sparse=False"
            )
