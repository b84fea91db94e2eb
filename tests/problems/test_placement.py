import numpy as np
import pytest
from hypothesis import given

from lowtide.errors import CheckError, FormatError
from lowtide.problems.placement import FREE, PlaceProblem, check_placement
from tests.placements import least_arena_bytes, problems

THREE = PlaceProblem.of([4, 4, 8], [0, 2, 1], [2, 4, 3], names=["a", "b", "c"])  # a and b never meet


def test_live_bytes_and_their_maximum_are_the_bound():
    steps, live = THREE.live_bytes
    assert steps.tolist() == [0, 1, 2, 3, 4]
    assert live.tolist() == [4, 12, 12, 4, 0]
    assert THREE.lower_bound_bytes == 12
    assert PlaceProblem.of([4], [0], [1], fixed_bytes=16, align_bytes=8).lower_bound_bytes == 20
    assert PlaceProblem.of([], [], []).lower_bound_bytes == 0


def test_a_placement_without_overlap_passes():
    check_placement(THREE, [0, 0, 4], 12)
    check_placement(PlaceProblem.of([4, 0, 4], [0, 0, 2], [1, 9, 2]), [0, 2, 1], 5)  # what is empty meets nobody


@pytest.mark.parametrize(
    ("offsets", "arena", "complaint"),
    [
        ([0, 0, 3], 12, r"buffer a at \[0, 4\) and buffer c at \[3, 11\) overlap at step 1"),
        ([8, 0, 0], 12, r"buffer c at \[0, 8\) and buffer b at \[0, 4\) overlap at step 2"),
        ([0, 0, 4], 11, r"buffer c: expected within the arena of 11 bytes, got \[4, 12\)"),
        ([-1, 0, 4], 12, r"buffer a: expected within the arena"),
        ([0, 0], 12, r"expected offsets of 3 buffers, got 2"),
    ],
)
def test_a_wrong_placement_is_told(offsets, arena, complaint):
    with pytest.raises(CheckError, match=complaint):
        check_placement(THREE, offsets, arena)


def test_alignment_and_fixed_offsets_are_checked():
    with pytest.raises(CheckError, match="buffer 0: expected an offset that is a multiple of 4, got 2"):
        check_placement(PlaceProblem.of([1], [0], [1], align_bytes=4), [2], 99)
    with pytest.raises(CheckError, match="buffer 0: expected the fixed offset 8, got 4"):
        check_placement(PlaceProblem.of([1], [0], [1], fixed_bytes=8), [4], 99)


@given(problems())
def test_the_checker_agrees_with_brute_force_on_any_offsets(problem):
    rng = np.random.default_rng(problem.buffer_count)
    offsets = rng.integers(0, 6, problem.buffer_count)
    arena = int((offsets + problem.size_bytes).max(initial=0))
    assert _passes(problem, offsets.tolist(), arena) == _right(problem, offsets.tolist())


@given(problems())
def test_the_bound_is_never_above_the_best_arena(problem):
    assert problem.lower_bound_bytes <= least_arena_bytes(problem) if problem.buffer_count else True


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        (([-1], [0], [1]), "buffer 0: expected a size"),
        (([1], [2], [1]), r"buffer 0: expected a life that starts before it ends, got \[2, 1\)"),
        (([1], [0], [1, 2]), "end: expected one for each of 1 buffers, got 2"),
        (([1.5], [0], [1]), "size_bytes: expected integers"),
        (([[1]], [0], [1]), "size_bytes: expected one dimension"),
        (([2**61, 2**61], [0, 0], [1, 1]), "add up to less than 2"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers, complaint):
    with pytest.raises(FormatError, match=complaint):
        PlaceProblem.of(*numbers)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(FormatError, match="buffer 0: expected an alignment of 1 byte or more, got 0"):
        PlaceProblem.of([1], [0], [1], align_bytes=0)
    with pytest.raises(FormatError, match="buffer 0: expected a fixed offset that is a multiple of its alignment 4, got 6"):
        PlaceProblem.of([1], [0], [1], align_bytes=4, fixed_bytes=6)
    with pytest.raises(FormatError, match="buffers 0 and 1: expected fixed offsets apart, got both on byte 3"):
        PlaceProblem.of([4, 4], [0, 0], [1, 1], fixed_bytes=[0, 3])
    PlaceProblem.of([4, 4], [0, 1], [1, 2], fixed_bytes=[0, 3])


def test_a_problem_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        THREE.size_bytes[0] = 1


def _passes(problem, offsets, arena):
    try:
        check_placement(problem, offsets, arena)
    except CheckError:
        return False
    return True


def _right(problem, offsets):
    cells = set()
    for buffer, offset in enumerate(offsets):
        if offset % problem.align_bytes[buffer] or problem.fixed_bytes[buffer] not in (FREE, offset):
            return False
        for step in range(problem.start[buffer], problem.end[buffer]):
            for byte in range(offset, offset + int(problem.size_bytes[buffer])):
                if (step, byte) in cells:
                    return False
                cells.add((step, byte))
    return True
