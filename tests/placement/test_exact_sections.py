import numpy as np
from hypothesis import given, settings

from lowtide.placement.exact import luby
from lowtide.placement.floors import enlarge, is_seen, new_seen, put, see, take_back, walk_of
from lowtide.placement.sections import cells, cut, pairs
from lowtide.problems.placement import FREE, PlaceProblem
from tests.placements import meet, problems


def row(ptr, ids, at: int) -> list[int]:
    return ids[ptr[at] : ptr[at + 1]].tolist()


@settings(max_examples=200, deadline=None)
@given(problems(max_buffers=9))
def test_buffers_meet_if_they_share_a_section(problem: PlaceProblem) -> None:
    whole = cut(problem)
    net, known = whole.net, whole.buffers.tolist()
    assert sorted(known) == [each for each in range(problem.buffer_count) if meet(problem, each, each)]
    sections = [set(row(net.member_ptr, net.member_ids, each)) for each in range(len(net.member_ptr) - 1)]
    assert cells(problem) == sum(map(len, sections))
    for one in range(len(known)):
        others = {other for other in range(len(known)) if other != one and meet(problem, known[one], known[other])}
        assert set(row(net.meet_ptr, net.meet_ids, one)) == others
        assert set().union(*(each for each in sections if one in each)) == others | {one}
        assert {each for each in range(len(sections)) if one in sections[each]} == set(range(net.low[one], net.high[one]))
        assert row(net.fixed_ptr, net.fixed_ids, one) == sorted(
            (each for each in others if net.fixed[each] != FREE), key=net.fixed.__getitem__
        )
    assert pairs(problem) == len(net.meet_ids)
    assert not any(one < other for one in sections for other in sections)  # none is part of another


@settings(max_examples=100, deadline=None)
@given(problems(max_buffers=9))
def test_units_divide_all_that_offsets_are_made_of(problem: PlaceProblem) -> None:
    whole = cut(problem)
    fixed = problem.fixed_bytes[whole.buffers]
    assert not (problem.size_bytes[whole.buffers] % whole.unit_bytes).any()
    assert not (fixed[fixed != FREE] % whole.unit_bytes).any()
    aligned = whole.net.align * whole.unit_bytes % problem.align_bytes[whole.buffers]
    assert not aligned.any()


@settings(max_examples=100, deadline=None)
@given(problems(max_buffers=9))
def test_every_step_can_be_taken_back(problem: PlaceProblem) -> None:
    net = cut(problem).net
    walk, fresh = walk_of(net), walk_of(net)
    for buffer in range(len(net.size)):
        put(net, walk, buffer)
        rest = [each for each in range(len(net.size)) if each > buffer]
        for section in range(len(net.member_ptr) - 1):
            here = walk.member[net.member_ptr[section] : net.member_ptr[section] + walk.count[section]]
            assert sorted(here) == [each for each in rest if net.low[each] <= section < net.high[each]]
            assert walk.total[section] == net.size[here].sum()
    take_back(net, walk, 0)
    for name in ("floor", "placed", "count", "total"):
        assert (getattr(walk, name) == getattr(fresh, name)).all()


def test_a_table_knows_what_it_saw_until_it_is_full() -> None:
    random = np.random.default_rng(0)
    words = random.integers(1, 2**63, (48, 2)).astype(np.uint64)
    table, larger = new_seen(64), new_seen(128)
    for one, two in words:
        assert not is_seen(table, one, two)
        see(table, one, two)
    assert all(is_seen(table, one, two) for one, two in words)
    assert table.count[0] == 48
    enlarge(table, larger)
    assert all(is_seen(larger, one, two) for one, two in words)
    for word in range(1, 3):
        see(table, np.uint64(word), np.uint64(word))
    assert table.count[0] < 3  # it forgot, rather than search for ever


def test_runs_are_long_as_luby_says() -> None:
    assert [luby(run) for run in range(1, 16)] == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]
