"""What can be done with one block are right sequences of it; those of neighbouring blocks go together as one of both."""

import numpy as np
from hypothesis import given

from lowtide.remat.blocks.find import find_blocks
from lowtide.remat.blocks.options import _joined, forward_twice, option_of
from lowtide.remat.blocks.plan import Planned
from lowtide.remat.cost import cost_of, first_wrong
from tests.chains import chains, equal_blocks, in_order
from tests.problems import unhurried


def _is_right(lone, runs):
    return first_wrong(lone.problem, runs) == -1 and set(runs) == set(lone.runs) and np.count_nonzero(runs == lone.turn) == 1


def _joins(fine, coarse):
    """(block, options of its parts, their sequence): where each part takes its first option, its last, or runs its forward part twice."""
    for block, lone in enumerate(coarse.lone):
        first, last = np.searchsorted(fine.blocks.starts, coarse.blocks.starts[block : block + 2])
        for choice in (0, -1):
            options = [fine.options[part][choice] for part in range(first, last)]
            yield lone, options, _joined(lone, options)
        options = [option_of(part, forward_twice(part)) for part in fine.lone[first:last]]
        yield lone, options, _joined(lone, options)


@unhurried
@given(chains())
def test_options_of_a_block_are_right_sequences(problem):
    blocks = find_blocks(problem, in_order(problem))
    if blocks is None:
        return
    fine = Planned.of(problem, blocks, {})
    coarse = Planned.of(problem, blocks.merged(2), {}, fine)
    for planned in (fine, coarse):
        for lone, options in zip(planned.lone, planned.options, strict=True):
            assert all(_is_right(lone, option.runs) for option in options)
    for lone, options, joined in _joins(fine, coarse):
        assert _is_right(lone, joined)
        assert len(joined) == sum(len(option.runs) - 1 for option in options) + 1


def test_what_runs_again_in_one_part_runs_again_in_the_whole():
    problem = equal_blocks(8, inner_bytes=8, inner_us=3.0)
    blocks = find_blocks(problem, in_order(problem))
    fine = Planned.of(problem, blocks, {})
    coarse = Planned.of(problem, blocks.merged(4), {}, fine)
    for lone, options, joined in _joins(fine, coarse):
        extra_us = cost_of(lone.problem, joined).time_us - float(lone.problem.cost_us.sum())
        assert extra_us == sum(option.extra_us for option in options)
    assert any(option.extra_us > 0 for _, options, _ in _joins(fine, coarse) for option in options)
