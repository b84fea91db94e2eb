"""Cuts that are wrong, and options that make no sense: found and said; and what the page, the file and the header say of cuts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

import lowtide
from lowtide.cli import app
from lowtide.edge.check_cuts import check_cut
from lowtide.edge.cuts import Cut, Ring, with_cuts
from lowtide.edge.graph import EdgeGraph
from lowtide.edge.interpret import interpret
from lowtide.edge.onnx import network_of
from lowtide.edge.output import from_json, to_header, to_json, to_page
from lowtide.edge.plan import Space
from lowtide.errors import CheckError, FormatError
from tests.edge_chains import Chain, inputs_of, random_chain

RAM = Space("ram")


def _cut_chain() -> EdgeGraph:
    chain = Chain(1, 12, 12)
    chain.conv(4, 3, pads=(1, 1, 1, 1))
    chain.conv(4, 3, pads=(1, 1, 1, 1))
    return with_cuts(network_of(chain.model()), [Cut(0, 1, 2, 3, 5)])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cut": "yes"}, "cut: expected True or False"),
        ({"cut": True, "inputs_outside": 1}, "inputs_outside: expected True or False"),
        ({"cut": True, "extra_macs": True}, "extra_macs: expected a share"),
        ({"extra_macs": 0.5}, "extra_macs: expected it together with cut=True"),
        ({"extra_macs": None}, "extra_macs: expected it together with cut=True"),
    ],
)
def test_odd_options_are_refused(options: dict[str, Any], sentence: str):
    with pytest.raises(FormatError, match=sentence):
        lowtide.plan_edge(_cut_chain(), [lowtide.Space("ram")], **options)


def test_the_check_finds_what_is_wrong_with_a_cut():
    graph = _cut_chain()
    (node,) = graph.nodes
    ring = node.attributes["rings"][0]
    check_cut(graph, node)
    for change, text in (
        ({"rings": (replace(ring, slots=2),)}, "which its ring has lost"),
        ({"rings": (replace(ring, slot_bytes=ring.slot_bytes - 1),)}, "larger than a slot"),
        ({"rings": (replace(ring, offset_bytes=1),)}, "lies outside of its"),
        ({"rings": ()}, "expected a ring for each"),
        ({"cut": replace(node.attributes["cut"], band=2)}, "multiplications"),
        ({"cut": replace(node.attributes["cut"], axis=0)}, "cannot be cut along"),
    ):
        with pytest.raises(CheckError, match=text):
            check_cut(graph, replace(node, attributes={**node.attributes, **change}))
    with pytest.raises(CheckError, match="multiplications"):
        check_cut(graph, replace(node, macs=node.macs - 1))


def test_the_check_finds_a_result_over_an_input_that_is_still_read():
    chain = Chain(1, 12, 12)
    chain.conv(3, 3, pads=(1, 1, 1, 1))
    graph = with_cuts(network_of(chain.model()), [Cut(0, 0, 2)])
    node = graph.nodes[0]
    assert node.in_place == ()
    with pytest.raises(CheckError, match="still read"):
        check_cut(graph, replace(node, in_place=((0, 0),)))
    plan = lowtide.plan_edge(graph, [RAM])
    over = replace(plan, graph=replace(graph, nodes=(replace(node, in_place=((0, 0),)),)))
    block = replace(plan.blocks[0], tensors=(graph.inputs[0], graph.outputs[0]), start=0, end=1, offset_bytes=0)
    with pytest.raises(CheckError, match="written over"):
        interpret(replace(over, blocks=(block,)), inputs_of(graph, 0))


def test_running_finds_a_ring_that_is_too_short():
    graph = _cut_chain()
    plan = lowtide.plan_edge(graph, [RAM])
    (node,) = graph.nodes
    ring = node.attributes["rings"][0]
    short = replace(node, attributes={**node.attributes, "rings": (Ring(ring.offset_bytes, 2, ring.slot_bytes),)})
    with pytest.raises(CheckError, match="expected slice 0 of"):
        interpret(replace(plan, graph=replace(graph, nodes=(short,))), inputs_of(graph, 0))


def test_what_cannot_be_cut_is_told_so():
    graph = network_of(random_chain(0))
    for cuts in (
        [Cut(0, 99, 2)],
        [Cut(0, 0, 0)],
        [Cut(0, 0, 1, 2, 1)],
        [Cut(0, 0, 2, 2, 1)],
        [Cut(0, 0, 2, 3, 0)],
        [Cut(0, 1, 2), Cut(1, 1, 2)],
        [Cut(0, 0, 9)],
    ):
        with pytest.raises(FormatError, match="cuts: "):
            with_cuts(graph, cuts)
    for share in (-0.1, math.nan, "10%"):
        with pytest.raises(FormatError, match="extra_macs"):
            lowtide.plan_edge(graph, [RAM], cut=True, extra_macs=share)


def test_a_header_has_the_rings_of_each_cut():
    text = to_header(lowtide.plan_edge(_cut_chain(), [RAM]))
    assert "#define PLAN_CUT_0 {0, 1, 2, 3, 5, 0}" in text
    assert "#define PLAN_CUT_0_RINGS {{0, 3, " in text


def test_a_cut_of_a_file_that_is_none_is_refused():
    plan = lowtide.plan_edge(network_of(random_chain(5)), [RAM], cut=True)
    text = to_json(plan)
    assert '"cuts": [' in text
    broken = text.replace('"cuts": [', '"cuts": [[0, 1],')
    broken = broken.replace("[[0, 1],]", "[[0, 1]]")
    with pytest.raises(FormatError, match="a cut: expected"):
        from_json(broken, network_of(random_chain(5)))


def test_the_command_line_cuts(tmp_path: Path):
    onnx.save(random_chain(5), str(tmp_path / "net.onnx"))
    out = tmp_path / "plan.json"
    arguments = ["edge", str(tmp_path / "net.onnx"), "--memory", "sram=any", "--cut", "--extra-macs", "10%", "--json", str(out)]
    shown = CliRunner().invoke(app, [*arguments, "--inputs-outside", "--page", str(tmp_path / "plan.html")])
    assert shown.exit_code == 0, shown.output
    assert "of multiplications done again" in shown.output
    assert "of multiplications done again" not in CliRunner().invoke(app, arguments[:4]).output
    odd = CliRunner().invoke(app, [*arguments[:4], "--flash", "50MB/s", "--constants", "flash=any@50MB/s"])
    assert "--constants: expected it without --flash" in odd.output
    plan = from_json(out.read_text(), network_of(random_chain(5)))
    assert plan.cuts
    assert plan.extra_macs <= 0.1
    assert (tmp_path / "plan.html").read_text() == to_page(plan)
    refused = CliRunner().invoke(app, [*arguments[:-3], "much"])
    assert "--extra-macs: expected a share such as 10%, got 'much'" in refused.output
