"""A run of operators as one that works slice by slice: between them lie rings of a few slices, and never a whole tensor.

A slice is one entry along `axis` of a tensor. The result is made one slice after the other, and each makes those that it still needs of
the tensor before it, which are kept in a ring for as long as someone needs them. With bands, the result is made in bands along a second
axis, one after the other: rings hold a band's part of a slice only, and what two bands both need is computed twice (line buffers, and
patches with halos: MCUNetV2, NeurIPS 2021, section 3.1; msf-CNN, NeurIPS 2025, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.edge.dtypes import BITS
from lowtide.edge.graph import EdgeGraph, EdgeNode, SharedBytes, shared_bytes
from lowtide.edge.groups import renumbered
from lowtide.edge.rings import CutStages, CutTraffic, Ring
from lowtide.edge.windows import CUT_DOMAIN, LOAD, is_weight, reads_of
from lowtide.errors import FormatError


@dataclass(frozen=True, slots=True)
class Cut:
    """Which operators become one, and how."""

    first: int  # of the network's operators
    last: int
    axis: int  # of the result: slices are one entry along it
    band_axis: int = -1  # -1: no bands
    band: int = 0  # entries of the result along it in one band
    staged: bool = False  # without bands: whether the first operator's input comes through a ring too, read once, perhaps written over


@dataclass(frozen=True, slots=True)
class CutBody:
    """The operators of a cut as a network of their own, and where the rings lie in the workspace."""

    cut: Cut
    graph: EdgeGraph  # its last operator makes the result
    rings: tuple[Ring, ...]  # of what each operator but the last makes

    @property
    def rows(self) -> list[tuple[int, int]]:
        """[low, high) of the result along the second axis, band after band; all of it where there are no bands."""
        if self.cut.band_axis < 0:
            return [(0, 0)]
        whole = self.graph.tensors[self.graph.outputs[0]].shape[self.cut.band_axis]
        return [(low, min(low + self.cut.band, whole)) for low in range(0, whole, self.cut.band)]


def cut_body(node: EdgeNode) -> CutBody | None:
    """What a node that is a cut consists of; None for another."""
    values = node.attributes
    return CutBody(values["cut"], values["body"], values["rings"]) if "cut" in values else None


def can_be_cut(graph: EdgeGraph, node: EdgeNode, axis: int, band_axis: int = -1) -> bool:
    """Whether an operator makes its result slice by slice along an axis, of whole bytes each, and in bands along another.

    Operators with windows or weights have no bands along channels, and none beside slices along them.
    """
    reads = reads_of(graph, node)
    if band_axis >= 0 and (
        not can_be_cut(graph, node, band_axis) or (1 in (axis, band_axis) and not (reads and reads.is_number_by_number))
    ):
        return False
    tensors = [graph.tensors[at] for at in (node.outputs[0], *(reads.of_input if reads is not None else ()))]
    return reads is not None and axis in reads.axes and all(BITS[each.stored_dtype or each.dtype] >= 8 for each in tensors)


def with_cuts(graph: EdgeGraph, cuts: Sequence[Cut], align_bytes: int = 1) -> EdgeGraph:
    """The network with each cut as one operator, whose workspace holds the rings, each slice at a multiple of the alignment.

    Raises FormatError for cuts that overlap, or of operators that cannot be cut so.
    """
    nodes: list[EdgeNode] = []
    at, shared = 0, shared_bytes(graph)
    for cut in sorted(cuts, key=lambda each: each.first):
        if not at <= cut.first <= cut.last < len(graph.nodes):
            raise FormatError(f"cuts: expected operators from {at} to {len(graph.nodes) - 1}, none twice, got {cut.first} to {cut.last}")
        nodes += [*graph.nodes[at : cut.first], _node(graph, cut, align_bytes, shared)]
        at = cut.last + 1
    return renumbered(graph, [*nodes, *graph.nodes[at:]])


def _node(graph: EdgeGraph, cut: Cut, align_bytes: int, shared: SharedBytes) -> EdgeNode:
    members = graph.nodes[cut.first : cut.last + 1]
    run = _run(graph, cut, align_bytes)
    if run is None:
        text = f"{members[0].name} to {members[-1].name} cannot be cut along axis {cut.axis}, in bands of {cut.band} along {cut.band_axis}"
        raise FormatError(f"cuts: operators {text}")
    inputs = tuple(dict.fromkeys(at for node in members for at in node.inputs if at >= 0 and at not in run.slots and at != run.output))
    whole = replace(graph, name=f"{members[0].name} to {members[-1].name}", outputs=(run.output,))
    if cut.staged:
        whole, members = _staged(whole, members)
        inputs = tuple(dict.fromkeys((members[0].inputs[0], *inputs)))
    read, written, from_rings = run.traffic(graph.nodes[cut.first : cut.last + 1], inputs)
    traffic = CutTraffic(tuple(read[0].tolist()), int(written[0]), int(from_rings[0]))
    body = renumbered(replace(whole, inputs=tuple(at for at in inputs if not is_weight(graph, at))), members)
    return EdgeNode(
        name=members[-1].name if cut.first == cut.last else whole.name,
        kind="Cut",
        domain=CUT_DOMAIN,
        inputs=inputs,
        outputs=(run.output,),
        attributes={"cut": cut, "body": body, "rings": run.rings(), "traffic": traffic},
        macs=run.macs[0],
        workspace_bytes=int(run.workspace_bytes()[0]),
        in_place=() if shared.is_in_parts(run.output) else tuple((0, inputs.index(one)) for one in run.written_over()),
    )


def _run(graph: EdgeGraph, cut: Cut, align_bytes: int) -> CutStages | None:
    """The run of a cut; None where its operators cannot be cut so."""
    members = graph.nodes[cut.first : cut.last + 1]
    shape = graph.tensors[members[-1].outputs[0]].shape
    if not 0 <= cut.axis < len(shape) or not -1 <= cut.band_axis < len(shape) or cut.band_axis == cut.axis:
        return None
    if cut.band_axis >= 0 and not 0 < cut.band <= shape[cut.band_axis]:
        return None
    if not all(can_be_cut(graph, node, cut.axis, cut.band_axis) for node in members):
        return None
    outside = {at for index, node in enumerate(graph.nodes) if not cut.first <= index <= cut.last for at in node.inputs} | {*graph.outputs}
    run = CutStages.of(graph, members[-1], cut.axis, cut.band_axis, (cut.band,), align_bytes)
    for node in reversed(members[:-1]):
        longer = None if node.outputs[0] in outside else run.led_by(node)
        if longer is None:
            return None
        run = longer
    return run.staged(first_source(graph, members)) if cut.staged else run


def first_source(graph: EdgeGraph, members: Sequence[EdgeNode]) -> int:
    """The first tensor that comes from outside."""
    inner = {node.outputs[0] for node in members}
    return next(at for node in members for at in node.inputs if at >= 0 and at not in inner and not is_weight(graph, at))


def _staged(graph: EdgeGraph, members: Sequence[EdgeNode]) -> tuple[EdgeGraph, tuple[EdgeNode, ...]]:
    """The same with a copy of the first tensor in between."""
    source, copy = first_source(graph, members), len(graph.tensors)
    tensor = graph.tensors[source]
    graph = replace(graph, tensors=(*graph.tensors, replace(tensor, name=f"{tensor.name} slices", constant=False)))
    load = EdgeNode(f"load {tensor.name}", LOAD, CUT_DOMAIN, (source,), (copy,))
    return graph, (load, *(replace(node, inputs=tuple(copy if at == source else at for at in node.inputs)) for node in members))


def steps_of(body: CutBody) -> tuple[tuple[int, int], ...]:
    """(tensor of the body, slice) in the order in which they are made, the same in each band: each just before it is first read."""
    nodes = body.graph.nodes
    run: CutStages | None = CutStages.of(body.graph, nodes[-1], body.cut.axis, -1, (0,), 1)
    for node in reversed(nodes[:-1]):
        run = None if run is None else run.led_by(node)
    return () if run is None else run.steps


def with_inputs_outside(graph: EdgeGraph) -> EdgeGraph:
    """The network whose inputs are read from where the caller has them, as weights are: they are in none of the memories."""
    tensors = (replace(tensor, constant=True) if at in graph.inputs else tensor for at, tensor in enumerate(graph.tensors))
    return replace(graph, tensors=tuple(tensors))


def cuts_of(graph: EdgeGraph) -> tuple[Cut, ...]:
    """The cuts that a network was made with."""
    return tuple(body.cut for node in graph.nodes if (body := cut_body(node)) is not None)


def extra_macs(graph: EdgeGraph) -> float:
    """The share of multiplications that are done again: 0.0 where none is."""
    bodies = [cut_body(node) for node in graph.nodes]
    once = sum(
        node.macs if body is None else sum(member.macs for member in body.graph.nodes)
        for node, body in zip(graph.nodes, bodies, strict=True)
    )
    return max(0.0, sum(node.macs for node in graph.nodes) / once - 1) if once else 0.0
