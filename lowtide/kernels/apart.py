"""Operators of other libraries that write into their arguments, with some of these made anew: a graph writes each storage once.

Kernels of one's own and quantising optimizers have such operators, and no form that returns what it would write.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch

from lowtide.kernels.library import define

_PREFIX = "apart_"
_NAME = re.compile(rf"lowtide\.{_PREFIX}(\d+(?:_\d+)*)__(\w+?)__(\w+)__(\w+?)\.default", re.ASCII)


def origin(name: str) -> tuple[str, tuple[int, ...]] | None:
    """The operator that such a one was made of, "mine.update.default", and the positions; None for the name of another."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    positions, *names = match.groups()
    return ".".join(names), tuple(map(int, positions.split("_")))


@cache
def apart(op: Any, positions: tuple[int, ...]) -> Any:
    """The operator that takes what `op` takes, leaves the tensors at `positions` as they are, and returns what it would have written there.

    None for an operator of torch's own, and for one that returns more than what it writes.
    """
    schema = op._schema
    if op.namespace in ("aten", "prims", "lowtide") or any(each.alias_info is None for each in schema.returns):
        return None
    arguments = str(schema).split(" -> ")[0].partition("(")[2]
    for at in positions:
        argument = schema.arguments[at]
        if argument.kwarg_only or str(argument.type) not in ("Tensor", "Optional[Tensor]"):
            return None
        arguments = re.sub(rf"Tensor\(\w+!\)(\??) {argument.name}\b", rf"Tensor\1 {argument.name}", arguments)
    name = f"{_PREFIX}{'_'.join(map(str, positions))}__{op.namespace}__{op._opname}__{op._overloadname}"

    def computed(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for at in positions:
            given[at] = given[at].clone(memory_format=torch.preserve_format)
        op(*given, **kwargs)
        written = [given[at] for at in positions]
        return written if len(written) > 1 else written[0]

    results = ", ".join(["Tensor"] * len(positions))
    define(f"{name}({arguments} -> {results if len(positions) == 1 else f'({results})'}", computed)
    return getattr(torch.ops.lowtide, name).default
