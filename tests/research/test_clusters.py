"""Algorithm 1 against one that computes all stages anew after each merge; clusters on hand-written graphs."""

import itertools
import random

import numpy as np
import pytest

from bench.ago.balance import Balance, cluster_weights, histogram, of_clusters
from lowtide.errors import CheckError
from lowtide.ir.graph import Graph
from research.fusion.clusters import is_complex, merge, partition, partition_of_operators, split
from tests.cpu.networks import inverted_residuals, mixed

Edges = list[tuple[int, int]]
ANY = 2**31


def random_edges(source: random.Random, nodes: int) -> Edges:
    """A connected graph without cycles, its nodes in program order."""
    edges = {(source.randrange(late), late) for late in range(1, nodes) if source.random() < 0.9}
    for _ in range(source.randrange(nodes)):
        early, late = sorted(source.sample(range(nodes), 2))
        edges.add((early, late))
    return sorted(edges)


def merged(
    edges: Edges, weights: list[float], most: float, complex_counts: list[int] | None = None, groups: list[int] | None = None
) -> list[int]:
    pairs = np.array(edges, np.int64).reshape(-1, 2)
    count = len(weights)
    counts, of_group = np.array(complex_counts or [0] * count, np.int64), np.array(groups or [0] * count, np.int64)
    ends = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    return merge(*ends, np.array(weights), counts, of_group, np.zeros(count, np.bool_), most, 1 if complex_counts else ANY).tolist()


def stages(clusters: list[int], edges: Edges) -> dict[int, int]:
    """By cluster, the length of the longest path to it. Raises ValueError for a cycle."""
    before: dict[int, set[int]] = {cluster: set() for cluster in clusters}
    for early, late in edges:
        if clusters[early] != clusters[late]:
            before[clusters[late]].add(clusters[early])
    found: dict[int, int] = {}
    while len(found) < len(before):
        ready = [cluster for cluster, needed in before.items() if cluster not in found and needed <= found.keys()]
        if not ready:
            raise ValueError("a cycle")
        found |= {cluster: max((found[each] + 1 for each in before[cluster]), default=0) for cluster in ready}
    return found


def affix(node: int, clusters: list[int], edges: Edges, stage: dict[int, int]) -> set[int]:
    """The neighbours whose stages differ by one."""
    pairs = {(clusters[early], clusters[late]) for early, late in edges} | {(clusters[late], clusters[early]) for early, late in edges}
    return {other for one, other in pairs if one == node and abs(stage[other] - stage[node]) == 1}


def brute_force(edges: Edges, weights: list[float], most: float) -> list[int]:
    """Algorithm 1 as the paper writes it: all stages anew after each merge, the heaviest candidate found anew."""
    clusters, weight = list(range(len(weights))), dict(enumerate(weights))
    candidates = set(clusters)
    while candidates:
        node = max(candidates, key=lambda each: (weight[each], -each))
        near = affix(node, clusters, edges, stages(clusters, edges))
        other = min(near, key=lambda each: (weight[each], each), default=None)
        if other is None or weight[node] + weight[other] >= most:
            candidates.discard(node)
            continue
        weight[node] += weight[other]
        candidates.discard(other)
        candidates.add(node)
        clusters = [node if each == other else each for each in clusters]
    return clusters


@pytest.mark.parametrize("seed", range(8))
def test_clusters_are_those_of_the_paper(seed: int):
    source = random.Random(seed)
    for _ in range(40):
        nodes = source.randint(1, 14)
        edges = random_edges(source, nodes) if nodes > 1 else []
        weights = [float(source.randint(1, 9)) for _ in range(nodes)]
        most = source.choice([6.0, 12.0, 20.0, 1e9])
        assert merged(edges, weights, most) == brute_force(edges, weights, most)


def test_there_are_no_cycles_in_20_000_random_graphs():
    """While merging whole affix sets at once, upstream and downstream ones mixed, makes some: the paper's Theorem 1 holds for one merge."""
    source, cycles = random.Random(0), 0
    for trial in range(20_000):
        nodes = source.randint(4, 12)
        edges = random_edges(source, nodes)
        found = merged(edges, [float(source.randint(1, 9)) for _ in range(nodes)], source.choice([8.0, 16.0, 1e9]))
        stages(found, edges)
        if trial < 2_000:
            node, alone = source.randrange(nodes), list(range(nodes))
            near = affix(node, alone, edges, stages(alone, edges))
            try:
                stages([node if each in near else each for each in alone], edges)
            except ValueError:
                cycles += 1
    assert cycles > 0


