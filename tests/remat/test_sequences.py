"""What a sequence with recomputation costs equals the cost of the program written out; eviction keeps its limit and runs what it must."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.remat import eviction
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.eviction import ScoreWeights
from lowtide.remat.problem import RematProblem
from tests.problems import Case, slow_footprint, unhurried
from tests.sequences import evict, repeating


def _written_out(case, sequence):
    """The same program with a tensor of its own for each copy."""
    sizes = list(case.tensor_bytes)
    maker = {tensor: node for node, task in enumerate(case.tasks) for tensor in task.makes}
    copy, kept, tasks = {tensor: tensor for tensor in range(len(sizes))}, set(), []
    seen = set()
    for node in sequence:
        task = case.tasks[node]
        reads = tuple(copy[tensor] for tensor in task.reads)
        takes = tuple((copy[tensor], slot) for tensor, slot in task.takes)
        makes = []
        for tensor in task.makes:
            if node in seen:
                sizes.append(sizes[tensor])
                copy[tensor] = len(sizes) - 1
            makes.append(copy[tensor])
        seen.add(node)
        tasks.append(type(task)(task.name, tuple(makes), reads, (), task.workspace_bytes, takes))
    kept = frozenset(copy[tensor] for tensor in case.kept if tensor not in maker or maker[tensor] in seen)
    return Case(tuple(sizes), tuple(tasks), kept, case.resident_bytes)


@unhurried
@given(repeating())
def test_the_footprint_is_that_of_the_program_written_out(made):
    case, problem, _, sequence = made
    out = _written_out(case, sequence)
    expected, _ = slow_footprint(out, tuple(range(len(sequence))))
    cost = cost_of(problem, np.array(sequence, np.int32))
    assert cost.footprint_bytes.tolist() == expected
    assert cost.time_us == sum(problem.cost_us[node] for node in sequence)


@unhurried
@given(repeating())
def test_a_wrong_sequence_is_told(made):
    case, problem, _, sequence = made
    done, expected = set(), -1
    for place, node in enumerate(sequence):
        again = node in done
        rows = problem.limits
        limits = set(rows.ids[rows.ptr[node] : rows.ptr[node + 1]].tolist())
        if (again and (not problem.repeatable[node] or limits & done)) or not case.preds(node) - set(case.tasks[node].after) <= done:
            expected = place
            break
        done.add(node)
    assert first_wrong(problem, np.array(sequence, np.int32)) == expected


@unhurried
@given(
    repeating(), st.floats(0, 1), st.sampled_from([ScoreWeights(), ScoreWeights(1, 1, 0.5), ScoreWeights(0, 1, 0), ScoreWeights(0.5, 0, 1)])
)
def test_eviction_keeps_its_limit_and_every_run_is_right(made, share, weights):
    case, problem, order, sequence = made
    if not order:
        return
    for base in (list(order), sequence):
        array = np.array(base, np.int32)
        if first_wrong(problem, array) >= 0:
            continue
        peak = cost_of(problem, array).peak_bytes
        floor = max(map(_own_bytes, [case] * len(order), order)) + case.resident_bytes
        limit = int(floor + share * (peak - floor))
        found = evict(problem, array, limit, weights)
        if found is None:
            assert limit < peak
            continue
        assert first_wrong(problem, found.sequence) == -1
        assert cost_of(problem, found.sequence).peak_bytes <= limit
        firsts = list(dict.fromkeys(found.sequence.tolist()))
        assert set(firsts) == set(base)


@unhurried
@given(repeating(), st.floats(0, 1), st.integers(0, 200))
def test_a_rule_that_may_look_only_so_often_finds_the_same_or_nothing(made, share, looks):
    case, problem, order, _ = made
    if not order:
        return
    base = np.array(order, np.int32)
    limit = case.resident_bytes + int(share * (cost_of(problem, base).peak_bytes - case.resident_bytes))
    found = evict(problem, base, limit)
    with mock.patch.multiple(eviction, _VISITS=looks, _VISITS_A_STEP=0):
        hurried = evict(problem, base, limit)
    assert hurried is None or hurried.sequence.tolist() == found.sequence.tolist()


def _own_bytes(case, node):
    return sum(case.tensor_bytes[tensor] for tensor in (*case.tasks[node].makes, *case.tasks[node].reads))


@unhurried
@given(repeating())
def test_with_room_for_all_nothing_is_repeated(made):
    _, problem, order, _ = made
    if order:
        base = np.array(order, np.int32)
        assert evict(problem, base, cost_of(problem, base).peak_bytes).sequence.tolist() == list(order)


def _value(name, kind=Kind.ACTIVATION, nbytes=8):
    return Value(name, Storage(name, nbytes, "cpu", kind), "float32", (nbytes // 4,), (1,))


def _chain(length):
    """A forward chain whose backward chain reads it from the end."""
    x = _value("x", Kind.INPUT)
    acts = [_value(f"a{place}") for place in range(length)]
    grads = [_value(f"g{place}") for place in range(length)]
    nodes = [Node("aten.sin.default", ((x, *acts)[place],), (acts[place],)) for place in range(length)]
    nodes += [
        Node("aten.mul.Tensor", ((acts[length - 1], *grads)[place], acts[length - 1 - place]), (grads[place],)) for place in range(length)
    ]
    return Graph((x,), tuple(nodes), (grads[-1],))


def test_a_long_chain_fits_into_little_memory():
    graph = _chain(64)
    problem = RematProblem.of(graph, [1.0] * len(graph.nodes))
    base = problem.sequence_of(range(len(graph.nodes)))
    kept = cost_of(problem, base)
    found = evict(problem, base, kept.peak_bytes // 4)
    assert found is not None
    assert cost_of(problem, found.sequence).peak_bytes <= kept.peak_bytes // 4
    assert cost_of(problem, found.sequence).time_us < 2 * kept.time_us


def test_a_rule_that_looks_without_end_gives_up():
    graph = _chain(64)
    problem = RematProblem.of(graph, [1.0] * len(graph.nodes))
    base = problem.sequence_of(range(len(graph.nodes)))
    limit = cost_of(problem, base).peak_bytes // 4
    with mock.patch.multiple(eviction, _VISITS=1000, _VISITS_A_STEP=0):
        assert evict(problem, base, limit) is None
    with mock.patch.multiple(eviction, _VISITS=0, _VISITS_A_STEP=200):
        assert evict(problem, base, limit) is not None


def test_what_is_written_over_limits_its_readers():
    param = _value("p", Kind.PARAMETER)
    after = Value("p_1", param.storage, "float32", (2,), (1,), version=1)
    made, late = _value("m"), _value("l")
    graph = Graph(
        (param,),
        (
            Node("aten.sin.default", (param,), (made,)),
            Node("aten.add_.Tensor", (param, made), (), writes=((param, after),)),
            Node("aten.cos.default", (made,), (late,)),
        ),
        (late,),
    )
    problem = RematProblem.of(graph, [1.0] * 3)
    assert problem.repeatable.tolist() == [True, False, True]
    assert first_wrong(problem, np.array([0, 0, 1, 2], np.int32)) == -1
    assert first_wrong(problem, np.array([0, 1, 0, 2], np.int32)) == 2


def test_what_is_handed_over_before_others_run_is_made_once():
    x, given, left, last = _value("x"), _value("g"), _value("y"), _value("z")
    maker = Node("aten.sin.default", (x,), (left,))
    for after, again in (((), True), ((maker,), False)):
        waits = Node("aten.mul.Tensor", (given, x), (last,), after=after)
        assert RematProblem.of(Graph((x, given), (maker, waits), (left, last)), [1.0] * 2).repeatable.tolist() == [again, True]


@pytest.mark.parametrize("limit", [0, 15])
def test_an_impossible_limit_has_no_sequence(limit):
    problem = RematProblem.of(_chain(4), [1.0] * 8)
    assert evict(problem, problem.sequence_of(range(8)), limit) is None
