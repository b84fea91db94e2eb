"""How much memory operators take for themselves: the temporaries inside a call, which no graph shows.

    takes   nodes of a graph with concrete sizes
    leaves  a workspace in bytes for each node; what could not be measured, and why

The workspace of a node is the highest allocator level during its call above the level at its start, less the bytes of the storages that it
makes in the graph. Results that nobody reads are not in the graph, hence part of the workspace. Each distinct call is run once, alone, on
made-up data, and remembered on disk. The data is ones, and zeros for integers, which are valid indices everywhere: an operator whose result
has a size known beforehand does not size its temporaries by the data. Only views and arithmetic on numbers are not run. Element-wise
operators are: they convert mixed types in temporaries, and a few (native_dropout_backward, ldexp) hold one as large as their result.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide.cost.cache import Cache
from lowtide.cost.profiler import device_name, peak_bytes_of_each
from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Node, Storage, Value
from lowtide.ir.sizes import ITEM_BYTES, Size

MakeTensor = Callable[[Value], Any]

_OPERATOR = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){2}", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHARE_OF_FREE = 4  # one call may take a quarter of the memory that is free now
_SHOWN = 160  # characters of a call that a warning shows
_FREE_WHERE_UNTOLD_BYTES = 4 * 2**30  # systems without /proc/meminfo


@dataclass(frozen=True)
class Unknown:
    """A call that was not measured."""

    call: str  # as `signature` writes it
    reason: str  # the error that it raised, or the limit that it passes
    of_memory: bool = False  # it needs more memory than there is, or than one call may take

    @classmethod
    def of(cls, call: str, error: Exception) -> Unknown:
        """A call and the error that it raised, as text: a traceback would keep the call's tensors alive."""
        lacking = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "not enough memory" in str(error)
        return cls(call, f"{type(error).__name__}: {error}", lacking)


@dataclass(frozen=True)
class Workspaces:
    """What `measure_workspaces` found."""

    nbytes: tuple[int, ...]  # by node; 0 where unknown
    unknown_nodes: int
    unknown: tuple[Unknown, ...]  # the distinct calls behind them
    measured_calls: int  # distinct calls that were run now; the others were remembered, or need none

    @property
    def known_nodes(self) -> int:
        """Nodes whose workspace is known."""
        return len(self.nbytes) - self.unknown_nodes


def measure_workspaces(nodes: Sequence[Node], *, limit_bytes: int | None = None, remember: bool = True) -> Workspaces:
    """The workspace of each node, on the device of what it makes.

    A call whose arguments and results pass `limit_bytes` (a quarter of the device's free memory, where None) is not run, and one that fails
    is not hidden: both are listed as unknown. `remember=False` neither reads nor writes the disk. The caller's random state stays as it is.
    Raises LowtideError when a profiler is already running on this thread.
    """
    calls = [None if needs_none(node) else signature(node) for node in nodes]
    by_device: dict[str, dict[str, Node]] = {}
    for call, node in zip(calls, nodes, strict=True):
        if call is not None:
            by_device.setdefault(device_of(node), {}).setdefault(call, node)
    levels: dict[str, int] = {}
    trials: list[_Trial] = []
    for device, wanted in by_device.items():
        cache = Cache("workspaces", circumstances(device)) if remember else None
        known = cache.load() if cache is not None else {}
        tried = _run([_Trial(call, node) for call, node in wanted.items() if call not in known], device, limit_bytes)
        found = {trial.call: trial.level_bytes for trial in tried if trial.failure is None}
        levels |= known | (cache.merge(found) if cache is not None and found else found)
        trials += tried
    found_out = _report(nodes, calls, levels, trials)
    warn_of_memory(found_out.unknown, "their temporaries are taken to be none")
    return found_out


def _report(nodes: Sequence[Node], calls: Sequence[str | None], levels: dict[str, int], trials: Sequence[_Trial]) -> Workspaces:
    nbytes = tuple(max(0, levels[call] - _made_bytes(node)) if call in levels else 0 for call, node in zip(calls, nodes, strict=True))
    unknown = tuple(trial.failure for trial in trials if trial.failure is not None)
    return Workspaces(nbytes, sum(call is not None and call not in levels for call in calls), unknown, len(trials) - len(unknown))