def test_upstream_and_downstream_neighbours_mixed():
    """0 -> 1 -> 3 and 0 -> 2 -> 3: both 0 and 3 may join 1, but not both at once, as 2 stands between."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert affix(1, [0, 1, 2, 3], edges, stages([0, 1, 2, 3], edges)) == {0, 3}
    with pytest.raises(ValueError, match="a cycle"):
        stages([1, 1, 2, 1], edges)
    assert merged(edges, [1.0, 9.0, 5.0, 1.0], 11.5) == [1, 1, 2, 2]


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_at_most_one_complex_operator_within_groups(seed: int):
    source = random.Random(seed)
    for _ in range(60):
        nodes = source.randint(2, 14)
        edges = random_edges(source, nodes)
        counts = [1, *(source.randint(0, 1) for _ in range(nodes - 1))]
        groups = [source.choice([-1, 0, 0, 1]) for _ in range(nodes)]
        found = merged(edges, [1.0] * nodes, 1e9, counts, groups)
        stages(found, edges)
        for cluster in set(found):
            members = [node for node in range(nodes) if found[node] == cluster]
            assert sum(counts[node] for node in members) <= 1
            assert len({groups[node] for node in members}) == 1
            assert groups[cluster] >= 0 or len(members) == 1


def test_a_chain_of_10_000_is_cut():
    edges = [(early, early + 1) for early in range(9_999)]
    assert len(set(merged(edges, [1.0 + each % 7 for each in range(10_000)], 50.0))) < 2_000


def test_units_are_what_conventional_fusion_makes_one_kernel():
    graph = inverted_residuals(2)
    parts = partition(graph)
    for nodes in split(parts).clusters:
        assert sum(map(is_complex, nodes)) == 1
        assert is_complex(nodes[0])  # activations and additions belong to what makes their argument
    assert {node for nodes in parts.clusters for node in nodes} == set(graph.nodes)
    assert len(parts.clusters) < len(split(parts).clusters)


def test_clusters_can_run_in_their_order():
    graph = mixed()
    parts = partition(graph, most_weight=100.0)
    known = {*graph.inputs, *(value for node in parts.constants for value in node.results)}
    for nodes in parts.clusters:
        for node in nodes:
            assert known.issuperset(node.inputs)
            known.update(node.results)


def test_constants_are_in_no_cluster():
    graph = mixed()
    parts = partition(graph)
    assert [node.op for node in parts.constants] == ["aten.t.default"]
    assert not set(parts.constants) & {node for nodes in parts.clusters for node in nodes}


def test_what_is_not_generated_stays_alone():
    graph = mixed()
    parts = partition(graph, most_weight=1e9)
    assert ["aten.cumsum.default"] in [[node.op for node in nodes] for nodes in parts.clusters]


def test_the_weight_is_a_limit():
    graph = inverted_residuals(4)
    for find in (partition, partition_of_operators):
        weights = cluster_weights(find(graph, 150.0))
        heaviest = max(cluster_weights(find(graph, 0.0)))
        assert max(weights) < max(150.0, heaviest + 1e-9)


def test_clusters_that_overlap_or_need_one_another_are_refused():
    graph = inverted_residuals(1)
    first, second, third = graph.nodes[:3]
    with pytest.raises(ValueError, match="no node in common"):
        of_clusters(graph, [[first, second], [second, third]])
    with pytest.raises(ValueError, match="run one after another"):
        of_clusters(graph, [[first, third], [second]])
    assert len(of_clusters(graph, [[first, second]]).clusters) == len(graph.nodes) - 1


def test_balance():
    assert Balance.of([10.0, 10.0]) == Balance(2, 10.0, 10.0, 1.0, 2)
    assert Balance.of([1.0, 0.0, 0.0, 0.0]).jain == 0.25
    counts = histogram([5.0, 50.0, 50.0, 1e6])
    assert [count for *_, count in counts] == [0, 1, 0, 0, 2, 0, 0, 0, 0, 1]
    with pytest.raises(ValueError, match="one cluster"):
        Balance.of([])


def test_a_graph_that_is_none_is_refused():
    graph = inverted_residuals(1)
    with pytest.raises(CheckError):
        partition(Graph(graph.inputs[1:], graph.nodes, graph.outputs))


def test_same_graph_same_clusters():
    one, two = (partition(inverted_residuals(5)) for _ in range(2))
    assert [[node.outputs[0].name for node in nodes] for nodes in one.clusters] == [
        [node.outputs[0].name for node in nodes] for nodes in two.clusters
    ]


def test_an_empty_graph_has_no_clusters():
    assert partition(Graph((), (), ())).clusters == ()
    assert list(itertools.chain(*split(partition(Graph((), (), ()))).clusters)) == []
