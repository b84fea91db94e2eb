"""What `optimize` and `explain` are told beside the program and its limits: values, each checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from lowtide.api.notation import AUTO
from lowtide.api.processes import SHARDS
from lowtide.base.messages import Callback
from lowtide.capture.batches import BATCHES
from lowtide.cost.device import Device
from lowtide.cost.presets import preset
from lowtide.placement.base import Placer
from lowtide.placement.base import checked as checked_placer
from lowtide.planning.request import sweeps_of
from lowtide.remat.sweep import Sweep
from lowtide.schedule import Solver
from lowtide.schedule.base import checked as checked_solver

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """What a training step does beside loss and optimizer.

    after_backward: called as `after_backward(model)` between backward and optimizer step, with gradients in `.grad`; for instance to clip
        them. If it returns tensors or numbers (`.item()` of a tensor is one), each call returns them beside the loss: `value, norm =
        step(*batch)`.
    accumulate: micro-batches per step. The batch is cut along dimension 0 into this many equal parts, whose losses are averaged.
        "batches": the batch is a list of micro-batches of any lengths, each passed to `loss` as a batch would be. The sum of their losses
        is differentiated; divide in `loss` if you want a mean. Each call, `step(*micro_batches)`, returns a list.
    scaler: scales the loss, unscales the gradients before after_backward, skips the optimizer's step if one is not finite, and is
        updated; all within the step. Every gradient then exists before the first parameter is updated, which costs memory.

    Raises TypeError for what is no function or no scaler, ValueError for a number of micro-batches that cannot be meant.
    """

    after_backward: Callable[[nn.Module], Any] | None = None
    accumulate: int | str = 1
    scaler: torch.amp.GradScaler | None = None

    def __post_init__(self) -> None:
        if self.after_backward is not None and not callable(self.after_backward):
            raise TypeError(f"after_backward: expected a function after_backward(model), got a {type(self.after_backward).__name__}")
        if self.accumulate != BATCHES and (type(self.accumulate) is not int or self.accumulate < 1):
            raise ValueError(
                f'accumulate: expected a positive number of micro-batches, or "{BATCHES}" that are given; got {self.accumulate!r}'
            )
        if self.scaler is not None and not isinstance(self.scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler: expected a torch.amp.GradScaler, got a {type(self.scaler).__name__}")


@dataclass(frozen=True)
class Shapes:
    """What may differ between batches, and what becomes of one that differs otherwise.

    dynamic: which sizes of the batch differ from call to call, by argument (its name, or its position in a tuple), dimension and range:
        `{"input_ids": {1: ("length", 16, 2048)}, "labels": {1: "length"}}`. Dimensions of one name have one size. The program is captured
        once and planned for the whole range. Each shape runs within the limit, without any further capture. `step.plan_for(batch)` says
        what a shape takes. A share of memory is of eager's peak for the largest shape. "auto": a size that differs between batches
        becomes a dimension, up to twice the largest number met. Each time that grows, the program is captured again.
    batches: with dynamic="auto" further examples, so that what differs between them is known before the first call.
    on_new_shape: what to do with a batch that is unlike this one in its shapes or strides alone. "extend": the step is captured and
        planned for that shape as well, once, within as many bytes as here. "eager": it runs as the caller's own loop would, on the same
        objects; no limit holds for it. "error": BatchError. By default one further shape is captured, as the last batch of an epoch is
        mostly smaller. Any shape after that runs eagerly, with one warning. Under a limit, every shape is captured.

    Raises TypeError for what is no range, or `batches` beside one that is said; ValueError for another word.
    """

    dynamic: Mapping[Any, Mapping[int, Any]] | str | None = None
    batches: Sequence[Any] = ()
    on_new_shape: str | None = None

    def __post_init__(self) -> None:
        if self.dynamic is not None and self.dynamic != AUTO and not isinstance(self.dynamic, Mapping):
            raise TypeError(f'dynamic: expected a mapping from arguments to {{dimension: range}}, "auto" or None; got {self.dynamic!r}')
        if not isinstance(self.batches, (list, tuple)):
            raise TypeError(f"batches: expected a list of batches, got a {type(self.batches).__name__}")
        if self.dynamic != AUTO and self.batches:
            raise TypeError(f'batches: expected them with dynamic="auto" alone, which takes ranges from them; got dynamic={self.dynamic!r}')
        if self.on_new_shape is not None:
            _word("on_new_shape", self.on_new_shape, ON_NEW_SHAPE, " or None")


@dataclass(frozen=True)
class Parallel:
    """The processes that train a model together.

    group: processes that train this model together, each on its own batches, as DistributedDataParallel would. All ranks begin with the
        numbers of rank 0. Each step takes the mean of their gradients, once, after all micro-batches. Rank 0 plans, all ranks run the
        same program at each call. If one fails, or gets a batch of another shape, all raise. A wrapped model brings its own.
    shard: what each of n ranks holds only 1/n of. "optimizer": the optimizer's state; each rank updates its part of every parameter, and
        gathers the others'. "gradients": their means, too. Each is gathered while `Training(after_backward=...)` reads it, which may
        write them by numbers alone (`grad.mul_(factor)`, as clipping does). "parameters": the parameters, too. They are gathered before
        they are read and freed where a pass ends. Between steps a parameter is this rank's part, flat; `with step.gathered():` makes it
        whole. With a `Training(scaler=...)`, means of gradients are whole. For optimizers that update each element by itself (SGD,
        AdamW), without state yet, or with parts.

    Raises ValueError for another word in `shard`.
    """

    group: torch.distributed.ProcessGroup | None = None
    shard: str | None = None

    def __post_init__(self) -> None:
        if self.shard is not None:
            _word("shard", self.shard, SHARDS, " or None")


@dataclass(frozen=True)
class Planning:
    """How a plan is looked for, for which machine, and who hears of it.

    effort: how far to look for what to recompute and what to swap, and how many variants of generated kernels to measure. It is "quick",
        "normal" (the default) or "thorough". Each level includes what the one before finds, so more effort is never worse. None reads a
        clock. Interrupted from the keyboard, the search ends with a warning and uses the best found by then.
    search: the same said in full, a lowtide.Sweep, in place of `effort`.
    solver: how to find the order; the best of the quick heuristics by default.
    placer: how to find addresses in an arena; by default what `lowtide.place` does, with little exact search, as a step waits for it.
    workspaces: try operators on made-up data, so that the promised peak counts their temporaries and their results lie as real ones do.
        By default where the model can run. Without, only what is cached of earlier trials is known.
    device: where a model on the meta device is taken to be; "cpu" by default. "cuda" needs no GPU where `simulate` names one.
    simulate: plan for another machine: the name of a preset ("rtx3090", "a100", "h100", "h200", "cpu"; `lowtide devices` lists them) or a
        lowtide.Device. Times are then by its roofline, sizes as its allocator rounds them, nothing is measured, and the step cannot run.
    progress: show progress on standard error; by default where that is a terminal.
    callback: called for every stage, at its start and at its end.

    Raises TypeError for values of another kind, or both `effort` and `search`; ValueError for another level or machine.
    """

    effort: str | None = None
    search: Sweep | None = None
    solver: Solver | None = None
    placer: Placer | None = None
    workspaces: bool | None = None
    device: torch.device | str | None = None
    simulate: Device | str | None = None
    progress: bool | None = None
    callback: Callback | None = None

    def __post_init__(self) -> None:
        _flag("workspaces", self.workspaces, or_none=True)
        _flag("progress", self.progress, or_none=True)
        if self.effort is not None and not isinstance(self.effort, str):
            raise TypeError(f'effort: expected "quick", "normal" or "thorough", got {self.effort!r}; a lowtide.Sweep is given as `search`')
        if self.search is not None and not isinstance(self.search, Sweep):
            raise TypeError(f"search: expected a lowtide.Sweep, got {self.search!r}; a level of effort is given as `effort`")
        sweeps_of(self.effort, self.search)
        if self.solver is not None:
            checked_solver(self.solver)
        if self.placer is not None:
            checked_placer(self.placer)
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"callback: expected a function of a stage, got a {type(self.callback).__name__}")
        if self.simulate is not None and not isinstance(self.simulate, (str, Device)):
            raise TypeError(f"simulate: expected the name of a machine or a lowtide.Device, got a {type(self.simulate).__name__}")
        _ = self.machine  # a name that nobody has
        if self.device is not None and not isinstance(self.device, (str, torch.device)):
            raise TypeError(f'device: expected "cpu", "cuda" or a torch.device, got {self.device!r}')
        try:
            torch.device("cpu" if self.device is None else self.device)
        except RuntimeError:
            raise ValueError(f'device: expected "cpu", "cuda" or "cuda:0", got {self.device!r}') from None

    def sweeps(self, level: str) -> tuple[Sweep, ...]:
        """The searches that are asked for; those of a level where none are."""
        return sweeps_of(level if self.effort is None and self.search is None else self.effort, self.search)

    @property
    def machine(self) -> Device | None:
        """The one that is simulated. Raises ValueError for a name that no preset has."""
        return preset(self.simulate) if isinstance(self.simulate, str) else self.simulate


@dataclass(frozen=True)
class Run:
    """What a step may do to run in less memory or time, and how it is watched.

    kernels: what runs the step's operators. "auto", the default: torch's own kernels; with exact=False inference on a CPU has kernels that
        lowtide generates. "eager": torch's own everywhere. "compiled", with exact=False: PyTorch's inductor compiles norms, activations,
        element-wise chains and updates. Each becomes one operator of the plan, wherever that was measured to be faster; also on a GPU.
        It takes seconds for each kind of region, once, and the result is cached. If nothing can be compiled a warning says why, and
        torch's operators run. An optimizer's first step uses the regions of later steps. With several processes rank 0 decides. Not with
        `Shapes(dynamic=...)`, nor for steps that are only planned.
    arena: give the step memory of its own: one block that stays, so that nothing is asked of the system at each step. All that the step
        allocates lies at planned addresses there, operators' temporaries included. The first step of each kind is recorded, the next one
        plans. What the step returns is never in it. It needs Linux, a CPU or a CUDA device, and a C++ compiler, which runs once. On a GPU
        the first step has it, too, and under a limit PyTorch's allocator has no memory to break into pieces. "limit", the default: on a
        GPU under a limit. "always": everywhere; where there can be none a warning says so. "auto": where there can be one. "never".
        `step.arena` tells how much was served, and `step.empty_arena()` gives the memory back until the next call.
    graph: run the step as a CUDA graph: recorded once, and launched as a whole, where issuing operators from Python takes longer than they
        do. "auto": a program is captured at its second call, if that finds the same addresses and numbers as the first. One that cannot
        be a graph runs from Python. "always": there an error says why, and what to change. "never", the default: no GPU has shown yet what
        it gains. A graph holds Python numbers as they were. One that changes once, as a learning rate does after an
        epoch, costs two calls from Python. One that changes at each step has to be a tensor (`lr=torch.tensor(1e-3, device="cuda")`), which
        fused and capturable optimizers read anew. Tensors of a batch that lie elsewhere than before are copied to where the graph reads.
        What the step returns is copied out of the graph's memory. A limit holds with these copies; it needs an arena, and no
        `Shapes(dynamic=...)`. `step.graph` tells what was captured, and why not. `explain` counts a step without a graph.
    check: what a program reads beside its model and batch is watched. In case it reads something that is not watched, the step is
        captured once more and compared. "auto": at its second call, then ever more seldom, within a hundredth of the time that the steps
        take. "always": at each call. "never". A warning names what differs. Not with `Shapes(dynamic=...)`.
    swap: under a limit, tensors may also be copied to the host's memory and back while operators run. The device must have memory of its
        own; a CPU has none to swap to.
    state: where parameters and optimizer state lie. "device", the default: on the device throughout. "swap": under a limit, they may be
        among what is swapped. They are there again when the step is over, also if it fails. While it runs, nobody else may use them.
        "host": the optimizer's state lies in pinned memory of the host between steps, whatever the limit is; parameters stay on the
        device. `optimizer.state[parameter]["exp_avg"]` is a tensor on the CPU then, but for what is below 64 KiB. A step fetches each
        before its update and copies it back behind it. `step.fetch_state()` puts it on the device, as the optimizer's own `step()` needs
        it. For one process, without `Shapes(dynamic=...)` and a scaler.

    Raises TypeError for what is neither yes nor no, ValueError for other words, and for state="swap" or "host" without `swap`.
    """

    kernels: str = "auto"
    arena: str = "limit"
    check: str = "auto"
    graph: str = "never"
    swap: bool = True
    state: str = "device"

    def __post_init__(self) -> None:
        _word("kernels", self.kernels, KERNELS)
        _word("arena", self.arena, ARENAS)
        _word("graph", self.graph, GRAPHS)
        _word("check", self.check, CHECKS)
        _flag("swap", self.swap)
        _word("state", self.state, PLACES_OF_STATE)
        if self.state != "device" and not self.swap:
            raise ValueError(f'state: expected "device" where nothing is swapped (swap=False), got "{self.state}"')


CHECKS = ("auto", "always", "never")
ON_NEW_SHAPE = ("extend", "eager", "error")
PLACES_OF_STATE = ("device", "swap", "host")
KERNELS = ("auto", "eager", "compiled")
ARENAS = ("limit", "always", "auto", "never")
GRAPHS = ("auto", "always", "never")
VALUES = {"training": Training, "shapes": Shapes, "parallel": Parallel, "planning": Planning, "run": Run}
PLACES = {each.name: (name, each.name) for name, kind in VALUES.items() for each in fields(kind)}
PLACES |= {"process_group": ("parallel", "group")}


def told_in_values(verb: Callable[P, T]) -> Callable[P, T]:
    """The verb; what is told to it that belongs into a value is refused with a sentence that says into which one."""

    @wraps(verb)
    def as_given(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, given in kwargs.items():
            if name in PLACES:
                value, field = PLACES[name]
                text = repr(given) if given is None or isinstance(given, (bool, int, str)) else "..."
                raise TypeError(f"{name}: give it as {value}=lowtide.{VALUES[value].__name__}({field}={text})")
            if name in VALUES and not isinstance(given, VALUES[name]):
                raise TypeError(f"{name}: expected a lowtide.{VALUES[name].__name__}, got a {type(given).__name__}")
        return verb(*args, **kwargs)

    return as_given


def _flag(name: str, given: Any, *, or_none: bool = False) -> None:
    """No word stands for yes or no."""
    if not isinstance(given, bool) and not (or_none and given is None):
        raise TypeError(f"{name}: expected True or False{', or None' if or_none else ''}, got {given!r}")


def _word(name: str, given: Any, words: Sequence[str], further: str = "") -> None:
    if given not in words:
        raise ValueError(f"{name}: expected {'one of ' if len(words) > 2 else ''}{', '.join(map(repr, words))}{further}, got {given!r}")
