"""What leaves: JSON that reads back, a C header that compiles, and sentences for what makes no sense or does not fit."""

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

import lowtide
from lowtide.cli.edge import parse_memory
from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
from lowtide.edge.output import from_json, to_header, to_json, to_page
from lowtide.edge.plan import Space
from lowtide.errors import BudgetError, CheckError, FormatError
from tests.edge_graphs import chain, random_graph, random_spaces

FAST, SLOW = Space("fast", 6, 8.0, 8.0), Space("slow", 64, 1.0, 1.0)


def test_json_reads_back_as_the_same_plan():
    for seed in range(20):
        graph = random_graph(seed)
        plan = lowtide.plan_edge(graph, [*random_spaces(seed, 2), Space("rest", None, 0.5, 0.5)], dma=True, macs_per_s=4.0)
        assert from_json(to_json(plan), graph) == plan


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda item: item.update(order=item["order"][::-1]), CheckError),
        (lambda item: item.update(time_ps=item["time_ps"] + 1), CheckError),
        (lambda item: item["blocks"].pop(), CheckError),
        (lambda item: item["blocks"][0].update(space=9), CheckError),
        (lambda item: item.update(status="unknown"), CheckError),
        (lambda item: item.update(digest="0"), FormatError),
        (lambda item: item.update(format="other"), FormatError),
        (lambda item: item.update(more=1), FormatError),
        (lambda item: item.update(order="0"), FormatError),
        (lambda item: item.update(moves=[[1, 2]]), FormatError),
        (lambda item: item["spaces"][0].update(capacity_bytes=0), FormatError),
        (lambda item: item["spaces"][0].update(read_bytes_per_s="fast"), FormatError),
    ],
)
def test_json_that_was_changed_is_refused(change, error):
    graph = chain([4, 4, 4, 4])
    item = json.loads(to_json(lowtide.plan_edge(graph, [FAST, SLOW])))
    change(item)
    with pytest.raises(error):
        from_json(json.dumps(item), graph)


def _places(item, path=()):
    yield path
    for key, each in item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ():
        yield from _places(each, (*path, key))


def test_whatever_stands_in_a_place_of_the_json_is_refused_in_a_sentence_or_a_plan():
    graph = chain([4, 4, 4, 4])
    text = to_json(lowtide.plan_edge(graph, [FAST, SLOW], macs_per_s=4.0, dma=True))
    refused = 0
    for path in list(_places(json.loads(text)))[1:]:
        for odd in (None, True, -1, 0, 10**30, 1.5, math.nan, math.inf, "x", [], {}, [[0, 1]]):
            item = json.loads(text)
            holder = item
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = odd
            try:
                to_header(from_json(json.dumps(item), graph))
            except (FormatError, CheckError):
                refused += 1
    assert refused > 500


def test_text_that_is_no_json_is_refused():
    with pytest.raises(FormatError, match="expected JSON"):
        from_json("order = [0]", chain([1, 1]))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_header_compiles_whatever_the_names(tmp_path):
    graph = chain([4, 4, 4])
    names = ["a */ b", "a/*/b", 'x"\n#error'] + ["a ** b"] * 9
    tensors = tuple(replace(each, name=names[index]) for index, each in enumerate(graph.tensors))
    plan = lowtide.plan_edge(replace(graph, name="1 */ #error\n", tensors=tensors), [FAST, SLOW])
    header = tmp_path / "plan.h"
    header.write_text(to_header(plan))
    source = tmp_path / "main.c"
    source.write_text('#include "plan.h"\nint order[PLAN_STEPS] = PLAN_ORDER;\nchar arena[FAST_ARENA_BYTES + SLOW_ARENA_BYTES];\n')
    subprocess.run(["cc", "-Wall", "-Werror", "-c", str(source), "-o", str(tmp_path / "main.o")], check=True)
    defined = re.findall(r"#define (\w+)", header.read_text())
    assert len(set(defined)) == len(defined)


