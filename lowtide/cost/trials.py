"""How one call is tried on made-up data, as plain data; and has it tried where it does no harm, in a process of its own.

    takes   a node, and the nodes that make what it reads
    leaves  {"values": [...], "steps": [...]}, which JSON can hold: `trial` runs the steps and looks at the last

A value is made up as {"made": [dtype, shape, stride, device]}, is the number {"scalar": 0.75}, or is what an earlier step makes,
{"step": 0, "result": 3}. What one operator leaves for another to read, in a layout that is its own affair (the workspace of a recurrent
layer, bytes in a tensor of uint8), is never made up: the operator that makes it is run first. `with_makers` runs those of all that a call
reads, for a call that made-up data does not suit.

The process starts when the first recipe comes. Made-up data may crash an operator or make it wait for ever: then the process is ended, and
started again for the next recipe. What an operator does to memory of a GPU that is not its own spoils all that its process has there, so
that trials for a GPU are apart, too. That takes some 600 MiB of its memory meanwhile: where there is not much left, or where no second
process may use it, they run in this process. LOWTIDE_TRIALS=apart or =inside decides otherwise.

What defines an operator that is not torch's own is said, so that another process can import it too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton

from lowtide.cost import trial, trial_process
from lowtide.cost.operators import dtype_name, operator
from lowtide.cost.trial_process import TrialProcess, WorkerExitedError, WorkerTimeoutError
from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Node, Value
from lowtide.ir.operators.nodes import is_arithmetic, is_collective, is_transfer
from lowtide.ir.sizes import ITEM_BYTES, Size, reach
from lowtide.kernels.apart import origin

_OWN = frozenset({"aten", "prims", "prim", "quantized", "mkldnn", "onednn", "inductor"})  # a bare torch has them


def signature(node: Node) -> str:
    """Operator, layouts and devices of its tensors, which of them are one, other arguments.

    Names do not occur; what is written in place follows from the operator. An example:
    "aten.mm.default(%0:float32[2, 3]/[3, 1]@cpu, %1:float32[3, 4]/[4, 1]@cpu)".
    """
    seen: dict[Value, int] = {}
    given = [_spelled(arg, seen) for arg in node.args] + [f"{name}={_spelled(arg, seen)}" for name, arg in node.kwargs]
    return f"{node.op}({', '.join(given)})"


def _spelled(arg: Arg, seen: dict[Value, int]) -> str:
    """An argument as text. A value is spelled out at its first occurrence, and has its number from then on."""
    if isinstance(arg, tuple):
        return f"[{', '.join(_spelled(item, seen) for item in arg)}]"
    if isinstance(arg, Atom):
        return f"{arg.kind}:{arg.name}"
    if not isinstance(arg, Value):
        return repr(arg)
    if arg in seen:
        return f"%{seen[arg]}"
    seen[arg] = len(seen)
    return f"%{seen[arg]}:{arg.dtype}{list(arg.shape)}/{list(arg.stride)}@{arg.storage.device}"


Makers = Mapping[Value, Node]  # which node makes a value

_DEEPEST = 8  # steps before the call, one needing the other


def makers_of(nodes: Sequence[Node]) -> dict[Value, Node]:
    """Which of these nodes makes each value; a tensor that one has written in place is not what any made."""
    return {value: node for node in nodes for value in node.outputs if value is not None}


def recipe(node: Node, makers: Makers | None = None, *, with_makers: bool = False) -> dict[str, Any]:
    """How to try a call. Raises FormatError for a symbolic size, or for an argument that no graph holds."""
    steps: list[Node] = []
    _collect(node, makers or {}, steps, with_makers, 0)
    return _StepWriter(steps).document()


def argument_bytes(node: Node) -> int:
    """What the tensors take that a call reads. Raises FormatError for a symbolic size."""
    return sum(extent(value) * ITEM_BYTES[value.dtype] for value in node.inputs)


def extent(value: Value) -> int:
    """Elements from the first to the last that a value covers. Raises FormatError for a symbolic size."""
    return reach(numbers(value.shape), numbers(value.stride))


def numbers(sizes: Sequence[Size]) -> list[int]:
    """Sizes as numbers. Raises FormatError for a symbolic one."""
    for size in sizes:
        if not isinstance(size, int):
            raise FormatError(f"expected concrete sizes, got {size}: give its dimensions numbers first")
    return list(sizes)


def is_opaque(value: Value, makers: Makers) -> bool:
    """Whether a value is what one operator leaves for another: bytes, made beside other results."""
    return value.dtype == "uint8" and value in makers and len(makers[value].outputs) > 1


def _collect(node: Node, makers: Makers, steps: list[Node], all_makers: bool, depth: int) -> None:
    """The steps that a call needs, each after what it needs itself."""
    for value in node.inputs:
        maker = makers.get(value)
        if maker is None or maker in steps or depth == _DEEPEST or _is_untried(maker):
            continue
        makes_view = any(value.storage is given.storage for given in maker.inputs)
        if all_makers or is_opaque(value, makers) or (makes_view and _is_opaque_below(maker, value, makers)):
            _collect(maker, makers, steps, makes_view and all_makers, depth + 1)
    steps.append(node)


def _is_untried(maker: Node) -> bool:
    return is_arithmetic(maker) or is_transfer(maker) or is_collective(maker) or maker.body is not None


def _is_opaque_below(maker: Node, value: Value, makers: Makers) -> bool:
    return any(is_opaque(given, makers) for given in maker.inputs if given.storage is value.storage)


class _StepWriter:
    """Writes steps down, each value once."""

    def __init__(self, steps: Sequence[Node]) -> None:
        self._steps = steps
        self._numbers: dict[Value, int] = {}
        self._values: list[dict[str, Any]] = []

    def document(self) -> dict[str, Any]:
        written = []
        for at, node in enumerate(self._steps):
            args = [self._argument(arg) for arg in node.args]
            written.append({"op": node.op, "args": args, "kwargs": {name: self._argument(arg) for name, arg in node.kwargs}})
            for index, value in enumerate(node.outputs):
                if value is not None:
                    self._note(value, {"step": at, "result": index})
        return {"values": self._values, "steps": written}

    def _note(self, value: Value, entry: dict[str, Any]) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self._values)
            self._values.append(entry)
        return self._numbers[value]

    def _argument(self, arg: Arg) -> Any:
        if isinstance(arg, Value):
            return {"value": self._note(arg, _made_up(arg))}
        if isinstance(arg, tuple):
            return [self._argument(item) for item in arg]
        if isinstance(arg, Atom):
            return {"atom": [arg.kind, arg.name]}
        if isinstance(arg, complex):
            return {"complex": [arg.real, arg.imag]}
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise FormatError(f"expected concrete sizes, got {arg}: give its dimensions numbers first")


def _made_up(value: Value) -> dict[str, Any]:
    if value.dtype == "scalar":
        return {"scalar": 0.75}  # neither 0 nor 1, by which operators may divide or which they know a quicker way for
    return {"made": [value.dtype, numbers(value.shape), numbers(value.stride), value.storage.device]}


def definers(ops: list[str]) -> list[dict[str, Any]]:
    """Of each operator among these that is not torch's own: its schema, and the modules and libraries that may define it."""
    origins = [op if (source := origin(op)) is None else source[0] for op in ops]
    return [_definer(op) for op in dict.fromkeys(origins) if op.split(".")[0] not in _OWN]


