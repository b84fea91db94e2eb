"""Along what operators can be cut: all that the graphs of the bench and of the sweep call, and whether their parts make the whole.

    python -m bench.dimensions [--only PART ...] [--graphs FOLDER] [--calls 40] [--no-save]

Graphs: a training step of each model of the bench (Adam), of each subject of `bench.coverage` (momentum) and of a small network with every
optimizer of torch's, and a call of each subject in evaluation mode. What cannot be captured is counted. Of each operator so many different
calls (by shapes, types, layouts and arguments) of at most 300,000 elements a tensor are run on random numbers, whole and in parts of random
sizes along each axis, and compared: whole numbers to the bit, others as far as another order of sums allows. `--graphs` keeps graphs as
text between runs. One row an operator.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide.kernels.operators  # noqa: F401  makes lowtide's own operators known to torch
from bench import models
from bench.closed_axes import reason
from bench.coverage.subject import scalar_loss
from bench.coverage.subjects import SUBJECTS
from bench.parts import alike, call, cut, in_parts
from bench.results import Results
from lowtide.capture.batches import positional_and_keyword
from lowtide.capture.program import TrainingProgram, capture_inference, capture_training
from lowtide.capture.trace import Given
from lowtide.errors import LowtideError
from lowtide.ir.graph import Arg, Atom, Graph, Node, Value
from lowtide.ir.operators.nodes import axes_of, row_of
from lowtide.ir.text.graph_text import parse, to_text

_CPU = torch.device("cpu")
_MOST_ELEMENTS = 300_000
_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_COLUMNS = ("operator", "graphs", "nodes", "nodes_with_axes", "calls_tried", "axes_tried", "wrong", "closed")


@dataclass
class _Operator:
    """What was found of one operator."""

    graphs: set[str] = field(default_factory=set)
    nodes: int = 0
    with_axes: int = 0
    closed: str = ""
    calls: dict[object, Node] = field(default_factory=dict)
    tried: int = 0
    axes: int = 0
    wrong: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="graphs whose name has one of these parts")
    parser.add_argument("--graphs", type=Path, help="a folder for graphs as text")
    parser.add_argument("--calls", type=int, default=40, help="of each operator")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: defaultdict[str, _Operator] = defaultdict(_Operator)
    counted = Counter[str]()
    for name, capture in programs():
        if any(part in name for part in options.only):
            graph = _graph(name, capture, options.graphs)
            counted["captured" if graph is not None else "refused"] += 1
            if graph is not None:
                _count(found, name, graph, options.calls)
    for each in found.values():
        _try(each)
    results = _results(found, counted)
    results.print()
    if not options.no_save:
        print(results.save())


def programs() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Names, and what captures a graph."""
    for name in _OPTIMIZERS:
        yield f"optimizer/{name}", partial(_optimizer, name)
    for name in models.MODELS:
        yield f"bench/{name}", partial(_bench, name)
    for index, subject in enumerate(SUBJECTS):
        yield f"{subject.name}/training", partial(_subject, index, True)
        yield f"{subject.name}/inference", partial(_subject, index, False)


def _optimizer(name: str) -> Graph:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, foreach=False)
    loss = nn.functional.mse_loss
    return _trained(model, (torch.randn(6, 8), torch.randn(6, 4)), lambda model, x, y: loss(model(x), y), optimizer)


def _bench(name: str) -> Graph:
    work = models.get(name).build(2)
    return _trained(work.model, work.batch, work.loss, torch.optim.Adam(work.model.parameters(), lr=1e-3, foreach=False))


def _subject(index: int, training: bool) -> Graph:
    model, batch = SUBJECTS[index].build()
    if training:
        return _trained(model, batch, scalar_loss, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False))
    return capture_inference(model.eval(), Given(*positional_and_keyword(batch), _CPU)).graph