def warn_of_memory(unknown: Sequence[Unknown], consequence: str) -> None:
    """Say which calls could not be measured for lack of memory, and what is assumed of them. Python shows the same warning once."""
    lacking = [each for each in unknown if each.of_memory]
    if lacking:
        first, more = lacking[0], f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        warnings.warn(
            f"not enough memory to measure {first.call[:_SHOWN]} ({first.reason}){more}: {consequence}", RuntimeWarning, stacklevel=3
        )


def signature(node: Node) -> str:
    """All that the memory of a call depends on, as one line: operator, layouts and devices of its tensors, which are one, other arguments.

    Names do not occur; what is written in place follows from the operator. An example:
    "aten.mm.default(%0:float32[2, 3]/[3, 1]@cpu, %1:float32[3, 4]/[4, 1]@cpu)".
    """
    seen: dict[Value, int] = {}
    given = [_spelled(arg, seen) for arg in node.args] + [f"{name}={_spelled(arg, seen)}" for name, arg in node.kwargs]
    return f"{node.op}({', '.join(given)})"


def operator(name: str) -> OpOverload:
    """The operator "aten.add.Tensor". Raises FormatError for what is no such name, or names nothing that this torch has."""
    if not _OPERATOR.fullmatch(name):
        raise FormatError(f"expected an operator's name such as 'aten.add.Tensor', got {name!r}")
    namespace, base, overload = name.split(".")
    try:
        found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except AttributeError as error:
        raise FormatError(f"expected an operator of torch {torch.__version__}, got {name!r}: import the library that defines it") from error
    return found


