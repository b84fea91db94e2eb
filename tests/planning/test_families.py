"""Families: at each shape they do as well as a plan of that shape, and promise what that plan promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.presets import preset
from lowtide.errors import BudgetError, CheckError, ShapeError
from lowtide.ir.shapes.points import at
from lowtide.planning.request import Budget
from lowtide.ranges.family import MOST, JudgedSequences
from lowtide.ranges.planner import RangePlanner
from tests.planned import plan
from tests.planning.networks import REQUEST
from tests.planning.ranged_networks import BATCHES, LENGTHS, branches, network, ranged

LENGTH_ONLY = st.fixed_dictionaries({"length": st.integers(LENGTHS.least, LENGTHS.most)})
BOTH = st.fixed_dictionaries({"batch": st.integers(BATCHES.least, BATCHES.most), "length": st.integers(LENGTHS.least, LENGTHS.most)})


@pytest.fixture(scope="module")
def one():
    """A network over one dimension, and its planner."""
    return RangePlanner([[ranged(network(9, batch=2))]])


@pytest.fixture(scope="module")
def two():
    """A network over two dimensions, and its planner."""
    return RangePlanner([[ranged(network(9))]])


def within(planner, share=None, **limit):
    memory = None if share is None else int(share * planner.eager_peak_bytes(1))
    return replace(REQUEST, budget=Budget(memory, **limit))


def own_plan(planner, request, point):
    """The plan that is made for one shape alone."""
    return plan([each.at(point) for each in planner.programs[-1]], request)


@pytest.mark.parametrize("share", [None, 0.9, 0.7, 0.55])
@pytest.mark.parametrize("name", ["one", "two"])
def test_a_family_keeps_its_promise_at_every_shape(name, share, request):
    planner = request.getfixturevalue(name)
    asked = within(planner, share)
    (family,) = planner.families(asked)
    assert 1 <= len(family.members) <= MOST

    @given(LENGTH_ONLY if name == "one" else BOTH)
    @settings(deadline=None, max_examples=20)
    def holds(point):
        member = family.choose(point)
        found = family.plan(point)
        assert found.peak_bytes == member.peak_bytes(point) == family.peak_bytes(point)
        assert found.peak_bytes <= (asked.budget.memory_bytes or found.peak_bytes)
        assert found.reuses == member.decision.reuses
        problem = order_problem(at(member.decision.graph, point), found.workspace_bytes)
        assert simulate(problem, member.decision.order).peak_bytes == found.peak_bytes
        if share is not None:
            assert found.cost_report.time_us == family.time_us(point)

    holds()


@pytest.mark.parametrize("share", [0.9, 0.7, 0.55])
def test_a_family_is_about_as_fast_as_each_shapes_own_plan(one, share):
    asked = within(one, share)
    (family,) = one.families(asked)
    for length in (16, 100, 300, 377, 400, 431, 460, 480, 499, 512):
        point = {"length": length}
        own = own_plan(one, asked, point)
        assert family.time_us(point) <= 1.05 * own.cost_report.time_us
        if own.cost_report.time_us == own.cost_report.order_us:
            assert family.time_us(point) <= family.order_us(point) * (1 + 1e-9)


def test_a_family_without_a_limit_is_about_as_lean_as_each_shapes_own_plan():
    planner = RangePlanner([[ranged(branches())]])
    (family,) = planner.families(REQUEST)
    assert len(family.members) == 2
    for length in (*range(16, 512, 31), 512):
        point = {"length": length}
        assert family.peak_bytes(point) <= 1.02 * own_plan(planner, REQUEST, point).peak_bytes
        assert family.plan(point).peak_bytes == family.peak_bytes(point)


def test_where_the_order_as_written_is_as_lean_it_is_run():
    (family,) = RangePlanner([[ranged(branches())]]).families(REQUEST)
    written = tuple(range(4))
    found = {length: family.choose({"length": length}) for length in range(16, 513, 8)}
    assert {member.own_order == written for member in found.values()} == {True, False}
    for length, member in found.items():
        problem = member.ranged.order_problem_at({"length": length}, 1)
        as_written, least = simulate(problem, written).peak_bytes, member.peak_bytes({"length": length})
        assert member.own_order == written if as_written <= least else as_written > least


@pytest.mark.parametrize("without", ["_searched_alone", "_carried"])
def test_programs_of_one_step_fit_where_the_last_does(without, monkeypatch):
    """By what was found for the last one alone; where that does not do, by a search of their own."""
    planner = RangePlanner([[ranged(network(5, batch=2))], [ranged(network(5, batch=2))]])
    monkeypatch.setattr(RangePlanner, without, (lambda *args: []) if without == "_carried" else None)
    first, last = planner.families(within(planner, 0.6))
    fits = [last.fits({"length": length}) for length in range(16, 513, 31)]
    assert any(fits)
    assert [first.fits({"length": length}) for length in range(16, 513, 31)] == fits


def test_a_family_within_a_limit_of_time_keeps_to_it_and_is_lean(one):
    asked = within(one, latency=1.15)
    (family,) = one.families(asked)
    for length in (16, 100, 300, 450, 512):
        point = {"length": length}
        own = own_plan(one, asked, point)
        assert family.time_us(point) <= 1.15 * own.cost_report.order_us * (1 + 1e-6)
        assert family.peak_bytes(point) <= 1.05 * own.peak_bytes


@pytest.mark.parametrize("name", ["one", "two"])
def test_more_memory_is_never_slower_and_less_never_heavier(name, request):
    planner = request.getfixturevalue(name)
    families = [planner.families(within(planner, share))[0] for share in (0.55, 0.9, 0.6, 0.7, 0.71, 0.8)]
    assert len({family.members for family in families}) == 1
    families.sort(key=lambda family: family.request.budget.memory_bytes)

    @given(LENGTH_ONLY if name == "one" else BOTH)
    @settings(deadline=None, max_examples=40)
    def in_turn(point):
        found = [(family.peak_bytes(point), family.time_us(point)) for family in families if family.fits(point)]
        assert [peak for peak, _ in found] == sorted(peak for peak, _ in found)
        assert [us for _, us in found] == sorted((us for _, us in found), reverse=True)

    in_turn()


@pytest.mark.parametrize("name", ["one", "two"])
def test_less_time_is_never_leaner(name, request):
    planner = request.getfixturevalue(name)
    families = [planner.families(within(planner, latency=latency))[0] for latency in (1.0, 1.05, 1.1, 1.4)]

    @given(LENGTH_ONLY if name == "one" else BOTH)
    @settings(deadline=None, max_examples=40)
    def in_turn(point):
        peaks = [family.peak_bytes(point) for family in families]
        assert peaks == sorted(peaks, reverse=True)

    in_turn()


def test_a_shape_that_does_not_fit_is_refused_with_the_largest_that_does(two):
    asked = within(two, 0.2)
    (family,) = two.families(asked)
    wrong = {"batch": 32, "length": 512}
    fits = family.largest_that_fits(wrong)
    assert set(fits) == {"batch", "length"}
    for name, number in fits.items():
        assert family.peak_bytes(wrong | {name: number}) <= asked.budget.memory_bytes
        with pytest.raises(BudgetError):
            family.choose(wrong | {name: number + 1})
    with pytest.raises(
        BudgetError, match=rf"for batch = 32, length = 512; the largest that fits: batch = {fits['batch']} or length = "
    ) as refused:
        family.choose(wrong)
    assert refused.value.smallest_peak_bytes == family.leanest(wrong).peak_bytes(wrong)


def test_what_does_not_fit_even_the_smallest_shape_is_refused_at_once():
    planner = RangePlanner([[ranged(network(14, batch=2))]])
    with pytest.raises(BudgetError, match="nothing was searched") as impossible:
        planner.families(replace(REQUEST, budget=Budget(5000)))
    with pytest.raises(BudgetError, match="the smallest peak that was found") as refused:
        planner.families(replace(REQUEST, budget=Budget(impossible.value.smallest_peak_bytes)))
    assert refused.value.smallest_peak_bytes > impossible.value.smallest_peak_bytes


def test_wrong_points_are_refused(one):
    (family,) = one.families(REQUEST)
    for point in ({"length": 15}, {}, {"length": 16, "batch": 1}):
        with pytest.raises(ShapeError):
            family.choose(point)


def test_programs_that_were_measured_elsewhere_are_refused():
    points = [{"length": number} for number in (16, 512)]
    with pytest.raises(CheckError, match="expected programs over the same dimensions, measured at the same points; got 2 different grids"):
        RangePlanner([[ranged(network(2, batch=2))], [ranged(network(2, batch=2), points)]])


def test_all_programs_of_a_step_keep_to_the_limit():
    first, later = network(8, batch=2), network(9, batch=2)
    planner = RangePlanner([[ranged(first)], [ranged(later)]])
    asked = within(planner, 0.6)
    families = planner.families(asked)
    assert [len(family.candidates[0].graph.nodes) for family in families] == [16, 18]
    for length in (16, 300, 512):
        assert all(family.peak_bytes({"length": length}) <= asked.budget.memory_bytes for family in families)


@st.composite
def judged(draw):
    """Sequences that take what was drawn at three points."""
    rows = draw(st.integers(1, 30))
    peaks = draw(st.lists(st.integers(900, 2000), min_size=3 * rows, max_size=3 * rows))
    times = draw(st.lists(st.sampled_from([10.0, 10.05, 10.3, 11.0, 12.5, 16.0]), min_size=3 * rows, max_size=3 * rows))
    numbers = np.array(peaks, np.int64).reshape(rows, 3), np.array(times).reshape(rows, 3)
    return JudgedSequences((0,) * rows, tuple(np.array([row], np.int32) for row in range(rows)), *numbers)


@given(judged(), st.integers(900, 2000), st.floats(10, 16))
@settings(deadline=None)
def test_few_serve_each_point_under_every_limit(found, memory_bytes, most_us):
    kept = found.few()
    for peaks, times in zip(found.peak_bytes.T, found.time_us.T, strict=True):
        lean = peaks * 1.005 <= memory_bytes  # what is left out may be stood for by what is so much heavier
        if lean.any():
            least = times[lean].min()
            within = times[kept][peaks[kept] <= memory_bytes]
            assert within.min() <= least * (1 if least == times.min() else 1.0251)
        quick = times * 1.0251 <= most_us
        if quick.any():
            assert peaks[kept][times[kept] <= most_us].min() <= peaks[quick].min() * 1.005
    assert found.peak_bytes[kept, 0].min() == found.peak_bytes[:, 0].min()


@pytest.mark.parametrize("swap_state", [False, True])
def test_a_family_that_swaps_keeps_its_promise(swap_state):
    links = replace(preset("rtx3090"), launch_us=0.0, to_host_bytes_per_s=2e7, from_host_bytes_per_s=2e7, granule_bytes=1)
    planner = RangePlanner([[ranged(network(9, batch=2))]])
    asked = replace(within(planner, 0.45), links=links, swap_state=swap_state)
    (family,) = planner.families(asked)
    assert any(node.op.startswith("host.") for member in family.members for node in member.decision.graph.nodes)
    assert any(family.choose({"length": length}) is not family.choose({"length": 16}) for length in (400, 450, 512))
    for length in (16, 150, 300, 400, 450, 512):
        point = {"length": length}
        found = family.plan(point)
        assert found.peak_bytes == family.peak_bytes(point) <= asked.budget.memory_bytes
        assert found.reuses == family.choose(point).decision.reuses
        assert family.time_us(point) <= 1.06 * own_plan(planner, asked, point).cost_report.time_us