def _trained(model: nn.Module, batch: Any, loss: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Graph:
    program = TrainingProgram(model, loss, optimizer, None, 1, None)
    return capture_training(program, Given(*positional_and_keyword(batch), _CPU))[-1].graph


def _graph(name: str, capture: Callable[[], Graph], folder: Path | None) -> Graph | None:
    """A graph, from its text if there is one; None where its program is refused or does not run."""
    path = None if folder is None else folder / f"{name.replace('/', '__')}.txt"
    if path is not None and path.exists():
        return parse(path.read_text(encoding="utf-8"))
    try:
        graph = capture()
    except (LowtideError, RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
        print(f"{name}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
        return None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_text(graph), encoding="utf-8")
    return graph


def _count(found: dict[str, _Operator], name: str, graph: Graph, most: int) -> None:
    """Adds the operators of one graph."""
    for node in graph.nodes:
        each = found[node.op]
        each.graphs.add(name)
        each.nodes += 1
        axes = axes_of(node)
        each.with_axes += bool(axes)
        each.closed = each.closed or ("" if axes else reason(node))
        looks = (_look(node.args), _look(tuple(arg for _, arg in node.kwargs)))
        if axes and looks not in each.calls and len(each.calls) < most:
            each.calls[looks] = node


def _look(arg: Arg) -> object:
    if isinstance(arg, Value):
        return arg.dtype, arg.shape, arg.stride
    return tuple(map(_look, arg)) if isinstance(arg, tuple) else repr(arg)


def _try(operator: _Operator) -> None:
    """Runs the calls of one operator, whole and in parts."""
    for node in operator.calls.values():
        if max((prod(value.shape) for value in (*node.inputs, *node.results)), default=0) > _MOST_ELEMENTS:
            continue
        made: dict[Value, Any] = {}
        args, kwargs = _real(node.args, made), {name: _real(arg, made) for name, arg in node.kwargs}
        try:
            tried, whole = call(node.op, args, kwargs)
        except (RuntimeError, IndexError):
            continue  # made-up data do not suit it
        operator.tried += 1
        for number, axis in enumerate(axes_of(tried)):
            operator.axes += 1
            parts = in_parts(tried, axis, cut(int(axis.extent), random.Random(number)), args, kwargs)
            untouched = row_of(node.op).untouched
            operator.wrong += not all(
                one.shape == two.shape if untouched else alike(one, two) for one, two in zip(parts, whole, strict=True)
            )


def _real(arg: Arg, made: dict[Value, Any]) -> Any:
    """An argument with random tensors in the places of values; whole numbers are 0 or 1, which are indices into nearly everything."""
    if isinstance(arg, Value):
        return made.setdefault(arg, _random(arg))
    if isinstance(arg, Atom):
        return torch.device(arg.name) if arg.kind == "device" else getattr(torch, arg.name)
    return [_real(item, made) for item in arg] if isinstance(arg, tuple) else arg


def _random(value: Value) -> Any:
    if value.dtype == "scalar":
        return 0.9
    dtype = getattr(torch, value.dtype)
    numbers = torch.randn(value.shape) if dtype.is_floating_point or dtype.is_complex else torch.randint(0, 2, value.shape)
    if any(stride == 0 for stride in value.stride):
        return numbers.to(dtype)
    return torch.empty_strided(value.shape, value.stride, dtype=dtype).copy_(numbers)


def _results(found: dict[str, _Operator], counted: Counter[str]) -> Results:
    rows = []
    for name, each in sorted(found.items(), key=lambda item: -item[1].nodes):
        figures = (name, len(each.graphs), each.nodes, each.with_axes, each.tried, each.axes, each.wrong, each.closed)
        rows.append(dict(zip(_COLUMNS, figures, strict=True)))
    tensors = [row for row in rows if not str(row["operator"]).startswith("py.")]
    nodes, cut_nodes = (sum(int(row[column]) for row in tensors) for column in ("nodes", "nodes_with_axes"))
    with_axes = sum(row["nodes_with_axes"] > 0 for row in tensors)
    notes = (
        f"{counted['captured']} graphs, {counted['refused']} programs refused",
        f"operators on tensors with axes: {with_axes} of {len(tensors)}; nodes: {cut_nodes} of {nodes} ({cut_nodes / max(1, nodes):.1%})",
        f"calls tried: {sum(row['calls_tried'] for row in rows)}, axes: {sum(row['axes_tried'] for row in rows)}, "
        f"wrong: {sum(row['wrong'] for row in rows)}",
    )
    return Results("dimensions", "Along what operators can be cut", _COLUMNS, tuple(rows), notes)


if __name__ == "__main__":
    main()
