"""What runs a graph's regions here, for its plan."""

from __future__ import annotations

from dataclasses import replace

from lowtide.api.networks.faster import measured_ns
from lowtide.api.networks.made import networks_of
from lowtide.fuse.stages import Attention, Batched, Block, Convolution, Map, Pad, Product, Rows, Stage, Windows, Winograd
from lowtide.ir.regions import is_region
from lowtide.plan.generated import GeneratedRegion, Kernel
from lowtide.plan.plan import Plan

_SCHEMES: dict[type, str] = {
    Product: "register tiles",
    Convolution: "register tiles",
    Winograd: "transformed tiles",
    Batched: "register tiles",
    Attention: "rows of scores",
    Windows: "windows",
    Rows: "row by row",
    Map: "element by element",
    Pad: "element by element",
}


def told(plan: Plan) -> Plan:
    """A plan that tells what its regions are here; it must be able to run here. Raises NativeError."""
    if not any(map(is_region, plan.graph.nodes)):
        return plan
    regions = []
    for region, its in networks_of(plan.graph):
        generated_ns, torch_ns = measured_ns(region.body, its.source) or (None, None)
        kernels = tuple(Kernel(_scheme(stage), tuple(_name(node.op) for node in stage.nodes)) for stage in its.stages)
        times = (None if ns is None else ns / 1e3 for ns in (generated_ns, torch_ns))
        name = region.node.results[0].name
        regions.append(GeneratedRegion(name, kernels, region.arena_bytes, region.packed_bytes, *times))
    return replace(plan, generated=tuple(regions))


def _scheme(stage: Stage) -> str:
    if isinstance(stage, Block):
        return "rows through a ring" if stage.first is not None else "row by row"
    return _SCHEMES[type(stage)]


def _name(op: str) -> str:
    return op.split(".")[1] if "." in op else op
