"""Each kernel of a network by itself, against what a core can compute: processor time of one thread, the least of many runs.

    python -m bench.ago.kernels "squeezenet 112"

Kernels run one after the other, as in the network, on made-up numbers; after each round the next one begins. GFLOP/s count a product and a
sum as two; what moves data only has none.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from math import prod
from pathlib import Path

import torch

import lowtide
from bench.ago.networks import case
from lowtide.cpu import networks as made
from lowtide.cpu.network import FLAGS, Network
from lowtide.cpu.stages import Attention, Batched, Convolution, KernelStage, Product, RowBlock, Windows, Winograd
from lowtide.ir.bodies import Region, is_region
from lowtide.ir.graph import Graph, Value
from lowtide.runtime.libraries import compiler

_ROUNDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ago.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("case")
    torch.set_num_threads(1)
    model, args = case(parser.parse_args().case).built()
    graph = lowtide.optimize(model, args, exact=False).plan.graph
    for node in graph.nodes:
        if is_region(node):
            region = Region.of(node)
            its, *_ = made.built(region.body, region.fixed, region.joined)
            _print(its, times_ns(its, region.body))


def times_ns(its: Network, body: Graph) -> list[int]:
    """The least time of each stage of a network."""
    values = [*(body.inputs[at] for at in its.live), *its.results]
    sizes = [its.arena_bytes // 4 + 64, max(1, its.kept_elements), *map(_elements, values)]
    lines = [its.source, "#include <cstdio>", "#include <cstdlib>", "#include <ctime>", _NOW]
    lines += ["int main() {", f"  static float* at[{len(sizes)}];"]
    for place, size in enumerate(sizes):
        lines.append(f"  at[{place}] = (float*)aligned_alloc(64, ({size * 4} + 127) / 64 * 64);")
        lines.append(f"  for (long i = 0; i < {size}; i++) at[{place}][i] = (i * 7919 % 1000) * 1e-4f;")
    lines += ["  static Team team; Run run{&team, 0, 1, at};", f"  static long best[{len(its.stages)}];"]
    lines += [f"  for (int round = 0; round < {_ROUNDS}; round++) {{", "    long start, took;"]
    for at in range(len(its.stages)):
        lines.append(f"    start = now(); stage{at}(run); took = now() - start; if (!best[{at}] || took < best[{at}]) best[{at}] = took;")
    lines += ["  }", '  for (long each : best) printf("%ld\\n", each);', "}", ""]
    with tempfile.TemporaryDirectory() as folder:
        text, program = Path(folder) / "main.cpp", Path(folder) / "main"
        text.write_text("\n".join(lines), encoding="utf-8")
        options = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
        subprocess.run([*compiler(), *options, str(text), "-o", str(program)], check=True)
        answer = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return [int(line) for line in answer.stdout.split()]


_NOW = "static long now() { timespec t; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); return t.tv_sec * 1000000000L + t.tv_nsec; }"


def _elements(value: Value) -> int:
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(value.shape, value.stride, strict=True))


def flops(stage: KernelStage) -> int:
    """Products and sums of a stage, without its epilogue's."""
    if isinstance(stage, RowBlock):
        return sum(map(flops, stage.parts))
    if isinstance(stage, Product):
        return 2 * stage.rows * stage.k * stage.weight.columns
    if isinstance(stage, Convolution):
        return 2 * prod(stage.out.shape) * stage.weight.rows
    if isinstance(stage, Winograd):
        return 2 * prod(stage.out.shape) * 9 * stage.weight.rows
    if isinstance(stage, Windows):
        return 2 * prod(stage.out.shape) * prod(stage.geometry.kernel) if stage.weight is not None else 0
    if isinstance(stage, Batched):
        return 2 * prod(stage.a.shape) * stage.other.shape[-1]
    if isinstance(stage, Attention):
        return 2 * prod(stage.query.shape) * stage.key.shape[-1] * 2
    return 0


def _print(its: Network, taken_ns: list[int]) -> None:
    total = sum(taken_ns)
    for at, (stage, ns) in enumerate(zip(its.stages, taken_ns, strict=True)):
        rate = f"{flops(stage) / max(ns, 1):7.1f} GFLOP/s" if flops(stage) else " " * 15
        names = " ".join(node.op.removeprefix("aten.").split(".")[0] for node in stage.nodes)
        shapes = " -> ".join("x".join(map(str, layout.shape)) for layout in (*stage.reads[:1], stage.out))
        print(f"{at:4} {ns / 1e3:9.1f} us {100 * ns / total:5.1f} % {rate}  {type(stage).__name__:11} {shapes}  {names[:70]}")
    work = sum(map(flops, its.stages))
    print(f"     {total / 1e3:9.1f} us, {work / 1e6:.0f} MFLOP, {work / total:.1f} GFLOP/s")


if __name__ == "__main__":
    main()
