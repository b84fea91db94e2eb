"""Libraries that lowtide does without: imported where somebody asks for them, or named with the extra that brings them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def need(module: str, user: object, extra: str) -> ModuleType:
    """The module, imported. Raises ImportError saying who needs it and what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f"{user} needs {package}, which is not installed: pip install 'lowtide[{extra}]'") from error
