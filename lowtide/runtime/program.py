"""A lowered program, compiled and ready to run; and how torch.compile leaves such functions as they are.

That is told without importing what torch.compile consists of before anybody compiles.
"""

from __future__ import annotations

import ast
import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.compiler import is_dynamo_compiling

from lowtide.runtime.copies import HostMemory

P = ParamSpec("P")
T = TypeVar("T")
Result = TypeVar("Result")


def undisturbed(function: Callable[P, T]) -> Callable[P, T]:
    """The function, neither traced nor compiled where a compiled one calls it: a program is a program already."""
    disabled: Callable[P, T] | None = None

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules or (not is_dynamo_compiling() and get_eval_frame_callback() is None):
            return function(*args, **kwargs)  # nobody compiles: to switch that off takes longer than to look
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return called


_serial = count()
_AT, _RESULT = "is told at a node", "is given what it made"  # no variables of a program's
_following = threading.local()


@dataclass(frozen=True)
class NodeListener:
    at: Callable[[int], None]  # told which node of their order comes next, before it runs
    result: Callable[[Any], Any]  # given each result, and gives what goes on in its place
    nodes: frozenset[int]  # whose results these are

    def along(self, call: Callable[[], T]) -> T:
        """A call's result, as this thread runs it."""
        before = getattr(_following, "who", None)
        try:
            _following.who = self
            return call()
        finally:
            _following.who = before


@dataclass(frozen=True)
class Program:
    """Source text that defines `step(inputs) -> outputs`, as `lower` leaves it. Runs beneath autograd and without autocast.

    A program that stores and loads is `step(inputs, host)`, and needs the host's memory.
    Some kernels ask whether gradients are enabled (oneDNN's recurrent layers keep a workspace for the backward pass only then), so the
    program runs with the setting under which it was captured, while autograd itself is passed by.
    """

    source: str
    gradients: bool = True
    autocast_devices: tuple[str, ...] = ("cpu",)  # where autocast would otherwise reach into the operators
    host: HostMemory | None = None
    regions: Mapping[str, Callable[..., Sequence[Any]]] = field(default_factory=dict, compare=False)  # generated kernels, by first result
    host_bytes: int | None = None  # that all programs on the device may have pinned while this one runs
    positions: Callable[[], Sequence[int]] = field(default=tuple, compare=False)  # by line, in the order of its nodes; -1 is none
    _step: Callable[..., list[Any]] = field(init=False, repr=False, compare=False)
    _codes: list[CodeType] = field(init=False, repr=False, compare=False)  # of that, and of the one that was followed last

    def __post_init__(self) -> None:
        filename = f"<lowtide step {next(_serial)}>"
        namespace: dict[str, Any] = {"regions": self.regions}
        exec(compile(self.source, filename, "exec"), namespace)
        # Tracebacks and debuggers find the program's lines here, for as long as there is a program.
        weakref.finalize(self, linecache.cache.pop, filename, None)
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        object.__setattr__(self, "_step", namespace.pop("step"))
        object.__setattr__(self, "_codes", [] if self._step is None else [self._step.__code__])  # None: the source is another's

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run on the graph's inputs, tensors and numbers in their order; the graph's outputs."""
        return self.beneath(self._run, inputs)

    def beneath(self, run: Callable[[T], Result], inputs: T) -> Result:
        """A call's result, beneath autograd and without autocast, as the program runs."""
        enabled = [device for device in self.autocast_devices if torch.is_autocast_enabled(device)]
        for device in enabled:
            torch.set_autocast_enabled(device, False)
        try:
            if self.gradients and torch.is_inference_mode_enabled():
                with torch.inference_mode(False):  # what is made for the optimizer stays beyond that mode
                    return self._beneath_autograd(run, inputs)
            return self._beneath_autograd(run, inputs)
        finally:
            for device in enabled:
                torch.set_autocast_enabled(device, True)

    def _beneath_autograd(self, run: Callable[[T], Result], inputs: T) -> Result:
        with torch.set_grad_enabled(self.gradients), torch._C._AutoDispatchBelowAutograd():
            return run(inputs)

    def line_of(self, error: BaseException) -> int:
        """The line of the source at which a run has failed, the first is 1; 0 where it was none of them."""
        line, trace = 0, error.__traceback__
        while trace is not None:
            if any(trace.tb_frame.f_code is each for each in self._codes):
                line = trace.tb_lineno
            trace = trace.tb_next
        return line

    def _run(self, inputs: Sequence[Any]) -> list[Any]:
        listener = getattr(_following, "who", None)
        step = self._step if listener is None else self._followed(listener)
        if self.host is None:
            return step(inputs)
        transfers = self.host.transfers(self.host_bytes)
        try:
            try:
                with transfers:
                    return step(inputs, transfers)
            finally:
                transfers.last_waits[0]()
        finally:
            transfers.last_waits[1]()

    def _followed(self, listener: NodeListener) -> Callable[..., list[Any]]:
        """The same function, which a listener goes along with; its lines are those of the source."""
        tree, positions, latest = ast.parse(self.source), self.positions(), -1
        step = next(each for each in tree.body if isinstance(each, ast.FunctionDef))
        body = list[ast.stmt]()
        for statement in step.body:
            position = positions[statement.lineno - 1] if positions else -1
            if position > latest:
                latest = position
                body.append(_like(statement, ast.Expr(_call(_AT, ast.Constant(position)))))
            body.append(statement)
            if position in listener.nodes and isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                names = (each for target in statement.targets for each in ast.walk(target) if isinstance(each, ast.Name))
                for each in names:
                    exchange = ast.Assign([ast.Name(each.id, ast.Store())], _call(_RESULT, ast.Name(each.id, ast.Load())))
                    body.append(_like(statement, exchange))
        step.body = body
        namespace: dict[str, Any] = {"regions": self.regions, _AT: listener.at, _RESULT: listener.result}
        exec(compile(tree, self._codes[0].co_filename, "exec"), namespace)
        followed: Callable[..., list[Any]] = namespace["step"]
        self._codes[1:] = [followed.__code__]
        return followed


def _call(function: str, argument: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), [argument], [])


def _like(statement: ast.stmt, other: ast.stmt) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(other, statement))
