"""The judge against explicit memory on tiny graphs, against lowtide's own cost model, and on answers that are spoilt."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from lowtide.cost.memory import simulate
from lowtide.errors import CheckError
from lowtide.problems.placement import PlaceProblem, check_placement
from lowtide.remat.cost import cost_of, runs_all
from tests.yardstick.answers import Graph, answer_of, is_valid, least_by_state, peak_of, random_graph, random_sequence
from yardstick.check import value_of
from yardstick.problems import coded, order_problem, remat_problem, sequence_of

CHECK = Path(__file__).parents[2] / "yardstick" / "check.py"


def test_it_needs_the_standard_library_alone_and_is_short():
    source = CHECK.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 200
    modules = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names}
    assert modules <= sys.stdlib_module_names | {"__future__"}


@pytest.mark.parametrize(
    ("sequence", "status", "said"), [([0, 1], 0, "valid 3\n"), ([1, 0], 1, "invalid: entry 0 (run 1): an input is not there\n")]
)
def test_as_a_script(sequence: list[int], status: int, said: str, tmp_path: Path):
    graph = {"format": "yardstick.graph", "name": "two", "bytes": [1, 2], "makes": [[0], [1]], "reads": [[], [0]]}
    (tmp_path / "instance.json").write_text(json.dumps(graph))
    (tmp_path / "answer.json").write_text(json.dumps(answer_of(graph, "order", sequence)))
    command = [sys.executable, "-I", "-S", str(CHECK), "instance.json", "answer.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, said, "")


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "{"])
def test_a_file_that_is_no_answer_is_invalid(text: str, tmp_path: Path):
    for name, content in (("instance.json", text), ("answer.json", text)):
        (tmp_path / name).write_text(content)
    command = [sys.executable, str(CHECK), str(tmp_path / "instance.json"), str(tmp_path / "answer.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("invalid: ")


@pytest.mark.parametrize("seed", range(60))
def test_it_agrees_with_lowtide_on_random_sequences(seed: int):
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(2, 7), copies=True)
    graph["after"] = [[] for _ in graph["makes"]]  # lowtide's cost model takes first runs as they come
    graph["until"] = [[node for node in row if node != at] for at, row in enumerate(graph["until"])]
    problem = remat_problem(graph, copies=True)
    valid = 0
    for _ in range(60):
        sequence = random_sequence(rng, graph)
        entries = coded(problem, sequence)
        assert sequence_of(problem, entries) == sequence
        right = runs_all(problem, entries)
        assert is_valid(graph, answer_of(graph, "offload", sequence)) == right, sequence
        if right:
            valid += 1
            cost = cost_of(problem, entries)
            assert value_of(graph, answer_of(graph, "offload", sequence)) == cost.time_us
            assert peak_of(graph, sequence) == cost.peak_bytes
    assert valid


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_lowtide_on_orders(seed: int):
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(2, 6))
    problem, valid = order_problem(graph), 0
    for order in permutations(range(len(graph["makes"]))):
        try:
            peak_bytes = simulate(problem, order).peak_bytes
        except CheckError:
            assert not is_valid(graph, answer_of(graph, "order", list(order)))
            continue
        valid += 1
        assert value_of(graph, answer_of(graph, "order", list(order))) == peak_bytes
    assert valid


def test_it_agrees_with_lowtide_on_placements():
    rng, verdicts = random.Random(0), {True: 0, False: 0}
    for _ in range(2000):
        count = rng.randint(1, 6)
        start = [rng.randint(0, 4) for _ in range(count)]
        buffers = {
            "format": "yardstick.buffers", "name": "random", "size": [rng.randint(0, 4) for _ in range(count)],
            "start": start, "end": [each + rng.randint(0, 4) for each in start], "align": rng.choice((1, 2)),
        }  # fmt: skip
        problem = PlaceProblem.of(buffers["size"], buffers["start"], buffers["end"], align_bytes=buffers["align"])
        offsets = [rng.randint(-1 if rng.random() < 0.05 else 0, 14) for _ in range(count)]
        answer = {"instance": "random", "problem": "place", "offsets": offsets}
        arena = max(offset + size for offset, size in zip(offsets, buffers["size"], strict=True))
        try:
            check_placement(problem, offsets, arena)
        except CheckError:
            verdicts[False] += 1
            assert not is_valid(buffers, answer)
            continue
        verdicts[True] += 1
        assert value_of(buffers, answer) == arena
    assert min(verdicts.values()) > 200


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("problem", ["remat", "remat-twice"])
def test_the_best_of_all_sequences_is_what_explicit_memory_says(problem: str, seed: int):
    """All sequences of a tiny graph of up to two runs more than nodes; the least cost of those that the judge accepts at each limit."""
    rng = random.Random(seed)
    count, extra = 4, 2
    graph = random_graph(rng, count)
    peaks: dict[int, int] = {}  # by cost, the least peak
    for length in range(count, count + extra + 1):
        for sequence in product(range(count), repeat=length):
            answer = answer_of(graph, problem, list(sequence))
            if len(set(sequence)) == count and is_valid(graph, answer):
                cost = value_of(graph, answer)
                peaks[cost] = min(peaks.get(cost, 10**9), peak_of(graph, list(sequence)))
    assert peaks
    for limit in range(min(peaks.values()), max(peaks.values()) + 1):
        best = min(cost for cost, peak in peaks.items() if peak <= limit)
        least = least_by_state(graph, limit, 2 if problem == "remat-twice" else None)
        assert least <= best
        cheapest = min(graph["cost"])
        if best <= sum(graph["cost"]) + (extra + 1) * cheapest:  # no longer sequence is cheaper
            assert least == best


def spoilt() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """A kind of mutation, the instance, and the spoilt answer."""
    chain: Graph = {
        "format": "yardstick.graph", "name": "chain", "bytes": [5, 4, 3, 2, 1], "kept": [4], "makes": [[0], [1], [2], [3], [4]],
        "reads": [[], [0], [1], [0, 2], [1, 3]], "cost": [1, 2, 3, 4, 5], "once": [3], "until": [[], [2], [], [], []],
        "store": [7, 7, None, 7, None], "load": [7, 7, None, 7, None], "workspace_bytes": [0] * 5, "resident_bytes": 0,
    }  # fmt: skip
    swapped = [0, 1, ["store", 0], ["drop", 0], 2, ["load", 0], 3, 4]
    good = {"order": [0, 1, 2, 3, 4], "remat": [0, 1, 2, 0, 3, 4], "remat-twice": [0, 1, 2, 0, 3, 4], "offload": swapped}
    for problem, sequence in good.items():
        right = answer_of(chain, problem, sequence, peak_of(chain, sequence))
        assert is_valid(chain, right)
        yield "another instance", chain, right | {"instance": "other"}
        for other in (None, 1, "place", "sort", ["order"]):
            yield "another problem", chain, right | {"problem": other}
        for other in (None, "0", {"0": 1}, 5):
            yield "no list", chain, right | {"sequence": other}
        yield "nothing runs", chain, right | {"sequence": []}
        for at in range(len(sequence)):
            if sequence.count(sequence[at]) == 1:
                yield "an entry is missing", chain, right | {"sequence": sequence[:at] + sequence[at + 1 :]}
            for other in (-1, 5, 2.0, True, None, "1", ["run"], ["free", 1], ["run", True]):
                yield "an entry of no kind", chain, right | {"sequence": [*sequence[:at], other, *sequence[at + 1 :]]}
        yield "backwards", chain, right | {"sequence": sequence[::-1]}
        yield "a second run of what runs once", chain, right | {"sequence": [*sequence, 3]}
        yield "a second run after its input was written over", chain, right | {"sequence": [*sequence, 1]}
        if problem != "order":
            yield "above the limit", chain, right | {"limit_bytes": right["limit_bytes"] - 1}
            for other in (None, "9", 9.5):
                yield "no limit", chain, right | {"limit_bytes": other}
        if problem != "offload":
            yield "copies where there are none", chain, right | {"sequence": [0, 1, ["store", 0], ["drop", 0], 2, ["load", 0], 3, 4]}
    twice = answer_of(chain, "remat-twice", [0, 1, 2, 0, 3, 4])
    yield "three runs", chain, twice | {"sequence": [0, 0, 0, 1, 2, 3, 4]}
    free = {**chain, "reads": [[], [], [0, 1], [2], [3]]}
    yield "first runs in another order", free, twice | {"sequence": [1, 0, 2, 3, 4]}
    yield "two runs in an order", chain, twice | {"problem": "order"}
    for wrong in (
        [0, 1, ["store", 0], 2, 3, 4],  # waits for ever
        [0, 1, ["drop", 0], 2, ["load", 0], 3, 4],  # never stored
        [0, ["load", 0], 1, 2, 3, 4],
        [["store", 0], 0, 1, 2, 3, 4],  # not there
        [0, 1, ["store", 0], ["store", 0], ["drop", 0], 2, ["load", 0], 3, 4],
        [0, 1, ["store", 0], ["drop", 0], ["drop", 0], 2, ["load", 0], 3, 4],
        [0, 1, 2, ["store", 2], ["drop", 2], ["load", 2], 3, 4],  # may not be stored
        [0, 1, ["store", 0], 0, ["drop", 0], 2, ["load", 0], 3, 4],  # made anew while its copy waits
        [0, 1, 2, 3, 4, ["store", 5], ["drop", 5]],
    ):
        yield "wrong copies", chain, answer_of(chain, "offload", wrong)
    kept = {**chain, "store": [7] * 5, "load": [7] * 5}
    yield "what is kept is away", kept, answer_of(kept, "offload", [0, 1, 2, 3, 4, ["store", 4], ["drop", 4]])
    buffers = {"format": "yardstick.buffers", "name": "three", "size": [2, 2, 4], "start": [0, 1, 3], "end": [2, 3, 4], "align": 2}
    placed = {"instance": "three", "problem": "place", "offsets": [0, 2, 0]}
    assert value_of(buffers, placed) == 4
    for offsets in (
        [0, 0, 0],
        [0, 1, 0],
        [2, 2, 0],
        [-2, 2, 0],
        [0, 2],
        [0, 2, 0, 0],
        [0, 2.0, 0],
        [0, True, 0],
        None,
        {"0": 0},
        [1, 3, 0],
    ):
        yield "wrong offsets", buffers, placed | {"offsets": offsets}
    spaced = {**buffers, "spaces": [4, None], "allowed": [[0, 1], [0, 1], [1]], "benefit": [2, 2, 4]}
    lying = placed | {"problem": "spaces", "space": [0, 0, 1]}
    assert value_of(spaced, lying) == 4
    for space in ([0, 0, 0], [0, 2, 1], [0, -1, 1], [0, 0], [0, 0, 1.0], None, [0, False, 1]):
        yield "wrong spaces", spaced, lying | {"space": space}
    yield "above a capacity", spaced, lying | {"offsets": [0, 4, 0]}
    yield "two on one byte", spaced, lying | {"offsets": [0, 0, 0]}
    yield "a problem of one space", spaced, placed
    yield "a problem of several spaces", buffers, lying


def test_spoilt_answers_are_refused():
    cases = list(spoilt())
    assert len(cases) >= 100
    assert [(kind, answer) for kind, instance, answer in cases if is_valid(instance, answer)] == []


def test_a_benefit_is_of_what_lies_ahead():
    buffers = {
        "format": "yardstick.buffers", "name": "two", "size": [3, 3], "start": [0, 0], "end": [1, 1],
        "spaces": [3, 9, None], "allowed": [[0, 1, 2], [1, 2]], "benefit": [5, 7],
    }  # fmt: skip
    for space, benefit in (([0, 1], 12), ([1, 1], 12), ([2, 1], 7), ([0, 2], 5), ([2, 2], 0)):
        answer = {"instance": "two", "problem": "spaces", "space": space, "offsets": [0, 3 if space[0] == space[1] else 0]}
        assert value_of(buffers, answer) == benefit
