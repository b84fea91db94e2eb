"""The library that lowtide's own operators are defined in: torch calls them as `lowtide::...`."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("lowtide", "DEF")


def define(schema: str, implementation: object) -> None:
    """An operator by its schema, computed by one function on every device: that composes it of torch's own, and of kernels on a CPU."""
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], implementation, "CompositeExplicitAutograd")
