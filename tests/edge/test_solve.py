"""Plans for several memories against everything that can be done, and against each other."""

import math
from dataclasses import replace
from itertools import product

import pytest

import lowtide
from lowtide.edge.check import check
from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
from lowtide.edge.output import from_json, to_json
from lowtide.edge.plan import EdgeBlock, EdgePlan, Move, Space
from lowtide.edge.solve import EdgeAnswer, EdgeEffort, EdgeRequest, least_bytes, solve
from lowtide.errors import BudgetError, CheckError, FormatError
from lowtide.problems import Status
from tests.edge_brute import Brute
from tests.edge_graphs import chain, random_graph, random_spaces


@pytest.mark.parametrize("group", range(10))
def test_nothing_that_can_be_done_takes_less_than_is_proven(group: int):
    """Orders, spaces, results in place, moves and addresses, all of them."""
    found = [_compared(seed) for seed in range(group * 30, group * 30 + 30)]
    assert sum(status is Status.OPTIMAL for status in found) >= 20


def _compared(seed: int) -> Status:
    count, moves, dma = 2 + seed % 2, seed % 4 < 2, seed % 8 < 4
    graph = random_graph(seed, (6, 4)[count - 2] - 2 * moves)
    request = EdgeRequest.of(
        graph, random_spaces(seed * 7 + count, count), macs_per_s=3.0 if seed % 3 else None, dma=dma, effort=EdgeEffort(moves=moves)
    )
    answer = solve(request)
    known = math.inf if answer.plan is None else answer.plan.value
    least = Brute(graph, request.problem.spaces, macs_per_s=request.macs_per_s, dma=dma, moves=moves).least_ps(known)
    assert answer.bound <= least or (answer.plan is None and least == math.inf)
    if answer.status is Status.OPTIMAL:
        assert least == known
    if answer.status is Status.INFEASIBLE:
        assert least == math.inf
    return answer.status


@pytest.mark.parametrize("group", range(3))
def test_no_places_of_weights_take_less_time_than_is_proven(group: int):
    """All of them: each weight in flash, or in one of the memories from the start to the end."""
    found = [_with_weights(seed) for seed in range(group * 25, group * 25 + 25)]
    assert sum(status is Status.OPTIMAL for status in found) >= 12


def _with_weights(seed: int) -> Status:
    graph, dma, moves = random_graph(seed, 4, weights=0.5), seed % 4 < 2, seed % 3 == 0
    count = 1 + seed % 2
    spaces, flash = random_spaces(seed * 5 + 1, count), Space("flash", None if seed % 5 else 9, 0.5)
    request = EdgeRequest.of(graph, spaces, macs_per_s=3.0, dma=dma, constants=flash, effort=EdgeEffort(moves=moves))
    answer = solve(request)
    weights = [at for at, tensor in enumerate(graph.tensors) if tensor.constant]
    least, rates = math.inf, [*(memory.read_bytes_per_s or 0 for memory in request.problem.spaces)]
    for places in product(range(count + 1), repeat=len(weights)):
        taken = [
            sum(graph.tensors[at].size_bytes for at, each in zip(weights, places, strict=True) if each == space)
            for space in range(count + 1)
        ]
        left = [memory.room_bytes - nbytes for memory, nbytes in zip(request.problem.spaces, taken, strict=True)]
        if min(left[:count]) < 1 or left[count] < 0:
            continue
        where = dict(zip(weights, places, strict=True))
        weights_ps = {
            node.name: sum(math.ceil(graph.tensors[at].size_bytes * 10**12 / rates[where[at]]) for at in node.inputs if at in where)
            for node in graph.nodes
        }
        inside = [replace(memory, capacity_bytes=room) for memory, room in zip(request.problem.spaces[:count], left, strict=False)]
        least = min(least, Brute(graph, inside, macs_per_s=3.0, dma=dma, moves=moves, weights_ps=weights_ps).least_ps(least))
    assert answer.bound <= least
    if answer.status is Status.OPTIMAL and answer.plan is not None:
        assert answer.plan.value <= least
        assert from_json(to_json(answer.plan), graph).blocks == answer.plan.blocks
    if answer.status is Status.INFEASIBLE:
        assert least == math.inf
    return answer.status


