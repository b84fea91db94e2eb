"""One step for all shapes of a range: bit-equal to eager at each, within the limit at each, known before it runs."""

import copy
import gc
import random
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

import lowtide
from bench.in_values import in_values
from lowtide.errors import BatchError, BudgetError, ShapeError
from tests.api.ranged import DYNAMIC, Tokens, batch_of, halving, token_loss


def assert_equal_states(model, optimizer, twin, other):
    for one, two in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert all(torch.equal(optimizer.state[one][key], item) for key, item in other.state[two].items() if isinstance(item, torch.Tensor))


@pytest.fixture(scope="module")
def pair():
    """A step under a limit and the loop that it stands for, on models that begin alike."""
    torch.manual_seed(0)
    model = Tokens()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin))
    step = lowtide.optimize(
        model,
        batch_of(4, 32),
        loss=token_loss,
        optimizer=optimizer,
        memory="70%",
        shapes=lowtide.Shapes(dynamic=DYNAMIC),
        planning=lowtide.Planning(effort="quick"),
    )

    def eager(*batch):
        other.zero_grad()
        loss = token_loss(twin, *batch)
        loss.backward()
        other.step()
        return loss.detach()

    return step, eager, (model, optimizer), (twin, other)


def test_every_shape_is_eager_to_the_last_bit(pair):
    step, eager, ours, theirs = pair
    draws = random.Random(0)
    for seed in range(12):
        batch = batch_of(draws.randint(2, 8), draws.randint(8, 64))
        torch.manual_seed(seed)
        loss = step(*batch)
        torch.manual_seed(seed)
        assert torch.equal(loss, eager(*batch))
        assert_equal_states(*ours, *theirs)


@pytest.mark.parametrize("shape", [(8, 64), (2, 8), (3, 50), (8, 20)])
def test_the_promise_is_what_the_allocator_measures(pair, shape):
    step = pair[0]
    batch = batch_of(*shape)
    pair[0](*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = step.measure(*batch)
    plan = step.plan_for(*batch)
    assert abs(measured.peak_bytes - plan.peak_bytes) <= max(2**20, plan.peak_bytes // 100)
    largest = step.plan_for(*batch_of(8, 64))
    assert plan.peak_bytes <= largest.peak_bytes <= 0.7 * largest.eager_peak_bytes


def test_no_shape_of_the_range_is_captured_again(pair, monkeypatch):
    step = pair[0]
    monkeypatch.setattr("lowtide.api.captures.capture_training", None)
    for length in (9, 21, 33):
        shapes = [value.shape for value in step.plan_for(*batch_of(5, length)).graph.inputs]
        assert (5, length) in shapes


def test_another_limit_for_the_same_range_captures_nothing_anew(pair, monkeypatch):
    step = pair[0]
    monkeypatch.setattr("lowtide.api.captures.capture_training", None)
    wide = step.at("85%")
    plan = wide.plan_for(*batch_of(8, 64))
    assert step.plan_for(*batch_of(8, 64)).peak_bytes <= plan.peak_bytes <= 0.85 * plan.eager_peak_bytes
    assert wide.plan_for(*batch_of(4, 40)).peak_bytes <= plan.peak_bytes


def test_a_range_that_does_not_fit_names_what_does():
    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dynamic = {0: {1: ("length", 8, 2048)}, 1: {1: "length"}}
    settings = {"loss": token_loss, "optimizer": optimizer, "dynamic": dynamic, "effort": "quick"}
    step = lowtide.optimize(model, batch_of(4, 32), memory="4 MiB", **in_values(**settings))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetError, match=r"for length = 2000; the largest that fits: length = \d+"):
        step(*batch_of(4, 2000))
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    step(*batch_of(4, 40))


def test_a_batch_of_one_and_one_out_of_the_range_are_captured_apart(pair):
    model = Tokens()
    twin = copy.deepcopy(model)
    step = lowtide.optimize(
        model.eval(), batch_of(4, 32)[:1], shapes=lowtide.Shapes(dynamic={0: {0: ("rows", 1, 8), 1: ("length", 8, 64)}})
    )
    for rows, length in ((1, 20), (8, 64), (3, 64), (9, 30)):
        tokens = batch_of(rows, length)[0]
        with torch.no_grad():
            assert torch.equal(step(tokens), twin.eval()(tokens))
    refusing = lowtide.optimize(
        model, batch_of(4, 32)[:1], shapes=lowtide.Shapes(dynamic={0: {1: ("length", 8, 64)}}, on_new_shape="error")
    )
    refusing(batch_of(4, 33)[0])
    with pytest.raises(ShapeError, match=r"length: expected equal extents, got 32 .* and 31 .* tied by their name; where they may differ"):
        pair[0](batch_of(4, 32)[0], batch_of(4, 31)[1])
    with pytest.raises(BatchError, match="expected int64"):
        refusing(batch_of(5, 33)[0])


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        self.head = nn.Linear(8, 4)

    def forward(self, pictures):
        return self.head(self.body(pictures)).square().mean()


def test_parts_of_the_range_that_are_captured_apart(pair):
    """Torch lays out a convolution's small batches otherwise than others."""
    model = Pictures()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    dynamic = {0: {0: ("rows", 2, 32), 2: ("side", 16, 48), 3: "side"}}
    step = lowtide.optimize(
        model, (torch.randn(4, 3, 24, 24),), loss=lambda m, x: m(x), optimizer=optimizer, shapes=lowtide.Shapes(dynamic=dynamic)
    )
    for rows, side in ((20, 24), (4, 24), (15, 47), (16, 16), (32, 48)):
        pictures = torch.randn(rows, 3, side, side)
        loss = step(pictures)
        other.zero_grad()
        expected = twin(pictures)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected.detach())
        assert_equal_states(model, optimizer, twin, other)


