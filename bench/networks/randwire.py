"""RandWire: cells that are random graphs (Xie et al., ICCV 2019, "small regime"), by the Watts-Strogatz model WS(n, k, p).

A node sums what it reads with learned weights. That is one operator, or with `stacked` two, as frameworks without such an operator write
it: all inputs stacked into one tensor, and its product with the weights.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.networks.shapes import Net, Picture
from lowtide.problems.order import OrderProblem


@dataclass(frozen=True)
class RandWire:
    """Three random cells that each halve the side; the channels double from cell to cell."""

    seed: int
    stacked: bool = False
    channels: int = 78  # of the first cell
    nodes: int = 32  # of a cell
    neighbours: int = 4
    rewired: float = 0.75  # the share of edges that the model rewires
    side: int = 224
    classes: int = 1000

    def problem(self) -> OrderProblem:
        """One inference."""
        net, rng = Net(3, self.side), random.Random(self.seed)
        x = net.relu(net.conv(net.input, self.channels // 2, stride=2))
        x = net.conv(x, self.channels, stride=2)
        for stage in range(3):
            x = self._cell(net, x, self._edges(rng), self.channels << stage)
        net.classifier(net.conv(x, 1280), self.classes)
        return net.problem()

    def _edges(self, rng: random.Random) -> list[list[int]]:
        """By node: those it reads, ascending. Edges of the undirected model run from the smaller number to the larger."""
        near = watts_strogatz(self.nodes, self.neighbours, self.rewired, rng)
        return [sorted(other for other in near[node] if other < node) for node in range(self.nodes)]

    def _cell(self, net: Net, x: Picture, reads: list[list[int]], channels: int) -> Picture:
        """Nodes that read nobody read the cell's input and halve it; the cell is the mean of the nodes that nobody reads."""
        made: list[Picture] = []
        for sources in reads:
            summed = self._sum(net, [made[source] for source in sources]) if sources else x
            made.append(net.separable(summed, channels, stride=1 if sources else 2))
        read = {source for sources in reads for source in sources}
        unread = [picture for node, picture in enumerate(made) if node not in read]
        return net.mean([net.concat(unread)], channels) if self.stacked else net.mean(unread)

    def _sum(self, net: Net, inputs: list[Picture]) -> Picture:
        if len(inputs) == 1:
            return inputs[0]
        return net.weighted_sum([net.concat(inputs)], inputs[0].channels) if self.stacked else net.weighted_sum(inputs)


def watts_strogatz(nodes: int, neighbours: int, rewired: float, rng: random.Random) -> list[set[int]]:
    """By node: its neighbours. A ring where each knows its `neighbours` nearest; each edge moves its far end with probability `rewired`.

    Watts and Strogatz, Nature 1998. Nodes go round the ring once, each with its edges to the next, the nearest first.
    """
    steps = range(1, neighbours // 2 + 1)
    near: list[set[int]] = [{(node + step) % nodes for step in steps} | {(node - step) % nodes for step in steps} for node in range(nodes)]
    for node in range(nodes):
        for step in steps:
            strangers = [other for other in range(nodes) if other != node and other not in near[node]]
            if rng.random() >= rewired or not strangers:
                continue
            old, new = (node + step) % nodes, rng.choice(strangers)
            near[node].remove(old)
            near[old].remove(node)
            near[node].add(new)
            near[new].add(node)
    return near
