"""Programs for ExecuTorch's runtime, planned by its own `greedy` and by lowtide; what became of each, as JSON on the last line.

A process of its own runs this, with a folder of ExecuTorch's packages that the other tests do not see.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
from executorch.exir import ExecutorchBackendConfig, to_edge
from executorch.exir.memory_planning import Verifier
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch.runtime import Runtime
from torch import nn

from lowtide import Space
from lowtide.errors import BudgetError, FormatError
from lowtide.integrations.executorch import MemoryPlanningPass

warnings.simplefilter("ignore")


class Irregular(nn.Module):
    """Convolutions that read earlier ones at random."""

    def __init__(self, count: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.links = [sorted(set(torch.randint(0, index, (2,), generator=drawn).tolist())) if index else [] for index in range(count)]
        widths = [8 * (1 + index % 4) for index in range(count)]
        inputs = [3, *(sum(widths[other] for other in links) for links in self.links[1:])]
        self.convs = nn.ModuleList(nn.Conv2d(inputs[index], widths[index], 3, padding=1) for index in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for links, conv in zip(self.links, self.convs, strict=True):
            found.append(torch.relu(conv(torch.cat([found[other] for other in links], 1) if links else x)))
        return found[-1].mean((2, 3)) + sum(each.mean() for each in found[-4:])


class Counter(nn.Module):
    """It writes to a buffer that lives between calls, and reads it before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.total * 2
        self.total.add_(self.linear(x))
        return before, self.total * x


class Branches(nn.Module):
    """Two results of one operator, a view, and a branch that depends on the data."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.relu(x).max(1)
        values = torch.cond(x.sum() > 0, lambda a: (a * 2 + 1).sin() * a, lambda a: a.cos(), (values,))
        return (values * 3).view(2, 2), places


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def main() -> None:
    torch.manual_seed(0)
    image, rows = torch.randn(1, 3, 12, 12), torch.randn(4, 8)
    nets = {"irregular": (Irregular(14), image), "counter": (Counter(), rows), "branches": (Branches(), rows), "same": (Same(), rows)}
    found: dict[str, Any] = {}
    with torch.no_grad():
        for name, (net, example) in nets.items():
            net.eval()
            found[name] = compared(net, example, {})
        found["irregular in order"] = compared(nets["irregular"][0], image, {"reorder": False})
        found["counter outside"] = compared(nets["counter"][0], rows, {"alloc_graph_input": False, "alignment": 64})
        fast, slow = Space("fast", 12_000, 8e9, 8e9), Space("slow", 2**20, 1e8, 1e8)
        found["two memories"] = compared(nets["irregular"][0], image, {"memories": [slow, fast]})
        for name, settings in {
            "too small": {"memories": [Space("fast", 4096)]},
            "no space": {"memories": ["fast"]},
            "no flag": {"reorder": "yes"},
            "shared": {"memories": [slow, fast], "share_mutable_buffers": True},
        }.items():
            try:
                compared(nets["irregular"][0], image, settings)
            except (BudgetError, FormatError) as error:
                found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


def compared(net: nn.Module, example: torch.Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes by arena, and whether three calls of the runtime gave the same bits under both plans."""
    planning = MemoryPlanningPass(**settings)
    kept = {name: value for name, value in settings.items() if name not in ("memories", "reorder")}
    programs = []
    starts = [InitializedMutableBufferPass(["total"])]  # else the runtime has there what lay there
    for config in (ExecutorchBackendConfig(passes=starts), ExecutorchBackendConfig(passes=starts, memory_planning_pass=planning)):
        programs.append(to_edge(torch.export.export(net, (example,))).to_executorch(config))
    runtime = Runtime.get()
    methods = [runtime.load_program(program.buffer).load_method("forward") for program in programs]
    same = True
    for _ in range(3):
        x = torch.randn_like(example)
        same &= all(torch.equal(a, b) for a, b in zip(*(method.execute([x]) for method in methods), strict=True))
    module = programs[1].exported_program()
    inside = kept.get("alloc_graph_input", True)
    Verifier(module.graph_module, inside, True, True, module.graph_signature).verify_storage_reuse()  # raises
    sizes = [program.exported_program().graph_module.meta["non_const_buffer_sizes"][1:] for program in programs]
    return {"same": same, "greedy": sizes[0], "lowtide": sizes[1], "status": [plan.status.name for plan in planning.plans]}


if __name__ == "__main__":
    main()
