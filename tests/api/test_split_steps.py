"""Steps that run part by part, from a model to its trained parameters; and that none does unless it is asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from bench.in_values import in_values
from lowtide.ir.bodies import is_loop

WORDS = torch.randint(0, 3000, (4, 48), generator=torch.Generator().manual_seed(0))


class Language(nn.Module):
    """Words in, words out, by one table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.wide, self.narrow = nn.Embedding(3000, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        return (x + self.narrow(torch.tanh(self.wide(x)))) @ self.table.weight.t()


def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


def loops(step: lowtide.Step) -> int:
    return sum(is_loop(node) for variant in step._lookup.families[0].variants for node in variant.plan.graph.nodes)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_in_parts_trains_as_eager_does_in_the_memory_promised(optimizer, tmp_path):
    model = Language()
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    step = lowtide.optimize(
        model,
        (WORDS,),
        loss=loss,
        optimizer=optimizer(model.parameters(), lr=1e-2),
        exact=False,
        memory="40%",
        planning=lowtide.Planning(progress=False),
    )
    theirs, best = (optimizer(each.parameters(), lr=1e-2, foreach=False) for each in (twin, exact))
    assert loops(step)
    for _ in range(3):
        value = step(WORDS)
        for each, its in ((twin, theirs), (exact, best)):
            its.zero_grad()
            expected = loss(each, WORDS)
            expected.backward()
            its.step()
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=0)
    for mine, eager, right in zip(model.parameters(), twin.parameters(), exact.parameters(), strict=True):
        if optimizer is torch.optim.SGD:  # Adam divides gradients by their own size: where they are but rounding, so is the update
            assert (mine - right).norm() <= 4 * (eager - right).norm()
    with pytest.warns(UserWarning, match="step.measure trains"):
        measured = step.measure(WORDS)
    assert measured.peak_bytes == pytest.approx(step.plan.peak_bytes, rel=0.01)
    assert measured.peak_bytes <= 0.4 * step.plan.eager_peak_bytes
    assert "for start in range(0, 192" in step.source
    text = str(step.plan)
    assert "run part by part" in text
    assert "(192) in" in text
    step.export(tmp_path / "plan.html")
    assert '<h2 id="splits">What runs part by part</h2>' in (tmp_path / "plan.html").read_text(encoding="utf-8")
    path = tmp_path / "plan.json"
    step.plan.save(path)
    settings = {"loss": loss, "optimizer": optimizer(model.parameters(), lr=1e-2), "progress": False, "plan": path}
    assert lowtide.optimize(model, (WORDS,), exact=False, **in_values(**settings)).source == step.source
    with pytest.raises(lowtide.FormatError, match="exact=False"):
        lowtide.optimize(model, (WORDS,), **in_values(**settings))


def test_nothing_is_split_unless_rounding_may_differ():
    model = Language()
    for given in ({"latency": 1.5}, {"memory": "100%"}, {}):
        step = lowtide.optimize(
            model,
            (WORDS,),
            loss=loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            **in_values(workspaces=False, progress=False, **given),
        )
        assert loops(step) == 0
    twin = copy.deepcopy(model)
    assert torch.equal(step(WORDS), loss(twin, WORDS))


def test_sizes_are_rounded_within_parts_too():
    """On a machine whose allocator rounds up to 512 bytes, what a part takes is promised so."""
    model = Language()
    step = lowtide.optimize(
        model, (WORDS[:, :41],), loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), exact=False, memory="40%",
        planning=lowtide.Planning(simulate="rtx3090", effort="quick", progress=False), run=lowtide.Run(swap=False),
    )  # fmt: skip
    assert loops(step)
    assert step.plan.granule_bytes == 512
