"""What a plan tells of its generated kernels: which operators share one, how that runs, and how long it takes beside torch's operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.base.units import bytes_text, time_text

_MOST = 12  # kinds of kernels that are told of a region


@dataclass(frozen=True, slots=True)
class Kernel:
    """One generated kernel."""

    scheme: str  # "rows through a ring", "register tiles", ..
    operators: tuple[str, ...]  # that it does, in order: "convolution", "relu"


@dataclass(frozen=True, slots=True)
class GeneratedRegion:
    """What runs a node of `fuse.region`."""

    name: str  # of its first result
    kernels: tuple[Kernel, ...]  # in the order in which they run
    arena_bytes: int  # that lies between kernels
    packed_bytes: int  # of constants as kernels read them
    us: float | None  # measured beside torch's operators; None where it was not measured here
    torch_us: float | None


def generated_lines(regions: Sequence[GeneratedRegion]) -> list[str]:
    """Regions, and the kinds of their kernels, the most frequent first."""
    return [line for region in regions for line in (_region_line(region), *_kernel_lines(region.kernels))]


def _region_line(region: GeneratedRegion) -> str:
    times = "" if region.us is None or region.torch_us is None else f"; {time_text(region.us)}, by torch {time_text(region.torch_us)}"
    sizes = f"{bytes_text(region.arena_bytes)} between them, {bytes_text(region.packed_bytes)} of packed constants"
    operators = sum(len(kernel.operators) for kernel in region.kernels)
    return f"generated: {operators} operators as {len(region.kernels)} kernels up to {region.name}, {sizes}{times}"


def _kernel_lines(kernels: Sequence[Kernel]) -> list[str]:
    kinds = Counter(kernels).most_common()
    lines = [f"{count:>14}  {kernel.scheme}: {', '.join(kernel.operators) or 'copy'}" for kernel, count in kinds[:_MOST]]
    rest = sum(count for _, count in kinds[_MOST:])
    return [*lines, f"{rest:>14}  more, of {len(kinds) - _MOST} kinds"] if rest else lines