def _definer(op: str) -> dict[str, Any]:
    try:
        schema = str(operator(op)._schema)
    except FormatError as error:
        schema = str(error)
    return {"op": op, "schema": schema, "modules": _modules(op), "libraries": sorted(torch.ops.loaded_libraries)}


def _modules(op: str) -> list[str]:
    """Modules that can be imported by name: where `torch.library` says that the operator comes from, or named as its namespace."""
    namespace, base, *_ = op.split(".")
    name = f"{namespace}::{base}"
    names = []
    if (defined := OPDEFS.get(name)) is not None:
        names.append(defined._init_fn.__module__)
    if (fake := singleton.find(name).fake_impl.kernel) is not None:
        names += _module_of(fake.source.rpartition(":")[0])
    names += [name for name in (namespace,) if name in sys.modules]
    return [name for name in dict.fromkeys(names) if name != "__main__"]


@lru_cache(maxsize=256)
def _module_of(file: str) -> tuple[str, ...]:
    return tuple(name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == file)


LIMIT_S = 60.0  # for one request; a CPU may take seconds for a large operator
_MOST_ENDS = 8  # of the process, before it is given up
_ROOM_BYTES = 4 * 2**30  # of a GPU that are free, for a second process to use it
_INSIDE: dict[str, Any] = {"failure": "no other process can use this GPU", "inside": True}