@pytest.mark.parametrize(
    ("constants", "options", "sentence"),
    [
        ("flash", {}, "constants: expected a memory with a rate to read"),
        (Space("flash", 100), {}, "constants: expected a memory with a rate to read"),
        (Space("ram", 100, 1.0), {}, "expected names of their own, got ram twice"),
        (Space("flash", 100, 1.0), {"constants_bytes_per_s": 2.0}, "expected it without constants_bytes_per_s"),
    ],
)
def test_odd_memories_of_weights_are_refused(constants, options, sentence: str):
    with pytest.raises(FormatError, match=sentence):
        lowtide.plan_edge(random_graph(1), [Space("ram", 100, 2.0, 2.0)], constants=constants, **options)


@pytest.mark.parametrize("flash_bytes", [None, 2**20])
def test_flash_is_no_room_for_activations(flash_bytes: int | None):
    tensors = [EdgeTensor("x", (64,), "int8", 64), EdgeTensor("w", (90,), "int8", 90, constant=True), EdgeTensor("y", (64,), "int8", 64)]
    graph = EdgeGraph("net", tuple(tensors), (EdgeNode("op", "Op", "", (0, 1), (2,)),), (0,), (2,))
    expected = r"Op op needs x of 64 B, y of 64 B at once; all spaces but flash have 100 B; it would fit with ram="
    with pytest.raises(BudgetError, match=expected) as refused:
        lowtide.plan_edge(graph, [Space("ram", 100, 2.0, 2.0)], constants=Space("flash", flash_bytes, 1.0))
    assert refused.value.smallest_peak_bytes == 128


def test_weights_that_fit_nowhere_are_told_so():
    with pytest.raises(BudgetError, match=r"it would fit with .*flash="):
        lowtide.plan_edge(random_graph(2, weights=1.0), [Space("ram", 12, 2.0, 2.0)], constants=Space("flash", 2, 1.0))


def test_one_space_takes_the_least_bytes_that_any_order_needs():
    for seed in range(60):
        graph = random_graph(seed, 5)
        answer = solve(EdgeRequest.of(graph, [Space("ram")]))
        assert answer.plan is not None
        nbytes = answer.plan.arena_bytes[0]
        assert answer.bound <= nbytes
        for room, fits in ((nbytes, True), (nbytes - 1, False)):
            if answer.status is Status.OPTIMAL and room > 0:
                brute = Brute(graph, [Space("ram", room, 1.0, 1.0)], macs_per_s=None, dma=False, moves=False)
                assert (brute.least_ps() < math.inf) == fits


def test_more_bytes_and_faster_rates_are_never_slower():
    for seed in range(20):
        graph, spaces = random_graph(seed), random_spaces(seed, 2)
        times = [
            _time(graph, [replace(spaces[0], capacity_bytes=nbytes), replace(spaces[1], capacity_bytes=None)]) for nbytes in range(1, 16)
        ]
        assert times == sorted(times, reverse=True)
        rates = [replace(spaces[1], capacity_bytes=None, read_bytes_per_s=rate, write_bytes_per_s=rate) for rate in (0.5, 1.0, 2.0, 3.0)]
        times = [_time(graph, [spaces[0], slow]) for slow in rates]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("seed", [3, 5, 11])
