"""What a plan promises is what the allocator measures, of lowtide and of eager PyTorch."""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import lowtide
from bench import torchvision_shim
from bench.in_values import in_values
from lowtide.api.compare import Workload, eager_step
from lowtide.cost.profiler import measure_memory
from lowtide.planning.planner import Planner
from lowtide.runtime.ranks import SinglePeer
from lowtide.schedule import ProgramOrder


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def perceptron() -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    return model, (torch.randn(32, 256), torch.randint(0, 10, (32,))), cross_entropy


def convolutions() -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64),
        nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return model, (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))), cross_entropy


def resnet18() -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    torchvision_shim.install()
    from torchvision.models import resnet18

    return resnet18(), (torch.randn(2, 3, 64, 64), torch.randint(0, 1000, (2,))), cross_entropy


def gpt2() -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    torchvision_shim.install()  # transformers imports torchvision
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4))
    model.__dict__["loss_type"] = "ForCausalLM"
    return model.train(), (torch.randint(0, 50257, (2, 64)),), lambda model, x: model(input_ids=x, labels=x, use_cache=False).loss


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("workload", [perceptron, convolutions, resnet18, gpt2])
def test_promised_peaks_are_measured(workload, optimizer):
    model, batch, loss = workload()
    made = optimizer(model.parameters(), lr=1e-3)
    step = lowtide.optimize(model, batch, loss=loss, optimizer=made)
    step(*batch)
    with pytest.warns(UserWarning, match=r"step\.measure trains"):
        measured = step.measure(*batch)
    assert abs(step.plan.peak_bytes - measured.peak_bytes) <= max(2**20, measured.above_bytes // 100)
    assert step.plan.measured_peak_bytes == measured.peak_bytes
    assert measured.resident_bytes == step.plan.resident_bytes == measured.peak_bytes - measured.above_bytes

    plain = eager_step(Workload(model, batch, loss, made))
    plain()
    made.zero_grad()
    eager = measure_memory(plain).above_bytes
    assert abs(step.plan.eager_peak_bytes - step.plan.resident_bytes - eager) <= 0.03 * eager
    assert measured.above_bytes < eager
    assert "lowtide" in str(step.plan)


def test_what_is_resident_is_what_the_caller_holds():
    model, batch, loss = convolutions()
    optimizer = optim.AdamW(model.parameters())
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    step(*batch)
    state = [item for entries in optimizer.state.values() for item in entries.values()]
    held = [*model.parameters(), *model.buffers(), *batch, *state]
    assert step.plan.resident_bytes == sum(tensor.untyped_storage().nbytes() for tensor in held)


def test_inference_holds_no_more_than_it_needs():
    model, batch, _ = convolutions()
    model.eval()
    fn = lowtide.optimize(model, batch[:1])
    assert torch.equal(fn(batch[0]), model(batch[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it trains nothing, and warns of nothing
        measured = fn.measure(batch[0])
    with torch.no_grad():
        assert measured.above_bytes <= measure_memory(lambda: model(batch[0])).above_bytes
    assert abs(fn.plan.peak_bytes - measured.peak_bytes) <= 2**20


def test_a_first_step_is_not_measured_as_a_later_one():
    model, batch, loss = perceptron()
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optim.Adam(model.parameters()), planning=lowtide.Planning(workspaces=False))
    with pytest.raises(lowtide.StepError, match=r"makes its state.*call the step once, then measure"):
        step.measure(*batch)


def test_a_saved_plan_is_used_again(tmp_path):
    model, batch, loss = perceptron()
    twin = copy.deepcopy(model)
    first = lowtide.optimize(
        model,
        batch,
        loss=loss,
        optimizer=optim.SGD(model.parameters(), 0.1),
        planning=lowtide.Planning(solver=ProgramOrder(), workspaces=False),
    )
    first.plan.save(tmp_path / "plan.json")
    for plan in (tmp_path / "plan.json", str(tmp_path / "plan.json"), first.plan, lowtide.Plan.load(tmp_path / "plan.json")):
        again = lowtide.optimize(
            twin, batch, loss=loss, optimizer=optim.SGD(twin.parameters(), 0.1), plan=plan, planning=lowtide.Planning(workspaces=False)
        )
        assert (again.plan.order, again.plan.solver, again.plan.peak_bytes) == (first.plan.order, first.plan.solver, first.plan.peak_bytes)
        assert again.source == first.source
    torch.manual_seed(0)
    expected = first(*batch)
    torch.manual_seed(0)
    assert torch.equal(again(*batch), expected)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_saved_plan_holds_the_optimizers_first_step_too_so_that_nothing_is_planned_again(tmp_path, monkeypatch):
    model, batch, loss = perceptron()
    twin = copy.deepcopy(model)
    step = lowtide.optimize(
        model, batch, loss=loss, optimizer=optim.Adam(model.parameters()), memory="95%", planning=lowtide.Planning(workspaces=False)
    )
    step.plan.save(tmp_path / "plan.json")
    assert len(step.plan.first_steps) == 1

    def plans(*args):
        raise AssertionError("planned again")

    monkeypatch.setattr(Planner, "_plan", plans)
    again = lowtide.optimize(
        twin,
        batch,
        loss=loss,
        optimizer=optim.Adam(twin.parameters()),
        plan=tmp_path / "plan.json",
        planning=lowtide.Planning(workspaces=False),
    )
    assert again.plan.to_json() == step.plan.to_json()
    for seed in range(3):
        torch.manual_seed(seed)
        expected = step(*batch)
        torch.manual_seed(seed)
        assert torch.equal(again(*batch), expected)


def test_a_saved_plan_of_another_program_is_refused(tmp_path):
    model, batch, loss = perceptron()
    step = lowtide.optimize(
        model, batch, loss=loss, optimizer=optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
    )
    step.plan.save(tmp_path / "plan.json")
    with pytest.raises(lowtide.FormatError, match="the saved plan is of another program"):
        lowtide.optimize(
            model,
            batch,
            loss=loss,
            optimizer=optim.AdamW(model.parameters()),
            plan=tmp_path / "plan.json",
            planning=lowtide.Planning(workspaces=False),
        )


def _regression(width: int = 64, dtype: torch.dtype = torch.float32, activation: type[nn.Module] = nn.Tanh, **settings):
    model = nn.Sequential(nn.Linear(8, width), activation(), nn.Linear(width, 1)).to(dtype)
    batch = torch.randn(4, 8, dtype=dtype), torch.randn(4, 1, dtype=dtype)
    optimizer = optim.SGD(model.parameters(), 0.1)
    settings = {"loss": lambda model, x, y: functional.mse_loss(model(x), y), "optimizer": optimizer, "workspaces": False} | settings
    return lowtide.optimize(model, batch, **in_values(solver=ProgramOrder(), **settings))


@pytest.mark.parametrize(
    "other", [{"width": 128}, {"dtype": torch.float64}, {"activation": nn.Sigmoid}, {"accumulate": 2}, {"simulate": "h100"}]
)
def test_a_plan_is_bound_to_its_program_whatever_its_order(other, tmp_path):
    step = _regression()
    step.plan.save(tmp_path / "plan.json")
    with pytest.raises(lowtide.FormatError, match=r"the saved plan is of another program.*made with torch .* for cpu"):
        _regression(plan=tmp_path / "plan.json", **other)
    assert _regression(plan=tmp_path / "plan.json").plan.to_json() == step.plan.to_json()


def test_a_plan_whose_operators_were_edited_is_refused(tmp_path):
    told = json.loads(_regression().plan.to_json())
    told["graph"] = [line.replace("aten.tanh.default", "aten.sigmoid.default") for line in told["graph"]]
    del told["checksum"]
    told["checksum"] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    with pytest.raises(lowtide.FormatError, match="the saved plan was changed"):
        _regression(plan=lowtide.Plan.from_json(json.dumps(told)))


def test_the_same_input_gives_the_same_plan():
    def plan() -> str:
        model, batch, loss = convolutions()
        return lowtide.optimize(
            model, batch, loss=loss, optimizer=optim.Adam(model.parameters()), planning=lowtide.Planning(workspaces=False)
        ).plan.to_json()

    assert plan() == plan()


def test_stages_are_told():
    told: list[lowtide.Stage] = []
    step = lowtide.optimize(nn.Linear(2, 2), torch.ones(1, 2), planning=lowtide.Planning(callback=told.append))
    assert [(stage.name, stage.seconds is None) for stage in told[:2]] == [("capture", True), ("capture", False)]
    assert {stage.name for stage in told} == set(step.seconds)
    assert all(seconds >= 0 for seconds in step.seconds.values())


def test_what_is_measured_is_a_step_that_all_ranks_are_in():
    """One that fails there must not meet the others again, as one that fails in a call."""
    entered = []

    class Noted(SinglePeer):
        @contextmanager
        def in_step(self) -> Iterator[None]:
            entered.append("in")
            yield

    model = nn.Linear(4, 3)
    step = lowtide.optimize(model, torch.ones(2, 4), loss=lambda model, x: model(x).sum(), optimizer=torch.optim.SGD(model.parameters()))
    step._peers = Noted()
    step(torch.ones(2, 4))
    step.measure(torch.ones(2, 4))
    assert entered == ["in", "in"]


class Codebook(nn.Module):
    """Codes of a codebook that follows what is coded by moving averages, as in a VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 32)
        self.register_buffer("codes", torch.randn(128, 32))
        self.register_buffer("counts", torch.ones(128))
        self.decoder = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        with torch.no_grad():
            chosen = functional.one_hot(nearest, 128).float()
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.mul_(0.99).add_(chosen.T @ z / (self.counts[:, None] + 1e-5), alpha=0.01)
        code = self.codes[nearest]
        return self.decoder(z + (code - z).detach()), (code.detach() - z).square().mean()


def test_a_limit_gives_no_higher_peak_than_none_where_algebra_saves_memory_for_time():
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, far = model(x)
        return functional.cross_entropy(out, y) + 0.1 * far, out.argmax(1)

    model, batch = Codebook(), (torch.randn(32, 64), torch.randint(10, (32,)))
    peaks_bytes = [
        lowtide.optimize(model, batch, loss=loss, optimizer=optim.AdamW(model.parameters()), memory=limit).plan.peak_bytes
        for limit in (None, "300%", "90%")
    ]
    assert max(peaks_bytes) == peaks_bytes[0]
