"""The verb `optimize`: checks what it is given, captures and plans by others, and hands back a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.api import arguments
from lowtide.api.captures import Captures
from lowtide.api.maker import PlanningSettings, StepMaker
from lowtide.api.notation import AUTO, check_uncut, met_so_far, varying_of
from lowtide.api.options import Parallel, Planning, Run, Shapes, Training, told_in_values
from lowtide.api.processes import ProcessGroupSetup
from lowtide.api.range_maker import RangeMaker
from lowtide.api.step import Step
from lowtide.api.step_memory import GraphWish, StepArena, StepMemory
from lowtide.base.files import read_utf8
from lowtide.base.messages import Stages, bytes_text, wants_progress
from lowtide.capture.batches import positional_and_keyword
from lowtide.capture.optimizers.wrappers import counters_of
from lowtide.errors import FormatError
from lowtide.plan.plan import Plan
from lowtide.planning.machine import Machine
from lowtide.planning.replan import SavedStep
from lowtide.planning.request import Limit, MemoryLimits
from lowtide.ranges.save import WrittenRange, is_range, read_range
from lowtide.runtime.batch import BatchSpec
from lowtide.schedule import Auto


def loaded(plan: Plan | str | os.PathLike[str] | None, dynamic: Any) -> tuple[Plan | None, WrittenRange | None]:
    """A plan of one shape, or those of a range; None for what it is not. Raises TypeError, FormatError, CheckError and OSError."""
    if plan is None:
        return None, None
    if not isinstance(plan, (str, os.PathLike)):
        if dynamic is not None:
            raise TypeError(
                "plan: expected with `dynamic` the path of what step.save(path) has written for that range, got a plan of one shape"
            )
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: expected a Plan, or the path of a file that step.save(path) has written; got a {type(plan).__name__}")
        return plan, None
    text, where = read_utf8(plan), os.fspath(plan)
    if dynamic is None and not is_range(text):
        return Plan.load(plan), None
    if dynamic is None or dynamic == AUTO:
        raise FormatError(f"{where}: expected with dynamic={dynamic!r} a plan of one shape, or the range itself: {_remedy(text)}")
    try:
        return None, read_range(text)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error


def _remedy(text: str) -> str:
    if not is_range(text):
        return "this is a plan of one shape, leave `dynamic` out to use it"
    parts = "; ".join(part.dimensions for part in read_range(text).parts)
    return f"these are plans of a range, give it as it was: dynamic={{...}} of {parts}"


_ON_META = (
    "the model is on the meta device: its step can be planned, not run; materialise it with model.to_empty(device=...) and optimize again"
)
_ELSEWHERE = "the plan is for another machine ({}): its step cannot run here; optimize again without `Planning(simulate=...)`"
# By effort, of generated kernels that the model cannot tell apart: so many are measured for a region.
_VARIANTS = {"quick": 0, "normal": 24, "thorough": 96}


@told_in_values
def optimize(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    memory: MemoryLimits = None,
    latency: float | None = None,
    exact: bool = True,
    plan: Plan | str | os.PathLike[str] | None = None,
    training: Training = Training(),
    shapes: Shapes = Shapes(),
    parallel: Parallel = Parallel(),
    planning: Planning = Planning(),
    run: Run = Run(),
) -> Step:
    """A callable that does what the program does, bit for bit, in less memory and at no cost in time.

    With `loss` and `optimizer`, one call is one training step: zero_grad, forward, backward, optimizer.step. Without, one call is
    `model(*batch)` without gradients. Nothing is run here, except that each distinct operator is tried once on made-up data; on a CPU
    in a separate process. The model, the optimizer and the random generators stay as they were, also when an error is raised.

    model: lies where it is to run. On the meta device its step can be planned (as if on `Planning(device=...)`) but not run. Within
        DistributedDataParallel its module is captured, and the means of gradients and the broadcast of buffers are operators of the step.
    batch: an example of what each call will get, same shapes, strides and dtypes. A tuple or list is passed on as positional arguments, a
        mapping as keyword arguments, anything else as the one argument. Calls take it the same way: `step(*batch)`, `step(**batch)`,
        `step(batch)`.
    loss: `loss(model, *batch)`, returns the scalar to be differentiated, a tuple that starts with it, or an object or dict with a `loss`.
        What it returns, detached, is what each call returns.
    optimizer: any torch optimizer whose step is plain arithmetic on tensors and hyper-parameters. Those are read at each call. In a list
        (`[muon, adamw]`) all of them step, in this order, each its own parameters.
    memory: the most that the step may take at its peak, including all that the caller holds. It is bytes, "8GiB", or "60%" of the peak of
        the program as it stands. If order alone is not enough, as few tensors as possible are evicted and restored. They are recomputed,
        or copied to the host and back (see `Run(swap=...)`). Random operators and updates are never repeated, and all numbers stay the
        same to the last bit. `{"cuda": "24GiB", "host": "48GiB"}` also limits what these copies may pin of the host's memory, in bytes.
    latency: the most that a step may take, as a multiple of its time without recomputation. The peak is then as small as was found.
    exact: eager's numbers, to the last bit. False also allows rewrites that round differently, if they save memory. Under a limit, sets of
        operators run part by part. Products are added up as they are made. At inference, batch norms are folded into convolutions and
        linear layers. Gradients of ELU and of norms without a weight are computed from results, and those of a convolution's input without
        that input. On a GPU products with rows of odd sizes are padded where that is faster. Inference on a CPU without a limit runs
        generated kernels, which the system's C++ compiler builds. Their weights are packed, which takes that memory once more, and packed
        again when they change. `step.plan` says what was done, `step.verify` how far that is from eager. With `Shapes(dynamic=...)` nothing
        runs part by part yet.
    plan: a plan saved earlier for this very program, to be used instead of solving again. With `Shapes(dynamic=...)` it is the path of
        what `step.save` wrote for that range.
    training: what a training step does beside: `Training(accumulate=4, after_backward=clip, scaler=scaler)`.
    shapes: batches that differ from this one: `Shapes(dynamic="auto")`, `Shapes(on_new_shape="extend")`.
    parallel: processes that train together: `Parallel(group=dist.group.WORLD, shard="optimizer")`.
    planning: how far to look and for which machine: `Planning(effort="thorough")`, `Planning(simulate="h200")`.
    run: memory, kernels and checks of the step that runs: `Run(arena="always", state="swap")`.

    Raises CaptureError if the program cannot be one graph, and BatchError if the batch cannot be cut as asked. Raises BudgetError if no
    plan within `memory` was found, and FormatError for a `plan` of another program.
    """
    if not isinstance(exact, bool):
        raise TypeError(f"exact: expected True or False, got {exact!r}")
    dynamic = shapes.dynamic
    varies, together = dynamic is not None, parallel.group is not None
    group_setup = ProcessGroupSetup.of(
        model, parallel.group, parallel.shard, trains=loss is not None, varies=varies, policy=shapes.on_new_shape
    )
    model = group_setup.model
    trained = arguments.checked_optimizer(model, loss, optimizer, training, run, varies=varies, together=together)
    if plan is not None and (memory is not None or latency is not None):
        raise TypeError("plan: a saved plan keeps to the limit that it was made for; leave out `memory` and `latency`, or `plan`")
    saved, ranged = loaded(plan, dynamic)
    if saved is not None and not run.swap and any(each.pinned_bytes for each in (saved, *saved.first_steps)):
        raise ValueError(
            f"plan: it copies {bytes_text(saved.pinned_bytes)} to the host, got it with Run(swap=False): leave one of them out"
        )
    limit = Limit.of(memory, latency) if ranged is None else Limit(ranged.memory_bytes, ranged.latency)
    args, kwargs = positional_and_keyword(batch)
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    machine = planning.machine
    target = arguments.device_of(model, planning.device, machine)
    arguments.check_memories(limit, target, machine, swap=run.swap, varies=varies)
    spec = BatchSpec.of(args, kwargs, target, training=loss is not None)
    program = arguments.training_program(
        model, loss, trained, training, ranks=group_setup.ranks, wrapper=group_setup.wrapper, counters=counters_of(optimizer),
        single_tensor=run.kernels == "compiled",  # which fuses the operators of single tensors
        between_steps=arguments.lies_on_host(run, target, machine is not None),
    )  # fmt: skip
    arguments.warn_of_nowhere_to_swap(run, target, machine is not None)
    obstacle = _ON_META if on_meta else "" if machine is None else _ELSEWHERE.format(machine.name)  # why the step can only be planned
    stages = Stages(planning.callback, wants_progress(planning.progress))
    tries = not on_meta if planning.workspaces is None else planning.workspaces
    arguments.check_kernels(run.kernels, exact, varies=varies, tries=tries and not obstacle)
    wish = GraphWish("never" if obstacle else run.graph, target, varies, group_setup.peers.several)
    solver, sweeps, counts = planning.solver or Auto(), planning.sweeps("normal"), wish.counts(limit.is_limit)
    has_arena = loss is None and target.type == "cuda" and run.arena != "never"  # under a limit; what training returns is small
    settings = PlanningSettings(limit, run.state == "swap", solver, sweeps, exact, run.kernels, counts, has_arena)
    varying, seen = varying_of(dynamic, args, kwargs), met_so_far(dynamic, shapes.batches, args, kwargs)
    check_uncut(varying, training.accumulate)
    capturing = Captures(model, program, target, stages, varying, group_setup.peers, machine)
    links_bytes_per_s = 0.0 if obstacle else group_setup.links_bytes_per_s(target)
    here = Machine(str(target), machine, tries, run.swap, stages, links_bytes_per_s, _VARIANTS[planning.effort or "normal"])
    of_shapes = StepMaker(capturing, here, settings, None if saved is None else SavedStep(saved), stages)
    guessing = RangeMaker.guessing(of_shapes, seen, args, kwargs) if seen else None
    maker = RangeMaker(of_shapes, (args, kwargs), ranged) if varying else guessing or of_shapes
    with group_setup.sharded_during_capture(runs=not obstacle):
        family = maker.make(args, kwargs, as_saved=saved is not None)
    if trained is not None:
        arguments.warn_of_gradients_let_go(model, trained, family.variants[-1].captured.trained)

    wish.check(family.variants[-1])

    def new_memory(stages: Stages, limited: bool) -> StepMemory:
        wanted = run.arena != "never" and (run.arena != "limit" or (target.type == "cuda" and limited))
        arena = StepArena.of(target, planning.placer, stages, warns=run.arena != "auto") if wanted and not obstacle else None
        return StepMemory(arena, wish.graphs(arena, limited))

    return Step(maker, spec, family, obstacle, new_memory, shapes.on_new_shape, seen, run.check)
