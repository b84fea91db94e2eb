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
    by: str = ""  # another compiler


def generated_lines(regions: Sequence[GeneratedRegion]) -> list[str]:
    """Regions, and the kinds of their kernels, the most frequent first."""
    own = [region for region in regions if not region.by]
    lines = [line for region in own for line in (_region_line(region), *_kernel_lines(region.kernels))]
    others = [region for region in regions if region.by]
    return [*lines, _compiled_line(others), *_kernel_lines([each for region in others for each in region.kernels])] if others else lines


def _compiled_line(regions: Sequence[GeneratedRegion]) -> str:
    operators = sum(len(kernel.operators) for region in regions for kernel in region.kernels)
    times = ""
    if all(region.us is not None and region.torch_us is not None for region in regions):
        us, torch_us = sum(region.us or 0 for region in regions), sum(region.torch_us or 0 for region in regions)
        times = f"; alone they take {time_text(us)}, by torch {time_text(torch_us)}"
    return f"compiled by {regions[0].by}: {operators} operators in {len(regions)} regions{times}"


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
