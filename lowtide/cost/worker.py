"""The other end of `trial_process`: a process that does nothing but try calls, one at a time, as it is asked to.

Requests and replies are lines of JSON: data, never code. The operators' own input and output lead nowhere, so that nothing mixes with the
replies; the system ends the process when one call takes far too long, also where nobody is left to do it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeAlias

Reply: TypeAlias = dict[str, Any]
Take: TypeAlias = Callable[[], Reply]

_GRACE_S = 30  # beyond the limit, at which whoever asked ends the process


def serve(setup: dict[str, Any]) -> None:
    """Try calls until no more are asked for. `setup` is the first line that came in."""
    answer_all(setup, _warm_up, _answer)


def answer_all(setup: dict[str, Any], warm_up: Callable[[], object], answer: Callable[[dict[str, Any]], Reply]) -> None:
    """Answer requests until there are no more. The first reply says that what takes seconds once, `warm_up`, is done."""
    requests, replies = _private_channels()
    _no_core_dumps()
    warm_up()
    _reply(replies, {"ready": True})
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # errors up to here are read by whoever started this process
    for line in requests:
        with _time_limit(setup["limit_s"]):
            _reply(replies, answer(json.loads(line)))


def _warm_up() -> None:
    """Import torch, and load the profiler."""
    from lowtide.cost.trial import take_level

    ones = [{"made": ["float32", [1], [1], "cpu"]}]
    take_level({"values": ones, "steps": [{"op": "aten.relu.default", "args": [{"value": 0}], "kwargs": {}}]}, "cpu", True)


def _apply(settings: dict[str, Any], gradients: bool, device: str) -> None:
    """Take over the settings that decide which kernels run. Raises RuntimeError where they come to something else here."""
    import torch

    from lowtide.cost.operators import of_torch
    from lowtide.cost.trial import circumstances, on_gpu

    torch.set_num_threads(settings["threads"])
    torch.backends.mkldnn.set_flags(settings["onednn"])
    deterministic = settings["deterministic"], settings["warn_only"]
    if deterministic != (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()):
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])  # imports inductor, which takes a second
    torch.set_float32_matmul_precision(settings["precision"])
    torch.set_default_dtype(of_torch(settings["dtype"]))
    if on_gpu(device):
        for name, flag in settings["cudnn"].items():
            if getattr(torch.backends.cudnn, name) != flag:
                setattr(torch.backends.cudnn, name, flag)
    expected, got = settings["circumstances"], list(circumstances(device, gradients))
    if got != expected:
        raise RuntimeError(f"expected a process that works under {expected}, got one under {got}")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from lowtide.cost.trial import answer, on_gpu, take_launches, take_level, take_times

    device, recipes, gradients = request["device"], request["recipes"], request["gradients"]

    def take() -> dict[str, Any]:
        _apply(request["settings"], gradients, device)
        _have(request["operators"])
        if request["wanted"] == "level":
            return take_level(recipes[0], device, gradients)
        if request["wanted"] == "launches":
            return take_launches(recipes, device, gradients)
        return take_times(recipes, device, gradients, request["warm_up"])

    return _on_gpu(answer, take, device) if on_gpu(device) else answer(take)


def _on_gpu(answer: Callable[[Take], Reply], take: Take, device: str) -> Reply:
    """The answer; with "shut" where this process may not use the GPU, with "spoilt" where it can no more."""
    import torch

    from lowtide.cost.trial import finish

    try:
        finish(device)
    except Exception as error:  # torch has several ways to say that there is no GPU
        return {"failure": f"{type(error).__name__}: {error}", "shut": True}
    reply = answer(take)
    try:
        finish(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return {"failure": reply.get("failure", f"{type(error).__name__}: {error}"), "spoilt": True}
    return reply


def _have(operators: list[dict[str, Any]]) -> None:
    """Load the libraries and import the modules that define operators which are not torch's own. Raises FormatError where that fails."""
    from lowtide.cost.operators import operator
    from lowtide.errors import FormatError

    for each in operators:
        reason = _import(each)
        try:
            schema = str(operator(each["op"])._schema)
        except FormatError as error:
            raise FormatError(f"{error}; the process that measures finds nothing to import that does{reason}") from error
        if schema != each["schema"]:
            raise FormatError(f"expected {each['schema']} in the process that measures, got {schema}")


def _import(needed: dict[str, Any]) -> str:
    """Import what may define an operator; why something could not be, for a message."""
    import torch

    reasons = []
    for library in needed["libraries"]:
        try:
            torch.ops.load_library(library)
        except Exception as error:  # a library may raise anything, and another may define the operator: the reason is told if none does
            reasons.append(f"{library}: {error}")
    for module in needed["modules"]:
        try:
            importlib.import_module(module)
        except Exception as error:  # the same of a module
            reasons.append(f"{module}: {type(error).__name__}: {error}")
    return f" ({'; '.join(reasons)})" if reasons else ""


def _reply(replies: TextIO, answer: dict[str, Any]) -> None:
    replies.write(json.dumps(answer) + "\n")
    replies.flush()


def _private_channels() -> tuple[TextIO, TextIO]:
    """The pipes that this process was started with; standard input and output lead nowhere from now on."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "r+") as nowhere:
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
    return requests, replies


def _no_core_dumps() -> None:
    """A call that crashes leaves no file behind."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Past the limit the system ends the process, wherever it is."""
    if sys.platform == "win32":
        yield
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s + _GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
