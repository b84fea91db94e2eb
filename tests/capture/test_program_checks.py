"""What a program asks of activations only to raise is looked at by each step, at its place; other branches upon them are refused."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributions, nn, optim
from torch.nn import functional

import lowtide
from tests.refusals import HERE, Function, no_nan
from tests.training import Settings, check, differences, eager_step


@pytest.fixture(autouse=True)
def _validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler switches the checks of distributions off for a whole process."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
PLAIN = lowtide.Planning(workspaces=False)


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
        raise LargeError(f"{len(h)} rows")


def variance(h: Tensor) -> None:
    functional.gaussian_nll_loss(h, h, h.square().where(h == h, -1))


def handed_on(h: Tensor) -> None:
    if is_bad(h):
        raise ArithmeticError(f"{len(h)} rows")


def is_bad(h: Tensor) -> bool:
    return not is_fine(h)


def is_fine(h: Tensor) -> bool:
    return bool(torch.isfinite(h).all()) if h.dim() else False


def test_an_answer_that_another_function_takes_is_no_check():
    """Of several answers one may do: the program goes on where a check of each would raise."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        if not any(map(is_fine, (h, h.detach()))):
            raise ArithmeticError
        return h.square().mean()

    model = Heads()
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        lowtide.optimize(model, (X,), loss=loss, optimizer=optim.SGD(model.parameters(), 0.1), planning=PLAIN)


@pytest.mark.parametrize(
    ("looks", "error", "words"),
    [
        (no_nan, AssertionError, "assert not h.isnan"),
        (raised, FloatingPointError, "if h is None"),
        (own, OverflowError, "if not ok"),
        (variance, ValueError, "if .*var"),
        (normal, ValueError, r"loc of Normal, expected Real"),
        (handed_on, ArithmeticError, "if is_bad"),
    ],
    ids=["no_nan", "raised", "own", "variance", "normal", "handed_on"],
)
@pytest.mark.parametrize("limit", [None, "1MB"])
def test_a_step_raises_what_the_program_would_and_changes_what_it_would(looks, error, words, limit, capsys):
    """Statistics are updated before the program looks, parameters are not. Under a limit nothing is counted or shown."""
    for _ in range(20 if limit else 0):  # what runs often, Python runs by other instructions
        looks(X.clone())
    ends, told, shown = [], [], []
    for optimized in (False, True):
        torch.manual_seed(0)
        model, calls = Heads(), []
        optimizer = optim.SGD(model.parameters(), 0.1)

        def loss(model: Heads, x: Tensor, calls: list[int] = calls) -> Tensor:
            h = model(x)
            calls.append(len(x))
            looks(functional.dropout(h))
            return h.square().mean() + functional.dropout(h).mean()

        def eagerly(x: Tensor, model: Heads = model, optimizer: optim.Optimizer = optimizer, loss=loss) -> None:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()

        step = lowtide.optimize(model, (X,), loss=loss, optimizer=optimizer, planning=PLAIN, memory=limit) if optimized else eagerly
        torch.manual_seed(1)
        step(X)
        with pytest.raises(error, match=rf"at .*{HERE}.*{words}" if optimized and limit else None) as caught:
            step(torch.full_like(X, float("nan")))
        ends.append((*model.state_dict().values(), torch.get_rng_state()))
        told.append((type(caught.value), str(caught.value), calls))
        shown.append(capsys.readouterr().out)
    assert all(torch.equal(*pair) or pair[0].isnan().equal(pair[1].isnan()) for pair in zip(*ends, strict=True))
    if limit is None:
        assert (told[0], shown[0]) == (told[1], shown[1])


def test_a_check_that_fails_is_as_in_eager_in_all_that_comes_before(capsys):
    """Draws of every generator, buffers, counts and lists; and the steps behind it go on as eager's do."""

    def make() -> Any:
        model, own, kept = Heads(), torch.Generator().manual_seed(3), list[Any]()
        model.calls = 0

        def loss(model: Heads, x: Tensor) -> Tensor:
            model.calls += 1
            with torch.no_grad():
                model.linear.weight.mul_(0.9)
            h = model(x * random.random() * float(np.random.rand())) + torch.rand(1, generator=own)
            kept.append(h.mean().item())
            print(model.calls, f"{h.mean():.3f}")
            if not h.isfinite().all():
                raise FloatingPointError(f"call {model.calls}")
            kept.append("finite")
            return h.square().mean()

        return model, own, kept, loss, optim.SGD(model.parameters(), 0.1, momentum=0.9)

    ends = []
    for optimized in (False, True):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model, own, kept, loss, optimizer = make()
        step = lowtide.optimize(model, (X,), loss=loss, optimizer=optimizer, planning=PLAIN) if optimized else None
        errors = []
        for number in range(6):
            x = X * float("nan") if number in (2, 4) else X + number
            try:
                step(x) if step else eager_step(model, loss, optimizer, (x,), {}, Settings())
            except FloatingPointError as error:
                errors.append(str(error))
            model.norm.reset_running_stats()  # which were nan
        ends.append([model.state_dict(), model.calls, own.get_state(), kept, errors, torch.get_rng_state(), random.getstate()])
        ends[-1] += [np.random.get_state()[1], capsys.readouterr().out, optimizer.state_dict()]
    assert not (told := differences(*ends)), told