def concrete_args(node: Node, make_tensor: MakeTensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments as its operator takes them: `make_tensor` gives each value, once; atoms become torch's own.

    Raises FormatError for a symbolic size, or for an atom that this torch does not have.
    """
    make = functools.cache(make_tensor)
    return tuple(_concrete(arg, make) for arg in node.args), {name: _concrete(arg, make) for name, arg in node.kwargs}


def made_up(value: Value) -> Any:
    """A tensor of ones (zeros for integers) with the value's layout, or the number 1.0 for a scalar."""
    if value.dtype == "scalar":
        return 1.0
    dtype = _of_torch(value.dtype)
    ones = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
    # Strides may overlap (expanded tensors): what lies beneath is filled, not the tensor.
    flat = torch.full((_extent(value),), int(ones), dtype=dtype, device=value.storage.device)
    return flat.as_strided(_ints(value.shape), _ints(value.stride))


def fits(node: Node, limit_bytes: int) -> None:
    """Raises MemoryError where a call's arguments and results take more than `limit_bytes`."""
    needed = sum(_extent(value) * ITEM_BYTES[value.dtype] for value in node.inputs) + _made_bytes(node)
    if needed > limit_bytes:
        raise MemoryError(f"arguments and results take {needed} bytes, the limit is {limit_bytes}: raise limit_bytes to measure it")


def ready_call(node: Node) -> Callable[[], Any]:
    """A node's operator with made-up arguments. Raises FormatError as `concrete_args` does."""
    args, kwargs = concrete_args(node, made_up)
    return functools.partial(operator(node.op), *args, **kwargs)


class _Trial:
    """One call on made-up data: made right before it runs, let go right after. It keeps its failure or its level."""

    def __init__(self, call: str, node: Node) -> None:
        self.call, self.node = call, node
        self.failure: Unknown | None = None
        self.level_bytes = 0
        self._ready: Callable[[], object] | None = None

    def prepare(self, limit_bytes: int) -> bool:
        """Whether the call can be tried."""
        self._ready = self._attempt(lambda: self._make(limit_bytes))
        return self.failure is None

    def __call__(self) -> object:
        """Run the call that `prepare` made."""
        ready, self._ready = self._ready, None
        return None if ready is None else self._attempt(ready)

    def _make(self, limit_bytes: int) -> Callable[[], object]:
        fits(self.node, limit_bytes)
        ready = ready_call(self.node)
        if device_of(self.node).startswith("cuda"):
            ready()  # the first call of a kind makes buffers that its library keeps: they are not the call's
        return ready

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """Whatever an operator raises on made-up data is its answer."""
        try:
            return action()
        except Exception as error:
            self.failure = Unknown.of(self.call, error)
            return None


def _run(trials: list[_Trial], device: str, limit_bytes: int | None) -> list[_Trial]:
    """Run the trials one after another, in one recording."""
    if not trials:
        return trials
    ready: list[_Trial] = []
    with aside(device):
        limit = free_bytes(device) // _SHARE_OF_FREE if limit_bytes is None else limit_bytes
        measured = peak_bytes_of_each(_prepared(trials, limit, ready), device)
    for trial, level in zip(ready, measured, strict=True):
        trial.level_bytes = level.peak_bytes
    return trials


def _prepared(trials: Iterable[_Trial], limit_bytes: int, ready: list[_Trial]) -> Iterator[_Trial]:
    """The trials that can be tried, each made when asked for and noted in `ready`."""
    for trial in trials:
        if trial.prepare(limit_bytes):
            ready.append(trial)
            yield trial


@contextmanager
def aside(device: str) -> Iterator[None]:
    """Leave no trace on the caller: neither on random state nor on modes.

    Gradients are enabled because some kernels ask, and a training step's answer is yes; nothing is recorded, as no made-up tensor requires
    any.
    """
    kind = torch.device(device).type
    devices = [torch.device(device)] if kind == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.autocast(kind, enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what an operator says of made-up data concerns nobody
        yield


def needs_none(node: Node) -> bool:
    """Whether a node surely needs no workspace: it computes with numbers, or makes nothing but views."""
    if node.op.startswith("py."):
        return True
    made = [value for value in node.outputs if value is not None]
    if made and not node.writes and all(value.dtype == "scalar" for value in made):
        return True
    return bool(made) and not node.writes and not _made(node)


def _made(node: Node) -> set[Storage]:
    """The storages that a node makes: those of its outputs that are not views of its arguments."""
    return {value.storage for value in node.outputs if value is not None} - {value.storage for value in node.inputs}


def _made_bytes(node: Node) -> int:
    granule = 512 if device_of(node).startswith("cuda") else 1  # what the device's allocator rounds to
    return sum(-(-size // granule) * granule for size in _ints([storage.nbytes for storage in _made(node)]))


def device_of(node: Node) -> str:
    """Where the node's result is made, or else where it reads."""
    values = (*(value for value in node.results if value.dtype != "scalar"), *node.inputs)
    return values[0].storage.device if values else "cpu"


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


def _concrete(arg: Arg, make_tensor: MakeTensor) -> Any:
    if isinstance(arg, Value):
        return make_tensor(arg)
    if isinstance(arg, tuple):
        return [_concrete(item, make_tensor) for item in arg]
    if isinstance(arg, Atom):
        return torch.device(arg.name) if arg.kind == "device" else _of_torch(arg.name)
    if arg is None or isinstance(arg, (bool, int, float, complex, str)):
        return arg
    raise FormatError(f"expected concrete sizes, got {arg}: give its dimensions numbers first")


def _of_torch(name: str) -> Any:
    """`torch.float32` and the like, by name."""
    if not _IDENTIFIER.fullmatch(name):
        raise FormatError(f"expected a name such as 'float32', got {name!r}")
    try:
        return getattr(torch, name)
    except AttributeError as error:
        raise FormatError(f"expected a dtype, layout or memory format of torch {torch.__version__}, got {name!r}") from error


def _ints(sizes: Sequence[Size]) -> list[int]:
    for size in sizes:
        if not isinstance(size, int):
            raise FormatError(f"expected concrete sizes, got {size}: give its dimensions numbers first")
    return list(sizes)


def _extent(value: Value) -> int:
    """Elements from the first to the last that a value covers."""
    shape, stride = _ints(value.shape), _ints(value.stride)
    return 0 if 0 in shape else 1 + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))


def free_bytes(device: str) -> int:
    """Memory that the device could give now."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    told = re.search(r"MemAvailable:\s*(\d+) kB", info.read_text()) if info.exists() else None
    return int(told[1]) * 1024 if told else _FREE_WHERE_UNTOLD_BYTES


def circumstances(device: str) -> tuple[str, ...]:
    """What decides, besides the call, which kernels run and what they take."""
    return (
        f"torch {torch.__version__}",
        device_name(device),
        f"{torch.get_num_threads()} threads",
        f"oneDNN {torch.backends.mkldnn.enabled}",
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        f"matmul precision {torch.get_float32_matmul_precision()}",
    )
