"""Devices by name: those of the makers' data sheets, and this machine, "cpu", as it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.cost.device import Device


def _gpu(
    name: str, half: float, tf32: float, bandwidth: float, host: float, gib: int, double: float, peers: float = 0,
    capability: tuple[int, int] = (8, 0), **reached: float,
) -> Device:  # fmt: skip
    """A GPU of so many TFLOP/s, GB/s of its memory, of its host link and of its links to other GPUs, one way; `reached` is measured."""
    rates = {"float16": half * 1e12, "bfloat16": half * 1e12, "float32": tf32 * 1e12, "float64": double * 1e12}
    settings: dict[str, Any] = {"launch_us": 5.0, "efficiency": 0.6} | reached
    return Device(
        name=name,
        flops_per_s=rates,
        bandwidth_bytes_per_s=bandwidth * 1e9,
        to_host_bytes_per_s=host * 1e9,
        from_host_bytes_per_s=host * 1e9,
        granule_bytes=512,
        memory_bytes=gib * 2**30,
        peers_bytes_per_s=peers * 1e9,
        capability=capability,
        **settings,
    )


# Measured with PyTorch 2.11 on both: what products and copies reach, what a kernel takes that does nothing, and what an operator takes
# the host from Python.
_HOPPER: dict[str, float] = {
    "launch_us": 2.0, "issue_us": 8.0, "efficiency": 0.81, "moving_efficiency": 0.87, "half_flops": 3.5e9, "askew": 6.0
}  # fmt: skip

# rtx3090 is the machine of MAGIS's evaluation, as its published code counts; the others but Hopper are by their data sheets alike.
PRESETS: Sequence[Device] = (
    _gpu("rtx3090", half=71, tf32=35.6, bandwidth=936, host=12, gib=24, double=0.556, capability=(8, 6)),
    _gpu("rtx4090", half=165, tf32=82.6, bandwidth=1008, host=25, gib=24, double=1.29, capability=(8, 9)),
    _gpu("l40s", half=362, tf32=183, bandwidth=864, host=25, gib=48, double=1.41, capability=(8, 9)),
    _gpu("a100", half=312, tf32=156, bandwidth=2039, host=25, gib=80, double=19.5, peers=300),
    _gpu("h100", half=989, tf32=494, bandwidth=3350, host=55, gib=80, double=67, peers=450, capability=(9, 0), **_HOPPER),
    _gpu("h200", half=989, tf32=494, bandwidth=4800, host=55, gib=141, double=67, peers=450, capability=(9, 0), **_HOPPER),
)

CARDS = ("rtx4090", "l40s", "h100", "h200")  # one of each size that people rent


HERE = "cpu"  # this machine, as it was measured


def preset(name: str, asked_by: str = "simulate") -> Device:
    """The preset of a name; this machine's, "cpu", is measured at first use.

    Raises ValueError saying which there are, and by which argument it was `asked_by`.
    """
    if name == HERE:
        from lowtide.cost.timings import device_here  # imports torch, and this

        return device_here(name)
    known = next((device for device in PRESETS if device.name == name), None)
    if known is None:
        raise ValueError(f"{asked_by}: expected one of {', '.join([HERE, *(device.name for device in PRESETS)])}, got {name!r}")
    return known
