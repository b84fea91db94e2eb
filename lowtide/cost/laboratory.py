"""What calls take and give, tried on made-up data once and remembered on disk.

    takes   a call: a node, and the nodes that make what it reads
    leaves  the highest level of memory during the call, what its results look like, how long it takes; or why that is unknown

Each distinct call is tried once, alone, and remembered under the circumstances that decide which kernels run. Where `tries` is off nothing
is run, and what is remembered still serves. Trials in a process of their own may be begun ahead, while whoever wants to know goes on.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch

from lowtide.base import VERSION
from lowtide.base.messages import warn
from lowtide.cost import trial
from lowtide.cost.cache import Cache
from lowtide.cost.element_wise import told_by_few
from lowtide.cost.trials import Makers, Trials, argument_bytes, makers_of, recipe, signature
from lowtide.errors import FormatError
from lowtide.ir import result_specs as specs
from lowtide.ir.graph import Atom, Node
from lowtide.kernels import made_of
from lowtide.plan.contents import Provenance

_SHARE_OF_FREE = 4  # one call may take a quarter of the memory that is free now
SHOWN = 160  # characters of a call that a warning shows


TrialListener: TypeAlias = Callable[[float], None]
GpuClocks: TypeAlias = tuple[int, int, int]  # nanoseconds of a device beside the host in warm and in cold caches, and of the host
_Reply: TypeAlias = dict[str, Any]  # what a trial gives, or {"failure": why it gives nothing}


@dataclass(frozen=True)
class Unmeasured:
    """A call that was not measured."""

    call: str  # as `signature` writes it
    reason: str  # the error that it raised, the limit that it passes, or how it ended the process that tried it
    of_memory: bool = False  # it needs more memory than there is, or than one call may take
    ended: bool = False  # there was no process to try it in any more, mostly since it ended it


@dataclass(frozen=True)
class Call:
    node: Node
    before: Sequence[Node] = ()  # nodes that make what it reads, as far as they are known
    makes_bytes: int = 0  # what its results are thought to take

    @cached_property
    def text(self) -> str:
        """The call as one line; of an operator of lowtide's own with what it is made of, as that may change."""
        return signature(self.node) + (f" of {made_of()}" if self.node.op.startswith("lowtide.") else "")

    @cached_property
    def nbytes(self) -> int:
        """Of its arguments and results. Raises FormatError for a symbolic size."""
        return argument_bytes(self.node) + self.makes_bytes

    @cached_property
    def device(self) -> str:
        """Where its results are made, or else where it reads."""
        return device_of(self.node)


