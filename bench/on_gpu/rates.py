"""What the device reaches: products, copies, links, launches, beside what its maker states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.on_gpu.ground import Ground, Row
from lowtide.cost.device import Device
from lowtide.cost.presets import PRESETS
from lowtide.cost.timings import device_here

_SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def rows(ground: Ground) -> Iterator[Row]:
    """The figures of this machine as planning takes them, those that are stated for it, and the utilisation curve."""
    here = device_here(ground.device)
    stated = next((each for each in PRESETS if each.name in ground.name.lower().replace(" ", "")), None)
    yield {"setting": "measured", "verdict": "measured", "why": _told(here)}
    if stated is not None:
        yield {"setting": f"stated, {stated.name}", "verdict": "stated", "why": _told(stated)}
    for dtype in (torch.float32, torch.bfloat16):
        yield {"setting": f"products, {str(dtype).removeprefix('torch.')}", "verdict": "measured", "why": _curve(ground, dtype)}
    yield {"setting": "launch", "verdict": "measured", "step_ms": _launch_ms(ground), "why": "one operator on one number"}


def _told(device: Device) -> str:
    shown: dict[str, Any] = {name: f"{rate:.4g} FLOP/s" for name, rate in device.flops_per_s.items()}
    shown |= {"bandwidth": f"{device.bandwidth_bytes_per_s:.4g} B/s", "launch": f"{device.launch_us:.3g} us", "half": device.half_flops}
    shown |= {"to host": f"{device.to_host_bytes_per_s:.4g} B/s", "from host": f"{device.from_host_bytes_per_s:.4g} B/s"}
    return ", ".join(f"{name} {figure}" for name, figure in shown.items())


def _curve(ground: Ground, dtype: torch.dtype) -> str:
    """The rate of square products by their side."""
    found = []
    for side in _SIDES[:4] if ground.dry else _SIDES:
        one = torch.randn(side, side, device=ground.device).to(dtype)
        taken = ground.in_turns_ms({"": lambda one=one: one @ one})[""]  # type: ignore[misc]
        found.append(f"{side}: {2 * side**3 / taken / 1e9:.4g} TFLOP/s")
    return ", ".join(found)


def _launch_ms(ground: Ground) -> float:
    number, count = torch.zeros((), device=ground.device), 100

    def many() -> None:
        for _ in range(count):
            number.add_(1.0)

    return ground.in_turns_ms({"": many})[""] / count
