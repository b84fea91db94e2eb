"""A checkout that nobody installed runs: `make gpu` installs nothing."""

from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.base import VERSION


@pytest.fixture
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)


@pytest.mark.usefixtures("nothing_is_installed")
def test_a_step_trains_and_its_plan_says_which_lowtide_made_it():
    model, x = nn.Linear(6, 3), torch.randn(4, 6)
    step = lowtide.optimize(model, x, loss=lambda model, x: model(x).sum(), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    step(x)
    assert step.plan.provenance.lowtide == VERSION


@pytest.mark.usefixtures("nothing_is_installed")
def test_a_function_is_saved_and_read(tmp_path: Path):
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(4, 6)
    with torch.no_grad():
        fn = lowtide.optimize(model, x, exact=False)
        fn.save_frozen(tmp_path / "fn", x)
        assert torch.allclose(lowtide.load_frozen(tmp_path / "fn")(x), model(x), atol=1e-6)


def test_an_installation_is_of_the_version_that_is_said():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in text
    assert 'version = { attr = "lowtide.base.VERSION" }' in text
