"""What a program reads from its data is looked up again at each call: other data, another program, the same numbers as eagerly."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.utils import rnn

import lowtide
from tests.training import Settings, copied, differences, eager_step

WORDS, LENGTH, ROWS = 12, 5, 4


class Reader(nn.Module):
    """Embeds words, and asks its buffer a question."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(WORDS, 6), nn.Dropout(0.2), nn.Linear(6, WORDS)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(words))
        if self.scale > 1:
            hidden = hidden * self.scale
        return self.head(hidden)


def words(seed: int) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def both_ways(
    loss: Callable[..., Any], batches: Sequence[tuple[Any, ...]], *, make: Callable[[], nn.Module] = Reader,
    between: Callable[[nn.Module, int], Any] = lambda model, turn: None, accumulate: int = 1,
) -> lowtide.Step:  # fmt: skip
    """Train on these batches eagerly and with lowtide; fail unless both end alike, to the last bit. The step, captured with the first."""
    ends, step = [], None
    for optimized in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer = optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        if optimized:
            step = lowtide.optimize(
                model,
                batches[0],
                loss=loss,
                optimizer=optimizer,
                planning=lowtide.Planning(workspaces=False),
                training=lowtide.Training(accumulate=accumulate),
            )
        torch.manual_seed(1)
        results = []
        for turn, batch in enumerate(batches):
            how = Settings(accumulate=accumulate)
            results.append(copied(step(*batch) if step is not None else eager_step(model, loss, optimizer, batch, {}, how)))
            between(model, turn)
        ends.append((results, copied(dict(model.state_dict())), copied(optimizer.state_dict()), torch.get_rng_state()))
    assert not (told := differences(*ends)), "\n".join(told[:8])
    assert step is not None
    return step


def captures(step: lowtide.Step) -> int:
    return len(step._lookup.families)


# What is read, and from batches of how many kinds.


