"""What a model needs, card by card: against `explain`, and on cards of all sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api.needs import Fit, usable_bytes
from lowtide.cost.presets import preset

GIB = 2**30


def _program(rows=8192):
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.GELU())))
        batch = (torch.empty(rows, 2048),)
    return model, batch, lambda model, x: model(x).square().mean(), torch.optim.AdamW(model.parameters())


def _cards(*usable):
    """Cards of the same rates of which so many bytes are usable."""
    cards = [replace(preset("h100"), name=f"{nbytes / GIB:.2f}", memory_bytes=int((nbytes + 600 * 2**20) / 0.98) + 2) for nbytes in usable]
    assert all(0 <= usable_bytes(card) - nbytes <= 2 for card, nbytes in zip(cards, usable, strict=True))
    return cards


def test_peaks_are_those_that_explain_tells():
    model, batch, loss, optimizer = _program()
    needs = lowtide.needs(model, batch, loss=loss, optimizer=optimizer, cards=["h100"])
    planning = lowtide.Planning(device="cuda", simulate="h100")
    explanation = lowtide.explain(model, batch, loss=loss, optimizer=optimizer, planning=planning)
    assert needs.eager_peak_bytes == explanation.peak_bytes
    assert needs.by_kind == explanation.by_kind
    assert needs.order_peak_bytes == explanation.remedies[0].peak_bytes
    assert needs.least_bytes == min(point.peak_bytes for point in explanation.frontier)
    assert needs.parameters == sum(each.numel() for each in model.parameters())
    (card,) = needs.cards
    assert card.fit is Fit.AS_IT_STANDS
    assert card.time_us == pytest.approx(explanation.time_us)


def test_the_smaller_the_card_the_more_is_done_and_it_is_never_quicker():
    model, batch, loss, optimizer = _program()
    ends = lowtide.needs(model, batch, loss=loss, optimizer=optimizer, cards=["h200"])
    between = (ends.least_bytes + ends.order_peak_bytes) // 2
    usable = (ends.least_bytes - 4096, ends.least_bytes, between, ends.order_peak_bytes, ends.eager_peak_bytes, 2 * ends.eager_peak_bytes)
    needs = lowtide.needs(model, batch, loss=loss, optimizer=optimizer, cards=[*reversed(_cards(*usable))])
    fits = [each.fit for each in needs.cards]
    assert fits == [Fit.NOT, Fit.SLOWER, Fit.SLOWER, Fit.BY_ORDER, Fit.AS_IT_STANDS, Fit.AS_IT_STANDS]
    times = [each.time_us for each in needs.cards[1:]]
    assert times == sorted(times, reverse=True)
    assert needs.cards[1].slower > needs.cards[2].slower > 0 == needs.cards[3].slower
    assert needs.cards[0].verdict == "does not fit"
    assert "slower" in str(needs)


def test_inference():
    model, batch, _, _ = _program()
    needs = lowtide.needs(model, batch, cards=["rtx4090"])
    assert needs.cards[0].fit is Fit.AS_IT_STANDS
    assert needs.eager_peak_bytes < 2 * GIB


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([], "expected a list of names"),
        ("h100", "expected a list of names"),
        (["h1000"], "cards: expected one of"),
        (["h100", None], "cards: expected GPUs, whose memory is known, got None"),
    ],
)
def test_cards_that_are_none(cards, words):
    model, batch, loss, optimizer = _program()
    with pytest.raises(ValueError, match=words):
        lowtide.needs(model, batch, loss=loss, optimizer=optimizer, cards=cards)
