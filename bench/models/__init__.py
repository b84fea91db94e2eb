"""The models that lowtide is measured on. Importing this is quick; torchvision and transformers are imported by what is built of them.

One is had and built so:

    work = bench.models.get("resnet50").build(batch_size=8)  # work.model, work.batch, work.loss(model, *batch)
"""

from __future__ import annotations

from bench import torchvision_shim
from bench.models import language, vision
from bench.models.workload import Entry, Workload

torchvision_shim.install()

MODELS: dict[str, Entry] = {entry.name: entry for entry in (*vision.ENTRIES, *language.ENTRIES)}

__all__ = ["MODELS", "Entry", "Workload", "get"]


def get(name: str) -> Entry:
    """The model of that name. Raises KeyError that lists them all."""
    if name not in MODELS:
        raise KeyError(f"expected one of {', '.join(MODELS)}; got {name!r}")
    return MODELS[name]
