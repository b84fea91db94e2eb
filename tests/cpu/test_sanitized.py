"""Generated code under the address and undefined-behaviour sanitizers: arguments and results are exactly as long as their tensors."""

from __future__ import annotations

import os
import subprocess
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cpu import networks as made
from lowtide.cpu.executable import _SLACK_ELEMENTS
from lowtide.cpu.library import FLAGS
from lowtide.cpu.network import Network
from lowtide.ir.bodies import Region, is_region
from lowtide.ir.graph import Graph, Value
from lowtide.runtime.libraries import compiler

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


def elements(value: Value) -> int:
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(value.shape, value.stride, strict=True))


def program(its: Network, body: Graph) -> str:
    """A network's source with a main function that gives it memory and runs it alone."""
    values = [*(body.inputs[at] for at in its.live), *its.results]
    sizes = [its.arena_bytes // 4 + _SLACK_ELEMENTS, max(1, its.kept_elements), *map(elements, values)]
    blocks = [f"  at[{at}] = (float*)calloc({size}, 4);" for at, size in enumerate(sizes)]
    lines = [its.source, "#include <cstdlib>", f"int main() {{ static float* at[{len(sizes)}];", *blocks]
    return "\n".join([*lines, "  static Team team; Run run{&team, 0, 1, at};", "  lowtide_network(&run); return 0; }", ""])


class Images(nn.Module):
    """Odd channels, groups, a stem, a depthwise convolution between products, pools and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.group = nn.Conv2d(3, 10, 3, 2, 1), nn.Conv2d(10, 10, 3, padding=1, groups=2)
        self.deep = nn.Sequential(nn.Conv2d(10, 22, 1), nn.ReLU6(), nn.Conv2d(22, 22, 3, 1, 1, groups=22), nn.SiLU(), nn.Conv2d(22, 10, 1))
        self.pool, self.norm, self.head = nn.MaxPool2d(3, 2, 1), nn.LayerNorm(10), nn.Linear(10, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.group(self.stem(x)))
        x = nn.functional.avg_pool2d(self.pool(x + self.deep(x)), 2)
        return self.head(self.norm(x.mean([2, 3])))


class Tiles(nn.Module):
    """Convolutions on transformed tiles that do not divide the image, of columns that fill no vector; shuffled channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(17, 42, 3, padding=1), nn.Conv2d(42, 21, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(torch.relu(self.one(x)))
        return torch.cat([x.relu(), x], 1).view(1, 2, 21, 11, 12).transpose(1, 2).reshape(1, 42, 11, 12)


class Words(nn.Module):
    """Attention by one operator and by several, of features that fill no vector."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(15, 45)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(1, 11, 3, 5).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y + torch.softmax(q @ k.transpose(2, 3), -1) @ v


EXAMPLES = {
    "images": (Images, (torch.ones(1, 3, 17, 19),)),
    "tiles": (Tiles, (torch.ones(1, 17, 13, 14),)),
    "words": (Words, (torch.ones(1, 11, 15), torch.ones(1, 1, 11, 11))),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_read_or_written_outside(name: str, sanitizers: None, tmp_path: Path) -> None:
    model, args = EXAMPLES[name]
    graph = lowtide.optimize(model().eval(), args, exact=False).plan.graph
    regions = [Region.of(node) for node in graph.nodes if is_region(node)]
    assert regions
    for region in regions:
        its, *_ = made.built(region.body, region.fixed, region.joined)
        found = run(program(its, region.body), tmp_path)
        assert found.returncode == 0, found.stderr[:2000]


def test_the_sanitizers_see_what_is_read_outside(sanitizers: None, tmp_path: Path) -> None:
    model, args = EXAMPLES["words"]
    graph = lowtide.optimize(model().eval(), args, exact=False).plan.graph
    region = next(Region.of(node) for node in graph.nodes if is_region(node))
    its, *_ = made.built(region.body, region.fixed, region.joined)
    last = elements(its.results[-1])
    source = program(its, region.body)
    assert prod(its.results[-1].shape) == last
    assert run(source.replace(f"calloc({last}, 4)", f"calloc({last - 1}, 4)"), tmp_path).returncode != 0
