"""Devices by name: those of the makers' data sheets, and this machine, "cpu", as it was measured."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.cost.device import Device


def _gpu(name: str, half: float, tf32: float, bandwidth: float, host: float, gib: int, double: float, peers: float = 0) -> Device:
    """A GPU of so many TFLOP/s, GB/s of its memory, of its host link and of its links to other GPUs, one way."""
    rates = {"float16": half * 1e12, "bfloat16": half * 1e12, "float32": tf32 * 1e12, "float64": double * 1e12}
    return Device(
        name=name,
        flops_per_s=rates,
        bandwidth_bytes_per_s=bandwidth * 1e9,
        launch_us=5.0,
        to_host_bytes_per_s=host * 1e9,
        from_host_bytes_per_s=host * 1e9,
        efficiency=0.6,
        granule_bytes=512,
        memory_bytes=gib * 2**30,
        peers_bytes_per_s=peers * 1e9,
    )


# rtx3090 is the machine of MAGIS's evaluation, as its published code counts; the others are measured by their data sheets alike.
PRESETS: Sequence[Device] = (
    _gpu("rtx3090", half=71, tf32=35.6, bandwidth=936, host=12, gib=24, double=0.556),
    _gpu("a100", half=312, tf32=156, bandwidth=2039, host=25, gib=80, double=19.5, peers=300),
    _gpu("h100", half=989, tf32=494, bandwidth=3350, host=55, gib=80, double=67, peers=450),
    _gpu("h200", half=989, tf32=494, bandwidth=4800, host=55, gib=141, double=67, peers=450),
)


HERE = "cpu"  # this machine, as it was measured


def preset(name: str) -> Device:
    """The preset of a name; this machine's, "cpu", is measured at first use. Raises ValueError saying which there are."""
    if name == HERE:
        from lowtide.cost.timings import device_here  # imports torch, and this

        return device_here(name)
    found = next((device for device in PRESETS if device.name == name), None)
    if found is None:
        raise ValueError(f"device: expected one of {', '.join([HERE, *(device.name for device in PRESETS)])}, got {name!r}")
    return found
