"""Parts, chains, schemes and joins, against brute force where that can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cpu.choice import MOST_PARTS, Group, candidates, joined, reform
from lowtide.cpu.model import Core, Level, Model, machine_of
from lowtide.cpu.partition import is_complex, partition
from lowtide.cpu.reform import KernelShape, Part, Scheme, chains_of, parts_of, schemes_of
from lowtide.ir.graph import Graph, Node, Value
from tests.cpu.networks import Builder, inverted_residuals, mixed

MACHINE = Core(100e3, (Level(32 * 2**10, 200e3), Level(2**20, 110e3), Level(2**24, 55e3), Level(2**62, 8e3)))


class Said:
    """Costs that are made up: each part takes 10, what is joined what was said."""

    def __init__(self, us: dict[tuple[Part, ...], float], threads: int = 1) -> None:
        self.us, self.threads = us, threads

    def alone_us(self, part: Part) -> float:
        return 10.0

    def joined_us(self, parts: Sequence[Part], shape: KernelShape) -> float | None:
        return self.us.get(tuple(parts)) if shape.scheme is Scheme.ROWS else None


def chain(graph: Graph) -> tuple[Part, ...]:
    """The longest chain of a graph that is one cluster."""
    found = partition(graph, most_weight=1e9)
    return max((each for parts in parts_of(found) for each in chains_of(parts, found)), key=len)


def test_a_block_is_a_chain_of_three_parts():
    graph = inverted_residuals(1)
    parts = chain(graph)
    assert [[node.op.split(".")[1] for node in part.nodes] for part in parts] == [
        ["convolution", "hardtanh"], ["convolution", "hardtanh"], ["convolution", "add"],
    ]  # fmt: skip
    assert [part.given for part in parts] == [graph.inputs[0], graph.nodes[1].outputs[0], graph.nodes[3].outputs[0]]


def test_a_result_that_others_read_ends_a_chain():
    assert [
        len(each) for parts in parts_of(partition(inverted_residuals(3))) for each in chains_of(parts, partition(inverted_residuals(3)))
    ]
    graph = inverted_residuals(3)
    found = partition(graph, most_weight=1e9)
    lengths = [len(each) for parts in parts_of(found) for each in chains_of(parts, found)]
    assert lengths == [3, 3, 3]  # what is added later is read twice


def test_every_part_is_in_one_group_and_groups_can_run_in_order():
    for graph in (inverted_residuals(4), mixed()):
        groups = reform(partition(graph), Model(MACHINE))
        nodes = [node for group in groups for node in group.nodes]
        constants = set(partition(graph).constants)
        assert sorted(map(id, nodes)) == sorted(id(node) for node in graph.nodes if node not in constants)
        known = {*graph.inputs, *(value for node in constants for value in node.results)}
        for group in groups:
            made = {value for node in group.nodes for value in node.results}
            assert all(value in known or value in made for node in group.nodes for value in node.inputs)
            known |= made
            assert len(group.parts) > 1 or sum(map(is_complex, group.nodes)) <= 1


def test_without_join_each_part_is_alone():
    groups = reform(partition(inverted_residuals(4)), Model(MACHINE), join=False)
    assert all(len(group.parts) == 1 and group.scheme is None for group in groups)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_joins_are_the_best_of_all(data: st.DataObject):
    build = Builder(1, 8, 14, 14)
    x = build.x
    count = data.draw(st.integers(1, 7))
    for at in range(count):
        x = build.convolution(x, 8, 3 if at % 2 else 1, groups=8 if at % 2 else 1)
    parts = chain(build.graph(x))
    assert len(parts) == count
    runs = [parts[start:end] for start in range(count) for end in range(start + 2, min(count, start + MOST_PARTS) + 1)]
    costs = Said({run: data.draw(st.sampled_from([9.0, 18.0, 20.0, 25.0, 31.0])) for run in runs if data.draw(st.booleans())})
    found = joined(parts, costs)
    assert [part for group in found for part in group.parts] == list(parts)
    assert sum(group.us for group in found) == least(parts, costs)


def least(parts: tuple[Part, ...], costs: Said) -> float:
    """Over all ways to cut a chain."""
    found = []
    for cuts in itertools.product([False, True], repeat=len(parts) - 1):
        ends = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), len(parts)]
        runs = [parts[start:end] for start, end in itertools.pairwise(ends)]
        if all(len(run) == 1 or run in costs.us for run in runs):
            found.append(sum(10.0 if len(run) == 1 else costs.us[run] for run in runs))
    return min(found)


def test_ties_go_to_fewer_joins():
    parts = chain(inverted_residuals(1))
    assert [len(group.parts) for group in joined(parts, Said({parts[:2]: 20.0}))] == [1, 1, 1]


def test_schemes_hold_what_they_say():
    parts = chain(inverted_residuals(1, channels=16, side=28))
    rows, channels = schemes_of(parts)
    assert rows == KernelShape(Scheme.ROWS, ring_bytes=(3 + 1) * 28 * 96 * 4, repeated=1.0, rows=28, passes=1)
    assert channels == KernelShape(Scheme.CHANNELS, ring_bytes=2 * 28 * 28 * 16 * 4, repeated=1.0, rows=1, passes=6)
    two = schemes_of(parts, threads=2)[0]
    assert (two.rows, two.repeated) == (14, pytest.approx(1 + 2 / 28))
    assert [shape.scheme for shape in schemes_of(parts[:2])] == [Scheme.ROWS]
    assert schemes_of(parts[:1]) == ()


def test_what_changes_shape_on_the_way_is_not_joined():
    build = Builder(1, 8, 14, 14)
    first = build.convolution(build.x, 16)
    view = Value("seen", first.storage, "float32", (1, 16, 7, 28), (16 * 7 * 28, 7 * 28, 28, 1))
    build.nodes.append(Node("aten.view.default", (first, (1, 16, 7, 28)), (view,)))
    parts = chain(build.graph(build.convolution(view, 8)))
    assert len(parts) == 2
    assert schemes_of(parts) == ()


def test_a_ring_that_fits_wins_and_one_that_does_not_loses():
    model = Model(MACHINE)
    large, small = chain(inverted_residuals(1, 24, 112)), chain(inverted_residuals(1, 160, 7))
    for parts, wins in ((large, True), (small, False)):
        joined_us = model.joined_us(parts, schemes_of(parts)[0])
        assert (joined_us < 0.97 * sum(map(model.alone_us, parts))) == wins


def test_a_kernel_that_is_none_is_not_joined():
    groups = reform(partition(inverted_residuals(1, 24, 112)), Model(MACHINE, exists=lambda parts, scheme: False))
    assert [len(group.parts) for group in groups] == [1, 1, 1]


def test_candidates_say_what_joining_gains():
    found = list(candidates(partition(inverted_residuals(2, 32, 28)), Model(MACHINE)))
    assert found
    assert all(each.gain == 1 - each.joined_us / each.apart_us for each in found)


def test_the_machine_is_read_from_the_system_and_never_fails(tmp_path: Path):
    for at, (level, kind, size) in enumerate([(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2M"), (3, "Unified", "32M")]):
        folder = tmp_path / f"index{at}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    levels = machine_of(100e3, 10e3, 2, tmp_path).levels
    assert [level.nbytes for level in levels[:3]] == [48 * 2**10, 2 * 2**20, 16 * 2**20]
    for machine in (machine_of(100e3, 10e3, 1, tmp_path / "nowhere"), machine_of(100e3, 10e3)):
        rates = [level.bytes_per_us for level in machine.levels]
        assert rates == sorted(rates, reverse=True)


def test_groups_say_what_they_take():
    graph = inverted_residuals(2, 24, 56)
    apart = reform(partition(graph), Model(MACHINE), join=False)
    together = reform(partition(graph), Model(MACHINE))
    assert all(isinstance(group, Group) and group.us > 0 for group in (*apart, *together))
    assert sum(group.us for group in together) < sum(group.us for group in apart)
