"""What is generated for other processors than this one, by more threads than there are here: numbers are eager's but for rounding.

Threads change no bit. Code for ARM is compiled and run by an emulator, where `g++-aarch64-linux-gnu` and `qemu-user` are installed.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import lowtide
from bench.ago.blocks import all_legal
from lowtide.api import archive
from lowtide.api.load import _Read
from lowtide.cpu import networks
from lowtide.cpu.executable import packed, ready
from lowtide.cpu.network import FLAGS, StagedBody, network_of
from lowtide.cpu.networks import placed
from lowtide.cpu.recipes import Target
from lowtide.ir.bodies import Region, is_region
from lowtide.ir.sizes import reach
from lowtide.lower.interpreter import watched
from lowtide.runtime.libraries import compiler, processor
from tests.cpu.alone import EXAMPLES, program

THREADS = (1, 2, 4, 8)
KEPT = tuple(flag for flag in FLAGS if flag not in ("-O3", "-shared", "-fPIC") and not flag.endswith("=native"))


@dataclass(frozen=True)
class Processor:
    """What code is made for, and how that is compiled and run here."""

    target: Target
    options: tuple[str, ...]
    needs: str  # of this machine's processor
    compiler: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()

    def built(self, source: str, folder: Path) -> Path:
        text, program = folder / "main.cpp", folder / "main"
        text.write_text(source, encoding="utf-8")
        command = [*(self.compiler or compiler()), "-O1", *self.options, *KEPT, str(text), "-o", str(program)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        return program

    def skip_without(self) -> None:
        lacks = [each for each in (*self.compiler[:1], *self.emulator) if shutil.which(each) is None]
        lacks += [] if self.emulator or self.needs in processor().split() else [f"a processor with {self.needs}"]
        if lacks:
            pytest.skip(f"{' and '.join(lacks)}: not here")


PROCESSORS = {
    "sse": Processor(Target(4, 16), ("-march=x86-64",), "sse2"),
    "avx2": Processor(Target(8, 16), ("-march=haswell",), "avx2"),
    "avx512": Processor(Target(16, 32), ("-march=skylake-avx512",), "avx512f"),
    "arm": Processor(Target(4, 32), ("-mcpu=cortex-a72", "-static"), "", ("aarch64-linux-gnu-g++",), ("qemu-aarch64",)),
}


@pytest.fixture(scope="module", params=EXAMPLES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[_Read, list[Tensor], Tensor]:
    """A function as a file says it, with all blocks that there are; a batch, and the result in double precision."""
    torch.manual_seed(0)
    model, shapes = EXAMPLES[request.param][0]().eval().requires_grad_(False), EXAMPLES[request.param][1]
    batch, path = [torch.randn(*shape) for shape in shapes], tmp_path_factory.mktemp("saved") / "model.lowtide"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(networks, "tuned", all_legal)
        lowtide.optimize(model, tuple(batch), exact=False).save_frozen(path, *batch)
    return _Read.of(*archive.read(path)), batch, model.double()(*(each.double() for each in batch))


@pytest.mark.parametrize("kind", PROCESSORS)
def test_numbers_are_those_of_eager_by_any_number_of_threads(kind: str, saved: tuple[_Read, list[Tensor], Tensor], tmp_path: Path) -> None:
    PROCESSORS[kind].skip_without()
    read, batch, expected = saved
    graph = read.decision.graph
    given = {
        value: batch[int(slot.path[0])] if slot.table == "batch" else tensor
        for value, slot, tensor in zip(graph.inputs, read.slots, read.inputs, strict=True)
    }
    (region,) = (Region.of(node) for node in graph.nodes if is_region(node))
    its = network_of(StagedBody.of(region.body, region.fixed, PROCESSORS[kind].target), region.joined, placed)
    args = [given[value] for value in region.node.inputs]
    spec = ready(its, (0, None), region.fixed, partial(watched, its.constants))
    data = b"".join(as_it_lies(each) for each in (packed(spec, [args[at] for at in region.fixed]), *(args[at] for at in its.live)))
    command = [*PROCESSORS[kind].emulator, str(PROCESSORS[kind].built(program(its, region.body), tmp_path)), *map(str, THREADS)]
    runs = np.frombuffer(subprocess.run(command, input=data, check=True, capture_output=True, timeout=100).stdout, np.float32)
    runs = runs.reshape(len(THREADS), -1)
    (result,) = its.results
    found = torch.as_strided(torch.from_numpy(runs[0].copy()), result.shape, result.stride)
    assert runs.shape[1] == reach(result.shape, result.stride)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert all(np.array_equal(run, runs[0]) for run in runs)


def as_it_lies(tensor: Tensor) -> bytes:
    """In memory."""
    return bytes(torch.as_strided(tensor, (reach(tensor.shape, tensor.stride()),), (1,)).numpy().tobytes())
