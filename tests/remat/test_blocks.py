"""Blocks are found from the integers alone; a block alone costs what it costs in the whole."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given

from lowtide.remat.blocks import block_problems, find_blocks
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.pruning import prompt, pruned
from lowtide.remat.seeds import Seeds
from tests.chains import Builder, chains, equal_blocks, in_order
from tests.optimum import least_us, small_blocks
from tests.problems import unhurried


@pytest.mark.parametrize("count", [3, 4, 9])
def test_equal_blocks_are_found_and_have_one_form(count):
    problem = equal_blocks(count)
    blocks = find_blocks(problem, in_order(problem))
    # The last block and the loss are one: nothing that is read later crosses the place between them but one byte.
    assert blocks.count == count
    assert [blocks.forward_of(block).tolist() for block in range(count - 1)] == [[2 * block, 2 * block + 1] for block in range(count - 1)]
    backward = [blocks.backward_of(block).tolist() for block in range(count)]
    assert list(itertools.chain(*reversed(backward))) == list(range(blocks.boundary, problem.problem.node_count))
    assert all(nodes == [3 * count - block] for block, nodes in enumerate(backward[:-1]))
    problems = block_problems(problem, blocks)
    assert len({each.key for each in problems[1:-1]}) == 1


def test_merged_blocks_cover_the_same_runs():
    problem = equal_blocks(7)
    blocks = find_blocks(problem, in_order(problem))
    for size in (2, 3, 10):
        merged = blocks.merged(size)
        assert merged.count == -(-blocks.count // size)
        assert (merged.starts[0], merged.boundary, merged.ends[0]) == (0, blocks.boundary, blocks.ends[0])
        assert set(merged.starts) <= set(blocks.starts)
        assert set(merged.ends) <= set(blocks.ends)


def test_at_most_so_many_blocks():
    problem = equal_blocks(50)
    assert 2 <= find_blocks(problem, in_order(problem), most=8).count <= 8


def test_a_skip_over_all_blocks_is_no_obstacle():
    step = Builder()
    skipped = step.node((), (5,))
    handed, inner = skipped, []
    for _ in range(4):
        inner.append(step.node(handed, (40,)))
        handed = step.node(inner[-1], (1,))
    grad = step.node((*handed, *skipped), (1,))
    for made in reversed(inner):
        grad = step.node((*grad, *made), (1,))
    problem = step.problem()
    assert find_blocks(problem, in_order(problem)).count >= 4


def test_a_network_without_narrow_places_has_no_blocks():
    step = Builder()
    made = [step.node((), (8,)) for _ in range(6)]
    for _ in range(6):
        made = [step.node((*made[place], *made[(place + 1) % 6]), (8,)) for place in range(6)]
    last = step.node(tuple(each[0] for each in made), (1,))
    for each in made:
        last = step.node((*last, *each), (1,))
    problem = step.problem()
    assert find_blocks(problem, in_order(problem)) is None


def _unrolled(count: int, *, number: bool = False, outputs: bool = False):
    """A cell run so many times: with a number that its last run makes and the last node reads; with a loss over all that it gave."""
    step = Builder()
    handed: tuple[int, ...] = ()
    inner, given_out, made_number = [], (), ()
    for _ in range(count):
        inner.append(step.node(handed, (8,), 3.0))
        handed = step.node(inner[-1], (1,))
        given_out += handed
    if number:
        made_number = step.node((), (0,))
    all_grads = step.node(given_out, (count,)) if outputs else ()
    grad, weight = step.node(handed, (1,)), ()
    for made in reversed(inner):
        grad = step.node((*grad, *made, *all_grads), (1,))
        weight = step.node((*grad, *weight), (20,))
    step.node((*weight, *made_number), (1,))
    return step.problem()


@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("outputs", [False, True])
def test_neither_a_number_nor_a_gradient_of_all_outputs_makes_blocks_one(number, outputs):
    problem = _unrolled(30, number=number, outputs=outputs)
    found = find_blocks(problem, in_order(problem), skips=not outputs)
    assert found is not None
    assert found.count >= 25
    least = min(cost_of(problem, each).peak_bytes for each in Seeds().of(problem, in_order(problem), [120]))
    assert least < 0.6 * cost_of(problem, in_order(problem)).peak_bytes


@unhurried
@given(chains())
def test_blocks_take_the_sequence_apart(problem):
    blocks = find_blocks(problem, in_order(problem))
    assume(blocks is not None)
    forward = [blocks.forward_of(block) for block in range(blocks.count)]
    backward = [blocks.backward_of(block) for block in reversed(range(blocks.count))]
    assert np.array_equal(np.concatenate([*forward, *backward]), blocks.sequence)
    assert all(len(nodes) for nodes in forward)
    problems = block_problems(problem, blocks)
    for each in problems:
        assert first_wrong(each.problem, each.sequence) == -1
    # A block alone counts only what it makes and what flows in, so it never costs more than the whole does there.
    whole = cost_of(problem, blocks.sequence).footprint_bytes
    for block, each in enumerate(problems):
        alone = cost_of(each.problem, each.sequence).footprint_bytes
        assert np.all(alone[: each.boundary] <= whole[blocks.starts[block] : blocks.starts[block + 1]])
        assert np.all(alone[each.boundary + 1 :] <= whole[blocks.ends[block + 1] : blocks.ends[block]])


@pytest.mark.parametrize(("count", "inner"), [(3, 1), (2, 2)])
def test_block_by_block_comes_near_the_true_optimum(count, inner):
    """Of all limits that any sequence keeps, every one, within 10 % of the least time and nine of ten times in that."""
    ratios = []
    for problem in small_blocks(6, count, inner):
        order = in_order(problem)
        limits = [cost_of(problem, order).peak_bytes * share // 8 for share in (4, 5, 6, 7)]
        costs = [cost_of(problem, sequence) for sequence in Seeds().of(problem, order, limits)]
        for limit_bytes in limits:
            least = least_us(problem, order.tolist(), limit_bytes)
            found = min((cost.time_us for cost in costs if cost.peak_bytes <= limit_bytes), default=np.inf)
            if least < np.inf:
                ratios.append(found / least)
    assert len(ratios) >= 20
    assert min(ratios) >= 1
    assert np.mean(np.array(ratios) == 1) >= 0.9
    assert max(ratios) <= 1.1


@unhurried
@given(chains())
def test_prompt_updates_are_a_right_order_of_no_higher_peak(problem):
    sequence = in_order(problem)
    found = prompt(problem, sequence)
    assert sorted(found) == sorted(sequence)
    assert first_wrong(problem, found) == -1
    assert cost_of(problem, found).peak_bytes <= cost_of(problem, sequence).peak_bytes


@unhurried
@given(chains())
def test_pruning_leaves_a_right_sequence_that_costs_no_more(problem):
    sequence = in_order(problem)
    twice = np.concatenate([sequence[: len(sequence) // 2], sequence])
    found = pruned(problem, twice)
    assert first_wrong(problem, found) == -1
    assert set(found) == set(sequence)
    assert cost_of(problem, found).time_us <= cost_of(problem, twice).time_us
    assert pruned(problem, found).tolist() == found.tolist()
