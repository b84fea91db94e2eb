"""What tensors are for, in people's words."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.base.units import bytes_text
from lowtide.ir.graph import Kind

_TEXTS = {
    Kind.PARAMETER: "parameters",
    Kind.BUFFER: "buffers",
    Kind.STATE: "optimizer state",
    Kind.INPUT: "batch",
    Kind.CONSTANT: "constants",
    Kind.ACTIVATION: "activations",
    Kind.GRADIENT: "gradients",
    Kind.TEMPORARY: "the optimizer's temporaries",
}


def kind_text(kind: Kind) -> str:
    return _TEXTS.get(kind, kind.value)


def kinds_text(by_kind: Mapping[Kind, int]) -> str:
    """Bytes by kind in a line: "parameters 9.00 MiB, batch 1.00 KiB"; nothing of what has none."""
    return ", ".join(f"{kind_text(kind)} {bytes_text(nbytes)}" for kind, nbytes in by_kind.items() if nbytes)
