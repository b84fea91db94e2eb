"""Makes a torchvision importable whose compiled operators do not load.

The wheels on the package index are compiled for CUDA: beside a CPU-only torch, their library does not load, and importing torchvision fails
as it describes, to torch, operators that do not exist. Classification models need none of them. `install` gives those operators a name and
a schema that takes anything, and no kernel: calling one still fails, loudly. transformers imports torchvision where it is installed, so the
shim serves it too.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

_DESCRIBED = re.compile(r"""@(?:torch\.library\.register_fake\(\s*["']torchvision::|register_meta\(\s*["'])(\w+)["']""")
_fragments: list[torch.library.Library] = []  # an operator lives as long as the library object that defined it


def install() -> tuple[str, ...]:
    """Define what torchvision describes and its library did not bring; the names defined. Nothing where torchvision is absent, or whole."""
    root = _root()
    if root is None or _fragments or _loads(root):
        return ()
    text = (root / "_meta_registrations.py").read_text(encoding="utf-8")
    names = tuple(dict.fromkeys(_DESCRIBED.findall(text)))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in names:
        library.define(f"{name}(...) -> ...")
    _fragments.append(library)
    return names


def _root() -> Path | None:
    """The folder of the installed torchvision, found without importing it."""
    spec = importlib.util.find_spec("torchvision")
    return Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None


def _loads(root: Path) -> bool:
    """Whether torchvision's own library of operators works beside this torch."""
    for library in (*root.glob("_C*.so"), *root.glob("_C*.pyd")):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False
