"""Which blocks a network has: by the model, and where that cannot tell, measured, once, and kept on disk.

    takes   a body as stages, and how many kernels may be measured for it
    leaves  the numbers of its blocks; the same for as long as the file of measurements is there

The file is by machine, compiler and the generator's version, its entries by kernels: networks that have some in common share them.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence

from lowtide.base.release import VERSION
from lowtide.cost.cache import Cache
from lowtide.cpu.build import library as built
from lowtide.cpu.build.trial import times_ns
from lowtide.cpu.choosing import Choosing, Joins, Variant
from lowtide.cpu.network import Bare, Placing
from lowtide.cpu.tune.trial import Trial
from lowtide.ir.graph import Value
from lowtide.runtime.libraries import processor

_NOISE = (
    1.05  # by as much a variant is faster than what the model chose, or that stays: a kernel alone is not quite what it is in its network
)
_MOST_NS = 3600 * 10**9
_known: dict[str, int] = {}  # of this process, where nothing can be kept
JOINS = Joins.BEST


def tuned(bare: Bare, most: int, placing: Placing) -> tuple[int, ...]:
    """The numbers. At most so many variants of kernels count, whether they are measured now or were before. Raises NativeError."""
    trial, choosing = Trial.of(bare.stages, bare.target), Choosing.of(bare.stages, bare.body, bare.known)
    asked: dict[str, Variant] = {}

    def note(variants: Sequence[Variant], by_model: int) -> int:
        wanted = {trial.key(variant): variant for variant in variants} if most else {}
        if len(asked | wanted) <= most:
            asked.update(wanted)
        return by_model

    by_model = choosing.numbers(JOINS, note)
    if not asked:
        return by_model
    known = _times_ns(bare, trial, asked, placing)

    def fastest(variants: Sequence[Variant], by_model: int) -> int:
        times = [known.get(trial.key(variant), 0) for variant in variants]
        best = min(range(len(times)), key=lambda at: times[at])
        return best if all(times) and _NOISE * times[best] < times[by_model] else by_model

    return choosing.numbers(JOINS, fastest)


def _times_ns(bare: Bare, trial: Trial, asked: Mapping[str, Variant], placing: Placing) -> dict[str, int]:
    """What these variants take, by key: measured before, or now."""
    known = {**_known, **_cache().load()}
    wanted = {key: variant for key, variant in asked.items() if key not in known}
    if wanted:
        known |= _measured(bare, trial, wanted, placing)
    return {key: known[key] for key in asked}


def _measured(bare: Bare, trial: Trial, wanted: Mapping[str, Variant], placing: Placing) -> dict[str, int]:
    addresses, arena_bytes, kept = bare.addresses(bare.stages, placing)
    live = [value for at, value in enumerate(bare.body.inputs) if at not in set(bare.fixed)]
    elements = [arena_bytes // 4, kept, *map(_elements, (*live, *bare.body.outputs))]
    taken = times_ns(trial.source(wanted, addresses), len(wanted), elements)
    _known.update(_cache().merge(dict(zip(wanted, taken, strict=True))))
    return dict(_known)


def _elements(value: Value) -> int:
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(value.shape, value.stride, strict=True))


def _cache() -> Cache:
    templates = b"".join(path.read_bytes() for path in sorted(built.SOURCES))
    machine = (platform.machine(), hashlib.sha256(processor().encode()).hexdigest(), os.environ.get("CXX", ""))
    return Cache("kernel_times", (*machine, hashlib.sha256(templates).hexdigest(), VERSION), 1, _MOST_NS)
