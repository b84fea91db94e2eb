"""Writes an inference function to a file, as `load` reads it; before that it is frozen: made of what a step runs, without the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lowtide.api import archive
from lowtide.api.archive import said_of
from lowtide.api.frozen import Frozen
from lowtide.api.saved_check import check
from lowtide.api.variant import Variant
from lowtide.base import VERSION
from lowtide.cpu.networks import placements
from lowtide.errors import BatchError, FormatError, StepError
from lowtide.ir.graph import Graph
from lowtide.ir.text.graph_text import to_text
from lowtide.runtime.batch import BatchSpec


def freeze(variant: Variant, batch: BatchSpec, inputs: Sequence[Any]) -> Frozen:
    """A variant on what it ran on last. Raises StepError for one that cannot be frozen."""
    check_can_be_frozen(variant)
    networks = {name: network.frozen() for name, network in variant.networks.items()}
    return Frozen(variant.inference_by(networks), batch, inputs, networks)


def check_can_be_frozen(variant: Variant) -> None:
    """Raise StepError for what is no inference by generated kernels alone."""
    if not (variant.is_generated and variant.leaves_only_its_result):
        raise StepError(f"{_EXPECTED}; {_why_not(variant)}: keep the step itself, it holds no weights but the model's")


_EXPECTED = (
    "frozen: expected an inference function with generated kernels (exact=False, float32, on a CPU, with a C++ compiler) that changes "
    "nothing of the model's, of one shape"
)


def _why_not(variant: Variant) -> str:
    if variant.captured.gradients:
        return "this is a training step"
    if not variant.networks:
        return "this one has none: it was not asked for so, or torch's own kernels are as fast here"
    return "this one changes something, or is of a range of shapes" if variant.is_generated else "inductor has compiled some of this one's"


def save(path: str | os.PathLike[str], variant: Variant, batch: BatchSpec, inputs: Sequence[Any]) -> None:
    """Write what a variant runs on now, but for the batch. Raises StepError for what a file cannot hold, OSError."""
    check_can_be_frozen(variant)
    decision, slots = variant.decision, variant.captured.slots
    graph, kept = _used(decision.graph)
    stored = [at for at in kept if slots[at].table != "batch"]
    if any(isinstance(inputs[at], torch.Generator) for at in stored):
        raise StepError(
            "save_frozen: this function draws from a generator of the program's own, which a file cannot hold: leave `generator=` out, so "
            "that it draws from torch's, or freeze it in this process (`step.frozen(*batch)`)"
        )
    places = {at: ["tensor", place] for place, at in enumerate(stored)}
    try:
        check(graph, decision.order, [decision.graph.inputs[at] for at in stored])
        contents = {
            "versions": {"lowtide": VERSION, "torch": torch.__version__},
            "batch": batch.rows(),
            "result": said_of(variant.captured.result, len(graph.outputs)),
            "inputs": [places.get(at, ["batch", slots[at].path[0]]) for at in kept],
            "order": list(decision.order),
            "offsets": placements(graph),
            "graph": to_text(graph, sources=False).splitlines(),
        }
    except (FormatError, BatchError) as error:
        raise StepError(f"save_frozen: {error}: such a function can be frozen in this process, not saved") from error
    archive.write(path, contents, [inputs[at] for at in stored])


def _used(graph: Graph) -> tuple[Graph, list[int]]:
    """The graph without inputs that nobody reads, and which it has."""
    read = {*graph.outputs, *(value for node in graph.nodes for value in node.inputs)}
    kept = [at for at, value in enumerate(graph.inputs) if value in read]
    return replace(graph, inputs=tuple(graph.inputs[at] for at in kept)), kept