class Trials:
    """Tries recipes for programs that run with gradients enabled, or not. `close` ends the process."""

    def __init__(self, gradients: bool) -> None:
        self._gradients = gradients
        self._settings = _settings()
        self._circumstances: dict[str, list[str]] = {}  # by device
        self._inside: dict[str, bool] = {}  # by GPU, whether trials run in this process
        self._on_gpus: set[str] = set()  # which the process has used
        self._apart: TrialProcess | None = None
        self._ends = 0
        self._given_up = ""  # why there is no process any more

    def begin(self) -> dict[str, Any]:
        """Start the process, where that can be done, before anything is asked of it."""
        with suppress(WorkerExitedError):  # whoever asks hears of it
            self._process()
        return {}

    def is_inside(self, device: str) -> bool:
        """Whether recipes for a device are tried in this process."""
        if not trial.on_gpu(device):
            return False
        if device not in self._inside:
            wanted = os.environ.get("LOWTIDE_TRIALS", "")
            if wanted not in ("", "apart", "inside"):
                raise ValueError(f"LOWTIDE_TRIALS: expected apart or inside, got {wanted!r}")
            self._inside[device] = wanted == "inside" or (not wanted and trial.free_bytes(device) < _ROOM_BYTES)
        return self._inside[device]

    def level(self, recipe: dict[str, Any], device: str, *, ahead: bool = False) -> dict[str, Any]:
        """{"level_bytes": ..., "results": ...}, or {"failure": ...} where the recipe gives nothing.

        {"failure": ..., "inside": True} where no other process can try it, but this one: from then on it does, unless `ahead`.
        """
        if self.is_inside(device):
            return _INSIDE if ahead else trial.answer(lambda: trial.take_level(recipe, device, self._gradients))
        return self._asked({"wanted": "level", "recipes": [recipe]}, device)

    def times(self, recipes: list[dict[str, Any]], device: str, warm_up: bool) -> dict[str, Any]:
        """{"ns": [...]}, one number a recipe, where the host itself computes; {"failure": ...} where one of them gives nothing."""
        if trial.on_gpu(device):
            raise ValueError(f"expected the host, got {device}: a device beside it has two clocks")
        return self._asked({"wanted": "times", "recipes": recipes, "warm_up": warm_up}, device)

    def launches(self, recipes: list[dict[str, Any]], device: str) -> dict[str, Any]:
        """{"ns": [(device's, host's), ...]} by recipe, on a device beside the host; {"failure": ...} as for `level`."""
        if self.is_inside(device):
            return trial.answer(lambda: trial.take_launches(recipes, device, self._gradients))
        return self._asked({"wanted": "launches", "recipes": recipes}, device)

    def close(self) -> None:
        """Leave the process to whoever needs one next, and let go what trials in this one keep."""
        if self._apart is not None:
            if self._on_gpus:  # where it would hold memory
                self._apart.end()
            else:
                trial_process.put(self._apart)
            self._apart = None
        trial.forget_crowds()

    def stop(self) -> None:
        """End the process, whatever it does, and start no other; whoever waits for an answer gets a failure."""
        self._given_up = "it was stopped"
        if (running := self._apart) is not None:
            running.end()

    def _asked(self, request: dict[str, Any], device: str) -> dict[str, Any]:
        operators = definers([step["op"] for recipe in request["recipes"] for step in recipe["steps"]])
        settings = self._settings | {"circumstances": self._circumstances_of(device)}
        proven = not trial.on_gpu(device) or device in self._on_gpus
        try:
            process = self._process()
            whole = {**request, "operators": operators, "gradients": self._gradients, "settings": settings, "device": device}
            reply = process.ask(whole, LIMIT_S)
            if not reply.pop("shut", False):
                self._on_gpus |= {device} if trial.on_gpu(device) else set()
            elif not proven:
                return self._take_inside(device)
            if reply.pop("spoilt", False):  # its context of the GPU, for all that would come
                process.end()
                self._apart = None
            return reply
        except WorkerExitedError as gone:
            self._apart = None
            if not proven and not isinstance(gone, WorkerTimeoutError):
                return self._take_inside(device)
            return {"failure": f"the process that tried it is gone: {gone}", "ended": True, "late": isinstance(gone, WorkerTimeoutError)}
        except BaseException:  # Ctrl-C in the middle of an answer: the next request would get it
            if self._apart is not None:
                self._apart.end()
                self._apart = None
            raise

    def _take_inside(self, device: str) -> dict[str, Any]:
        self._inside[device] = True
        return _INSIDE

    def _circumstances_of(self, device: str) -> list[str]:
        if device not in self._circumstances:
            self._circumstances[device] = list(trial.circumstances(device, self._gradients))
        return self._circumstances[device]

    def _process(self) -> TrialProcess:
        """The process, started where there is none. Raises WorkerExitedError."""
        if self._given_up:
            raise WorkerExitedError(self._given_up)
        if self._apart is None:
            if self._ends > _MOST_ENDS:
                self._give_up(f"it ended {self._ends} times")
            self._apart = trial_process.take() or self._started()
            self._ends += 1
        return self._apart

    def _started(self) -> TrialProcess:
        try:
            return TrialProcess({"limit_s": LIMIT_S})
        except WorkerExitedError as gone:
            self._give_up(str(gone))

    def _give_up(self, why: str) -> NoReturn:
        self._given_up = why
        raise WorkerExitedError(why)


def _settings() -> dict[str, Any]:
    """What decides in this process which kernels run, and can be set in another."""
    return {
        "threads": torch.get_num_threads(),
        "onednn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "dtype": dtype_name(torch.get_default_dtype()),
        "cudnn": trial.cudnn_flags(),
    }
