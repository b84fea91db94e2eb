"""A frozen function has its weights once, as they were, and nothing of the model."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.ir.bodies import is_region

ResultSpec = tuple[nn.Module, torch.Tensor, lowtide.Step]


class Net(nn.Module):
    """Generated kernels, an operator of torch's between them, and a result that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.first(x).relu()
        return {"all": y.cumsum(2), "out": self.second(y.cumsum(2).mean((2, 3)))}


@pytest.fixture
def made() -> ResultSpec:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 3, 6, 6)
    return model, x, lowtide.optimize(model, (x,), exact=False)


def same(found: Any, wanted: Any) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in found)


def test_it_gives_what_the_step_gives(made: ResultSpec) -> None:
    _, x, step = made
    assert sum(map(is_region, step.plan.graph.nodes)) == 2
    fn, other = step.frozen(x), torch.randn_like(x)
    for given in (x, other):
        assert same(fn(given), step(given))
    assert "2 generated networks" in repr(fn)


def test_weights_are_those_of_the_moment(made: ResultSpec) -> None:
    model, x, step = made
    fn, before = step.frozen(x), step(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert not torch.equal(step(x)["out"], before["out"])
    assert same(fn(x), before)
    assert same(step.frozen(x)(x), step(x))


def test_the_model_goes() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 3, 6, 6)
    step = lowtide.optimize(model, (x,), exact=False)
    fn, want = step.frozen(x), step(x)
    left = [weakref.ref(each) for each in (step, model, *model.parameters())]
    del model, step
    gc.collect()
    assert [each() for each in left] == [None] * len(left)
    assert same(fn(x), want)
    assert 4 * (8 * 3 * 9 + 8 * 5) < fn.held_bytes < 2**15


def test_a_batch_of_another_kind_is_refused(made: ResultSpec) -> None:
    _, x, step = made
    fn = step.frozen(x)
    for wrong in (x.double(), torch.randn(1, 3, 7, 6), x.to(memory_format=torch.channels_last)):
        with pytest.raises(lowtide.BatchError):
            fn(wrong)
    with pytest.raises(lowtide.BatchError):
        fn(x, x)


def test_another_shape_is_refused_with_what_to_do(made: ResultSpec) -> None:
    _, x, step = made
    with pytest.raises(lowtide.BatchError, match=r"for one shape; make another with `fn\.frozen\(\*batch\)`"):
        step.frozen(x)(torch.randn(1, 3, 7, 6))


def test_a_step_that_trains_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = lowtide.optimize(model, (torch.ones(2, 3),), loss=lambda model, x: model(x).sum(), optimizer=optimizer)
    with pytest.raises(lowtide.StepError, match="frozen: expected an inference function"):
        step.frozen(torch.ones(2, 3))


def test_a_function_without_generated_kernels_is_refused(made: ResultSpec) -> None:
    model, x, _ = made
    with pytest.raises(lowtide.StepError, match="with generated kernels"):
        lowtide.optimize(model, (x,)).frozen(x)


def test_the_first_call_gives_back_what_is_free(made: ResultSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    _, x, step = made
    given: list[None] = []
    monkeypatch.setattr("lowtide.api.frozen.give_back", lambda: given.append(None))
    fn = step.frozen(x)
    assert given == []
    for _ in range(3):
        fn(x)
    assert given == [None]


def test_a_copy_is_refused_with_what_to_do(made: ResultSpec) -> None:
    with pytest.raises(lowtide.StepError, match=r"cannot be pickled or copied.*load_frozen"):
        copy.deepcopy(made[2].frozen(made[1]))


def test_recurrent_networks_go_into_a_file(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.GRU(16, 8, batch_first=True).eval(), torch.randn(1, 5, 16)
    lowtide.optimize(model, (x,), exact=False).save_frozen(tmp_path / "gru.lowtide", x)
    for found, wanted in zip(lowtide.load_frozen(tmp_path / "gru.lowtide")(x), model(x), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)
