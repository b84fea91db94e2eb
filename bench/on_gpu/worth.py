"""What each part of a fast step is worth on its own: a graph, a fused update, padded products, regions, and what they compute again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import lowtide
from bench.compiled import ALONE
from bench.on_gpu.ground import Ground, Row
from bench.on_gpu.limits import Network, work_of
from lowtide.rewrite import rewritings

_WARM_UP = 3  # steps, after which one that is to be a graph is one


@contextmanager
def _without_padding() -> Iterator[None]:
    with patch.object(rewritings, "_alignments", lambda graph, times_of: {}):
        yield


@contextmanager
def _holding() -> Iterator[None]:
    with _without_padding(), ALONE["regions alone"]():
        yield


@dataclass(frozen=True)
class Setting:
    """A step with one part more than another one has."""

    name: str
    over: str  # the setting that it is compared with
    options: dict[str, Any] = field(default_factory=dict)
    fused: bool = False
    while_planned: Callable[[], AbstractContextManager[None]] = nullcontext


_ROUNDED: dict[str, Any] = {"exact": False}
_COMPILED = _ROUNDED | {"run": lowtide.Run(kernels="compiled")}
SETTINGS = (
    Setting("operators", "operators"),
    Setting("graph", "operators", {"run": lowtide.Run(graph="auto")}),
    Setting("fused update", "operators", fused=True),
    Setting("algebra that rounds", "operators", _ROUNDED, while_planned=_without_padding),
    Setting("padding", "algebra that rounds", _ROUNDED),
    Setting("regions", "algebra that rounds", _COMPILED, while_planned=_holding),
    Setting("recomputation in regions", "regions", _COMPILED, while_planned=_without_padding),
    Setting("all", "operators", _ROUNDED | {"run": lowtide.Run(kernels="compiled", graph="auto")}, fused=True),
)


def rows(network: Network, ground: Ground) -> Iterator[Row]:
    """A row a setting: its time, over that of the setting that it is compared with, and its peak."""
    calls, promised = dict[str, Callable[[], Any]](), dict[str, int]()
    for setting in SETTINGS:
        try:
            step, batch = _step(setting, network, ground)
        except lowtide.LowtideError as error:
            yield {"setting": setting.name, "verdict": "refused", "why": str(error)[:400]}
            continue
        calls[setting.name], promised[setting.name] = partial(step, *batch), step.plan.peak_bytes - step.plan.resident_bytes
    times = ground.in_turns_ms(calls)
    for setting in SETTINGS:
        if setting.name in calls:
            over = f"over {setting.over}" if setting.over in times else None
            yield {
                "setting": setting.name,
                "verdict": "measured",
                "step_ms": times[setting.name],
                "measured_ratio": times[setting.name] / times[setting.over] if over else None,
                "promised_bytes": promised[setting.name],
                "measured_bytes": ground.above_bytes(calls[setting.name]),
                "why": over,
            }


def _step(setting: Setting, network: Network, ground: Ground) -> tuple[lowtide.Step, tuple[Any, ...]]:
    work = work_of(network, ground)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4, fused=setting.fused)
    planning = lowtide.Planning(progress=False)
    with setting.while_planned():
        step = lowtide.optimize(work.model, work.batch, loss=work.loss, optimizer=optimizer, planning=planning, **setting.options)
    for _ in range(_WARM_UP):
        step(*work.batch)
    return step, work.batch
