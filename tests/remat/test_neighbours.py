"""The search builds nothing twice, and its exceptions touch only what eviction weighed: what it leaves out could have changed nothing."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.remat import sweep as frontier
from lowtide.remat.cost import cost_of
from lowtide.remat.eviction import Bias, attempt
from lowtide.remat.neighbours import Neighbours
from lowtide.remat.state import BYSTANDER, CHOSEN, WEIGHED
from lowtide.remat.sweep import Sweep
from tests.problems import unhurried
from tests.sequences import RULES, evict, linked, repeating, stored_chain


def _evicted(made, share, weights):
    """What eviction makes of the case's order, and its limit; None where there is nothing."""
    case, problem, order, *_ = made
    if not order:
        return None
    base = np.array(order, np.int32)
    limit = int(case.resident_bytes + share * (cost_of(problem, base).peak_bytes - case.resident_bytes))
    found = evict(problem, base, limit, weights)
    return None if found is None else (problem, base, limit, found)


@unhurried
@given(st.one_of(repeating(), linked()), st.floats(0, 1), st.sampled_from(RULES), st.data())
def test_exceptions_for_bystanders_and_to_keep_what_was_kept_change_nothing(made, share, weights, data):
    evicted = _evicted(made, share, weights)
    if evicted is None:
        return
    problem, base, limit, found = evicted
    factors = [
        data.draw(st.sampled_from([0.01, 100.0] if role == BYSTANDER else [1.0, 100.0] if role == WEIGHED else [1.0]))
        for role in found.roles.tolist()
    ]
    again = evict(problem, base, limit, weights, Bias(np.array(factors, np.float64), np.ones(len(factors))))
    assert again.sequence.tolist() == found.sequence.tolist()


@unhurried
@given(repeating(), st.floats(0, 1), st.sampled_from(RULES))
def test_something_is_repeated_only_where_something_was_chosen_to_go(made, share, weights):
    evicted = _evicted(made, share, weights)
    if evicted is None:
        return
    _, base, _, found = evicted
    if len(found.sequence) > len(base):
        assert CHOSEN in found.roles


@pytest.mark.parametrize("swap", [False, True])
def test_no_state_of_a_round_is_built_twice(monkeypatch, swap):
    problem = dataclasses.replace(stored_chain(6), repeatable=np.arange(12) < 6)
    problem, built = problem if swap else dataclasses.replace(problem, links=None), []

    def noted(problem, base, limit, weights, bias):
        exceptions = (b"", b"") if bias is None else (bias.keep.tobytes(), bias.store.tobytes())
        built.append((problem.links is None, base.tobytes(), limit, weights, *exceptions))
        return attempt(problem, base, limit, weights, bias)

    monkeypatch.setattr(frontier, "attempt", noted)
    archive = Sweep(max_states=600).explore([problem], [[np.arange(12, dtype=np.int32)]])
    assert len(built) > 150
    assert len(built) == len(set(built))
    assert archive.states >= len(built)


def test_exceptions_keep_what_went_and_release_what_could_have_gone():
    part = np.array([BYSTANDER, WEIGHED, CHOSEN, WEIGHED, CHOSEN, BYSTANDER], np.int8)
    neighbours, bias = Neighbours(), Bias(np.ones(6), np.ones(6))
    seen = np.zeros((3, 6), np.bool_)
    for _ in range(200):
        bias = neighbours._exceptions(bias, part)
        keep = bias.keep
        seen |= [keep < 1, keep == 1, keep > 1]
    assert seen[0].tolist() == [False, True, False, True, False, False]
    assert seen[2].tolist() == [False, False, True, False, True, False]
    assert np.all((bias.keep >= 1e-6) & (bias.keep <= 1e6))
