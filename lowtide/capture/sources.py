"""Where a node comes from: the user's source line and module path, for backward nodes those of the forward operator."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from lowtide.ir.graph import Source

_OWN_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))  # not torchvision's
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_CALLS_THE_USER = str(Path(__file__).with_name("program.py"))


class Sources:
    """Follows a running program: `current()` says where it is."""

    def __init__(self) -> None:
        self._modules: list[str] = []
        self._by_sequence: dict[int, Source] = {}
        self._user_file: dict[str, bool] = {}

    def current(self) -> Source | None:
        """The source of the operator that runs now. In a backward pass, that of the forward operator whose gradient it computes."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._by_sequence.get(node._sequence_nr())
        source = self.of_frame(sys._getframe(1), _CALLS_THE_USER)
        if source is not None and torch.is_grad_enabled():
            # Autograd numbered this operator's backward node just before it came here (see torch.fx.proxy).
            self._by_sequence[torch.autograd._get_sequence_nr() - 1] = source
        return source

    def of_frame(self, frame: FrameType | None, last: str = "") -> Source | None:
        """The innermost frame that is neither torch's nor lowtide's nor Python's own, searched up to the first one of the file `last`."""
        while frame is not None:
            name = frame.f_code.co_filename
            if name == last:
                return None  # what called the capture is no part of the program: a plan must not depend on it
            if self._is_users(name):
                return Source(name, frame.f_lineno, self._modules[-1] if self._modules else "")
            frame = frame.f_back
        return None

    def _is_users(self, filename: str) -> bool:
        known = self._user_file.get(filename)
        if known is None:
            pythons = filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename
            known = not pythons and not filename.startswith(("<", *_OWN_FOLDERS))
            self._user_file[filename] = known
        return known

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Keep track of the module that runs, by hooks that are gone afterwards."""
        paths = {module: path for path, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(paths.get(module, type(module).__name__))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._modules.pop()

        entering = nn.modules.module.register_module_forward_pre_hook(enter)
        leaving = nn.modules.module.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()


def users_line() -> str:
    """The innermost line of the user's own code that is running, for messages: "train.py:12"; a guess at worst, never an error."""
    source = Sources().of_frame(sys._getframe(1))
    return f"{source.file}:{source.line}" if source is not None else "an unknown line"