def test_more_bytes_are_not_slower_on_larger_networks_either(seed: int):
    """Of some 50 operators, also where the search ends before its proof."""
    graph = random_graph(seed, 60, 40)
    one = solve(EdgeRequest.of(graph, [Space("ram")])).plan
    assert one is not None
    times = []
    for share in range(1, 9):
        spaces = [Space("fast", one.arena_bytes[0] * share // 8, 8.0, 8.0), Space("slow", None, 1.0, 1.0)]
        answer = solve(EdgeRequest.of(graph, spaces, dma=True, effort=EdgeEffort(max_steps=5_000)))
        assert answer.plan is not None
        times.append(answer.plan.value)
    assert times == sorted(times, reverse=True)


def _time(graph, spaces) -> int:
    answer = solve(EdgeRequest.of(graph, spaces, macs_per_s=5.0, dma=True))
    assert answer.plan is not None
    assert answer.plan.time_ps is not None
    return answer.plan.time_ps


def test_the_least_bytes_of_a_space_within_a_time_are_enough_and_one_less_is_not():
    for seed in range(12):
        graph = random_graph(seed)
        fast, slow = Space("fast", None, 8.0, 8.0), Space("slow", None, 1.0, 1.0)
        slowest = _time(graph, [replace(fast, capacity_bytes=1), slow])
        request = EdgeRequest.of(graph, [fast, slow])
        answer = least_bytes(request, 0, slowest * 2 // 3)
        assert answer.plan is not None
        assert answer.plan.time_ps is not None
        assert answer.plan.time_ps <= slowest * 2 // 3
        nbytes = answer.plan.arena_bytes[0]
        if answer.status is Status.OPTIMAL and nbytes > 1:
            assert _without_macs(graph, [replace(fast, capacity_bytes=nbytes), slow]) <= slowest * 2 // 3
            assert _without_macs(graph, [replace(fast, capacity_bytes=nbytes - 1), slow]) > slowest * 2 // 3


def test_with_little_effort_the_least_bytes_are_no_more_than_those_of_least_time():
    graph, effort = random_graph(15, 40), EdgeEffort(max_steps=1000)
    spaces = [Space("fast", 10, 8.0, 8.0), Space("slow", None, 1.0, 1.0)]
    fastest = lowtide.plan_edge(graph, spaces, effort=effort)
    leanest = lowtide.plan_edge(graph, spaces, least="fast", within_us=fastest.time_us, effort=effort)
    assert leanest.arena_bytes[0] <= fastest.arena_bytes[0]


def test_a_memory_whose_bytes_are_made_least_keeps_to_its_size():
    graph = random_graph(3, 8)
    needed = lowtide.plan_edge(graph, [Space("fast", None, 8.0, 8.0), Space("slow", 7, 1.0, 1.0)], least="fast").arena_bytes[0]
    spaces = [Space("fast", needed - 1, 8.0, 8.0), Space("slow", 7, 1.0, 1.0)]
    with pytest.raises(BudgetError, match=f"it would fit with fast=.*{needed} bytes"):
        lowtide.plan_edge(graph, spaces, least="fast")
    assert lowtide.plan_edge(graph, [replace(spaces[0], capacity_bytes=needed), spaces[1]], least="fast").arena_bytes[0] == needed


def test_a_time_that_a_memory_is_too_small_for_tells_a_size_that_does():
    graph = random_graph(3, 8)
    fast, slow = Space("fast", 1, 8.0, 8.0), Space("slow", None, 1.0, 1.0)
    anything = lowtide.plan_edge(graph, [replace(fast, capacity_bytes=None), slow])
    with pytest.raises(BudgetError, match="with fast=1 B: allow more time, or fast="):
        lowtide.plan_edge(graph, [fast, slow], least="fast", within_us=anything.time_us)
    with pytest.raises(BudgetError, match="however large fast is: allow more time"):
        lowtide.plan_edge(graph, [fast, slow], least="fast", within_us=anything.time_us / 2)


def test_a_plan_is_within_its_own_time():
    """As a float of microseconds, which is no whole number of picoseconds."""
    node = EdgeNode("product", "Op", "", (0,), (1,), macs=2024002)
    graph = EdgeGraph("one", tuple(EdgeTensor(name, (4,), "int8", 4) for name in "xy"), (node,), (0,), (1,))
    spaces = [Space("fast", None, 8e12, 8e12), Space("slow", None, 1e12, 1e12)]
    plan = lowtide.plan_edge(graph, spaces, macs_per_s=1e12)
    assert plan.time_ps == 2024002
    assert plan.time_us is not None
    assert int(plan.time_us * 10**6) < plan.time_ps
    assert lowtide.plan_edge(graph, spaces, macs_per_s=1e12, least="fast", within_us=plan.time_us).arena_bytes[0] == 0


def _without_macs(graph, spaces) -> int:
    answer = solve(EdgeRequest.of(graph, spaces))
    assert answer.plan is not None
    return answer.plan.value


def test_addresses_are_aligned_and_arenas_whole_multiples():
    answer = solve(EdgeRequest.of(chain([5, 7, 3, 9]), [Space("ram", 64, align_bytes=8)]))
    assert answer.plan is not None
    assert answer.status is Status.OPTIMAL
    assert answer.plan.arena_bytes == (24,)
    assert all(block.offset_bytes % 8 == 0 for block in answer.plan.blocks)


def test_a_move_beneath_long_multiplications_costs_nothing_where_a_dma_is():
    """Each tensor of 4 bytes is read at the fast rate in one of two spaces that holds one at a time."""
    spaces = [Space("fast", 8, 4.0, 4.0), Space("slow", None, 1.0, 1.0)]
    graph = chain([4, 4, 4, 4], macs=8)
    with_dma = solve(EdgeRequest.of(graph, spaces, macs_per_s=1.0, dma=True)).plan
    assert with_dma is not None
    assert with_dma.time_ps == 3 * 8 * 10**12


def moving_plan() -> EdgePlan:
    """A plan that moves a block, found among random networks."""
    for seed in range(400):
        answer: EdgeAnswer = solve(EdgeRequest.of(random_graph(seed, 6), random_spaces(seed, 2), macs_per_s=3.0, dma=True))
        if answer.plan is not None and answer.plan.moves and len(answer.plan.blocks) > 4:
            return answer.plan
    raise AssertionError("expected a plan with moves among 400")


def test_a_plan_that_was_changed_is_refused():
    plan = moving_plan()
    check(plan)
    changed = [*_changed_blocks(plan), *_changed_rest(plan)]
    assert [name for name, other in changed if not _is_refused(other)] == []
    assert len(changed) > 20


def _is_refused(plan: EdgePlan) -> bool:
    try:
        check(plan)
    except CheckError:
        return True
    return False


def _changed_blocks(plan: EdgePlan) -> list[tuple[str, EdgePlan]]:
    changed = []
    for index, block in enumerate(plan.blocks):
        others: list[tuple[str, EdgeBlock]] = [
            ("longer ago", replace(block, start=block.start - 1)),
            ("out of its space", replace(block, offset_bytes=2**40)),
            ("before its space", replace(block, offset_bytes=-1)),
            ("in no space", replace(block, space=7)),
            ("never", replace(block, end=block.start)),
        ]
        if block.tensors:
            others.append(("too small", replace(block, size_bytes=block.size_bytes - 1)))
        if block.end - block.start > 1:
            others.append(("too short", replace(block, end=block.end - 1)))
        changed += [(f"block {index}: {name}", replace(plan, blocks=_with(plan.blocks, index, other))) for name, other in others]
    return changed


def _changed_rest(plan: EdgePlan) -> list[tuple[str, EdgePlan]]:
    move = plan.moves[0]
    return [
        ("backwards", replace(plan, order=plan.order[::-1])),
        ("one twice", replace(plan, order=(plan.order[0], *plan.order[:-1]))),
        ("no moves", replace(plan, moves=())),
        ("moved later", replace(plan, moves=(Move(move.block, move.to, move.before + 1), *plan.moves[1:]))),
        ("moved the other way", replace(plan, moves=(Move(move.to, move.block, move.before), *plan.moves[1:]))),
        ("moved twice", replace(plan, moves=(move, *plan.moves))),
        ("a faster time", replace(plan, time_ps=plan.value - 1, bound=0, status=Status.FEASIBLE)),
        ("a bound above", replace(plan, bound=plan.value + 1)),
        ("optimal without proof", replace(plan, bound=plan.value - 1, status=Status.OPTIMAL)),
        ("smaller spaces", replace(plan, spaces=tuple(replace(each, capacity_bytes=1) for each in plan.spaces))),
    ]


def _with(blocks: tuple[EdgeBlock, ...], index: int, block: EdgeBlock) -> tuple[EdgeBlock, ...]:
    return (*blocks[:index], block, *blocks[index + 1 :])
