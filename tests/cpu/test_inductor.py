"""Regions of a step compiled by inductor: near to eager's, at the promised peak, compiled once, and torch's where that fails."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from bench.in_values import in_values
from lowtide.ir.bodies import is_by_inductor
from lowtide.ir.text.graph_text import to_text
from lowtide.regions import compilation as compiled
from lowtide.regions import inductor, kernels
from lowtide.regions.clusters import numbered
from lowtide.rewrite import alignment, rewritings
from tests.residual import Net, square

FUSED: dict[str, Any] = {"exact": False, "kernels": "compiled"}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
    monkeypatch.setattr(compiled, "is_faster", lambda *_: True)
    monkeypatch.setattr(compiled, "_open", {})
    monkeypatch.setattr(inductor, "processes", lambda: 1)
    torch.manual_seed(0)
    model = Net()
    return model, torch.randn(32, 64), torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: nn.Module, x: torch.Tensor, dtype: torch.dtype, steps: int) -> list[torch.Tensor]:
    mine, x = copy.deepcopy(model).to(dtype), x.to(dtype)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        square(mine, x).backward()
        optimizer.step()
    return [parameter.detach().double() for parameter in mine.parameters()]


def furthest(ones: list[torch.Tensor], twos: list[torch.Tensor]) -> float:
    return max(float((one - two).abs().max()) for one, two in zip(ones, twos, strict=True))


def test_a_step_is_near_and_keeps_its_promise_and_is_compiled_once(work, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, optimizer = work
    true, eager = trained(model, x, torch.float64, 4), trained(model, x, torch.float32, 4)
    step = lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(**FUSED))
    regions = [node for node in step.plan.graph.nodes if is_by_inductor(node)]
    assert any(node.writes for node in regions)
    assert any(node.outputs for node in regions)
    for _ in range(4):
        step(x)
    mine = [parameter.detach().double() for parameter in model.parameters()]
    assert furthest(mine, true) < 4 * furthest(eager, true) + 1e-6
    with pytest.warns(UserWarning, match="step.measure trains"):
        assert step.measure(x).peak_bytes == step.plan.peak_bytes

    monkeypatch.setattr(inductor, "_artifact", _never)  # another process finds the artifacts
    monkeypatch.setattr(compiled, "_open", {})
    again = lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(**FUSED))
    assert again.plan.graph is not step.plan.graph
    assert sum(map(is_by_inductor, again.plan.graph.nodes)) == len(regions)
    again(x)


class Odd(nn.Module):
    """A layer whose rows tensor cores could not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 37, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).square()).sigmoid()


def test_products_are_padded_beside_regions(work, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """As on a GPU where that takes less time: in all programs of the step, and in a plan that was saved."""
    monkeypatch.setattr(alignment, "_has_tensor_cores", lambda value: value.dtype == "float32")
    costs = lambda graph, whole, times_of: {rewritings._key(*each): -1.0 for each in whole.applied}  # noqa: E731
    monkeypatch.setattr(rewritings, "_costs", costs)
    _, x, _ = work
    model = Odd()
    true, eager = trained(model, x, torch.float64, 4), trained(model, x, torch.float32, 4)
    first, again = (copy.deepcopy(model) for _ in range(2))
    step = lowtide.optimize(first, (x,), loss=square, optimizer=torch.optim.AdamW(first.parameters(), lr=1e-2), **in_values(**FUSED))
    for plan in (step.plan, *step.plan.first_steps):
        assert compiled_nodes(plan)
        assert {node.results[0].shape[-1] for node in plan.graph.nodes if node.op == "aten.mm.default"} >= {40}
    for _ in range(4):
        step(x)
    mine = [parameter.detach().double() for parameter in first.parameters()]
    assert furthest(mine, true) < 4 * furthest(eager, true) + 1e-6

    step.save(tmp_path / "plan.json")
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    saved = lowtide.optimize(again, (x,), loss=square, optimizer=optimizer, plan=tmp_path / "plan.json", **in_values(**FUSED))
    assert to_text(saved.plan.graph, sources=False) == to_text(step.plan.graph, sources=False)
    for _ in range(4):
        saved(x)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))


def compiled_nodes(plan: Any) -> list[Any]:
    return [node for node in plan.graph.nodes if is_by_inductor(node)]


def test_an_optimizers_first_step_has_the_regions_of_later_ones(work, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, optimizer = work
    tried: list[Any] = []
    try_them = compiled._tried
    monkeypatch.setattr(compiled, "_tried", lambda bodies, say: (tried.append(bodies), try_them(bodies, say))[1])
    step = lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(**FUSED))
    (first,) = step.plan.first_steps
    bodies = {to_text(numbered(node.body)) for node in compiled_nodes(step.plan)}
    assert {to_text(numbered(node.body)) for node in compiled_nodes(first)} <= bodies
    assert any(node.outputs for node in compiled_nodes(first))
    assert len(tried) == 1  # those of the later steps: nothing is compiled for it alone
    assert bodies <= tried[0].keys()
    eager = trained(model, x, torch.float32, 1)
    step(x)
    assert furthest([parameter.detach().double() for parameter in model.parameters()], eager) < 1e-5


