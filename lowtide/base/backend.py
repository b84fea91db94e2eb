"""How torch.compile knows the backend "lowtide" of a checkout that nobody installed, once lowtide is imported.

torch asks for entry points when the first backend is asked for by name, and only then. It may not be imported for that, so that it finds a
distribution of ours where Python looks for all; where it has asked before, it is told.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from lowtide.base import VERSION

GROUP, NAME, WHERE = "torch_dynamo_backends", "lowtide", "lowtide.integrations.dynamo:lowtide"
_FILES = {"METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n", "entry_points.txt": f"[{GROUP}]\n{NAME} = {WHERE}\n"}


class CheckoutFinder:
    """Among Python's finders, the last: it finds no module, and one distribution."""

    @staticmethod
    def find_spec(*_: object) -> None:
        return None

    @staticmethod
    def find_distributions(context: Any) -> Iterator[Any]:
        from importlib.metadata import Distribution

        class Checkout(Distribution):
            def read_text(self, filename: str) -> str | None:
                return _FILES.get(filename)

            def locate_file(self, path: Any) -> Any:
                return path

        if context.name in (None, NAME):
            yield Checkout()


def register() -> None:
    if not any(each is CheckoutFinder for each in sys.meta_path):
        sys.meta_path.append(CheckoutFinder)
    if (registry := sys.modules.get("torch._dynamo.backends.registry")) is not None:
        from importlib.metadata import EntryPoint

        registry._BACKENDS.setdefault(NAME, EntryPoint(NAME, WHERE, GROUP))
