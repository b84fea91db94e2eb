"""Where a node comes from: the user's source line and module path, for backward nodes those of the forward operator."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

from lowtide.capture.care.turns import listed, replaced
from lowtide.ir.graph import Source

_OWN_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))  # not torchvision's
_SIZES_OF_TORCH = tuple(f"{_OWN_FOLDERS[0]}{name}" for name in ("__init__.py", "_tensor.py", f"fx{os.sep}"))  # what sizes are made of
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LONGEST_CODE = 80  # characters of code in a message
_CALLS_THE_USER = str(Path(__file__).with_name("program.py"))

Line: TypeAlias = "tuple[str, int]"  # file, line


class Sources:
    """Follows a running program: `current()` says where it is."""

    def __init__(self) -> None:
        self._modules: list[str] = []  # the paths of those that run
        self._by_sequence: dict[int, Source] = {}

    def current(self) -> Source | None:
        """The source of the operator that runs now. In a backward pass, that of the forward operator whose gradient it computes."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.of_gradient(node)
        source = self.of_frame(sys._getframe(1), _CALLS_THE_USER)
        if source is not None and torch.is_grad_enabled():
            # Autograd numbered this operator's backward node just before it came here (see torch.fx.proxy). One that has none comes behind.
            self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, source)
        return source

    def of_gradient(self, node: Any) -> Source | None:
        """The source of the forward operator whose gradient an autograd node computes."""
        return self._by_sequence.get(node._sequence_nr())

    def of_frame(self, frame: FrameType | None, last: str = "") -> Source | None:
        """The innermost frame that is neither torch's nor lowtide's nor Python's own, searched up to the first one of the file `last`."""
        while frame is not None:
            name = frame.f_code.co_filename
            if name == last:
                return None  # what called the capture is no part of the program: a plan must not depend on it
            if not _is_below(name):
                return Source(name, frame.f_lineno, self._modules[-1] if self._modules else "")
            frame = frame.f_back
        return None

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        paths = {module: path for path, module in model.named_modules()}

        def following(call: Callable[..., Any]) -> Callable[..., Any]:
            def within(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                self._modules.append(paths.get(module, type(module).__name__))
                try:
                    return call(module, *args, **kwargs)
                finally:
                    self._modules.pop()

            return within

        with listed(_followed, self), replaced(nn.Module, "_call_impl", following):
            yield


_followed: list[Sources] = []  # of the captures under way, the innermost last


def users_line() -> str:
    """The lines of the user's that are running, for messages (see `lines_text`); in a backward pass, where the forward operator was called.

    A guess at worst, never an error.
    """
    if _followed and torch._C._current_autograd_node() is not None and (source := _followed[-1].current()) is not None:
        return f"{source.file}:{source.line}"
    frame = sys._getframe(1)
    return lines_text(_until_the_capture(frame)) or lines_text(_lines(walk_stack(frame))) or "an unknown line"


def users_code() -> str:
    """What the innermost of the user's frames is about to compute, such as "`float(x.shape[1])`"; "" where that is not known."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_below(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or torch._C._current_autograd_node() is not None or not hasattr(frame.f_code, "co_positions"):  # from Python 3.11 on
        return ""
    first, last, begin, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    text = linecache.getline(frame.f_code.co_filename, first or 0).encode()[begin:end].decode(errors="replace")
    return f"`{text}`" if first == last and 0 < len(text) <= _LONGEST_CODE else ""


def asker(frame: FrameType) -> str:
    """The file of whoever calls Python's own library there; "" for torch, lowtide, and what happens while a module is imported."""
    files = [file for file, _ in _until_the_capture(frame)]
    first = next((each for each in files if each.startswith((*_OWN_FOLDERS, *_TYPED_IN)) or not _is_below(each)), _OWN_FOLDERS[0])
    return "" if first.startswith(_OWN_FOLDERS) or any(each.startswith("<frozen importlib") for each in files) else first


def is_called_by_user(frame: FrameType) -> bool:
    """Whether the user's own code calls Python's own library there."""
    return (file := asker(frame)).startswith(_TYPED_IN) or (file != "" and not is_library(file))


def is_asked_by_user() -> bool:
    """Whether the number of a symbolic size is wanted by the user's own code, not by torch's."""
    above = (file for file, _ in _lines(walk_stack(sys._getframe(1))) if not file.startswith((_OWN_FOLDERS[1], *_SIZES_OF_TORCH)))
    return not _is_below(next(above, ""))


def line_of(error: BaseException) -> str:
    """The lines of the user's that an error came through; "" where it came through none."""
    return lines_text(reversed([*_lines(walk_tb(error.__traceback__))]))


def lines_text(lines: Iterable[Line]) -> str:
    """Of lines from the innermost outward: "model.py:40", or "model.py:40, called at train.py:12".

    The first is the innermost that is not torch's, lowtide's or Python's own, the second the outermost that is no library's at all.
    """
    above = [line for line in lines if not _is_below(line[0])]
    if not above:
        return ""
    own = [line for line in above if not is_library(line[0])]
    innermost, outermost = above[0], own[-1] if own else above[0]
    text = f"{innermost[0]}:{innermost[1]}"
    return text if outermost == innermost else f"{text}, called at {outermost[0]}:{outermost[1]}"


def _lines(frames: Iterable[tuple[FrameType, int]]) -> Iterator[Line]:
    return ((frame.f_code.co_filename, line) for frame, line in frames)


def _until_the_capture(frame: FrameType) -> Iterator[Line]:
    """The lines of the program: up to the file that calls it."""
    return itertools.takewhile(lambda line: line[0] != _CALLS_THE_USER, _lines(walk_stack(frame)))


@functools.cache
def _is_below(filename: str) -> bool:
    """Whether a file is torch's, lowtide's or Python's own, or none at all."""
    pythons = filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename
    return pythons or filename.startswith(("<", *_OWN_FOLDERS))


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a file was installed, not written here."""
    return _is_below(filename) or f"site-packages{os.sep}" in filename or f"dist-packages{os.sep}" in filename


_TYPED_IN = ("<string>", "<stdin>", "<ipython", "<doctest", "<python-input")


def is_users(function: Any) -> bool:
    """Whether a function is the user's own: of no library, though it may lie in no file."""
    file = _file_of(function)
    if file is not None and file.startswith(_TYPED_IN):
        file = getattr(function, "__globals__", {}).get("__file__")  # of the module that made it
    return _is_users_file(file)


def is_written_by_user(item: Any) -> bool:
    """Whether a module, or the module of a class, is no library's and not Python's own.

    One that lies in no file is the user's (a notebook), unless it is part of a library, which another language makes.
    """
    name = item.__name__ if isinstance(item, ModuleType) else str(item.__module__)
    file = getattr(item if isinstance(item, ModuleType) else sys.modules.get(name), "__file__", None)
    while file is None and "." in name:
        name = name.rpartition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
    return name not in sys.builtin_module_names and _is_users_file(file)


def _is_users_file(file: str | None) -> bool:
    return file is None or file.startswith(_TYPED_IN) or not is_library(file)


def is_torchs(function: Any) -> bool:
    """Whether a function is of torch's, lowtide's or Python's own files."""
    file = _file_of(function)
    return file is not None and _is_below(file)


def _file_of(function: Any) -> str | None:
    """The file that a function was written in; None where it has none, as methods of lists have not."""
    bare = getattr(function, "func", function)  # of a functools.partial
    code = getattr(getattr(bare, "__func__", bare), "__code__", None)
    return None if code is None else code.co_filename
