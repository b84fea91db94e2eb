"""Generated networks as programs of their own: compiled with other options, for other processors, run by any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import lowtide
from lowtide.cpu.executable import _SLACK_ELEMENTS
from lowtide.cpu.network import Network
from lowtide.ir.bodies import Region, is_region
from lowtide.ir.graph import Graph
from lowtide.ir.sizes import reach

_MAIN = """
#include <cstdio>
#include <cstdlib>
static Team team;
static void* work(void* run) { lowtide_network((const Run*)run); return nullptr; }
int main(int argc, char** argv) {
  for (int i = 0; i < SLOTS; i++) at[i] = (float*)calloc(SIZES[i], 4);
  for (int i = 1; i < RESULTS && argc > 1; i++)
    if (fread(at[i], 4, SIZES[i], stdin) != size_t(SIZES[i])) return 3;
  for (int arg = 1; arg < argc || arg == 1; arg++) {
    int count = argc > 1 ? atoi(argv[arg]) : 1;
    Run runs[MOST_THREADS];
    pthread_t threads[MOST_THREADS];
    for (int i = RESULTS; i < SLOTS; i++) memset(at[i], 255, 4 * SIZES[i]);
    for (int id = 0; id < count; id++) new (runs + id) Run{&team, id, count, at, team.round};
    for (int id = 1; id < count; id++) if (pthread_create(threads + id, nullptr, work, runs + id)) return 4;
    work(runs);
    for (int id = 1; id < count; id++) pthread_join(threads[id], nullptr);
    team.round = runs[0].round;
    for (int i = RESULTS; i < SLOTS; i++) fwrite(at[i], 4, SIZES[i], stdout);
  }
  return 0;
}
"""


def regions_of(model: nn.Module, args: tuple[Tensor, ...]) -> list[Region]:
    """Those that kernels are generated for."""
    return [Region.of(node) for node in lowtide.optimize(model, args, exact=False).plan.graph.nodes if is_region(node)]


def program(its: Network, body: Graph) -> str:
    """A network's source with a main function.

    It reads constants and arguments, runs by as many threads as each word of the command says, and writes the results of each run.
    Without a word it reads nothing, and one thread runs. Arguments and results are exactly as long as their tensors.
    """
    live = [body.inputs[at] for at in its.live]
    sizes = [
        its.arena_bytes // 4 + _SLACK_ELEMENTS,
        max(1, its.kept_elements),
        *(reach(each.shape, each.stride) for each in (*live, *its.results)),
    ]
    said = f"constexpr int SLOTS = {len(sizes)}, RESULTS = {2 + len(live)};\nconst long SIZES[] = {{{', '.join(map(str, sizes))}}};"
    return f"{its.source}\n#include <new>\n#include <pthread.h>\n{said}\nstatic float* at[SLOTS];\n{_MAIN}"


class Images(nn.Module):
    """Odd channels, groups, a stem, a depthwise convolution between products, pools and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.group = nn.Conv2d(3, 10, 3, 2, 1), nn.Conv2d(10, 10, 3, padding=1, groups=2)
        self.deep = nn.Sequential(nn.Conv2d(10, 22, 1), nn.ReLU6(), nn.Conv2d(22, 22, 3, 1, 1, groups=22), nn.SiLU(), nn.Conv2d(22, 10, 1))
        self.pool, self.norm, self.head = nn.MaxPool2d(3, 2, 1), nn.LayerNorm(10), nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.group(self.stem(x)))
        x = nn.functional.avg_pool2d(self.pool(x + self.deep(x)), 2)
        return self.head(self.norm(x.mean([2, 3])))


class Tiles(nn.Module):
    """Convolutions on transformed tiles that do not divide the image, of columns that fill no vector; shuffled channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(17, 42, 3, padding=1), nn.Conv2d(42, 21, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(torch.relu(self.one(x)))
        return torch.cat([x.relu(), x], 1).view(1, 2, 21, 11, 12).transpose(1, 2).reshape(1, 42, 11, 12)


class Words(nn.Module):
    """Attention by one operator and by several, of features that fill no vector."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(15, 45)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (each.view(1, 11, 3, 5).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y + torch.softmax(q @ k.transpose(2, 3), -1) @ v


EXAMPLES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {  # and the shapes of their batch
    "images": (Images, ((1, 3, 17, 19),)),
    "tiles": (Tiles, ((1, 17, 13, 14),)),
    "words": (Words, ((1, 11, 15), (1, 1, 11, 11))),
}