def checked(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    if words.max() >= WORDS:
        raise ValueError(f"a word out of range: {words.max():d}")
    assert torch.all(words >= 0)
    return model(words).square().mean()


def masked_unless_trivial(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    mask = more > 0
    out = model(words)
    return out.square().mean() if mask.all() else (out * mask.unsqueeze(-1)).square().mean()


def cut_to_longest(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    lengths = more.sum(1)
    steps = torch.arange(lengths.max())
    return (model(words[:, : lengths.max()]).mean(-1) * (steps < lengths.unsqueeze(1))).mean()


def cut_by_int(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return model(words)[:, : int(more.sum(1).max().item()) + 1].mean()


def listed(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return sum(row[: 1 + length].mean() for row, length in zip(model(words), more.sum(1).tolist(), strict=True))


def as_array(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return model(words)[:, : 1 + int(np.asarray(more).sum(1).max())].mean()


def selected(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    mask = more > 0
    return functional.cross_entropy(model(words)[mask], words[mask], reduction="sum")


def mask_selected(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return model(words).masked_select((more > 0).unsqueeze(-1)).square().sum()


def at_positions(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return model(words)[more.nonzero(as_tuple=True)].square().sum()


def filled_in(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    mask, out = more > 0, model(words)
    result = torch.zeros_like(out)
    result[mask] = out[mask] * 2
    return result.square().mean()


def repeated(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return model(words).repeat_interleave(more.sum(1), dim=0).square().sum()


def distinct(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return model(torch.unique(words * more)).square().sum()


def counted(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return (model(words).mean() * torch.bincount(more.sum(1))).sum()


def one_hot(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return (model(words).mean() * functional.one_hot(words * more)).mean()


def compared(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return model(words).mean() if torch.equal(more, torch.ones_like(more)) else model(more).square().mean()


def close(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return model(words).mean() if torch.allclose(more.float(), torch.ones(())) else model(words).sum()


def split(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    return sum(part.sum().square() for part in model(words).tensor_split(more.sum(0)[:2].sort().values, 1))


def split_by_sizes(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    count = more.sum(1).clamp(max=LENGTH - 1).max()
    return sum(part.mean() for part in model(words).split([int(count), LENGTH - int(count)], 1))


def ctc(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    rows = model(words).log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(rows, words[:, :3].clamp(min=1), torch.full((ROWS,), LENGTH), more.sum(1).clamp(max=2))


def ctc_of_numbers(model: Reader, words: Tensor, more: Tensor) -> Tensor:
    rows = model(words).log_softmax(-1).transpose(0, 1)
    targets = words[:, :3].clamp(min=1)
    losses = functional.ctc_loss(rows, targets, (LENGTH,) * ROWS, (2, 1, 0, 2), reduction="sum")
    return losses + functional.ctc_loss(rows, targets, [LENGTH] * ROWS, [2, 1, 0, 2], zero_infinity=True)


def packed(model: Recurrent, words: Tensor, more: Tensor) -> Tensor:
    lengths = more.sum(1).clamp(min=1)
    sequence = rnn.pack_padded_sequence(model.embedding(words), lengths, batch_first=True, enforce_sorted=False)
    out, state = model.recurrent(sequence)
    padded, counts = rnn.pad_packed_sequence(out, batch_first=True, padding_value=-1.0, total_length=LENGTH)
    return padded.square().mean() + state.sum() + (padded.sum((1, 2)) / counts).mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(WORDS, 4), nn.GRU(4, 4, batch_first=True)


MASKS = [torch.ones(ROWS, LENGTH, dtype=torch.long), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])]
PROGRAMS = {
    1: [checked, ctc_of_numbers],
    2: [
        masked_unless_trivial, cut_to_longest, cut_by_int, listed, as_array, selected, mask_selected, at_positions, filled_in, repeated,
        distinct, counted, one_hot, compared, close, split, split_by_sizes, ctc, packed,
    ],
}  # fmt: skip


@pytest.mark.parametrize(("loss", "kinds"), [(loss, kinds) for kinds, losses in PROGRAMS.items() for loss in losses])
def test_what_follows_from_the_batch_is_read(loss, kinds):
    turns = [0, 0, 1, 1, 0, 1]
    fixed = loss in (distinct, one_hot)  # these read the words too
    batches = [(words(0 if fixed else seed), MASKS[kind].clone()) for seed, kind in enumerate(turns)]
    step = both_ways(loss, batches, make=Recurrent if loss is packed else Reader)
    assert captures(step) <= kinds or loss is ctc


@pytest.mark.parametrize("loss", [masked_unless_trivial, selected, listed])
def test_micro_batches_are_read_one_by_one(loss):
    batches = [(words(turn), MASKS[turn % 2].clone()) for turn in range(4)]
    assert captures(both_ways(loss, batches, accumulate=2)) == 2


class Spread(nn.Module):
    """Learns a mean and a spread."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.full((3,), 0.045))


def learned_distribution(model: Spread, x: Tensor) -> Tensor:
    return -torch.distributions.Normal(model.mean, model.scale.exp()).log_prob(x).mean()  # which checks that the scale is positive


def learned_variance(model: Spread, x: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(model.mean.expand_as(x), x, model.scale.square().expand_as(x))


def branching_on_the_scale(model: Spread, x: Tensor) -> Tensor:
    return (x - model.mean).square().mean() + (model.scale.sum() if (model.scale > 0.02).all() else -model.scale.sum())


@pytest.mark.parametrize(
    ("loss", "programs"), [(learned_distribution, 1), (learned_variance, 1), (branching_on_the_scale, 2)], ids=lambda item: item
)
def test_a_yes_or_no_is_read_of_trained_parameters(loss, programs):
    batches = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(turn)),) for turn in range(8)]
    for accumulate in (1, 2):
        assert captures(both_ways(loss, batches, make=Spread, accumulate=accumulate)) == programs


def test_what_a_trained_parameter_no_longer_keeps_fails_as_eagerly():
    model, x = Spread(), torch.randn(4, 3)

    def loss(model: Spread, x: Tensor) -> Tensor:
        # Where something was compiled by torch.compile before, torch looks at arguments only when told to.
        return -torch.distributions.Normal(model.mean, model.scale, validate_args=True).log_prob(x).mean()

    step = lowtide.optimize(
        model, (x,), loss=loss, optimizer=optim.SGD(model.parameters(), 0.0), planning=lowtide.Planning(workspaces=False)
    )
    step(x)
    with torch.no_grad():
        model.scale[1] = -1
    with pytest.raises(ValueError, match="scale"):
        step(x)


@pytest.mark.parametrize("of", ["buffer", "batch"])
def test_a_yes_or_no_of_activations_is_refused(of):
    model = Reader()

    def loss(model: Reader, x: Tensor) -> Tensor:
        seen = x if of == "batch" else model.table
        return model.head(x).sum() if model.head(seen).sum() > 0 else -model.head(x).sum()

    model.register_buffer("table", torch.randn(2, 6))
    with pytest.raises(lowtide.CaptureError, match=rf"follows from .*{of}.* and parameter head.*activations are known only when"):
        lowtide.optimize(model, (torch.randn(2, 6),), loss=loss, optimizer=optim.SGD(model.parameters(), 0.1))


def test_inference_reads_the_batch_and_the_parameters():
    class Gated(Reader):
        def forward(self, words: Tensor, more: Tensor) -> Tensor:
            out = super().forward(words)
            return out * 2 if self.head.bias.max() > 0 and not more.bool().all() else out

    model = Gated().eval()
    run = lowtide.optimize(model, (words(0), MASKS[0]), planning=lowtide.Planning(workspaces=False))
    for turn in range(4):
        with torch.no_grad():
            model.head.bias.fill_(turn - 1.5)
            expected = model(words(turn), MASKS[turn % 2])
        assert torch.equal(run(words(turn), MASKS[turn % 2]), expected)
    assert captures(run) == 3  # nobody asks for the mask while the bias is negative


def test_buffers_and_constants_that_change_are_noticed():
    limit = torch.tensor(3)

    def loss(model: Reader, words: Tensor) -> Tensor:
        return model(words).square().mean() if words.float().mean() > limit else model(words).sum()

    def between(model: nn.Module, turn: int) -> None:
        model.scale.fill_(turn)
        limit.fill_(3 if turn % 2 else 100)

    def make() -> nn.Module:
        limit.fill_(3)
        return Reader()

    step = both_ways(loss, [(words(turn),) for turn in range(6)], make=make, between=between)
    assert captures(step) == 4


def test_an_assertion_that_fails_leaves_all_as_it_was():
    model = Reader()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    step = lowtide.optimize(model, (words(0), MASKS[0]), loss=checked, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    step(words(0), MASKS[0])
    before = copied((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match="a word out of range: 99"):
        step(torch.full((ROWS, LENGTH), 99), MASKS[0])
    with pytest.raises(AssertionError):
        step(torch.full((ROWS, LENGTH), -1), MASKS[0])
    assert not differences(before, copied((model.state_dict(), optimizer.state_dict())))
    step(words(1), MASKS[0])
    assert captures(step) == 1


def test_an_assertion_that_fails_at_the_example_is_a_capture_error():
    model = Reader()
    with pytest.raises(lowtide.CaptureError, match="ValueError: a word out of range: 99"):
        lowtide.optimize(model, (torch.full((2, 2), 99), MASKS[0]), loss=checked, optimizer=optim.SGD(model.parameters(), 0.1))


def test_an_example_without_data_is_refused_where_it_is_read():
    model = Reader()
    optimizer = optim.SGD(model.parameters(), 0.1)
    with pytest.raises(lowtide.CaptureError, match="batch 1, which has no data here"):
        lowtide.optimize(model, (words(0), MASKS[0].to("meta")), loss=masked_unless_trivial, optimizer=optimizer)
    with pytest.raises(lowtide.CaptureError, match="batch 1, which has no data here"):
        lowtide.explain(
            model,
            (words(0), MASKS[0].to("meta")),
            loss=masked_unless_trivial,
            optimizer=optimizer,
            planning=lowtide.Planning(simulate="cpu"),
        )


def test_the_example_and_batches_are_let_go_of():
    model = Reader()
    example = (words(0), MASKS[0].clone())
    step = lowtide.optimize(
        model, example, loss=selected, optimizer=optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
    )
    step(*example)
    seen = [weakref.ref(each) for each in example]
    other = (words(1), MASKS[1].clone())
    step(*other)  # captured anew
    seen += [weakref.ref(each) for each in other]
    del example, other
    gc.collect()
    assert [each() for each in seen] == [None] * 4


def test_what_changes_with_every_batch_is_told_and_left_to_the_loop():
    model = Reader().eval()
    twin = copy.deepcopy(model)
    optimizers = [optim.SGD(each.parameters(), 0.1) for each in (model, twin)]
    loss = lambda model, words, more: model(words).sum() * words.float().mean().item()  # noqa: E731
    step = lowtide.optimize(model, (words(0), MASKS[0]), loss=loss, optimizer=optimizers[0], planning=lowtide.Planning(workspaces=False))

    def run() -> None:
        for seed in range(9):
            step(words(seed), MASKS[0])
            optimizers[1].zero_grad()
            loss(twin, words(seed), MASKS[0]).backward()
            optimizers[1].step()

    with pytest.warns(UserWarning, match=r"3 calls in a row: .*_local_scalar_dense.*test_data_guards\.py:\d+ gives") as told:
        run()
    assert len(told) == 1
    assert captures(step) in (4, 5)  # a mean that comes again is captured
    assert not differences(dict(model.state_dict()), dict(twin.state_dict()))


# Any program that branches on statistics of its batch.

STATISTICS: dict[str, Callable[[Tensor, float], Any]] = {
    "largest": lambda x, limit: x.max() > limit,
    "all": lambda x, limit: (x < limit + 2).all(),
    "number": lambda x, limit: x.max().item() > limit,
    "whole": lambda x, limit: int(x.abs().sum()) % 2 == 0,
    "equal": lambda x, limit: torch.equal(x[0], x[1]),
    "count": lambda x, limit: len(x[x > limit]) > 2,
    "listed": lambda x, limit: sorted(x.flatten().tolist())[1] > limit,
}
CHANGES: list[Callable[[Tensor], Tensor]] = [lambda h: h * 2, torch.sin, lambda h: h.relu(), lambda h: h - h.mean()]


# Rows whose lists all differ are told of after three captures: the loop runs the others.
@pytest.mark.filterwarnings("ignore:lowtide has captured the step anew")
@settings(max_examples=8, deadline=None)
@given(
    questions=st.lists(
        st.tuples(st.sampled_from(sorted(STATISTICS)), st.sampled_from([-1.0, 0.0, 1.0]), st.integers(0, 3), st.integers(0, 3)),
        min_size=1, max_size=3,
    ),
    rows=st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=2, max_size=6),
)  # fmt: skip
def test_any_branches_on_the_batch(questions, rows):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x)
        for name, limit, yes, no in questions:
            hidden = CHANGES[yes if STATISTICS[name](x, limit) else no](hidden)
        return hidden.square().mean()

    batches = [(torch.tensor(row, dtype=torch.float32).reshape(2, 3),) for row in rows]
    step = both_ways(loss, batches, make=lambda: nn.Linear(3, 3))
    assert captures(step) <= len({tuple(row) for row in rows})