class Laboratory:
    """A context manager, at whose end what is new is written down, and what failed in a way that nobody expects is told, once.

    gradients: whether the program that is asked for runs with gradients enabled; some kernels ask.
    """

    def __init__(self, *, gradients: bool = True, remember: bool = True, tries: bool = True) -> None:
        self.gradients, self.remember = gradients, remember
        self.failures: dict[str, Unmeasured] = {}
        self.tried = 0  # calls whose level and results were found now
        self.rough_ns: dict[str, int] = {}  # by such a call, how long it took while its allocations were watched: too long for a short one
        self.listener: TrialListener | None = None  # hears which share of what was asked for is done
        self._tries, self._trials = tries, Trials(gradients)
        self._shelves: dict[str, _Shelf] = {}
        self._ahead: dict[str, Future[_Reply]] = {}  # of calls whose trials were begun
        self._behind: ThreadPoolExecutor | None = None  # the thread that asks for them

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, raised: type[BaseException] | None = None, *_: object) -> None:
        if self._behind is not None:
            self._behind.shutdown(wait=False, cancel_futures=True)
            if raised and not all(future.done() for future in self._ahead.values()):  # nobody wants to know any more
                self._trials.stop()
            self._behind.shutdown()
        self._trials.close()
        self.keep()
        self._tell()

    def expect(self, device: str) -> None:
        """Where no call on the host is known yet, start the process that tries them while the caller goes on."""
        if self._tries and not trial.on_gpu(device) and not self._shelf(device).levels:
            self._behind = self._behind or ThreadPoolExecutor(1, "lowtide-trials")
            self._ahead[""] = self._behind.submit(self._trials.begin)

    def begin(self, call: Call) -> bool:
        """Have a call tried while the caller goes on, if it is not known yet; whether that is so. Not in the caller's own process."""
        shelf = self._shelf(call.device)
        if not self._tries or self._trials.is_inside(call.device) or call.text in self.failures or shelf.knows(call.text):
            return False
        if call.text not in self._ahead:
            self._behind = self._behind or ThreadPoolExecutor(1, "lowtide-trials")
            self._ahead[call.text] = self._behind.submit(self._level_of, call, makers_of(call.before), ahead=True)
        return True

    def level_bytes(self, call: Call) -> int | None:
        """The highest level of the allocator during a call above that at its start; None where it is unknown."""
        return self._shelf(call.device).levels[call.text] if self._knows(call) else None

    def results(self, call: Call) -> specs.Results | None:
        """What a call's results look like; None where that is unknown."""
        return specs.parse(self._shelf(call.device).results[call.text]) if self._knows(call) else None

    def launches_ns(self, calls: Sequence[Call]) -> list[GpuClocks | None]:
        """What one run of each call takes a device beside the host, in warm and in cold caches, and takes the host; all of one device.

        None of what cannot be run.
        """
        alone = (self._alone(call, self._trials.launches) for call in calls)
        return self._together(calls, self._trials.launches) or [None if ns is None else tuple(ns) for ns in alone]

    def times_ns(self, calls: Sequence[Call], *, warm_up: bool) -> list[int | None]:
        """The time of one run of each call, all of one device; None of what cannot be run.

        They are run one after another; where that fails for any, each by itself.
        """
        run = partial(self._trials.times, warm_up=warm_up)
        alone = (self._alone(call, run) for call in calls)
        return self._together(calls, run) or [None if ns is None else int(ns) for ns in alone]

    def _together(self, calls: Sequence[Call], run: Callable[[list[dict[str, Any]], str], _Reply]) -> list[Any] | None:
        """What a trial of several calls gives; None where they cannot all be run so."""
        if len(calls) < 2 or not self._tries or any(call.text in self.failures for call in calls):
            return None
        try:
            for call in calls:
                _fit(call)
            recipes = [recipe(call.node, makers_of(call.before)) for call in calls]
        except (FormatError, MemoryError):
            return None
        reply = self._in_turn(lambda: run(recipes, calls[0].device))
        return None if "failure" in reply else list(reply["ns"])

    def _alone(self, call: Call, run: Callable[[list[dict[str, Any]], str], _Reply]) -> Any:
        """What a trial of one call gives; None of what cannot be run."""
        reply = self._got(call, lambda: _reply(call, makers_of(call.before), lambda steps: run([steps], call.device)))
        return None if reply is None else reply["ns"][0]

    def tell(self, share: float) -> None:
        if self.listener is not None:
            self.listener(share)

    def circumstances(self, device: str) -> tuple[str, ...]:
        """What decides, besides the call, which kernels run and what they take."""
        return trial.circumstances(device, self.gradients)

    def keep(self) -> None:
        """Write down what is new. Of what another process tried meanwhile its numbers count, so that all who share the file agree."""
        for shelf in self._shelves.values():
            shelf.keep()

    def _knows(self, call: Call) -> bool:
        """Whether a call is known, now that it has been tried where it was not."""
        shelf = self._shelf(call.device)
        if not self._tries and not shelf.levels:  # spelling calls takes long
            return False
        if shelf.knows(call.text):
            return True

        def run() -> _Reply:
            ahead = self._ahead.get(call.text)
            reply = None if ahead is None else ahead.result()
            return self._level_of(call, makers_of(call.before)) if reply is None or "inside" in reply else reply

        reply = self._got(call, run)
        if reply is None:
            return False
        self.tried += 1
        if "ns" in reply:  # few elements tell of bytes alone
            self.rough_ns[call.text] = reply["ns"]
        shelf.note(call.text, reply["level_bytes"], reply["results"])
        return True

    def _level_of(self, call: Call, makers: Makers, *, ahead: bool = False) -> _Reply:
        return _reply(call, makers, lambda steps: self._trials.level(steps, call.device, ahead=ahead), by_few=True)

    def _got(self, call: Call, run: Callable[[], _Reply]) -> _Reply | None:
        """What a trial gives; None, and the failure noted, where it gives nothing."""
        if not self._tries or call.text in self.failures:
            return None
        reply = self._in_turn(run)
        if "failure" not in reply:
            return reply
        self.failures[call.text] = Unmeasured(call.text, reply["failure"], reply.get("of_memory", False), reply.get("ended", False))
        return None

    def _in_turn(self, run: Callable[[], _Reply]) -> _Reply:
        """What a trial gives when those are over that were begun before: there is one process for all, or none but this one."""
        wait(self._ahead.values())
        reply = run()
        return run() if "inside" in reply else reply

    def _shelf(self, device: str) -> _Shelf:
        if device not in self._shelves:
            is_here = not trial.on_gpu(device) or torch.cuda.is_available()
            self._shelves[device] = _Shelf.of(self.circumstances(device) if self.remember and is_here else None)
        return self._shelves[device]

    def _tell(self) -> None:
        ended = [each for each in self.failures.values() if each.ended]
        if ended:
            first, more = ended[0], f", and {len(ended) - 1} more" if len(ended) > 1 else ""
            warn(
                f"cannot measure {first.call[:SHOWN]} ({first.reason}){more}: temporaries are taken to be none, and results to look as "
                "torch's fake kernels say",
                RuntimeWarning,
            )


