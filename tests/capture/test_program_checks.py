"""What a program asks of activations only to raise is looked at by each step, at its place; other branches upon them are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributions, nn, optim
from torch.nn import functional

import lowtide
from tests.refusals import HERE, no_nan
from tests.training import check


@pytest.fixture(autouse=True)
def _validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler switches the checks of distributions off for a whole process."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Heads(nn.Module):
    """Gives what distributions are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def normal(h: Tensor) -> distributions.Distribution:
    return distributions.Normal(h, h.exp())


def independent(h: Tensor) -> distributions.Distribution:
    return distributions.Independent(distributions.Laplace(h, functional.softplus(h)), 1)


def correlated(h: Tensor) -> distributions.Distribution:
    return distributions.MultivariateNormal(h, torch.eye(6) + (h[:, :, None] * h[:, None, :]))


def categorical(h: Tensor) -> distributions.Distribution:
    return distributions.Categorical(logits=h)


def beta(h: Tensor) -> distributions.Distribution:
    return distributions.Beta(h.exp(), 1 + h.square())


def squashed(h: Tensor) -> distributions.Distribution:
    return distributions.TransformedDistribution(normal(h), [distributions.TanhTransform(cache_size=1)])


def mixture(h: Tensor) -> distributions.Distribution:
    return distributions.MixtureSameFamily(categorical(h), normal(h))


@pytest.mark.parametrize("of", [normal, independent, correlated, categorical, beta, squashed, mixture], ids=lambda of: of.__name__)
def test_distributions_over_what_a_model_gives(of):
    def loss(model: Heads, x: Tensor) -> Tensor:
        found = of(model(x))
        drawn = found.rsample() if found.has_rsample else found.sample()
        return -found.log_prob(drawn.clamp(-0.9, 0.9) if of is squashed else drawn).mean()

    def make() -> tuple[nn.Module, Tensor, object, optim.Optimizer]:
        model = Heads()
        return model, X.clone(), loss, optim.Adam(model.parameters())

    check(make)


def raised(h: Tensor) -> None:
    if h is None or h.abs().amax() != h.abs().amax() or (h > 1e6).any().item():
        words = "many" if len(h) > 1 else "one"
        raise FloatingPointError(f"{words} numbers")


class LargeError(OverflowError):
    """An exception of a program's own."""


def own(h: Tensor) -> None:
    ok = torch.isfinite(h).all()
    if not ok:
        print("not finite")
        raise LargeError


def variance(h: Tensor) -> None:
    functional.gaussian_nll_loss(h, h, h.square().where(h == h, -1))


@pytest.mark.parametrize(
    ("looks", "error", "words"),
    [
        (no_nan, AssertionError, "assert not h.isnan"),
        (raised, FloatingPointError, "if h is None"),
        (own, OverflowError, "if not ok"),
        (variance, ValueError, "if .*var"),
        (normal, ValueError, r"loc of Normal, expected Real"),
    ],
    ids=["no_nan", "raised", "own", "variance", "normal"],
)
def test_a_step_raises_what_the_program_would_and_changes_what_it_would(looks, error, words):
    """Statistics are updated before the program looks, parameters are not."""
    ends = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model = Heads()
        optimizer = optim.SGD(model.parameters(), 0.1)

        def loss(model: Heads, x: Tensor) -> Tensor:
            h = model(x)
            looks(h)
            return h.square().mean() + functional.dropout(h).mean()

        def eagerly(x: Tensor, model: Heads = model, optimizer: optim.Optimizer = optimizer, loss=loss) -> None:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()

        step = (
            lowtide.optimize(model, (X,), loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
            if optimized
            else eagerly
        )
        torch.manual_seed(1)
        step(X)
        with pytest.raises(error, match=rf"at .*{HERE}.*{words}" if optimized else None):
            step(torch.full_like(X, float("nan")))
        ends.append((*model.state_dict().values(), torch.get_rng_state()))
    assert all(torch.equal(*pair) or pair[0].isnan().equal(pair[1].isnan()) for pair in zip(*ends, strict=True))


def returned(h: Tensor) -> Tensor:
    if h.isnan().any():
        return h * 0
    return h


def half_raised(h: Tensor) -> Tensor:
    if (h > 1e6).any():
        if len(h) > 3:
            raise ValueError("large")
        return h * 0
    return h


def raised_both(h: Tensor) -> Tensor:
    if not (h > 1e6).any() and not (h > 1e5).any():  # the second question is asked only upon one answer to the first
        raise ValueError("small")
    return h


def chosen(h: Tensor) -> Tensor:
    return h if h.isnan().any() else h * 2


@pytest.mark.parametrize("branches", [returned, half_raised, raised_both, chosen], ids=lambda item: item.__name__)
def test_what_goes_on_either_way_is_refused(branches):
    model = Heads()
    with pytest.raises(lowtide.CaptureError, match=r"control flow depends on data.*what only checks may stay"):
        lowtide.optimize(model, (X,), loss=lambda model, x: branches(model(x)).mean(), optimizer=optim.SGD(model.parameters(), 0.1))


def test_inference_checks_too_where_kernels_are_generated():
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))

        def forward(self, x: Tensor) -> Tensor:
            return distributions.Categorical(logits=self.body(x)).entropy()

    model = Policy().eval()
    for exact in (True, False):
        run = lowtide.optimize(model, (X,), exact=exact, planning=lowtide.Planning(workspaces=False))
        assert torch.allclose(run(X), model(X))
        with pytest.raises(ValueError, match="logits of Categorical"):
            run(torch.full_like(X, float("nan")))
        assert torch.allclose(run(X), model(X))