def test_each_shape_that_comes_has_regions_of_its_own(work) -> None:
    model, x, optimizer = work
    step = lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(on_new_shape="extend", **FUSED))
    step(x), step(x[:24])
    other = step.plan_for(x[:24])
    assert other.graph is not step.plan.graph
    assert compiled_nodes(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic": {0: {0: (2, 64)}}}, 'compiled for one shape: leave out `dynamic` and say Shapes.on_new_shape="extend"'),
        ({"dynamic": "auto"}, 'compiled for one shape: leave out `dynamic` and say Shapes.on_new_shape="extend"'),
        ({"simulate": "h100"}, "only planned .`simulate`, .* leave `kernels` out there, and say it on the machine that runs the step"),
        ({"workspaces": False}, "tries nothing .workspaces=False. has none"),
        ({"exact": True}, "say exact=False too"),
        ({"kernels": "xla"}, "expected one of 'auto', 'eager', 'compiled', got 'xla'"),
    ],
)
def test_what_regions_do_not_go_with_is_refused(work, options: dict[str, Any], message: str) -> None:
    model, x, optimizer = work
    with pytest.raises(ValueError, match=message):
        lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(**{**FUSED, **options}))


def test_a_model_without_memory_is_refused() -> None:
    model = Net().to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="a model on the meta device"):
        lowtide.optimize(model, (torch.empty(32, 64, device="meta"),), loss=square, optimizer=optimizer, **in_values(**FUSED))


def _never(*_: object) -> None:
    raise AssertionError("it was compiled before")


def _fails(module: Callable[[], Any], looks: object) -> None:
    raise OSError("no compiler is here")


def test_what_cannot_be_compiled_is_torchs(work, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    model, x, optimizer = work
    eager = trained(model, x, torch.float32, 2)
    monkeypatch.setattr(inductor, "_artifact", _fails)
    monkeypatch.setattr(inductor, "directory", lambda: tmp_path)
    with pytest.warns(RuntimeWarning, match="leaves a region to torch's operators: inductor cannot compile it"):
        step = lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(**FUSED))
    assert not any(map(is_by_inductor, step.plan.graph.nodes))
    for _ in range(2):
        step(x)
    assert furthest([parameter.detach().double() for parameter in model.parameters()], eager) == 0.0


def test_a_wrong_kernel_is_found(work, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, optimizer = work
    plain = compiled._run_of

    def wrong(body: Any) -> Callable[..., list[torch.Tensor]]:
        run = plain(body)
        return lambda *given: [tensor + 1 for tensor in run(*given)]

    monkeypatch.setattr(compiled, "_run_of", wrong)
    monkeypatch.setattr(compiled.Cache, "load", lambda self: {})
    step = lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(**FUSED))
    assert not any(node.outputs for node in step.plan.graph.nodes if is_by_inductor(node))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), AttributeError("module 'z3' has no attribute 'ExprRef'")])
def test_whatever_stands_in_inductors_way_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path, error: Exception) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(inductor.tempfile, "NamedTemporaryFile", fails)
    with pytest.raises(inductor.NativeError, match="does not load") as told:
        inductor._opened(tmp_path / "made.bin")
    assert str(error) in str(told.value)
    assert told.value.__cause__ is error


def test_another_process_compiles(work, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    model, x, optimizer = work
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(inductor, "processes", lambda: 2)
    monkeypatch.setattr(inductor, "_BODIES", 1)
    answers: list[dict[str, Any]] = []
    asked, ask = threading.Event(), inductor.TrialProcess.ask

    def heard(self: Any, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        answer = ask(self, request, limit_s)
        if "key" in request:
            answers.append(answer)
            asked.set()
        return answer

    take = inductor.ModuleGroup.take
    monkeypatch.setattr(inductor.TrialProcess, "ask", heard)
    monkeypatch.setattr(inductor.ModuleGroup, "take", lambda group, key: (asked.wait(300), take(group, key)))
    step = lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(**FUSED))
    assert compiled_nodes(step.plan)
    assert {} in answers
    step(x)


def test_kernels_are_one_library_from_which_other_processes_load_them(work, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    model, x, optimizer = work
    monkeypatch.setattr(inductor, "directory", lambda: tmp_path)
    monkeypatch.setattr(kernels, "_loaded", {})
    lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(**FUSED))
    names = [path.name for path in (tmp_path / "native").iterdir()]
    assert sum(name.endswith(".so") for name in names) == 1
    artifacts = [tmp_path / "native" / name for name in names if name.endswith(".bin")]
    assert len(artifacts) > 1

    monkeypatch.setattr(kernels, "_loaded", {})  # as in another process
    assert all(map(inductor._opened, artifacts))
    assert kernels._loaded

    library = next((tmp_path / "native").glob("*.so"))
    library.write_bytes(library.read_bytes()[:-1])  # cut off: loading it would end the process
    monkeypatch.setattr(kernels, "_loaded", {})
    assert all(map(inductor._opened, artifacts))
    assert not kernels._loaded


def test_kernels_that_cannot_be_together_are_compiled_alone(work, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    model, x, optimizer = work
    monkeypatch.setattr(inductor, "directory", lambda: tmp_path)
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(kernels, "joint", lambda sources: "this is no C++")
    step = lowtide.optimize(model, (x,), loss=square, optimizer=optimizer, **in_values(**FUSED))
    assert compiled_nodes(step.plan)
    assert not list((tmp_path / "native").glob("*.so"))
    step(x)
