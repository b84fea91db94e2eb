"""Whether a program runs the operators that eager runs, where values cannot be compared: on a GPU that computes nothing.

    python -m tests.null_cuda python -m bench.device_calls [--only NAME ...] [--missing] [--dtype float32] [--samples 2] [--no-save]
    python -m tests.null_cuda python -m bench.device_calls --dtype float16      # under autocast to it: samples in float32, and in float16

Subjects are those of `bench.op_db`: torch's own test database, then operators that are composite or known to autocast. Eager runs each
sample once, and the captured program runs in its own order, both watched by torch's profiler, which is told of every operator that is
called and changes no dispatch key. Compared are the innermost operators that compute: their names, and what they are handed. Views and
copies are left out. "fewer": eager computes what nobody reads, or what it reads itself. Of the package's own operators "different" tells.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch.utils._pytree import tree_map

import lowtide
from bench import op_db
from bench.op_db import MEMORY_AS_FOUND, Sample, loss
from bench.sweep import Row
from bench.torch_db.database import main
from bench.torch_db.trial import brief
from lowtide.api.captures import Captures
from lowtide.base.messages import Stages
from lowtide.capture.program import TrainingProgram
from lowtide.cost.laboratory import Laboratory
from lowtide.lower.python import lower
from lowtide.plan.contents import Decision
from lowtide.runtime.caller import Caller
from lowtide.runtime.program import Program

_NUMBERED = {"5": "float16", "6": "float32", "15": "bfloat16"}  # dtypes, as the profiler names them where they are told
COLUMNS = ("operator", "mode", "samples", "same", "fewer", "refused", "different", "raised", "dead", "why")
_COUNTED = COLUMNS[3:-1]
_QUIET = {
    "_local_scalar_dense", "_reshape_alias", "_resize_output", "_to_copy", "arange", "as_strided", "as_strided_scatter", "cat", "clone",
    "copy", "detach", "lift_fresh", "lift_fresh_copy",
    "cudnn_is_acceptable", "_cudnn_init_dropout_state", "diagonal_backward", "diagonal_scatter", "empty", "empty_like", "empty_permuted",
    "empty_strided", "_efficientzerotensor", "fill", "full", "full_like", "is_same_size", "item", "new_empty", "new_empty_strided",
    "new_full", "new_ones", "new_zeros", "ones", "ones_like", "record_stream", "resize", "resize_as", "result_type", "scalar_tensor",
    "select_backward", "select_scatter", "set", "slice_backward", "slice_scatter", "stack", "unfold_backward", "zero", "zeros",
    "zeros_like",
}  # fmt: skip  # copies and questions, which change no bits; views are known by their schemas


@dataclass(frozen=True)
class Recorded:
    """The operators that compute, and how often each was called with such tensors."""

    calls: Counter[str]
    own: Counter[str]  # of lowtide's own


def recorded(run: Callable[[], Any]) -> Recorded:
    """What `run` calls, as torch's profiler sees it, in all threads."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        run()
    found = Recorded(Counter(), Counter())
    for event in profile.profiler.kineto_results.experimental_event_tree():
        _innermost(event, found)
    return found


def _innermost(event: Any, found: Recorded) -> bool:
    """Takes down the innermost operators that compute; whether there was one."""
    space, _, name = event.name.partition("::")
    if space == "lowtide":
        found.own[name] += 1
        return True
    within = [_innermost(child, found) for child in event.children]
    if any(within):
        return True
    if space not in ("aten", "torchvision") or not name:
        return False
    plain = name.removesuffix("_out").rstrip("_") or name
    if plain in _QUIET or _calls_or_looks(name):
        return False
    said = [_said(each) for each in _read(plain, event.typed[1].inputs)]
    if len(said) > 1 and said[0].startswith(_NUMBERED.get(said[-1], "-")):
        said[-1] = "None"  # told to make of what it is given the dtype that this has, as it would without
    found.calls[f"{plain}({', '.join(said)})"] += 1
    return True


def _read(name: str, given: Sequence[Any]) -> Iterator[Any]:
    """What an operator is handed but what it writes into, which comes last."""
    arguments, tensors = _taken(name)
    for item in given[:arguments]:
        tensors -= hasattr(item, "sizes")
        if tensors >= 0 or not hasattr(item, "sizes"):
            yield item


def _said(item: Any) -> str:
    """What an operator is handed, in words; the profiler does not tell all there is."""
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(map(_said, item))}]"
    return f"{str(item.dtype).removeprefix('torch.')}{list(item.sizes)}" if hasattr(item, "sizes") else repr(item)


@functools.cache
def _taken(name: str) -> tuple[int, int]:
    """How many arguments the operator takes, and how many tensors, in any form that is not given what to write into.

    Up to a random state of cuDNN's, which eager hands on as it was left, also where nothing is drawn.
    """
    packet = getattr(torch.ops.aten, name, None)
    schemas = [getattr(packet, each)._schema.arguments for each in packet.overloads()] if packet is not None else []
    schemas = [[*takewhile(lambda each: each.name != "dropout_state", each)] for each in schemas if not any(one.is_out for one in each)]
    kinds = [[str(each.type) for each in arguments] for arguments in schemas]
    return max(map(len, kinds), default=99), max((sum("Tensor" in each for each in row) for row in kinds), default=99)


