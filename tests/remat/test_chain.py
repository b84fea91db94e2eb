"""The programme over a chain equals brute force; the plans that come of it are right sequences and cost what it says."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.problems.order import Rows
from lowtide.remat import blocks as blocks_module
from lowtide.remat import chain as chain_module
from lowtide.remat import eviction as evict_module
from lowtide.remat import options as options_module
from lowtide.remat import pruning as pruning_module
from lowtide.remat.blocks import find_blocks, segments
from lowtide.remat.chain import BACKWARD, FORWARD, HAND_ON, Chain, ChainTable
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import pruned
from lowtide.remat.seeds import BlockPlan, Seeds, warm_up_seeds
from tests.chains import chains, equal_blocks, in_order
from tests.problems import cases, topological_orders, unhurried

slowly = settings(unhurried, max_examples=40)
_MOST = 40


@st.composite
def bare_chains(draw):
    """A chain of up to four blocks with up to three options each, in small numbers."""
    count = draw(st.integers(1, 4))
    options = [draw(st.integers(1, 3)) for _ in range(count)]
    total = sum(options)

    def numbers(length, most):
        return np.array(draw(st.lists(st.integers(0, most), min_size=length, max_size=length)), np.int64)

    handed = np.zeros((count + 1, count + 1), np.int64)
    for first, last in itertools.combinations(range(count + 1), 2):
        handed[first, last] = draw(st.integers(0, 3))
    return Chain(
        option_ptr=np.concatenate([[0], np.cumsum(options)]).astype(np.int64),
        checkpoint=numbers(total, 8), forward=numbers(total, 9), backward=numbers(total, 9), extra_us=numbers(total, 9).astype(float),
        again_us=numbers(total, 9).astype(float), inner_us=numbers(total, 9).astype(float), hand_on=numbers(count, 9),
        hand_on_us=numbers(count, 9).astype(float), handed=handed, rest_forward=numbers(count, 3), rest_backward=numbers(count, 3),
        pinned=np.cumsum(np.append(0, numbers(count, 3))),
    )  # fmt: skip


def _plans(chain, s, t, held=0):
    """(peak, time, steps) of every plan for blocks s to t while so much is held for others: from nothing but the definition."""
    again = t < len(chain.hand_on) - 1
    pins = chain.pinned[1:] - chain.pinned[:-1]

    def besides(block):
        return sum(pins[: max(block, t + 1 if again else 0)]) - (pins[block] if again else 0) + (chain.rest_forward[t] if again else 0)

    for option in range(chain.option_ptr[s + 1] - chain.option_ptr[s]):
        at = chain.option_ptr[s] + option
        own_us = chain.extra_us[at] + ((chain.inner_us[at] if s == t else chain.again_us[at]) if again else 0)
        own = held + max(chain.forward[at] + besides(s), chain.backward[at] + chain.rest_backward[s] + sum(pins[:s]))
        for peak, us, steps in _plans(chain, s + 1, t, held + chain.checkpoint[at]) if s < t else [(0, 0, ())]:
            yield max(own, peak), own_us + us, ((FORWARD, s, option), *steps, (BACKWARD, s, option))
    for middle in range(s + 1, t + 1):
        ahead = range(s, middle)
        own = held + max(chain.hand_on[block] + chain.handed[s, block] + besides(block) for block in ahead)
        own_us = sum(chain.hand_on_us[block] for block in ahead) if again else 0
        behind = list(_plans(chain, s, middle - 1, held))
        for peak, us, steps in _plans(chain, middle, t, held + chain.handed[s, middle]):
            for peak_2, us_2, steps_2 in behind:
                all_steps = (*((HAND_ON, block, -1) for block in ahead), *steps, *steps_2)
                yield max(own, peak, peak_2), own_us + us + us_2, all_steps


@slowly
@given(bare_chains())
def test_the_table_equals_brute_force(chain):
    plans = list(_plans(chain, 0, len(chain.hand_on) - 1))
    table = ChainTable(chain, _MOST)
    for units in range(-1, _MOST + 1):
        fitting = [(us, steps) for peak, us, steps in plans if peak <= units]
        assert table.extra_us(units) == min((us for us, _ in fitting), default=np.inf)
        steps = tuple(table.steps(units))
        assert bool(steps) == bool(fitting)
        assert not steps or (table.extra_us(units), steps) in fitting
    assert table.extra_us(_MOST + 1) == table.extra_us(_MOST)


@pytest.mark.parametrize("count", [3, 6, 16])
def test_a_checkpoint_at_each_block_costs_what_arithmetic_says(count):
    problem = equal_blocks(count, inner_bytes=8, inner_us=3.0)
    plan = BlockPlan.of(problem, find_blocks(problem, in_order(problem)), {})
    cost = cost_of(problem, pruned(problem, plan.written(plan.checkpointed(1))))
    # Each block but the last makes its inner tensor once more. At the loss there are what each block but the first and the last has
    # read, the last block's inner tensor, what it hands on, and the first gradient.
    assert cost.time_us == float(problem.cost_us.sum()) + 3 * (count - 1)
    assert cost.peak_bytes == (count - 2) + 8 + 1 + 1


def test_checkpoints_at_every_other_block_keep_two_inner_tensors():
    problem = equal_blocks(8, inner_bytes=8, inner_us=3.0)
    plan = BlockPlan.of(problem, find_blocks(problem, in_order(problem)), {})
    cost = cost_of(problem, pruned(problem, plan.written(plan.checkpointed(2))))
    # Of each pair but the last, both inner tensors are made once more, and what the first hands to the second. At the loss there are
    # what the second and third pair have read, the last pair's inner tensors, what it hands on, and the first gradient.
    assert cost.time_us == float(problem.cost_us.sum()) + 3 * (2 * 3 + 1)
    assert cost.peak_bytes == 2 + 2 * 8 + 1 + 1


def test_each_micro_batch_is_planned():
    count = 6
    problem = equal_blocks(count, inner_bytes=8, inner_us=3.0, times=2)
    order = in_order(problem)
    assert segments(problem, order) == [(0, 3 * count + 1), (3 * count + 1, 6 * count + 2)]
    costs = [cost_of(problem, sequence) for sequence in Seeds().of(problem, order, [])]
    # Checkpoints at each block of both, as for one.
    expected = (count + 8, float(problem.cost_us.sum()) + 2 * 3 * (count - 1))
    assert expected in [(cost.peak_bytes, cost.time_us) for cost in costs]


@slowly
@given(chains(), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_seeds_are_right_sequences(problem, shares):
    order = in_order(problem)
    peak = cost_of(problem, order).peak_bytes
    levels = [int(peak * share) for share in shares]
    found = list(Seeds().of(problem, order, levels))
    assert len({sequence.tobytes() for sequence in found}) == len(found)
    for sequence in found:
        assert first_wrong(problem, sequence) == -1
        assert set(sequence) == set(order)


@unhurried
@given(cases(max_nodes=8), st.data())
def test_seeds_of_anything_are_right_sequences(case, data):
    orders = list(itertools.islice(topological_orders(case), 3))
    if not case.tasks or not orders:
        return
    count = len(case.tasks)
    problem = RematProblem(
        problem=case.problem,
        cost_us=np.ones(count),
        is_view=np.zeros(count, np.bool_),
        repeatable=np.array([bool(task.makes) for task in case.tasks], np.bool_),
        limits=Rows(np.zeros(count + 1, np.int32), np.zeros(0, np.int32)),
    )
    order = np.array(data.draw(st.sampled_from(orders)), np.int32)
    for sequence in Seeds().of(problem, order, [cost_of(problem, order).peak_bytes // 2]):
        assert first_wrong(problem, sequence) == -1


@pytest.mark.parametrize("count", [4, 9])
def test_plans_of_a_plain_chain_cost_what_the_table_says(count):
    problem = equal_blocks(count, inner_bytes=8, inner_us=3.0)
    blocks = find_blocks(problem, in_order(problem))
    plan = BlockPlan.of(problem, blocks, {})
    table = ChainTable(plan.chain(1), 200)
    peak, base_us = cost_of(problem, blocks.sequence).peak_bytes, float(problem.cost_us.sum())
    fitting = [units for units in range(peak + 1) if table.steps(units)]
    for units in fitting:
        cost = cost_of(problem, pruned(problem, plan.written(table.steps(units))))
        assert cost.peak_bytes <= units
        assert cost.time_us <= base_us + table.extra_us(units)
    # The table counts what a block hands on until its backward pass, though here nobody reads it then.
    assert table.extra_us(peak + count) == 0
    # Blocks that run more than twice reach below one checkpoint a block.
    assert count < 5 or fitting[0] < cost_of(problem, pruned(problem, plan.written(plan.checkpointed(1)))).peak_bytes


def test_same_input_same_seeds():
    problem = equal_blocks(12)
    sequence = in_order(problem)
    first, second = ([each.tolist() for each in Seeds().of(problem, sequence, [20, 40, 60])] for _ in range(2))
    assert first == second
    assert first


def test_a_warm_up_compiles_every_kernel():
    warm_up_seeds()
    kernels = (
        evict_module.go_through, blocks_module._valleys, chain_module._table, chain_module._steps, pruning_module._pruned,
        options_module._unbeaten_mask, options_module._priced,
    )  # fmt: skip
    compiled = [len(kernel.signatures) for kernel in kernels]
    assert all(compiled)
    problem = equal_blocks(6)
    list(Seeds().of(problem, in_order(problem), [30]))
    assert [len(kernel.signatures) for kernel in kernels] == compiled
