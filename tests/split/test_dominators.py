"""Dominators and scores, against brute force."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.split.sets import Borders, Dominators, Heat


def _random(seed: int) -> tuple[list[list[int]], Dominators]:
    rng = random.Random(seed)
    before: list[list[int]] = [[]]
    tree = Dominators()
    for node in range(1, rng.randint(2, 14)):
        before.append(sorted(rng.sample(range(1, node), min(node - 1, rng.randint(0, 3)))))
        assert tree.add(before[-1]) == node
    return before, tree


def _dominated(before: list[list[int]], node: int) -> set[int]:
    """What the start does not reach without a node."""
    reached = {0}
    for other in range(1, len(before)):
        if other != node and any(each in reached for each in before[other] or [0]):
            reached.add(other)
    return set(range(len(before))) - reached - {node} if node else set(range(1, len(before)))


@given(st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_what_dominates_is_what_all_paths_go_through(seed):
    before, tree = _random(seed)
    for node in range(len(before)):
        below = {other for other in range(1, len(before)) if other != node and node in _path(tree, other)}
        assert below == _dominated(before, node)


def _path(tree: Dominators, node: int) -> list[int]:
    found = [node]
    while node:
        node = tree.parent[node]
        found.append(node)
    return found


@given(st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_heat_and_score_are_the_equations(seed):
    before, tree = _random(seed)
    rng = random.Random(seed + 1)
    count = len(before)
    made = [0, *(rng.randint(0, 9) for _ in range(count - 1))]
    given_bytes: dict[tuple[int, ...], int] = {}
    for _ in range(8):
        maker = rng.choice([-1, *range(1, count)])
        later = range(max(maker, 0) + 1, count)
        readers = rng.sample(later, min(len(later), rng.randint(1, 3)))
        if readers:
            given_bytes[(maker, *readers)] = rng.randint(1, 9)
    borders = Borders(tree, given_bytes).of(tree, np.array(list(given_bytes.values()), np.int64))
    heat = Heat.of(tree, made, borders)
    for node in range(count):
        below = _dominated(before, node)
        assert heat.heat[node] == sum(made[other] for other in below)
        border = sum(nbytes for (maker, *readers), nbytes in given_bytes.items() if maker not in below and below & set(readers))
        assert heat.score[node] == heat.heat[node] / 2 - border


def test_a_long_chain_is_quick():
    tree = Dominators()
    for node in range(100_000):
        tree.add([node, node // 2] if node else [])
    assert tree.common(99_999, 50_000) == tree.common(50_000, 99_999)
