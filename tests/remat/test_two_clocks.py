"""The time of a step whose host issues what a device runs: both in order, neither the sum of all."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost.presets import preset
from lowtide.ir.text.graph_text import parse
from lowtide.problems.order import OrderProblem, Rows, Task
from lowtide.remat.cost import _QUEUE, cost_of
from lowtide.remat.problem import Clocks, Links, RematProblem, with_views
from tests.optimum import time_bound_us
from tests.sequences import RULES, evict, linked, repeating


def with_clocks(problem, device_us, issue_us):
    clocks = Clocks(np.array(device_us, np.float64), np.array(issue_us, np.float64))
    return dataclasses.replace(problem, clocks=clocks, cost_us=clocks.price_us(problem.repeatable))


def times(draw, count):
    return draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))


def chain(device_us, issue_us):
    count = len(device_us)
    tasks = [Task(f"n{i}", makes=(i,), reads=(i - 1,) if i else ()) for i in range(count)]
    no = np.zeros(count, np.bool_)
    problem = RematProblem(OrderProblem.of([8] * count, tasks, kept=[count - 1]), np.ones(count), no, ~no, Rows.of([()] * count))
    return with_clocks(problem, device_us, issue_us), np.arange(count, dtype=np.int32)


@given(st.data(), repeating())
def test_whoever_is_later_is_waited_for(data, drawn):
    _, problem, _, sequence = drawn
    nodes = problem.problem.node_count
    device, issue = times(data.draw, nodes), times(data.draw, nodes)
    issued = done = 0
    for node in sequence:
        issued += issue[node]
        done = max(done, issued) + device[node]
    both = with_clocks(problem, device, issue)
    assert cost_of(both, np.array(sequence, np.int32)).time_us == done
    assert done >= both.cost_us[sequence].sum() - 1e-9


@given(st.data(), linked())
def test_no_plan_takes_less_than_the_bound_that_sums_of_prices_make(data, drawn):
    _, problem, order = drawn
    nodes = problem.problem.node_count
    both = with_clocks(problem, times(data.draw, nodes), times(data.draw, nodes))
    sequence, top = np.array(order, np.int32), problem.problem.resident_bytes + int(problem.problem.tensor_bytes.sum())
    for limit in {top, (top + problem.problem.resident_bytes) // 2}:
        for rule in RULES if nodes else ():
            if (found := evict(both, sequence, limit, rule)) is not None:
                assert cost_of(both, found.sequence).time_us >= time_bound_us(both, limit) - 1e-6


@pytest.mark.parametrize(("device", "issue", "expected"), [(10, 1, 1 + 500 * 10), (1, 10, 500 * 10 + 1)])
def test_the_slower_clock_decides(device, issue, expected):
    problem, order = chain([device] * 500, [issue] * 500)
    assert cost_of(problem, order).time_us == expected
    assert problem.cost_us.tolist() == [max(device, issue)] * 500


def test_the_host_is_only_so_far_ahead():
    """What follows long operators was not issued while they ran, but for what finds room in the queue."""
    long, short = 2 * _QUEUE, 3 * _QUEUE
    problem, order = chain([100] * long + [1] * short, [1] * long + [20] * short)
    ahead_us = long * 100 + _QUEUE * 1
    assert cost_of(problem, order).time_us > ahead_us + 0.8 * (short - _QUEUE) * 20


@given(st.integers(0, 40), st.integers(1, 20))
def test_a_price_lies_between_both_clocks(device, issue):
    clocks = Clocks(np.array([device, 3.0 * device]), np.array([issue, 2.0 * issue]))
    price = clocks.price_us(np.array([True, True]))
    low, high = np.minimum(*clocks), np.maximum(*clocks)
    assert ((low <= price + 1e-9) & (price <= high + 1e-9)).all()


VIEWS = """\
def graph(
    x,  # float32[4, 4] 64 B input cpu
):
    x_t = aten.view.default(x, (2, 8))  # float32[2, 8] on x
    x_f = aten.view.default(x_t, (16,))  # float32[16] on x
    a = aten.sin.default(x)  # float32[4, 4] 64 B activation cpu
    a_t = aten.view.default(a, (16,))  # float32[16] on a
    b = aten.cos.default(x_f)  # float32[16] 64 B activation cpu
    c = aten.exp.default(a_t)  # float32[16] 64 B activation cpu
    return (b, c)
"""


def test_views_are_issued_with_what_they_look_at():
    graph = parse(VIEWS)
    assert with_views(graph, [1, 2, 10, 4, 20, 30]) == [0, 0, 14, 0, 23, 30]
    problem = RematProblem.of(graph, [0, 0, 1, 0, 1, 1], issue_us=[1, 2, 10, 4, 20, 30])
    assert cost_of(problem, problem.sequence_of(range(6))).time_us == 1 + 2 + 10 + 4 + 20 + 30 + 1


@pytest.mark.parametrize(("device", "hidden"), [(100.0, True), (1.0, False)])
def test_copies_are_hidden_behind_what_the_device_does_and_not_behind_what_the_host_does(device, hidden):
    link = dataclasses.replace(preset("rtx3090"), launch_us=0.01, to_host_bytes_per_s=8e4, from_host_bytes_per_s=8e4, issue_us=0.1)
    problem, order = chain([device] * 10, [0.5] * 10)
    swapped = dataclasses.replace(problem, links=Links.of(problem.problem, [True] * 10, link))
    codes, copy_us = swapped.codes, link.store_us(8)
    runs = [0, 1, codes.store(0), *range(2, 9), codes.drop(0), 9]
    assert 100 < copy_us < 101
    more_us = cost_of(swapped, np.array(runs, np.int32)).time_us - cost_of(problem, order).time_us
    assert more_us == 0 if hidden else more_us > 90