def test_a_frozen_layer_is_noticed_at_every_shape(pair):
    step, eager, (model, optimizer), (twin, other) = pair
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (model, twin):
        each.head.bias.requires_grad_(False)
    for shape in ((4, 30), (6, 31)):
        batch = batch_of(*shape)
        torch.manual_seed(1)
        loss = step(*batch)
        torch.manual_seed(1)
        assert torch.equal(loss, eager(*batch))


@pytest.mark.skipif(sys.platform != "linux", reason="the planned allocator is for Linux")
def test_addresses_of_larger_shapes_serve_the_smaller_ones():
    model = Tokens()
    twin = copy.deepcopy(model)
    dynamic = {0: {0: ("rows", 2, 8), 1: ("length", 8, 64)}}
    step = lowtide.optimize(model.eval(), batch_of(4, 32)[:1], shapes=lowtide.Shapes(dynamic=dynamic), run=lowtide.Run(arena="always"))
    for rows, length in ((4, 32), (8, 64), (3, 20)) * 3:
        tokens = batch_of(rows, length)[0]
        with torch.no_grad():
            assert torch.equal(step(tokens), twin.eval()(tokens))
    assert (step.arena.recorded_steps, step.arena.served_steps) == (2, 7)  # recorded at two shapes, each larger than those before
    assert step.arena.last.unexpected == step.arena.last.occupied == 0


def test_a_step_holds_on_to_no_batch():
    batch = batch_of(4, 32)[:1]
    watched = weakref.ref(batch[0])
    step = lowtide.optimize(Tokens().eval(), batch, shapes=lowtide.Shapes(dynamic={0: {1: ("length", 8, 64)}}))
    del batch
    gc.collect()
    assert watched() is None
    assert step(batch_of(4, 20)[0]).shape == (4, 20, 50)


def test_schedulers_hooks_and_clipping_go_with_every_shape():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=0.1, foreach=False) for each in (model, twin))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, other)]
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(float(model[1].bias.detach().sum())))

    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)

    dynamic = {0: {0: ("rows", 2, 8), 1: ("length", 4, 32)}, 1: {0: "rows", 1: "length"}}
    step = lowtide.optimize(
        model,
        batch_of(4, 16),
        loss=token_loss,
        optimizer=optimizer,
        shapes=lowtide.Shapes(dynamic=dynamic),
        training=lowtide.Training(after_backward=clip),
    )
    sums = []
    for shape in ((4, 16), (2, 4), (8, 32), (3, 7), (2, 4)):
        batch = batch_of(*shape)
        loss = step(*batch)
        other.zero_grad()
        expected = token_loss(twin, *batch)
        expected.backward()
        clip(twin)
        other.step()
        for each in schedulers:
            each.step()
        sums.append(float(twin[1].bias.detach().sum()))
        assert torch.equal(loss, expected.detach())
        assert_equal_states(model, optimizer, twin, other)
    assert steps == sums


