"""What runs a graph's regions here, for its plan."""

from __future__ import annotations

from dataclasses import replace

from lowtide.cpu.build.comparison import measured_ns
from lowtide.cpu.build.networks import networks_of
from lowtide.cpu.stages import Attention, Batched, Convolution, Map, Pad, Product, RowBlock, RowReduction, Stage, Windows, Winograd
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.regions import Region, is_by_inductor, is_region
from lowtide.plan.kernels import GeneratedRegion, Kernel
from lowtide.plan.plan import Plan
from lowtide.regions.compilation import times_ns

_SCHEMES: dict[type, str] = {
    Product: "register tiles",
    Convolution: "register tiles",
    Winograd: "transformed tiles",
    Batched: "register tiles",
    Attention: "rows of scores",
    Windows: "windows",
    RowReduction: "row by row",
    Map: "element by element",
    Pad: "element by element",
}


def told(plan: Plan) -> Plan:
    """A plan that tells what its regions are here; it must be able to run here. Raises NativeError."""
    if not any(map(is_region, plan.graph.nodes)):
        return plan
    regions = [_by_inductor(Region.of(node)) for node in plan.graph.nodes if is_by_inductor(node)]
    for region, its in networks_of(plan.graph):
        generated_ns, torch_ns = measured_ns(region.body, its.source) or (None, None)
        kernels = tuple(Kernel(_scheme(stage), tuple(_name(node.op) for node in stage.nodes)) for stage in its.stages)
        us, by_torch_us = (None if ns is None else ns / 1e3 for ns in (generated_ns, torch_ns))
        name = region.node.results[0].name
        regions.append(GeneratedRegion(name, kernels, region.arena_bytes, region.packed_bytes, us, by_torch_us))
    return replace(plan, generated=tuple(regions))


def _by_inductor(region: Region) -> GeneratedRegion:
    kernels = (Kernel(region.by, tuple(_name(node.op) for node in region.body.nodes if not is_view(node))),)
    us, torch_us = (None if ns is None else ns / 1e3 for ns in times_ns(region.body) or (None, None))
    return GeneratedRegion(region.node.results[0].name, kernels, region.arena_bytes, 0, us, torch_us, by=region.by)


def _scheme(stage: Stage) -> str:
    if isinstance(stage, RowBlock):
        return "rows through a ring" if stage.first is not None else "row by row"
    return _SCHEMES[type(stage)]


def _name(op: str) -> str:
    return op.split(".")[1] if "." in op else op
