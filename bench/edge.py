"""Networks on small devices: bytes of one memory beside what others' planners need, and time and moves in several.

    python -m bench.edge ONNX_FOLDER_OR_ORDER_JSON ...

The other planners are written from their descriptions. All keep the order of the file and write nothing in place.

- TFLM (GreedyMemoryPlanner): tensors by size, each at the lowest gap between those placed that live at the same time.
- Best fit: the same at the smallest gap that is large enough.
- ExecuTorch (greedy): tensors by size share objects, each the smallest object of those that nobody else uses then; objects lie in a row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import lowtide
from bench.results import Cell, Results
from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
from lowtide.edge.plan import Space
from lowtide.edge.problem import EdgeProblem
from lowtide.problems.order import OrderProblem
from lowtide.problems.order_json import load_problem

Life = tuple[int, int, int]  # bytes, first step, step after the last


def graph_of(name: str, problem: OrderProblem) -> EdgeGraph:
    """A bare ordering problem as a network: each tensor a byte string, each node an operator."""
    tensors = tuple(EdgeTensor(f"t{index}", (nbytes,), "uint8", nbytes) for index, nbytes in enumerate(problem.tensor_bytes.tolist()))
    nodes = []
    for node in range(problem.node_count):
        reads, makes, takes = (_row(rows, node) for rows in (problem.reads, problem.outputs_of, problem.takes))
        in_place = tuple((makes.index(int(problem.take_output[node])), reads.index(tensor)) for tensor in takes)
        workspace = int(problem.workspace_bytes[node])
        nodes.append(EdgeNode(problem.names[node], "", "", tuple(reads), tuple(makes), {}, 0, workspace, (), in_place))
    inputs = tuple(tensor for tensor, node in enumerate(problem.producer.tolist()) if node < 0)
    return EdgeGraph(name, tensors, tuple(nodes), inputs, tuple(tensor for tensor, kept in enumerate(problem.kept.tolist()) if kept))


def _row(rows: tuple, index: int) -> list[int]:
    ptr, ids = rows
    return ids[ptr[index] : ptr[index + 1]].tolist()


def lives(problem: EdgeProblem) -> list[Life]:
    """Each storage's bytes and steps in the order of the file, with nothing in place."""
    n = len(problem.tasks)
    start = [0 if storage in problem.given else n for storage in range(len(problem.size_bytes))]
    end = [n if storage in problem.kept else 0 for storage in range(len(problem.size_bytes))]
    for step, task in enumerate(problem.tasks):
        for storage in (*task.reads, *task.makes):
            start[storage], end[storage] = min(start[storage], step), max(end[storage], step + 1)
    workspaces = [(task.workspace_bytes, step, step + 1) for step, task in enumerate(problem.tasks) if task.workspace_bytes]
    return [*zip(problem.size_bytes, start, end, strict=True), *workspaces]


def greedy_by_size(buffers: Sequence[Life], *, best_fit: bool) -> int:
    """The bytes of an arena in which each, by size, is at the lowest gap, or at the smallest that is large enough."""
    placed: list[tuple[int, int, Life]] = []
    for buffer in sorted(buffers, key=lambda each: (-each[0], each[1])):
        beside = sorted((low, high) for low, high, other in placed if other[1] < buffer[2] and buffer[1] < other[2])
        gaps, top = [], 0
        for low, high in beside:
            if low - top >= buffer[0]:
                gaps.append((low - top, top))
            top = max(top, high)
        offset = top if not gaps else min(gaps)[1] if best_fit else min(at for _, at in gaps)
        placed.append((offset, offset + buffer[0], buffer))
    return max(high for _, high, _ in placed)


def shared_objects(buffers: Sequence[Life]) -> int:
    """The bytes of objects in a row, each shared by buffers that live at different times."""
    objects: list[tuple[int, list[Life]]] = []
    for buffer in sorted(buffers, key=lambda each: (-each[0], each[1])):
        free = [each for each in objects if all(other[2] <= buffer[1] or buffer[2] <= other[1] for other in each[1])]
        if free:
            min(free, key=lambda each: each[0])[1].append(buffer)
        else:
            objects.append((buffer[0], [buffer]))
    return sum(size for size, _ in objects)


def networks(paths: Sequence[str]) -> Iterator[EdgeGraph]:
    """Of ONNX files and of ordering problems."""
    for path in (Path(each) for each in paths):
        for file in sorted(path.glob("*.onnx")) if path.is_dir() else [path]:
            if file.suffix == ".json":
                yield graph_of(file.stem, load_problem(file))
            else:
                from lowtide.edge.onnx import read_onnx

                yield replace(read_onnx(file), name=file.stem)


def row(graph: EdgeGraph) -> dict[str, Cell]:
    """One network in one memory, and in a fast one of half those bytes beside a slow one."""
    buffers = lives(EdgeProblem.of(graph, [Space("ram")]))
    began = time.perf_counter()
    one = lowtide.plan_edge(graph, [Space("ram")])
    one_s, began = time.perf_counter() - began, time.perf_counter()
    fast = Space("fast", max(1, one.arena_bytes[0] // 2), 2e9, 2e9)
    two = lowtide.plan_edge(graph, [fast, Space("slow", None, 2e8, 2e8)], dma=True)
    return {
        "network": graph.name, "operators": len(graph.nodes),
        "TFLM bytes": greedy_by_size(buffers, best_fit=False), "best fit bytes": greedy_by_size(buffers, best_fit=True),
        "ExecuTorch bytes": shared_objects(buffers), "lowtide bytes": one.arena_bytes[0], "gap": one.gap, "seconds": one_s,
        "half fast: us": two.time_us, "gap of it": two.gap, "moves": len(two.moves), "seconds of it": time.perf_counter() - began,
    }  # fmt: skip


COLUMNS = (
    "network", "operators", "TFLM bytes", "best fit bytes", "ExecuTorch bytes", "lowtide bytes", "gap", "seconds", "half fast: us",
    "gap of it", "moves", "seconds of it",
)  # fmt: skip


def main(paths: Sequence[str]) -> None:
    rows = tuple(row(graph) for graph in networks(paths))
    notes = (__doc__.partition("\n\n    ")[2].partition("\n\n")[2] if __doc__ else "",)
    table = Results(
        "edge",
        "Networks on small devices: bytes of one memory; time with half of them fast (2 GB/s beside 0.2, a DMA)",
        COLUMNS,
        rows,
        notes,
    )
    table.print()
    table.save()


if __name__ == "__main__":
    main(sys.argv[1:])
