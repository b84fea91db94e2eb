"""Networks on small devices: bytes of one memory beside what others' planners need, and time and traffic in two.

    python -m bench.edge [ONNX_FOLDER_OR_ORDER_JSON ...]

MLPerf Tiny's networks are read from a folder, as Deeploy publishes them; MobileNetV2, MCUNet's and the irregular networks of the ICCAD
paper are built. The other planners are written from their descriptions. All keep the order of the file and write nothing in place.

- TFLM (GreedyMemoryPlanner): tensors by size, each at the lowest gap between those placed that live at the same time.
- Best fit: the same at the smallest gap that is large enough.
- ExecuTorch (greedy): tensors by size share objects, each the smallest object of those that nobody else uses then; objects lie in a row.
- Banked greedy: in two memories, tensors by size, each at the lowest gap of the fast one where that has room, else in the slow one.

Two memories are asked for the least time first. There a move may go over the slow memory for nothing, beneath an operator. Then they are
asked for the fewest bytes of the slow memory: by rates at which nothing else takes time, so that the bound is one of bytes.
Seconds are the processor's, of kernels that are compiled: one network is planned before the clock starts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import lowtide
from bench.deeploy import read_deeploy
from bench.edge_networks import mcunet_imagenet, mcunet_vww, mobilenet_v2
from bench.networks import PROBLEMS
from bench.results import Cell, Results
from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
from lowtide.edge.onnx import network_of, read_onnx
from lowtide.edge.plan import EdgePlan, Space
from lowtide.edge.problem import EdgeProblem, task_ps
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem

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
    return max(offset + buffers[at][0] for at, offset in _placed(buffers, best_fit=best_fit, room_bytes=2**62).items())


def _placed(buffers: Sequence[Life], *, best_fit: bool, room_bytes: int) -> dict[int, int]:
    """Offsets by buffer, of those for which there was room."""
    placed: dict[int, int] = {}
    for index in sorted(range(len(buffers)), key=lambda each: (-buffers[each][0], buffers[each][1])):
        size, start, end = buffers[index]
        beside = sorted((low, low + buffers[at][0]) for at, low in placed.items() if buffers[at][1] < end and start < buffers[at][2])
        gaps, top = [], 0
        for low, high in beside:
            if low - top >= size:
                gaps.append((low - top, top))
            top = max(top, high)
        offset = top if not gaps else min(gaps)[1] if best_fit else min(at for _, at in gaps)
        if offset + size <= room_bytes:
            placed[index] = offset
    return placed


def banked_greedy(graph: EdgeGraph, spaces: Sequence[Space]) -> tuple[float, int]:
    """Microseconds by the model, and bytes read and written in the slow memory, where each tensor stays in the first with room for it."""
    problem = EdgeProblem.of(graph, spaces)
    buffers = lives(problem)
    fast = _placed(buffers, best_fit=False, room_bytes=spaces[0].room_bytes)
    space_of = {storage: int(storage not in fast) for storage in range(len(problem.size_bytes))}
    time_ps = sum(task_ps(problem, task, space_of) for task in problem.tasks)
    traffic = [one for task in problem.tasks for one in (*task.read_traffic, *task.write_traffic)]
    return time_ps / 1e6, sum(nbytes for storage, nbytes in traffic if space_of[storage])


def slow_traffic(plan: EdgePlan) -> int:
    """Bytes that a plan reads and writes in its slow memory, moves among them."""
    total = sum(plan.blocks[move.block].size_bytes for move in plan.moves)
    for step, at in enumerate(plan.order):
        node, views = plan.graph.nodes[at], plan.graph.nodes[at].views
        looked = {node.inputs[source] for _, source in views} | {node.outputs[output] for output, _ in views}
        for tensor in {*node.inputs, *node.outputs} - looked:
            homes = [block for block in plan.blocks if tensor in block.tensors and block.start <= step < block.end]
            total += plan.graph.tensors[tensor].size_bytes if homes and max(homes, key=lambda each: each.start).space == 1 else 0
    return total


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
    """Of ONNX files and of ordering problems, then those that are built here."""
    for path in (Path(each) for each in paths):
        for file in sorted(path.glob("*.onnx")) if path.is_dir() else [path]:
            if file.suffix == ".json":
                yield graph_of(file.stem, load_problem(file))
            elif file.stem.startswith("mlperf"):
                yield replace(read_deeploy(file), name=file.stem)
            else:
                yield replace(read_onnx(file), name=file.stem)
    for make in (mobilenet_v2, mcunet_vww, mcunet_imagenet):
        yield network_of(make(add=True))
    for name in IRREGULAR:
        yield graph_of(name, PROBLEMS[name].problem())


def least_slow_bytes(graph: EdgeGraph, fast_bytes: int) -> tuple[int, float]:
    """The fewest bytes read and written in a slow memory, moves among them, that were found, and their gap."""
    plan = lowtide.plan_edge(graph, (Space("fast", fast_bytes, 1e18, 1e18), Space("slow", None, 1e6, 1e6)))
    return slow_traffic(plan), plan.gap if plan.gap > 1e-6 else 0.0  # the fast one takes a picosecond for each tensor


def row(graph: EdgeGraph) -> dict[str, Cell]:
    """One network in one memory, and in a fast one of half those bytes beside a slow one."""
    problem = EdgeProblem.of(graph, [Space("ram")])
    buffers = lives(problem)
    alive = max(sum(size for size, start, end in buffers if start <= step < end) for step in range(len(graph.nodes)))
    began = time.process_time()
    one = lowtide.plan_edge(graph, [Space("ram")])
    one_s, began = time.process_time() - began, time.process_time()
    spaces = (Space("fast", max(1, one.arena_bytes[0] // 2), 2e9, 2e9), Space("slow", None, 2e8, 2e8))
    two = lowtide.plan_edge(graph, spaces, dma=True)
    two_s = time.process_time() - began
    banked_us, banked_bytes = banked_greedy(graph, spaces)
    fewest_bytes, fewest_gap = least_slow_bytes(graph, spaces[0].room_bytes)
    return {
        "network": graph.name, "operators": len(graph.nodes), "alive in the file's order bytes": alive,
        "TFLM bytes": greedy_by_size(buffers, best_fit=False), "best fit bytes": greedy_by_size(buffers, best_fit=True),
        "ExecuTorch bytes": shared_objects(buffers), "lowtide bytes": one.arena_bytes[0], "gap": one.gap, "seconds": one_s,
        "half fast: us": two.time_us, "gap of it": two.gap, "moves": len(two.moves), "slow bytes": slow_traffic(two),
        "banked greedy us": banked_us, "banked greedy slow bytes": banked_bytes, "seconds of it": two_s,
        "least slow bytes": fewest_bytes, "gap of these": fewest_gap,
    }  # fmt: skip


IRREGULAR = (
    "nasnet-cifar", "amoebanet-cifar", "darts-cifar", "darts-imagenet", "randwire-s0", "randwire-s1", "randwire-s2",
    "hrnet_w18_small-256", "hrnet_w18_small_v2-256",
)  # fmt: skip
COLUMNS = (
    "network", "operators", "alive in the file's order bytes", "TFLM bytes", "best fit bytes", "ExecuTorch bytes", "lowtide bytes", "gap",
    "seconds", "half fast: us", "gap of it", "moves", "slow bytes", "banked greedy us", "banked greedy slow bytes", "seconds of it",
    "least slow bytes", "gap of these",
)  # fmt: skip


def main(paths: Sequence[str]) -> None:
    row(graph_of("warm-up", PROBLEMS["randwire-s2"].problem()))
    rows: list[dict[str, Cell]] = []
    for graph in networks(paths):
        rows.append(row(graph))
        print(rows[-1], flush=True)
    notes = ("No device was measured: times are the model's.",)
    title = "Networks on small devices: bytes of one memory; time with half of them fast (2 GB/s beside 0.2, a DMA)"
    table = Results("edge", title, COLUMNS, tuple(rows), notes)
    table.print()
    table.save()


if __name__ == "__main__":
    main(sys.argv[1:])
