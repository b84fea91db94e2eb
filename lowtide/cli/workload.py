"""What `lowtide optimize` is to work on: a function of the user's, or a model of the bench."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable

from lowtide.api.compare import Workload, plain_sgd, workload_of
from lowtide.cli.output import refuse
from lowtide.cli.users_code import users_code

_MODULE = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")


def builder(spec: str, batch_size: int, fake: bool) -> Callable[[], Workload]:
    """A function that makes the workload anew at each call: eager PyTorch and lowtide must start from the same weights."""
    if ":" not in spec:
        return lambda: _bench_workload(spec, batch_size, fake)
    if fake:
        refuse(f"--fake is for models of the bench; {spec} decides itself where its model lies")
    function = _function(spec)

    def build() -> Workload:
        with users_code(spec, alone=True):
            return workload_of(function)

    return build


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


def _bench_workload(name: str, batch_size: int, fake: bool) -> Workload:
    sys.path.insert(0, os.getcwd())
    try:
        models = importlib.import_module("bench.models")
    except ImportError as error:
        refuse(
            f"{name!r} is no module:function, and the bench's models cannot be imported ({error}): run inside a checkout, "
            "with lowtide[bench] installed"
        )
    try:
        made = models.get(name).build(batch_size, "meta" if fake else "cpu")
    except KeyError as error:
        refuse(str(error.args[0]))
    return Workload(made.model, made.batch, made.loss, plain_sgd(made.model))