def stops(h: Tensor) -> None:
    if not math.isfinite(h.mean().item()):
        print("stopping")
        sys.exit(1)


@pytest.mark.parametrize("limit", [None, "1MB"])
def test_a_check_that_ends_the_process(limit):
    model = Heads()
    optimizer = optim.SGD(model.parameters(), 0.1)

    def loss(model: Heads, x: Tensor) -> Tensor:
        h = model(x)
        stops(h)
        return h.square().mean()

    step = lowtide.optimize(model, (X,), loss=loss, optimizer=optimizer, memory=limit, planning=PLAIN)
    step(X)
    with pytest.raises(SystemExit) as caught:
        step(X * float("nan"))
    assert caught.value.code == 1 or (limit and "isfinite" in caught.value.code)  # a text is shown, and the code is 1


def handled(h: Tensor) -> Tensor:
    try:
        assert h.isfinite().all()
    except AssertionError:
        return h * 0
    return h


def handled_by_caller(h: Tensor) -> Tensor:
    try:
        own(h)
    except (KeyError, OverflowError):
        h = h * 0
    return h


def suppressed(h: Tensor) -> Tensor:
    with contextlib.suppress(FloatingPointError):
        raised(h)
        h = h * 2
    return h


def turned_into_another(h: Tensor) -> Tensor:
    try:
        no_nan(h)
    except AssertionError as error:
        raise ValueError("nan") from error
    return h


@pytest.mark.parametrize("catches", [handled, handled_by_caller, suppressed, turned_into_another])
@pytest.mark.parametrize("trains", [True, False])
def test_what_the_program_catches_itself_it_goes_on_with(catches, trains):
    ends = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model = Heads()
        optimizer = optim.SGD(model.parameters(), 0.1)

        def loss(model: Heads, x: Tensor) -> Tensor:
            return catches(model(x).where(x == x, math.nan)).nan_to_num().mean()

        if trains:
            step = lowtide.optimize(model, (X,), loss=loss, optimizer=optimizer, planning=PLAIN) if optimized else None
        else:
            called = Function(lambda x, model=model, loss=loss: loss(model, x))
            step = lowtide.optimize(called, (X,), planning=PLAIN) if optimized else lambda x, called=called: called(x).detach()
        results = []
        for number in range(5):
            x = X.where(X < 1, math.nan) if number in (1, 3) else X
            try:
                results.append(step(x) if step else eager_step(model, loss, optimizer, (x,), {}, Settings()))
            except ValueError as error:
                results.append(str(error))
        ends.append([results, model.state_dict(), optimizer.state_dict()])
    assert not (told := differences(*ends)), told


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
        with pytest.raises(ValueError, match=r"logits.* of .*Categorical"):
            run(torch.full_like(X, float("nan")))
        assert torch.allclose(run(X), model(X))


def test_labels_within_a_transform_are_not_looked_at_as_eager_does_not():
    class Each(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return torch.vmap(lambda label: functional.one_hot(label, 4))(y)

    run = lowtide.optimize(Each(), (LABELS,), planning=PLAIN)
    assert all(torch.equal(run(each), Each()(each)) for each in (LABELS, LABELS + 2))


@pytest.mark.parametrize(("count", "label"), [(4, 4), (4, -1), (-1, -1)])
def test_labels_are_looked_at_where_eager_makes_vectors_of_them(count, label):
    """Under fake tensors torch makes a row of zeros of a label that eager does not take."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(model(x)[:, :4], functional.one_hot(y, count).float())

    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    step = lowtide.optimize(model, (X, LABELS), loss=loss, optimizer=optim.SGD(model.parameters()), planning=PLAIN)
    expected_loss = loss(model, X, LABELS)
    assert torch.equal(step(X, LABELS), expected_loss)
    before, bad = [each.clone() for each in model.parameters()], LABELS.clone()
    bad[1] = label
    with pytest.raises(RuntimeError) as expected:
        loss(model, X, bad)
    with pytest.raises(RuntimeError) as raised:
        step(X, bad)
    assert str(raised.value) == str(expected.value)
    assert all(map(torch.equal, before, model.parameters()))
