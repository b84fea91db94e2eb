"""Where the time of several threads goes: in kernels, at barriers, and what one thread takes for the same.

    python -m bench.ago.barriers "squeezenet 56" --threads 2

A network's stages run one after the other, as always, on made-up numbers; each thread notes when it begins and ends its share of each. A
stage by several threads takes as long as its slowest thread; what the others wait meanwhile is imbalance, the rest until all go on is the
barrier itself. Ideal is what one thread takes, over the threads. All are medians over runs.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import lowtide
from bench.ago.kernels import flops
from bench.ago.networks import case
from lowtide.cpu import networks as made
from lowtide.cpu.network import ENTRY, Network, build, team
from lowtide.cpu.recipes import aligned
from lowtide.cpu.stages import KernelStage
from lowtide.ir.bodies import Region, is_region
from lowtide.ir.graph import Graph, Value

_ROUNDS, _WARM = 400, 50
_MOST_THREADS = 8


class Taken(NamedTuple):
    """Of one stage, in microseconds."""

    slowest: float
    idle: float  # of the fastest, until the slowest is done
    barrier: float  # from then until all go on
    alone: float  # by one thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stages", action="store_true", help="each by itself")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.cases:
        model, args = case(name).built()
        graph = lowtide.optimize(model, args, exact=False).plan.graph
        for region in (Region.of(node) for node in graph.nodes if is_region(node)):
            its, *_ = made.built(region.body, region.fixed, region.joined)
            _print(name, its, taken(its, region.body, options.threads), options.stages)


def taken(its: Network, body: Graph, threads: int) -> list[Taken]:
    """What each stage takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stamped.so"
        build(_stamped(its), path)
        library = ctypes.CDLL(str(path))
    values = [*(body.inputs[at] for at in its.live), *its.results]
    blocks = [_numbers(each) for each in (its.arena_bytes // 4, its.kept_elements, *map(_elements, values))]
    at = (ctypes.c_void_p * len(blocks))(*(block.data_ptr() for block in blocks))
    address = ctypes.cast(getattr(library, ENTRY), ctypes.c_void_p).value or 0
    count = 2 * len(its.stages)
    stamps = ((ctypes.c_longlong * count) * _MOST_THREADS).in_dll(library, "lowtide_stamps")
    together, alone = (_runs(lambda n=n: team().run(address, at, n, 200, None), stamps, n) for n in (threads, 1))
    return [_of(together, alone, stage) for stage in range(len(its.stages))]


def _stamped(its: Network) -> str:
    head = f'#include <time.h>\nextern "C" long long lowtide_stamps[{_MOST_THREADS}][{2 * len(its.stages)}];\n'
    note = "lowtide_stamps[run.id][{}] = now_ns();"
    source = re.sub(
        r"stage(\d+)\(run\);( barrier|$)",
        lambda m: f"{note.format(2 * int(m[1]))} stage{m[1]}(run); {note.format(2 * int(m[1]) + 1)}{m[2]}",
        its.source,
        flags=re.MULTILINE,
    )
    place = f"long long lowtide_stamps[{_MOST_THREADS}][{2 * len(its.stages)}];"
    return head + source.replace('#if HERE(0)\nextern "C" void', f'#if HERE(0)\n{place}\nextern "C" void')


def _runs(run: object, stamps: ctypes.Array, threads: int) -> list[list[list[int]]]:  # type: ignore[type-arg]
    found = []
    for at in range(_ROUNDS):
        run()  # type: ignore[operator]
        if at >= _WARM:
            found.append([list(stamps[each]) for each in range(threads)])
    return found


def _of(together: Sequence[list[list[int]]], alone: Sequence[list[list[int]]], stage: int) -> Taken:
    begin, end = 2 * stage, 2 * stage + 1
    slowest, idle, barrier = [], [], []
    for run in together:
        first = min(each[begin] for each in run) if stage == 0 else max(each[begin] for each in run)
        done = max(each[end] for each in run)
        slowest.append(max(each[end] - each[begin] for each in run))
        idle.append(done - min(each[end] for each in run))
        if stage:
            barrier.append(first - max(each[begin - 1] for each in run))
    single = [run[0][end] - run[0][begin] for run in alone]
    return Taken(*(statistics.median(each) / 1e3 if each else 0.0 for each in (slowest, idle, barrier, single)))


def _numbers(elements: int) -> torch.Tensor:
    block = aligned(elements + 64)
    return block.copy_(torch.arange(block.numel()).remainder_(997)).mul_(1e-4)


def _elements(value: Value) -> int:
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(value.shape, value.stride, strict=True))


def _print(name: str, its: Network, found: Sequence[Taken], stages: bool) -> None:
    for at, (stage, each) in enumerate(zip(its.stages, found, strict=True) if stages else ()):
        print(f"{at:4} {_line(each)}  {_said(stage)}")
    total = Taken(*(sum(column) for column in zip(*found, strict=True)))
    work = sum(map(flops, its.stages)) / 1e3
    print(f"{name}: {len(its.stages)} stages, {_line(total)}; {work / (total.slowest + total.barrier):.1f} GFLOP/s", flush=True)


def _line(each: Taken) -> str:
    return f"slowest {each.slowest:8.1f}  idle {each.idle:6.1f}  barrier {each.barrier:6.1f}  alone/2 {each.alone / 2:8.1f}"


def _said(stage: KernelStage) -> str:
    names = " ".join(node.op.removeprefix("aten.").split(".")[0] for node in stage.nodes)
    shapes = " -> ".join("x".join(map(str, layout.shape)) for layout in (*stage.reads[:1], stage.out))
    return f"{type(stage).__name__:11} {shapes}  {names[:60]}"


if __name__ == "__main__":
    main()
