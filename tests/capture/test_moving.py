"""What moves each time a program runs, and is no part of a graph: generators of Python and NumPy, counters, numbers of classes. Refused."""

import array
import itertools
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

import lowtide


class Number:
    """A count of a class, which others have from it."""

    n = 0


class Counts(Number):
    """It counts for itself."""


class Counting(nn.Linear):
    """A module that counts its calls in its class."""

    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x)


class Settings(dict):
    """A dictionary whose entries are attributes, and which raises KeyError for others."""

    __getattr__ = dict.__getitem__


GENERATOR, NUMPY, LEGACY = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
COUNTER, NUMBERS, SPACE = itertools.count(), array.array("d"), types.SimpleNamespace(n=0)


def set_number(holder):
    holder.n += 1


MOVES = {
    "a Random is drawn from": GENERATOR.random,
    "a Generator is drawn from": NUMPY.random,
    "a RandomState is drawn from": LEGACY.rand,
    "a count that it reaches": lambda: next(COUNTER),
    "a array that it reaches": lambda: NUMBERS.append(1.0),
    "attribute 'n' of the class Counts was 1 and is 2": lambda: set_number(Counts),
    "attribute 'n' of a SimpleNamespace is set": lambda: set_number(SPACE),
}


def planned(loss, model=None):
    model = model or nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    planning = lowtide.Planning(workspaces=False)
    return lowtide.optimize(model, torch.ones(2, 3), loss=loss, optimizer=optimizer, planning=planning)


@pytest.mark.parametrize("said", MOVES)
def test_it_is_refused(said):
    move = MOVES[said]
    with pytest.raises(lowtide.CaptureError, match=said):
        planned(lambda model, x: (move(), model(x).sum())[1])


def test_generators_and_classes_are_as_they_were():
    before = GENERATOR.getstate(), str(NUMPY.bit_generator.state), len(NUMBERS), Counts.n
    for said in ("a Random is drawn from", "a Generator is drawn from", "a array that it reaches"):
        test_it_is_refused(said)
    test_it_is_refused("attribute 'n' of the class Counts was 1 and is 2")
    assert before == (GENERATOR.getstate(), str(NUMPY.bit_generator.state), len(NUMBERS), Counts.n)


def test_a_draw_that_seldom_matters_is_refused():
    """A branch that one in a thousand calls takes: no capture would meet the other way."""
    with pytest.raises(lowtide.CaptureError, match="a Random is drawn from; draw with torch"):
        planned(lambda model, x: model(x.flip(1) if GENERATOR.random() < 0.001 else x).sum())


def test_a_module_that_counts_in_its_class_goes_on_counting():
    step = planned(lambda model, x: model(x).sum(), Counting(3, 3))
    assert Counting.calls == 0
    step(torch.ones(2, 3))
    step(torch.ones(2, 3))
    assert Counting.calls == 2


def test_what_is_there_and_does_not_move_is_let_through():
    settings = Settings(scale=0.5)
    step = planned(lambda model, x: model(x).sum() * (settings.scale if (GENERATOR, COUNTER, SPACE.n, Counts.n) else 1.0))
    assert step(torch.ones(2, 3)).isfinite()
