"""Which blocks the model finds faster than their stages, and which of those that want the same stage are made."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cpu.network import StagedBody
from lowtide.cpu.recipes import Target
from lowtide.cpu.stages import RowBlock, alternatives
from lowtide.cpu.trial import BlockTimes, Core, Level, _leanest, block_times, core_here
from lowtide.ir.graph import Graph, Kind, Node, Value
from tests.cpu.networks import Builder, inverted_residuals

CORE = Core(100e3, (Level(32 * 2**10, 200e3), Level(2**20, 110e3), Level(2**24, 55e3), Level(2**62, 8e3)))


def staged(graph: Graph) -> StagedBody:
    fixed = [at for at, value in enumerate(graph.inputs) if value.storage.kind is Kind.PARAMETER]
    return StagedBody.of(graph, fixed, Target(16, 32))


def largest(graph: Graph) -> tuple[RowBlock, BlockTimes | None]:
    body = staged(graph)
    block = alternatives(body.stages)[0][0]
    return block, block_times(block, body.known, CORE)


def test_a_block_is_pointwise_depthwise_pointwise():
    block, _ = largest(inverted_residuals(1))
    assert [[node.op.split(".")[1] for node in part.nodes] for part in block.parts] == [
        ["convolution", "hardtanh"], ["convolution", "hardtanh"], ["convolution", "add"],
    ]  # fmt: skip


def test_a_ring_that_fits_wins_and_one_that_does_not_loses():
    for channels, side, wins in ((24, 112, True), (160, 7, False)):
        times = largest(inverted_residuals(1, channels, side))[1]
        assert times is not None
        assert (times.gain > 0.03) == wins
        assert times.gain == 1 - times.joined_us / times.apart_us


def test_what_changes_shape_on_the_way_has_no_times():
    build = Builder(1, 8, 14, 14)
    deep = build.convolution(build.x, 8, 3, groups=8)
    turned = Value("turned", deep.storage, "float32", (1, 14, 14, 8), (14 * 14 * 8, 14, 1, 14 * 14))
    build.nodes.append(Node("aten.permute.default", (deep, (0, 2, 3, 1)), (turned,)))
    rows = Value("rows", deep.storage, "float32", (14 * 14, 8), (1, 14 * 14))
    build.nodes.append(Node("aten.view.default", (turned, (14 * 14, 8)), (rows,)))
    _, times = largest(build.graph(build.node("aten.mm.default", (rows, build.parameter(8, 24)), 14 * 14, 24)))
    assert times is None


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_blocks_that_want_the_same_stage_are_the_best_of_all(data: st.DataObject):
    build = Builder(1, 8, 14, 14)
    x = build.x
    for at in range(7):
        x = build.convolution(x, 8, 3 if at % 2 else 1, groups=8 if at % 2 else 1)
    windows = alternatives(staged(build.graph(x)).stages)
    assert len(windows) == 3
    every = [block for blocks in windows for block in blocks]
    times = {block: BlockTimes(data.draw(st.integers(5, 30)), 20.0) for block in every if data.draw(st.booleans())}

    def saved(chosen: tuple[RowBlock, ...]) -> float:
        return sum(times[block].apart_us - times[block].joined_us for block in chosen)

    ways = itertools.product(*([None, *(block for block in blocks if block in times)] for blocks in windows))
    legal = [chosen for way in ways if _are_apart(chosen := tuple(block for block in way if block is not None))]
    found = _leanest(windows, times)
    assert _are_apart(found)
    assert saved(found) == max(map(saved, legal))


def _are_apart(blocks: tuple[RowBlock, ...]) -> bool:
    parts = [part for block in blocks for part in block.parts]
    return len(parts) == len(set(parts))


def test_the_caches_are_read_from_the_system_and_that_never_fails(tmp_path: Path):
    for at, (level, kind, size) in enumerate([(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2M"), (3, "Unified", "32M")]):
        folder = tmp_path / f"index{at}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    assert [level.nbytes for level in core_here(tmp_path).levels[:3]] == [48 * 2**10, 2 * 2**20, 32 * 2**20]
    for core in (core_here(tmp_path / "nowhere"), core_here()):
        rates = [level.bytes_per_us for level in core.levels]
        assert rates == sorted(rates, reverse=True)
