"""One plan for all ranks: rank 0 makes it, the others put it on what they have captured themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lowtide.capture.trace import CapturedStep
from lowtide.errors import FormatError
from lowtide.ir.graph import Graph
from lowtide.ir.text.graph_text import to_text
from lowtide.plan.plan import Plan
from lowtide.runtime.ranks.peers import SinglePeer

_GPU = re.compile(r"cuda:\d+")


def compare_programs(peers: SinglePeer, captured: Sequence[CapturedStep]) -> None:
    """Raises CaptureError on all ranks, naming what they read differently or the first operator that differs, unless all have the same."""
    if peers.several:
        read = [each.told for one in captured for each in one.readings]
        peers.compare([_GPU.sub("cuda", to_text(one.graph, sources=False)) for one in captured], read)


def agreed_plans(
    peers: SinglePeer, make: Callable[[], list[Plan]], graphs: Sequence[Graph], put: Callable[[int, Plan], Plan]
) -> list[Plan]:
    """What `make` gives on rank 0; elsewhere each of these as `put` puts it on the graph of this number, which was captured there.

    Raises on all ranks what one of them raises.
    """
    if not peers.several:
        return make()
    made: list[Plan] = []

    def as_text() -> str:
        made.extend(make())
        return made[-1].to_json()

    text = peers.from_leader(as_text)
    return peers.together(lambda: made or [put(number, plan) for number, plan in enumerate(_read(text, graphs))])


def _read(text: str, graphs: Sequence[Graph]) -> list[Plan]:
    """Rank 0's plans, as they are for this rank's graphs, which differ from its own in the number of the GPU alone."""
    device = next((value.storage.device for graph in graphs for value in graph.inputs if value.storage.device.startswith("cuda")), "")
    last = Plan.from_json(_GPU.sub(device, text) if device else text)
    plans = [*last.first_steps, last]
    if len(plans) != len(graphs):
        raise FormatError(f"expected as many plans as programs, got {len(plans)} for {len(graphs)}")
    return plans
