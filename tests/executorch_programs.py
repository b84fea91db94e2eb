"""Programs for ExecuTorch's runtime, planned by its own `greedy` and by lowtide; what became of each, as JSON on the last line.

A process of its own runs this, with a folder of ExecuTorch's packages that the other tests do not see.
"""

from __future__ import annotations

import copy
import json
import warnings
from functools import cache
from typing import Any

import torch
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig, to_edge
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


class Conditions(nn.Module):
    """Branches whose results are read while other branches run: one after another, side by side, and one within another."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.cond(x.sum() > 0, lambda a: a.sin() * 2, lambda a: a.cos(), (x,))
        second = torch.cond(x.mean() > 0.1, lambda a: a * 2, lambda a: a + 1, (first,))
        inner = lambda a: torch.cond(a.mean() > 0, lambda b: b.exp() + b.tanh(), lambda b: b - 3, (a * 3,)) * a  # noqa: E731
        third = torch.cond(x.sum() < 1, inner, lambda a: a.sigmoid(), (x,))
        return second, third * first, first


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.while_loop(lambda a: a.sum() < 100, lambda a: (a * 2 + 1,), (x.abs() + 1,))[0]


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def main() -> None:
    torch.manual_seed(0)
    image, rows = torch.randn(1, 3, 12, 12), torch.randn(4, 8)
    nets = {
        "irregular": (Irregular(14), image),
        "counter": (Counter(), rows),
        "branches": (Branches(), rows),
        "conditions": (Conditions(), rows),
        "same": (Same(), rows),
    }
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
            "loop": {},
            "too small": {"memories": [Space("fast", 4096)]},
            "no space": {"memories": ["fast"]},
            "no flag": {"reorder": "yes"},
            "shared": {"memories": [slow, fast], "share_mutable_buffers": True},
        }.items():
            try:
                net, example = (Loop(), rows) if name == "loop" else nets["irregular"]
                planned(net, example, MemoryPlanningPass(**settings))
            except (BudgetError, FormatError) as error:
                found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


def planned(net: nn.Module, example: torch.Tensor, planning: MemoryPlanningPass | None) -> Any:
    """A program; what a buffer starts with is in it, else the runtime has there what lay there."""
    given = {} if planning is None else {"memory_planning_pass": planning}
    config = ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(["total"])], **given)
    return copy.deepcopy(exported(net, example)).to_executorch(config)


@cache
def exported(net: nn.Module, example: torch.Tensor) -> EdgeProgramManager:
    """Once for all that is planned of a network, from copies: `to_executorch` changes what it is asked of."""
    return to_edge(torch.export.export(net, (example,)))


def compared(net: nn.Module, example: torch.Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes by arena, and whether calls of the runtime gave the same bits under both plans, and what eager gives."""
    planning = MemoryPlanningPass(**settings)
    kept = {name: value for name, value in settings.items() if name not in ("memories", "reorder")}
    programs = [planned(net, example, None), planned(net, example, planning)]
    runtime = Runtime.get()
    methods = [runtime.load_program(program.buffer).load_method("forward") for program in programs]
    same = near = True
    eager = copy.deepcopy(net)
    for _ in range(6):
        x = torch.randn_like(example)
        expected = eager(x)
        one, other = (method.execute([x]) for method in methods)
        same &= all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        near &= all(
            torch.allclose(a, b, atol=1e-5) for a, b in zip(other, expected if isinstance(expected, tuple) else (expected,), strict=True)
        )
    module = programs[1].exported_program()
    inside = kept.get("alloc_graph_input", True)
    Verifier(module.graph_module, inside, True, True, module.graph_signature).verify_storage_reuse()  # raises
    sizes = [program.exported_program().graph_module.meta["non_const_buffer_sizes"][1:] for program in programs]
    return {"same": same, "near": near, "greedy": sizes[0], "lowtide": sizes[1], "status": [plan.status.name for plan in planning.plans]}


if __name__ == "__main__":
    main()
