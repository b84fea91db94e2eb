"""torch.compile with lowtide's backend: what "aot_eager" computes, bit for bit, within a limit; steps that it leaves alone."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.base.backend import WHERE
from lowtide.integrations.dynamo import lowtide as backend
from lowtide.plan.plan import Plan
from tests.training import differences

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning")


class Net(nn.Module):
    """Blocks, dropout, statistics; several results, one of them a view, one none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x))) + x
        return self.norm(x).square().mean(), x.mT, None, 3


class Loss(Net):
    """Nothing but the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Broken(Net):
    """Two graphs, with something between them that is none."""

    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return super().forward(x)


def trained(kind: Any, with_backend: Any, twice: bool = False, **options: Any) -> Any:
    """All that three steps leave."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind()
    compiled = torch.compile(model, backend=with_backend, dynamic=False, **({"options": options} if options else {}))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    results = []
    for _ in range(3):
        x = torch.randn(64, 32, requires_grad=True)
        loss, other, nothing, number = compiled(x)
        (loss + other.mean()).backward(retain_graph=twice)
        if twice:
            loss.backward()
        results.append((loss.detach(), other.detach(), nothing, number, x.grad))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        results.append(compiled(torch.ones(64, 32)))
    return copy.deepcopy((results, dict(model.state_dict()), torch.get_rng_state()))


@pytest.mark.parametrize("options", [{}, {"memory": "80%"}])
@pytest.mark.parametrize(("kind", "twice"), [(Net, True), (Broken, False)])
def test_computes_what_aot_eager_does(kind: Any, twice: bool, options: dict[str, Any]):
    plans: list[Plan] = []
    expected = trained(kind, "aot_eager", twice)
    found = trained(kind, backend, twice, workspaces=False, plan_callback=plans.append, **options)
    assert not (told := differences(expected, found)), "\n".join(told[:8])
    assert plans


class Scores(nn.Module):
    """Returns scores that are as large as all else, and quickly made again of what is saved anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(nn.functional.gelu(self.first(x)), 0.2))


@pytest.mark.parametrize("limit", ["85%", "70%", "50%"])
def test_a_limit_takes_nothing_from_the_caller_that_the_forward_pass_has_returned(limit: str):
    results = []
    for name, options in (("aot_eager", {}), (backend, {"options": {"memory": limit}})):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Scores()
        compiled = torch.compile(model, backend=name, dynamic=False, **options)
        scores = [compiled(torch.randn(4, 8)) for _ in range(3)]
        for each in reversed(scores):
            each.square().sum().backward()
        results.append(([each.detach() for each in scores], [each.grad for each in model.parameters()]))
    assert not (told := differences(*results)), "\n".join(told[:8])


def test_the_peak_is_within_the_limit():
    torch._dynamo.reset()
    model, plans, x = Loss(), list[Plan](), torch.randn(512, 32)
    compiled = torch.compile(model, backend=backend, dynamic=False, options={"memory": "70%", "plan_callback": plans.append})

    def step() -> None:
        compiled(x).backward()
        model.zero_grad()

    step()
    promised_bytes = plans[-1].peak_bytes - plans[-1].resident_bytes
    assert plans[-1].peak_bytes <= 0.7 * plans[-1].eager_peak_bytes
    assert lowtide.measure(step).above_bytes == pytest.approx(promised_bytes, rel=0.02)


class Sized(nn.Module):
    """Computes with the length of its batch, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        length = tokens.shape[1]
        return self.last(self.table(tokens)[:, : length // 2 + 1].mean(1) * length), 2 * length


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_sizes_that_vary(dynamic: bool | None) -> None:
    left = []
    for each in ("aot_eager", backend):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Sized()
        compiled = torch.compile(model, backend=each, dynamic=dynamic)
        results = []
        for length in (5, 7, 9, 7, 5, 6):
            value, number = compiled(torch.arange(4 * length).reshape(4, length) % 20)
            value.square().mean().backward()
            results.append([value.detach(), number])
        left.append([results, [parameter.grad for parameter in model.parameters()]])
    assert not differences(left[0], left[1])


def test_an_option_that_is_none_is_refused():
    torch._dynamo.reset()
    compiled = torch.compile(Net(), backend=backend, options={"budget": "60%"})
    with pytest.raises(Exception, match="expects memory, latency, effort, workspaces, plan_callback; got 'budget'"):
        compiled(torch.randn(8, 32))


def test_the_backend_has_its_name():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    _, _, said = text.partition("[project.entry-points.torch_dynamo_backends]\nlowtide = ")
    module, _, name = said.splitlines()[0].strip('"').partition(":")
    assert getattr(import_module(module), name) is backend
    assert f"{module}:{name}" == WHERE


@pytest.mark.parametrize("imports", ["import lowtide, torch", "import torch; torch._dynamo.list_backends(); import lowtide"])
def test_a_checkout_that_is_not_installed_has_a_backend_once_lowtide_is_imported(imports: str):
    """Whichever of the two comes first; and no torch is imported for that."""
    code = f"""
import importlib.metadata, sys
installed = importlib.metadata.MetadataPathFinder
installed.find_distributions = classmethod(lambda *_, **__: iter(()))  # nothing is
import lowtide
assert "torch" not in sys.modules
del sys.modules["lowtide"]
sys.meta_path[:] = [each for each in sys.meta_path if each.__module__ != "lowtide.base.backend"]
{imports}
assert torch._dynamo.lookup_backend("lowtide").__module__ == "lowtide.integrations.dynamo"
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})


def test_a_step_is_left_alone_by_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, 4)
    step = lowtide.optimize(
        model, x, loss=lambda model, x: model(x).square().mean(), optimizer=optimizer, planning=lowtide.Planning(workspaces=False)
    )
    seen = []

    def counting(module: Any, example: Any) -> Any:
        seen.append([node.name for node in module.graph.nodes if node.op == "call_function"])
        return module

    @torch.compile(backend=counting)
    def loop(x: Tensor) -> Tensor:
        y = x * 2
        return step(y) + y.sum()

    expected = copy.deepcopy(model)
    loop(x), loop(x)
    twin = torch.optim.AdamW(expected.parameters())
    for _ in range(2):
        expected(x * 2).square().mean().backward()
        twin.step()
        twin.zero_grad()
    assert not differences(dict(expected.state_dict()), dict(model.state_dict()))
    assert sorted(names for graph in seen for names in graph) == ["add", "mul", "sum_1"] or len(seen) <= 3