@dataclass
class _Shelf:
    """What is known of the calls on one device."""

    levels: dict[str, int]  # bytes, by call
    results: dict[str, str]  # as `specs` writes them
    caches: tuple[Cache, Cache] | None  # where that is kept
    new: set[str] = field(default_factory=set)  # not there yet

    @classmethod
    def of(cls, circumstances: tuple[str, ...] | None) -> _Shelf:
        if circumstances is None:
            return cls({}, {}, None)
        levels, results = Cache("workspaces", circumstances), Cache("results", circumstances, parse=specs.parse)
        return cls(levels.load(), results.load(), (levels, results))

    def knows(self, call: str) -> bool:
        return call in self.levels and call in self.results

    def note(self, call: str, level_bytes: int, results: str) -> None:
        self.levels[call], self.results[call] = level_bytes, results
        self.new.add(call)

    def keep(self) -> None:
        if self.caches is not None and self.new:
            levels, results = self.caches
            self.levels |= levels.merge({call: self.levels[call] for call in self.new})
            self.results |= results.merge({call: self.results[call] for call in self.new})
        self.new.clear()


def _reply(call: Call, makers: Makers, run: Callable[[dict[str, Any]], _Reply], *, by_few: bool = False) -> _Reply:
    """What a trial gives, or {"failure": ...}. `by_few`: one of few elements tells of many, as of bytes and looks, not of times."""
    try:
        reply = told_by_few(call.node, lambda node: run(recipe(node))) if by_few else None
        if reply is None:
            _fit(call)
            reply = _first_that_works(call, makers, run)
        if "results" in reply:
            reply["results"] = specs.to_text(tuple(map(specs.of_fields, reply["results"])))
    except (FormatError, MemoryError, ValueError) as error:
        return {"failure": f"{type(error).__name__}: {error}", "of_memory": isinstance(error, MemoryError)}
    return reply


def _first_that_works(call: Call, makers: Makers, run: Callable[[dict[str, Any]], _Reply]) -> _Reply:
    """The call on made-up data, or else, as that does not suit every operator, on what the nodes before it make."""
    plain = recipe(call.node, makers)
    reply = run(plain)
    if "failure" not in reply or reply.get("of_memory") or reply.get("late") or reply.get("inside"):
        return reply
    whole = recipe(call.node, makers, with_makers=True)
    again = run(whole) if whole != plain else reply
    return reply if "failure" in again else again


def _fit(call: Call) -> None:
    """Raises MemoryError where a call's arguments and results take more than they may, FormatError for a symbolic size."""
    needed = call.nbytes
    limit = trial.free_bytes(call.device) // _SHARE_OF_FREE
    if needed > limit:
        raise MemoryError(f"arguments and results take {needed} bytes, a call to be tried may take {limit}, a quarter of what is free now")


def device_of(node: Node) -> str:
    """Where a node's result is made: where its values lie, or else, where it makes something from nothing, what its arguments say."""
    values = (*(value for value in node.results if value.dtype != "scalar"), *(value for value in node.inputs if value.dtype != "scalar"))
    if values:
        return values[0].storage.device
    devices = [arg.name for arg in (*node.args, *(arg for _, arg in node.kwargs)) if isinstance(arg, Atom) and arg.kind == "device"]
    return devices[0] if devices else "cpu"


def provenance_here(device: str) -> Provenance:
    return Provenance(VERSION, torch.__version__, device, platform.python_version(), torch.get_num_threads())
