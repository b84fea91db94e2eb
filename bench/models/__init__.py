"""The models that lowtide is measured on. Importing this is quick; torchvision and transformers are imported by what is built of them.

One is had and built so:

    work = bench.models.get("resnet50").build(batch_size=8)  # work.model, work.batch, work.loss(model, *batch)

For the command line each is a function, by its name as an identifier: `lowtide optimize bench.models:bert_base`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from bench import torchvision_shim
from bench.models import language, vision
from bench.models.workload import Entry, Workload, plain_sgd

torchvision_shim.install()

MODELS: dict[str, Entry] = {entry.name: entry for entry in (*vision.ENTRIES, *language.ENTRIES)}

__all__ = ["MODELS", "Entry", "Workload", "get"]


def get(name: str) -> Entry:
    """The model of that name. Raises KeyError that lists them all."""
    if name not in MODELS:
        raise KeyError(f"expected one of {', '.join(MODELS)}; got {name!r}")
    return MODELS[name]


def __getattr__(name: str) -> Callable[..., tuple[Any, ...]]:
    """A model as the command line takes it: a function of `batch_size` and `device`."""
    entry = next((entry for entry in MODELS.values() if re.sub(r"\W", "_", entry.name) == name), None)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_training, entry)


def _training(entry: Entry, batch_size: int | None = None, device: str = "cpu") -> tuple[Any, ...]:
    """A model, its batch, its loss and plain SGD."""
    work = entry.build(batch_size, device)
    return work.model, work.batch, work.loss, plain_sgd(work.model)
