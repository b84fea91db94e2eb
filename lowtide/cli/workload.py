"""What `lowtide optimize` and `lowtide explain` are to work on: what a function of the user's returns.

The function may take `batch_size` and `device`; `--batch-size` and `--fake` say what it is given for them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from lowtide.api.compare import Workload, workload_of
from lowtide.cli.output import refuse
from lowtide.cli.users_code import users_code

_MODULE = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")


def builder(spec: str, batch_size: int | None, fake: bool) -> Callable[[], Workload]:
    """A function that makes the workload anew at each call: eager PyTorch and lowtide must start from the same weights.

    The user's function is given `batch_size` where one is asked for, and `device="meta"` for a fake one. Exits where it takes no such
    argument.
    """
    function = _function(spec)
    given: dict[str, object] = {}
    if batch_size is not None:
        given["batch_size"] = batch_size
    if fake:
        given["device"] = "meta"
    for name, option in (("batch_size", "--batch-size"), ("device", "--fake")):
        if name in given and callable(function):
            _check_takes(function, name, f"{option}: {spec}")

    def build() -> Workload:
        with users_code(spec, alone=True):
            work = workload_of(partial(function, **given) if callable(function) else function)
            if fake:
                _check_fake(work, spec)
            return work

    return build


def dynamic_of(text: str | None) -> Any:
    """What `--dynamic` says, as `optimize` takes it: "auto", or JSON with arguments' names or numbers as keys. Exits for anything else."""
    if text is None or text == "auto":
        return text
    try:
        said = json.loads(text)
        return {_key(name): {int(dim): each for dim, each in extents.items()} for name, extents in said.items()}
    except (ValueError, AttributeError) as error:
        refuse(f"""--dynamic: expected "auto" or JSON such as '{{"input_ids": {{"1": ["length", 16, 2048]}}}}', got {text!r} ({error})""")


def _key(name: str) -> str | int:
    return int(name) if name.isdecimal() else name


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


def _check_fake(work: Workload, spec: str) -> None:
    """Exits unless the parameters of a fake model take no memory."""
    real = next((name for name, parameter in work.model.named_parameters() if not parameter.is_meta), None)
    if real is not None:
        refuse(f'--fake: {spec} was given device="meta" and has to make its model there; its parameter {real} is elsewhere')


def _function(spec: str) -> Callable[[], object]:
    """The function that a text names. Its module is looked for in the working directory first."""
    module_name, _, function_name = spec.partition(":")
    if not _MODULE.fullmatch(module_name) or not function_name.isidentifier():
        refuse(f"expected module:function, both as Python would import them, such as train:build; got {spec!r}")
    sys.path.insert(0, os.getcwd())
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