class Positions(nn.Module):
    """A table of positions, cut to the length at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(50, 8), nn.Embedding(24, 8), nn.Linear(8, 50)
        self.register_buffer("numbers", torch.arange(24)[None])

    def forward(self, tokens):
        return self.head(self.words(tokens) + self.places(self.numbers[:, : tokens.shape[1]]))


def test_a_table_of_positions_ends_the_range_and_is_told():
    model = Positions()
    with pytest.warns(UserWarning, match=r"dimension length: the range is a number from 8 to 24, as the program rests on .*length.* at "):
        step = lowtide.optimize(
            model, batch_of(4, 16)[:1], shapes=lowtide.Shapes(dynamic={0: {0: ("rows", 2, 8), 1: ("length", 8, 200)}}, on_new_shape="error")
        )
    for rows, length in ((8, 24), (2, 8)):
        tokens = batch_of(rows, length)[0]
        assert torch.equal(step(tokens), model(tokens))
    with pytest.raises(BatchError, match="the range is rows from 2 to 8, length from 8 to 24"):
        step(batch_of(4, 25)[0])


class Masked(nn.Module):
    """What algebra holds as bits: dropout's masks, a rectifier's result."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, x):
        return self.body(x).square().mean()


@pytest.fixture(scope="module")
def masked():
    """A step within a limit, in which what costs time may be used, and the loop that it stands for."""
    torch.manual_seed(0)
    model = Masked()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    settings = {"loss": lambda model, x: model(x), "optimizer": optimizer, "effort": "quick"}
    dynamic = {0: {0: ("rows", 2, 64), 1: ("length", 3, 65)}}
    step = lowtide.optimize(model, (torch.randn(8, 20, 16),), memory="60%", **in_values(dynamic=dynamic, **settings))
    return step, (twin, other), settings


def test_algebra_serves_a_range(masked):
    step, (twin, other), _ = masked
    rules = set()
    for rows, length in ((64, 65), (8, 20), (7, 33), (63, 61), (2, 3)):
        x = torch.randn(rows, length, 16)
        rules |= {report.rule for report in step.plan_for(x).algebra}
        torch.manual_seed(rows)
        loss = step(x)
        torch.manual_seed(rows)
        other.zero_grad()
        expected = twin(x)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected.detach())
        assert all(map(torch.equal, step._caller.model.parameters(), twin.parameters()))
    assert "dropout's masks as bits" in rules


def test_a_range_is_about_as_lean_as_each_shape_alone_with_algebra(masked):
    model, settings = Masked(), masked[2] | {"simulate": "a100"}
    settings["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lowtide.optimize(
        model, (torch.randn(8, 20, 16),), **in_values(dynamic={0: {0: ("rows", 2, 64), 1: ("length", 3, 65)}}, **settings)
    )
    for rows, length in ((64, 65), (7, 33)):
        x = torch.randn(rows, length, 16)
        own, plan = lowtide.optimize(model, (x,), **in_values(**settings)).plan, step.plan_for(x)
        assert plan.peak_bytes <= 1.02 * own.peak_bytes
        assert {report.rule for report in plan.algebra} == {report.rule for report in own.algebra}


def test_numbers_are_verified_at_every_shape(pair):
    step = pair[0]
    for shape in ((4, 32), (3, 17)):
        batch = batch_of(*shape)
        step(*batch)
        found = step.verify(*batch)
        assert found.bit_equal
        assert len(found.gradients) > 10


def test_a_range_with_a_step_is_one_part():
    step, same = halving({0: {2: ("side", 16, 64, 4), 3: "side"}}, on_new_shape="error")
    assert all(map(same, (24, 16, 64, 36)))
    assert [text.splitlines()[0].partition(" for ")[2] for text in step.ranges] == ["side from 16 to 64 in steps of 4"]
    assert "side = 64: peak" in step.ranges[0]
    with pytest.raises(BatchError):
        same(30)


@pytest.mark.parametrize("most", [64, 67])
def test_a_step_that_the_program_needs_is_found_and_told(most):
    with pytest.warns(UserWarning, match=r'side: the range is a number from 16 to 64 in steps of 4, .*\("side", 16, 64, 4\) in `dynamic`'):
        step, same = halving({0: {2: ("side", 15, most), 3: "side"}}, on_new_shape="error")
    assert all(map(same, (24, 16, 64)))
    assert len(step.ranges) == 1
