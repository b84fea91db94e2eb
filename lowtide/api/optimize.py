"""The one verb."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.api.arena import StepArena
from lowtide.api.arguments import (
    check_arena,
    check_arguments,
    check_fuse,
    check_scaler,
    check_settings,
    check_swapping,
    device_of,
    warn_of_nowhere_to_swap,
)
from lowtide.api.capturing import Capturing
from lowtide.api.machine import Machine
from lowtide.api.maker import Asked, Maker
from lowtide.api.ranges.guessed import met_so_far
from lowtide.api.ranges.maker import RangeMaker
from lowtide.api.ranges.said import check_uncut, varying_of
from lowtide.api.ranges.saved import limit_of, loaded
from lowtide.api.ranks.group import Trainers
from lowtide.api.running.check import checked_policy as checked_check
from lowtide.api.running.shapes import checked_policy
from lowtide.api.stages import Callback, Stages, wants_progress
from lowtide.api.step import Step
from lowtide.capture.batches import positional_and_keyword
from lowtide.capture.optimizers.wrapped import counters_of, torch_optimizer
from lowtide.capture.program import TrainingProgram
from lowtide.cost.device import Device
from lowtide.cost.presets import preset
from lowtide.place import Placer
from lowtide.plan.plan import Plan
from lowtide.planning.effort import sweeps_of
from lowtide.planning.limits import Limit
from lowtide.remat.sweep.search import Sweep
from lowtide.runtime.batch import BatchSpec
from lowtide.schedule import Auto, Solver

_ON_META = (
    "the model is on the meta device: its step can be planned, not run; materialise it with model.to_empty(device=...) and optimize again"
)
_ELSEWHERE = "the plan is for another machine ({}): its step cannot run here; optimize again without `simulate`"
# By effort, of generated kernels that the model cannot tell apart: so many are measured for a region.
_VARIANTS = {"quick": 0, "normal": 24, "thorough": 96}


def optimize(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    after_backward: Callable[[nn.Module], Any] | None = None,
    accumulate: int | str = 1,
    scaler: torch.amp.GradScaler | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    shard: str | None = None,
    memory: int | str | None = None,
    latency: float | None = None,
    exact: bool = True,
    fuse: str | None = None,
    swap: bool = True,
    swap_state: bool = False,
    effort: str | None = None,
    search: Sweep | None = None,
    solver: Solver | None = None,
    workspaces: bool | None = None,
    arena: bool | str | None = "limit",
    placer: Placer | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    dynamic: Mapping[str | int, Mapping[int, Any]] | str | None = None,
    batches: Sequence[Any] = (),
    on_new_shape: str | None = None,
    check: str = "auto",
    device: torch.device | str | None = None,
    simulate: Device | str | None = None,
    progress: bool | None = None,
    callback: Callback | None = None,
) -> Step:
    """A callable that does what the program does, bit for bit, in less memory and at no cost in time.

    With `loss` and `optimizer`, one call is one training step: zero_grad, forward, backward, optimizer.step. Without, one call is
    `model(*batch)` without gradients. Nothing is run here, except that each distinct operator is tried once on made-up data; on a CPU
    in a separate process. The model, the optimizer and the random generators stay as they were, also when an error is raised.

    model: lies where it is to run. On the meta device its step can be planned (as if on `device`) but not run. Within
        DistributedDataParallel its module is captured, and the means of gradients and the broadcast of buffers are operators of the
        step.
    batch: an example of what each call will get, same shapes, strides and dtypes. A tuple or list is passed on as positional arguments,
        a mapping as keyword arguments, anything else as the one argument. Calls take it the same way: `step(*batch)`, `step(**batch)`,
        `step(batch)`.
    loss: `loss(model, *batch)`, returns the scalar to be differentiated, or a tuple that starts with it, or an object with a `.loss`.
        What it returns, detached, is what each call returns.
    optimizer: any torch optimizer whose step is plain arithmetic on tensors and hyper-parameters. Those are read at each call. In a
        list (`[muon, adamw]`) all of them step, in this order, each its own parameters.
    after_backward: called as `after_backward(model)` between backward and optimizer step, with gradients in `.grad`; for instance to
        clip them. If it returns tensors or numbers (`.item()` of a tensor is one), each call returns them beside the loss:
        `value, norm = step(*batch)`.
    accumulate: micro-batches per step. The batch is cut along dimension 0 into this many equal parts, whose losses are averaged.
        "batches": the batch is a list of micro-batches of any lengths, each passed to `loss` as a batch would be. The sum of their
        losses is differentiated; divide in `loss` if you want a mean. Each call, `step(*micro_batches)`, returns a list.
    scaler: scales the loss, unscales the gradients before after_backward, skips the optimizer's step if one is not finite, and is
        updated; all within the step. Every gradient then exists before the first parameter is updated, which costs memory.
    process_group: processes that train this model together, each on its own batches, as DistributedDataParallel would. All ranks begin
        with the numbers of rank 0. Each step takes the mean of their gradients, once, after all micro-batches. Rank 0 plans, all ranks
        run the same program at each call. If one fails, or gets a batch of another shape, all raise. A wrapped model brings its own.
    shard: what each of n ranks holds only 1/n of. "optimizer": the optimizer's state; each rank updates its part of every parameter,
        and gathers the others'. "gradients": their means, too. Each is gathered while `after_backward` reads it, which may write them
        by numbers alone (`grad.mul_(factor)`, as clipping does). "parameters": the parameters, too. They are gathered before they are
        read and freed where a pass ends. Between steps a parameter is this rank's part, flat; `with step.gathered():` makes it whole.
        With a `scaler`, means of gradients are whole. For optimizers that update each element by itself (SGD, AdamW), without state
        yet, or with parts.
    memory: the most that the step may take at its peak, including all that the caller holds. It is bytes, "8GiB", or "60%" of the peak
        of the program as it stands. If order alone is not enough, as few tensors as possible are evicted and restored. They are
        recomputed, or copied to the host and back (see `swap`). Random operators and updates are never repeated, and all numbers stay
        the same to the last bit.
    latency: the most that a step may take, as a multiple of its time without recomputation. The peak is then as small as was found.
    exact: eager's numbers, to the last bit. False also allows rewrites that round differently, if they save memory. Under a limit, sets
        of operators run part by part. Products are added up as they are made. At inference, batch norms are folded into convolutions
        and linear layers. Gradients of ELU and of norms without a weight are computed from results, and those of a convolution's input
        without that input. Inference on a CPU without a limit runs generated kernels, which the system's C++ compiler builds. Their
        weights are packed, which takes that memory once more, and packed again when they change. `step.plan` says what was done,
        `step.verify` how far that is from eager. With `dynamic` nothing runs part by part yet.
    fuse: "inductor", with exact=False: inductor compiles a step's norms, activations, element-wise chains and updates. Each becomes one
        operator of the plan, wherever that was measured to be faster; also on a GPU. It takes seconds for each kind of region, once,
        and the result is cached. If nothing can be compiled a warning says why, and torch's operators run. An optimizer's first step
        uses the regions of later steps. With several processes rank 0 decides. Not with `dynamic`, nor for steps that are only planned.
        By default inference on a CPU has lowtide's own generated kernels, and a training step none.
    swap: under a limit, tensors may also be copied to the host's memory and back while operators run. The device must have memory of
        its own; a CPU has none to swap to.
    swap_state: parameters and optimizer state may be among what is swapped. They are there again when the step is over, also if it
        fails. While it runs, nobody else may use them.
    effort: how far to look for what to recompute and what to swap, and how many variants of generated kernels to measure. It is
        "quick", "normal" (the default) or "thorough". Each level includes what the one before finds, so more effort is never worse.
        None reads a clock. Interrupted from the keyboard, the search ends with a warning and uses the best found by then.
    search: the same said in full, a lowtide.Sweep, in place of `effort`.
    solver: how to find the order; the best of the quick heuristics by default.
    workspaces: try operators on made-up data, so that the promised peak counts their temporaries and their results lie as real ones do.
        By default where the model can run. Without, only what is cached of earlier trials is known.
    arena: give the step memory of its own: one block that stays, so that nothing is asked of the system at each step. All that the step
        allocates lies at planned addresses there, operators' temporaries included. The first step of each kind is recorded, the next
        one plans. What the step returns is never in it. It needs Linux, a CPU or a CUDA device, and a C++ compiler, which runs once.
        Without these a warning says so and the step runs without an arena. On a GPU the first step has it, too, and under a limit
        PyTorch's allocator has no memory to break into pieces. "limit", the default, is True on a GPU under a limit, False elsewhere.
        None: an arena if there can be one, and no warning elsewhere. `step.arena` tells how much was served, and `step.empty_arena()`
        gives the memory back until the next call.
    placer: how to find those addresses; by default what `lowtide.place` does, with little exact search, as a step waits for it.
    plan: a plan saved earlier for this very program, to be used instead of solving again. With `dynamic` it is the path of what
        `step.save` wrote for that range.
    dynamic: which sizes of the batch differ from call to call, by argument (its name, or its position in a tuple), dimension and range:
        `{"input_ids": {1: ("length", 16, 2048)}, "labels": {1: "length"}}`. Dimensions of one name have one size. The program is
        captured once and planned for the whole range. Each shape runs within the limit, without any further capture.
        `step.plan_for(batch)` says what a shape takes. A share of memory is of eager's peak for the largest shape. "auto": a size that
        differs between batches becomes a dimension, up to twice the largest number met. Each time that grows, the program is captured
        again.
    batches: with dynamic="auto" further examples, so that what differs between them is known before the first call.
    on_new_shape: what to do with a batch that is unlike this one in its shapes or strides alone. "extend": the step is captured and
        planned for that shape as well, once, within as many bytes as here. "eager": it runs as the caller's own loop would, on the same
        objects; no limit holds for it. "error": BatchError. By default one further shape is captured, as the last batch of an epoch is
        mostly smaller. Any shape after that runs eagerly, with one warning. Under a limit, every shape is captured.
    check: what a program reads beside its model and batch is watched. In case it reads something that is not watched, the step is
        captured once more and compared. "auto": at its second call, then ever more seldom, within a hundredth of the time that the
        steps take. "always": at each call. "never". A warning names what differs. Not with `dynamic`.
    device: where a model on the meta device is taken to be; "cpu" by default.
    simulate: plan for another machine: the name of a preset ("rtx3090", "a100", "h100", "h200", "cpu"; `lowtide devices` lists them) or
        a lowtide.Device. Times are then by its roofline, sizes as its allocator rounds them, nothing is measured, and the step cannot
        run.
    progress: show progress on standard error; by default where that is a terminal.
    callback: called for every stage, at its start and at its end.

    Raises CaptureError if the program cannot be one graph, and BatchError if the batch cannot be cut as asked. Raises BudgetError if no
    plan within `memory` was found, and FormatError for a `plan` of another program.
    """
    checked_policy(on_new_shape)
    checked_check(check)
    check_settings(
        flags={"exact": exact, "swap": swap, "swap_state": swap_state},
        flags_or_none={"workspaces": workspaces, "progress": progress},
        effort=effort, search=search, solver=solver, callback=callback, simulate=simulate,
    )  # fmt: skip
    check_arena(arena, placer)
    trainers = Trainers.of(model, process_group, shard, trains=loss is not None, varies=dynamic is not None, policy=on_new_shape)
    model = trainers.model
    check_arguments(model, loss, optimizer, after_backward, accumulate)
    check_scaler(scaler, optimizer, swap_state)
    trained: torch.optim.Optimizer | None = torch_optimizer(optimizer)
    check_swapping(model, trained, swap, swap_state)
    if plan is not None and (memory is not None or latency is not None):
        raise TypeError("plan: a saved plan keeps to the limit that it was made for; leave out `memory` and `latency`, or `plan`")
    saved, ranged = loaded(plan, dynamic)
    limit = Limit.of(memory, latency) if ranged is None else limit_of(ranged)
    args, kwargs = positional_and_keyword(batch)
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    target = device_of(model, device)
    spec = BatchSpec.of(args, kwargs, target, training=loss is not None)
    program = None
    if loss is not None and trained is not None:
        around = trainers.wrapper, counters_of(optimizer)
        program = TrainingProgram(model, loss, trained, after_backward, accumulate, scaler, trainers.ranks, *around)
    machine = preset(simulate) if isinstance(simulate, str) else simulate
    warn_of_nowhere_to_swap(swap_state, target, machine is not None)
    obstacle = _ON_META if on_meta else "" if machine is None else _ELSEWHERE.format(machine.name)  # why the step can only be planned
    stages = Stages(callback, wants_progress(progress))
    tries = not on_meta if workspaces is None else workspaces
    check_fuse(fuse, exact, varies=dynamic is not None, tries=tries and not obstacle)
    asked = Asked(limit, swap_state, solver or Auto(), sweeps_of(effort, search), exact, fuse)
    varying, seen = varying_of(dynamic, args, kwargs), met_so_far(dynamic, batches, args, kwargs)
    check_uncut(varying, accumulate)
    capturing = Capturing(model, program, target, stages, varying, trainers.peers)
    links_bytes_per_s = 0.0 if obstacle else trainers.links_bytes_per_s(target)
    here = Machine(target, machine, tries, swap, stages, links_bytes_per_s, _VARIANTS[effort or "normal"])
    of_shapes = Maker(capturing, here, asked, saved, stages)
    guessing = RangeMaker.guessing(of_shapes, seen, args, kwargs) if seen else None
    maker = RangeMaker(of_shapes, varying, (args, kwargs), ranged) if varying else guessing or of_shapes
    with trainers.beginning(runs=not obstacle):
        family = maker.make(args, kwargs, as_saved=saved is not None)
    if arena == "limit":
        arena = target.type == "cuda" and limit.is_limit
    new_arena = None if arena is False or obstacle else partial(StepArena.of, target, placer, warns=arena is not None)
    return Step(maker, spec, family, obstacle, new_arena, on_new_shape, seen, check)
