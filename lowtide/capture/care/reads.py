"""Which attributes of modules a program reads while it runs: nothing else that a module holds can change what it does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

_READ_ALL = frozenset({"__dict__", "__getstate__", "__deepcopy__", "__reduce_ex__", "__reduce__"})
_NOT_THE_PROGRAM = (torch_module.__file__, str(Path(__file__).parents[2]))  # they look at a module's tables on its behalf
_lock = threading.Lock()
_active: list[AttributeReads] = []


class AttributeReads:
    """The names that were read, by module. A module of which everything was read has "__dict__" among its names."""

    def __init__(self) -> None:
        self._names: dict[int, set[str]] = {}

    def note(self, module: nn.Module, name: str, reader: str) -> None:
        """A name was read, in the file `reader`."""
        if name in _READ_ALL:
            if reader.startswith(_NOT_THE_PROGRAM):
                return
            name = "__dict__"
        self._names.setdefault(id(module), set()).add(name)

    def pairs(self, model: nn.Module) -> frozenset[tuple[str, str]]:
        """All of them in a model, as (path of the module, name)."""
        return frozenset((path, name) for path, module in model.named_modules() for name in self._names.get(id(module), ()))


@contextmanager
def following_reads() -> Iterator[AttributeReads]:
    """Note what is read of any module. Every read goes through `nn.Module` meanwhile, by `getattr` as well as by a dot."""
    reads = AttributeReads()
    with _lock:
        if not _active:
            nn.Module.__getattribute__ = _noting  # type: ignore[method-assign, assignment]
        _active.append(reads)
    try:
        yield reads
    finally:
        with _lock:
            _active.remove(reads)
            if not _active:
                del nn.Module.__getattribute__


def _noting(self: nn.Module, name: str) -> Any:
    reader = sys._getframe(1).f_code.co_filename
    for reads in _active:
        reads.note(self, name, reader)
    return super(nn.Module, self).__getattribute__(name)