@functools.cache
def _calls_or_looks(name: str) -> bool:
    """Whether it computes by calling others alone, or makes views."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    known = [each for each in overloads if torch._C._dispatch_has_kernel(each.name())]
    return bool(overloads) and all(
        has(each.name(), "CompositeImplicitAutograd") or each.is_view or "unsafe" in name or name in ("detach", "alias", "lift_fresh")
        for each in known
    )


def rows(info: Any, dtype: str, most: int) -> Iterator[Row]:
    """All samples of an operator: a row for each mode."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # the null device has none
    for training in (False, True):
        yield row(info, dtype, training, most)


def row(info: Any, dtype: str, training: bool, most: int) -> Row:
    """All samples of an operator in one mode; they are made on the CPU, where made-up numbers are what they are meant to be."""
    found: Row = {"mode": "training" if training else "inference", "samples": 0}
    if info.name in MEMORY_AS_FOUND:
        return found | {"why": "gives memory as it finds it"}
    if (training and not info.supports_autograd) or torch.float32 not in info.dtypes:
        return found
    try:
        samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=training))
    except Exception as error:
        return found | {"why": f"no samples: {type(error).__name__}"}
    chosen = samples[:: max(1, len(samples) // most)][:most] if most else samples
    autocast = None if dtype == "float32" else getattr(torch, dtype)
    ways = [None] if autocast is None else [None, autocast]  # of each sample: as it is, and as autocast's products hand it on
    verdicts = [verdict(info, on_device(sample, low), training, autocast) for sample in chosen for low in ways]
    counts = Counter(what for what, _ in verdicts)
    reasons = dict.fromkeys(f"{why} in eager" if what == "not in eager" else why for what, why in verdicts if why)
    found |= {what: counts[what] for what in _COUNTED}
    return found | {"samples": sum(counts[what] for what in _COUNTED), "why": " | ".join(reasons)[:1200]}


@dataclass(frozen=True)
class OnDevice:
    """A sample there."""

    input: Any
    args: Any
    kwargs: Any


def on_device(sample: Any, low: torch.dtype | None = None) -> OnDevice:
    """The same sample on the GPU, in low precision where one is given."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            dtype = low if low and leaf.dtype is torch.float32 else leaf.dtype
            return leaf.detach().to("cuda", dtype).requires_grad_(leaf.requires_grad)
        return "cuda" if leaf in ("cpu", torch.device("cpu")) else leaf

    return OnDevice(*tree_map(moved, (sample.input, sample.args, sample.kwargs)))


def verdict(info: Any, sample: Any, training: bool, autocast: torch.dtype | None) -> tuple[str, str]:
    """What became of a sample."""

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Sample(info, sample, training, autocast, "cuda")
        return model, torch.optim.SGD(model.parameters(), 0.5, foreach=False) if training else None

    return compared(made)


def compared(made: Callable[[], tuple[Any, Any]]) -> tuple[str, str]:
    """What became of a model without arguments, and perhaps an optimizer, that `made` makes anew: a column of the table, and why.

    "not in eager": eager raises, or calls other operators the next time.
    """
    try:
        expected, again = (recorded(partial(eagerly, *made())) for _ in range(2))
    except Exception as error:  # whatever it is: it is eager's
        return "not in eager", type(error).__name__
    if expected != again:
        return "not in eager", "other calls"
    try:
        found = recorded(program_of(*made()))
    except lowtide.LowtideError as error:
        return "refused", brief(error)
    except Exception as error:
        return "raised", f"{type(error).__name__}: {brief(error)}"
    if expected.calls == found.calls:
        return "same", ""
    if not found.calls - expected.calls and not found.own:
        return "fewer", f"without {_text(expected.calls - found.calls)}"
    own = f", and {', '.join(found.own)} of lowtide's own" if found.own else ""
    return "different", f"eager {_text(expected.calls - found.calls)}, lowtide {_text(found.calls - expected.calls)}{own}"


def _text(calls: Counter[str]) -> str:
    return " ".join(f"{count} x {call}" if count > 1 else call for call, count in calls.items()) or "nothing else"


def eagerly(model: Any, optimizer: Any) -> None:
    """One call, or one step of training, as PyTorch does it."""
    if optimizer is None:
        with torch.no_grad():
            model()
        return
    loss(model).backward()
    optimizer.step()


def program_of(model: Any, optimizer: Any) -> Callable[[], Any]:
    """A captured step as a program, no rewrite, in its own order; what runs it."""
    training = None if optimizer is None else TrainingProgram(model, loss, optimizer)
    with Laboratory(gradients=training is not None, tries=False) as laboratory:
        captured = Captures(model, training, torch.device("cuda"), Stages(None, False)).programs((), {}, laboratory)[-1]
    program = Program(lower(Decision.in_order(captured.graph)), training is not None, ("cuda",))
    view = Caller(model, optimizer).view()
    inputs = [view.read(slot, captured.constants) for slot in captured.slots]
    return lambda: program(inputs)


def summary(found: list[Row]) -> tuple[str, ...]:
    """Operators and samples by what became of them."""
    notes = []
    for mode in ("inference", "training"):
        of = [row for row in found if row.get("mode") == mode]
        told = ", ".join(
            f"{sum(row.get(what) or 0 for row in of)} {what} of {len({row['operator'] for row in of if row.get(what)})}"
            for what in _COUNTED
        )
        notes.append(f"{mode}: {len({row['operator'] for row in of})} operators; samples, and of how many operators: {told}")
    return tuple(notes)


DATABASE = replace(op_db.DATABASE, program="bench.device_calls", columns=COLUMNS, rows=rows, summary=summary)

if __name__ == "__main__":
    main(DATABASE, __doc__)