def test_a_page_has_a_lane_for_each_memory_and_each_block_once():
    plan = lowtide.plan_edge(random_graph(20, 6), random_spaces(20, 2), macs_per_s=3.0, dma=True)
    graph = replace(plan.graph, name="<net>", tensors=tuple(replace(each, name=f"<{each.name}>") for each in plan.graph.tensors))
    page = to_page(replace(plan, graph=graph))
    assert page.count("<h2>") == page.count("<svg ") == len(plan.spaces)
    assert page.count("<rect ") == len(plan.blocks)
    assert page.count('<rect class="moved"') == len(plan.moves) > 0
    assert "<net>" not in page
    for block in plan.blocks:
        assert f'x="{block.start}"' in page
        assert f"{block.size_bytes:,} bytes at {block.offset_bytes:,}, steps {block.start} to {block.end - 1}<" in page
    assert "http" not in page
    ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def test_what_makes_no_sense_is_refused_with_a_sentence():
    graph = chain([4, 4])
    for memories, sentence in (
        ([], "at least one memory"),
        ([FAST, FAST], "got fast twice"),
        ([FAST, Space("slow", 64)], "slow: expected its rates"),
        ([Space("ram", 3, align_bytes=4)], "at least its alignment of 4 bytes"),
        (["ram"], "expected values like Space"),
    ):
        with pytest.raises(FormatError, match=sentence):
            lowtide.plan_edge(graph, memories)
    for numbers, sentence in (
        ({"capacity_bytes": 0}, "expected 1 byte or more, got 0"),
        ({"capacity_bytes": -5}, "expected 1 byte or more, got -5"),
        ({"capacity_bytes": 2.5}, "expected 1 byte or more"),
        ({"read_bytes_per_s": 0}, "expected a number from"),
        ({"write_bytes_per_s": float("nan")}, "expected a number from"),
        ({"align_bytes": 0}, "align_bytes: expected"),
    ):
        with pytest.raises(FormatError, match=sentence):
            Space("ram", **numbers)
    with pytest.raises(FormatError, match="as in C"):
        Space("my ram")
    with pytest.raises(FormatError, match="macs_per_s"):
        lowtide.plan_edge(graph, [FAST, SLOW], macs_per_s=-1)
    with pytest.raises(FormatError, match="one of the memories fast, slow"):
        lowtide.plan_edge(graph, [FAST, SLOW], least="sram")


@pytest.mark.parametrize(
    ("graph", "sentence"),
    [
        (EdgeGraph("none", (), (), (), ()), "at least one operator"),
        (replace(chain([4, 4]), inputs=()), "nobody makes or gives"),
        (replace(chain([4, 4]), outputs=(9,)), "expected outputs"),
        (replace(chain([4, 4]), tensors=(EdgeTensor("t", (4,), "int8", -4),) * 2), "expected 0 bytes or more"),
        (replace(chain([4, 4]), nodes=chain([4, 4]).nodes * 2), "of its own"),
        (replace(chain([4, 4]), nodes=(EdgeNode("n", "Op", "", (0,), (7,)),)), "tensors from 0 to 1"),
        (replace(chain([4, 4]), nodes=(EdgeNode("n", "Op", "", (0,), (1,), in_place=((0, 3),)),)), "in_place as"),
        (replace(chain([4, 4, 4]), nodes=(EdgeNode("n", "Op", "", (0,), (1, 2), in_place=((0, 0), (1, 0))),)), "one of its outputs"),
        (replace(chain([4, 4]), nodes=(EdgeNode("n", "Op", "", (1, 0), (1,)),)), "cycle"),
    ],
)
def test_a_network_that_makes_no_sense_is_refused(graph, sentence):
    with pytest.raises(FormatError, match=sentence):
        lowtide.plan_edge(graph, [Space("ram")])


def test_what_does_not_fit_is_told_what_would():
    graph = chain([4, 30, 4])
    with pytest.raises(BudgetError, match=r"Op n0 needs t1 of 30 B, t0 of 4 B at once; .*it would fit with ram=1KiB \(34 bytes\)"):
        lowtide.plan_edge(graph, [Space("ram", 16)])
    lowtide.plan_edge(graph, [Space("ram", 34)])
    with pytest.raises(BudgetError) as refused:
        lowtide.plan_edge(graph, [FAST, Space("slow", 10, 1.0, 1.0)])
    sizes = dict(re.findall(r"(fast|slow)=\w+ \((\d+) bytes\)", str(refused.value)))
    assert sizes == {"fast": "30", "slow": "30"}
    lowtide.plan_edge(graph, [replace(FAST, capacity_bytes=30), Space("slow", 10, 1.0, 1.0)])


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("sram=512KiB@2GB/s", Space("sram", 524288, 2e9, 2e9)),
        ("psram=8MiB@0.1GB/s,50MB/s", Space("psram", 2**23, 0.1e9, 5e7)),
        ("ram=1000", Space("ram", 1000)),
        ("ram=64kB", Space("ram", 64000)),
        ("ram=any@1GiB/s", Space("ram", None, 2.0**30, 2.0**30)),
    ],
)
def test_memories_are_read_from_the_command_line(text, memory):
    assert parse_memory(text) == memory


@pytest.mark.parametrize("text", ["", "sram", "sram=", "sram=x", "sram=1KiB@", "sram=1KiB@2", "=1KiB", "sram=-1", "a b=1KiB", "sram=0"])
def test_a_memory_that_makes_no_sense_is_refused(text):
    with pytest.raises(FormatError):
        parse_memory(text)


def test_a_plan_and_its_graph_are_told_in_lines_not_in_weights():
    graph = chain([100, 200, 50])
    plan = lowtide.plan_edge(graph, [Space("sram", 4096, 1e9, 1e9), Space("psram", None, 1e8, 1e8)])
    assert "sram: " in str(plan)
    assert "of 4.00 KiB" in str(plan)
    assert "made least: the time, optimal, gap 0.0%" in str(plan)
    assert "\n" not in repr(plan) + repr(graph)
    assert len(repr(plan) + repr(graph)) < 300
