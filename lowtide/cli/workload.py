"""What `lowtide optimize`, `explain`, `needs` and `compile` are to work on: what a function of the user's returns.

The function may take `batch_size` and `device`; `--batch-size` and `--fake` say what it is given for them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import typer

from lowtide.api.compare import Workload, workload_of
from lowtide.cli.exit import interruptible
from lowtide.cli.output import refuse
from lowtide.errors import LowtideError

_LIBRARIES = {
    Path(__file__).resolve().parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")),
}
_MOST_LINES = 6


@contextmanager
def users_code(spec: str, *, alone: bool = False) -> Iterator[None]:
    """What the user's code raises in here is told as an error of that code; `alone`: nothing else runs in here.

    What lowtide refuses, and errors of its own, come out as they are. An interrupt is a KeyboardInterrupt.
    """
    try:
        with interruptible():
            yield
    except (LowtideError, typer.Exit):
        raise
    except SystemExit as error:
        refuse(f"{spec}: expected code that returns, got one that ends the program with exit code {error.code}", *_lines(error))
    except Exception as error:  # the user's code may raise anything: it is the user's error, told with their lines
        lines = _lines(error)
        if not lines and not alone:
            raise
        refuse(f"{spec}: {type(error).__name__}: {error}", *lines)


def _lines(error: BaseException) -> list[str]:
    """The user's own lines on the way to an error, the innermost last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    lines = [f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames]
    if isinstance(error, SyntaxError) and error.filename is not None:
        lines.append(f"{error.filename}:{error.lineno}: {(error.text or '').strip()}")
    return lines[-_MOST_LINES:]


def _is_users(filename: str) -> bool:
    path = Path(filename).resolve()
    return not filename.startswith("<") and not any(folder in path.parents for folder in _LIBRARIES)


_MODULE = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")


def builder(spec: str, batch_size: int | None, fake: bool, asks_fake: str = "--fake") -> Callable[[], Workload]:
    """A function that makes the workload anew at each call: eager PyTorch and lowtide must start from the same weights.

    The user's function is given `batch_size` where one is asked for, and `device="meta"` for a fake one, which `asks_fake` asks for.
    Exits where it takes no such argument.
    """
    function = _function(spec)
    given: dict[str, object] = {}
    if batch_size is not None:
        given["batch_size"] = batch_size
    if fake:
        given["device"] = "meta"
    for name, option in (("batch_size", "--batch-size"), ("device", asks_fake)):
        if name in given and callable(function):
            _check_takes(function, name, f"{option}: {spec}")

    def build() -> Workload:
        with users_code(spec, alone=True):
            work = workload_of(partial(function, **given) if callable(function) else function)
            if fake:
                _check_fake(work, f"{asks_fake}: {spec}")
            return work

    return build


def dynamic_of(text: str | None) -> Any:
    """What `--dynamic` says, as `optimize` takes it: "auto", or JSON with arguments' names or numbers as keys. Exits for anything else."""
    if text is None or text == "auto":
        return text
    try:
        entries = json.loads(text)
        return {int(key) if key.isdecimal() else key: {int(dim): each for dim, each in extents.items()} for key, extents in entries.items()}
    except (ValueError, AttributeError) as error:
        refuse(f"""--dynamic: expected "auto" or JSON such as '{{"input_ids": {{"1": ["length", 16, 2048]}}}}', got {text!r} ({error})""")


def _check_takes(function: Callable[..., object], name: str, what: str) -> None:
    """Exits unless a function can be given an argument by this name."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin
        parameters = {}
    named = name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    if not named and not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        takes = f"takes only {', '.join(parameters)}" if parameters else "takes no arguments"
        refuse(f"{what} has to take an argument `{name}` for that; it {takes}")


def _check_fake(work: Workload, what: str) -> None:
    """Exits unless the parameters of a fake model take no memory."""
    real = next((name for name, parameter in work.model.named_parameters() if not parameter.is_meta), None)
    if real is not None:
        refuse(f'{what} was given device="meta" and has to make its model there; its parameter {real} is elsewhere')


def _function(spec: str) -> Callable[[], object]:
    """The function that a text names. Its module is looked for in the working directory first; that of a file, in the file's folder."""
    where, _, function_name = spec.partition(":")
    file = Path(where) if where.endswith(".py") else None
    module_name = where if file is None else file.stem
    if not _MODULE.fullmatch(module_name) or not function_name.isidentifier():
        refuse(f"expected module:function, both as Python would import them, such as train:build or train.py:build; got {spec!r}")
    if file is not None and not file.is_file():
        refuse(f"cannot find {spec}: no such file: {file}")
    sys.path.insert(0, os.getcwd() if file is None else str(file.parent.absolute()))
    with users_code(spec, alone=True):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):  # one that the user's own code imports
                raise
            refuse(f"cannot find {spec}: {error}")
    try:
        function: Callable[[], object] = getattr(module, function_name)
    except AttributeError as error:
        refuse(f"cannot find {spec}: {error}")
    return function
