"""Makes instances of training steps: captured on the meta device, with the times of a machine that lowtide knows by numbers.

    python -m yardstick.steps [NAME ...]

Each has plain SGD, and the sizes, node times and times of copies that lowtide's preset `MACHINE` gives. Times are whole nanoseconds of
the device alone: what it takes the host to issue an operator is left out. Views make no bytes and are left out, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lowtide
from bench.models import MODELS, vision
from bench.models.workload import Entry, plain_sgd
from lowtide import optimize
from lowtide.cost.presets import preset
from lowtide.ir.graph import Graph
from lowtide.problems.order import Rows
from lowtide.remat.problem import RematProblem
from yardstick.files import save_instance

MACHINE = "h100"
_LENGTH, _WIDTH = 12, 256  # of recurrent networks' sequences and states


class Recurrent(nn.Module):
    """A cell over a sequence, written as a loop, and a layer that reads its last state."""

    def __init__(self, kind: type[nn.LSTMCell] | type[nn.GRUCell]) -> None:
        super().__init__()
        self.cell, self.head = kind(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 10)

    def forward(self, sequence: Tensor) -> Tensor:
        state: Any = None
        for each in sequence.unbind():
            state = self.cell(each, state)
        scores: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return scores


def _recurrent(kind: type[nn.LSTMCell] | type[nn.GRUCell]) -> Entry:
    def batch(size: int) -> tuple[Tensor, ...]:
        return torch.randn(_LENGTH, size, _WIDTH), torch.randint(0, 10, (size,))

    return Entry(kind.__name__, partial(Recurrent, kind), batch, vision.classification_loss, "a loop over a cell")


def _torchvision(name: str) -> Callable[[], Entry]:
    return lambda: vision._classifier(name)


_OTHERS: dict[str, Callable[[], Entry]] = {
    "densenet121": _torchvision("densenet121"),
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    "lstm": partial(_recurrent, nn.LSTMCell),
    "gru": partial(_recurrent, nn.GRUCell),
}
STEPS = {  # name and batch size
    "resnet18": 64, "resnet50": 64, "vgg16": 64, "mobilenet_v2": 64, "vit_b_16": 32, "gpt2": 8, "bert-base": 16, "unet": 8,
    "densenet121": 32, "efficientnet_b0": 64, "lstm": 256, "gru": 256, "transformer": 64,
}  # fmt: skip


def main(names: list[str]) -> None:
    """Writes an instance of each step."""
    for name in names or STEPS:
        document = step(name, STEPS[name])
        save_instance(document)
        print(document["name"], len(document["makes"]), "nodes", flush=True)


def step(name: str, batch_size: int) -> dict[str, Any]:
    """One training step as an instance."""
    entry = _OTHERS[name]() if name in _OTHERS else MODELS[name]
    made = entry.build(batch_size, "meta")
    planning = lowtide.Planning(progress=False, simulate=MACHINE)
    plan = optimize(made.model, made.batch, loss=made.loss, optimizer=plain_sgd(made.model), planning=planning).plan
    source = f"lowtide: {entry.note}, batch {batch_size}, plain SGD; times of the preset {MACHINE}"
    return {"format": "yardstick.graph", "name": f"step-{name}-{batch_size}", "source": source, "licence": "Apache-2.0"} | exported(
        plan.graph
    )


def exported(graph: Graph) -> dict[str, Any]:
    """The columns of a graph's instance."""
    device = preset(MACHINE)
    problem = RematProblem.of(graph, device.graph_us(graph), round_to=1, swap=device)
    base = problem.problem
    nodes = np.flatnonzero(~problem.is_view).tolist()
    number = {node: position for position, node in enumerate(nodes)}
    after = _without_views(_listed(base.preds), problem.is_view.tolist())
    reads, makes, takes, until = map(_listed, (base.reads, base.outputs_of, base.takes, problem.limits))
    assert problem.links is not None, "swap is asked for"
    storable = [bool(each) for each in _may_go(graph, base.tensor_count)]
    sizes = base.tensor_bytes.tolist()
    first = base.take_output.tolist()
    ordered = [sorted(makes[node], key=lambda tensor: (tensor != first[node], tensor)) for node in nodes]
    return {
        "unit": "ns",
        "resident_bytes": base.resident_bytes,
        "bytes": sizes,
        "kept": np.flatnonzero(base.kept).tolist(),
        "makes": ordered,
        "reads": [reads[node] for node in nodes],
        "after": [sorted(number[each] for each in after[node]) for node in nodes],
        "takes": [takes[node] for node in nodes],
        "cost": [round(1000 * problem.cost_us[node]) for node in nodes],
        "once": [number[node] for node in nodes if not problem.repeatable[node]],
        "until": [[number[each] for each in until[node] if each in number] for node in nodes],
        "store": [round(1000 * device.store_us(size)) if may else None for size, may in zip(sizes, storable, strict=True)],
        "load": [round(1000 * device.load_us(size)) if may else None for size, may in zip(sizes, storable, strict=True)],
    }


def _may_go(graph: Graph, count: int) -> list[bool]:
    """[m] whether a tensor may be stored."""
    from lowtide.remat.offload import storable

    return list(storable(graph, swap_state=False)[:count])


def _listed(rows: Rows) -> list[list[int]]:
    return [rows.ids[start:end].tolist() for start, end in pairwise(rows.ptr.tolist())]


def _without_views(preds: list[list[int]], is_view: list[bool]) -> list[set[int]]:
    """By node: those before it that are no views; a view hands on what is before it. Numbers are a topological order."""
    before: list[set[int]] = []
    for row in preds:
        before.append(set().union(*(before[each] if is_view[each] else {each} for each in row)))
    return before


if __name__ == "__main__":
    main(sys.argv[1:])
