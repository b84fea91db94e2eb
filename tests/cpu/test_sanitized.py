"""Generated code under the address and undefined-behaviour sanitizers: arguments and results are exactly as long as their tensors."""

from __future__ import annotations

import os
import subprocess
from math import prod
from pathlib import Path

import pytest
import torch

from lowtide.cpu import networks as made
from lowtide.cpu.network import FLAGS
from lowtide.ir.sizes import reach
from lowtide.runtime.libraries import compiler
from tests.cpu.alone import EXAMPLES, program, regions_of

SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0")
KEPT = tuple(flag for flag in FLAGS if flag not in ("-O3", "-shared", "-fPIC"))


def run(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile a program and run it. Raises CalledProcessError where it does not compile."""
    text, program = folder / "main.cpp", folder / "main"
    text.write_text(source, encoding="utf-8")
    subprocess.run([*compiler(), *SANITIZED, *KEPT, str(text), "-o", str(program)], check=True, capture_output=True, timeout=300)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=100, env=environment)


@pytest.fixture(scope="module")
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("sanitizers")
    try:
        if run("int main() { return 0; }", folder).returncode == 0:
            return
    except (OSError, subprocess.SubprocessError):
        pass
    pytest.skip("the compiler has no sanitizers here")


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_read_or_written_outside(name: str, sanitizers: None, tmp_path: Path) -> None:
    model, shapes = EXAMPLES[name]
    regions = regions_of(model().eval(), tuple(map(torch.ones, shapes)))
    assert regions
    for region in regions:
        its, *_ = made.built(region.body, region.fixed, region.joined)
        found = run(program(its, region.body), tmp_path)
        assert found.returncode == 0, found.stderr[:2000]


def test_the_sanitizers_see_what_is_read_outside(sanitizers: None, tmp_path: Path) -> None:
    model, shapes = EXAMPLES["words"]
    region = regions_of(model().eval(), tuple(map(torch.ones, shapes)))[0]
    its, *_ = made.built(region.body, region.fixed, region.joined)
    last = reach(its.results[-1].shape, its.results[-1].stride)
    source = program(its, region.body)
    assert prod(its.results[-1].shape) == last
    assert run(source.replace(f" {last}}};", f" {last - 1}}};"), tmp_path).returncode != 0
