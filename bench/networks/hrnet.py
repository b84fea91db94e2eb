"""HRNet for classification (Wang et al., TPAMI 2020): branches of several resolutions that exchange what they know, and a head."""

from __future__ import annotations

from dataclasses import dataclass

from bench.networks.shapes import Net, Picture
from lowtide.problems.order import OrderProblem

_EXPANSION = 4  # of a bottleneck block
_HEAD = (32, 64, 128, 256)  # channels inside the head's bottlenecks, by branch


@dataclass(frozen=True)
class HRNet:
    """Stage 1 at one resolution, stages 2 to 4 at two to four, each of some modules, and the classification head."""

    width: int  # channels of the finest branch; each further branch has twice as many
    blocks: int  # of each branch in a module
    modules: tuple[int, int, int]  # of stages 2, 3, 4
    stage1_channels: int  # inside the bottlenecks of stage 1
    stage1_blocks: int
    side: int = 256
    classes: int = 1000

    def problem(self) -> OrderProblem:
        """One inference."""
        net = Net(3, self.side)
        x = net.relu(net.conv(net.input, 64, stride=2))
        x = net.relu(net.conv(x, 64, stride=2))
        for _ in range(self.stage1_blocks):
            x = _bottleneck(net, x, self.stage1_channels)
        branches = [x]
        for modules in self.modules:
            branches = self._transition(net, branches)
            for _ in range(modules):
                branches = _exchanged(net, [self._branch(net, branch) for branch in branches])
        net.classifier(_head(net, branches), self.classes)
        return net.problem()

    def _transition(self, net: Net, branches: list[Picture]) -> list[Picture]:
        """Brings stage 1 to its width, and adds a branch of half the side."""
        wide = [
            branch if branch.channels == self.width << level else net.relu(net.conv(branch, self.width << level))
            for level, branch in enumerate(branches)
        ]
        return [*wide, net.relu(net.conv(branches[-1], self.width << len(branches), stride=2))]

    def _branch(self, net: Net, x: Picture) -> Picture:
        for _ in range(self.blocks):
            inner = net.conv(net.relu(net.conv(x, x.channels)), x.channels)
            x = net.relu(net.add(inner, x))
        return x


def _bottleneck(net: Net, x: Picture, channels: int) -> Picture:
    inner = net.relu(net.conv(net.relu(net.conv(x, channels)), channels))
    inner = net.conv(inner, _EXPANSION * channels)
    shortcut = x if x.channels == inner.channels else net.conv(x, inner.channels)
    return net.relu(net.add(inner, shortcut))


def _exchanged(net: Net, branches: list[Picture]) -> list[Picture]:
    """Each branch as the sum of all, brought to its channels and side one after another."""
    fused = []
    for like in branches:
        total: Picture | None = None
        for branch in branches:
            term = _brought(net, branch, like)
            total = term if total is None else net.add(total, term)
        assert total is not None  # there is a branch at least
        fused.append(net.relu(total))
    return fused


def _brought(net: Net, x: Picture, like: Picture) -> Picture:
    """A coarse branch by a pointwise convolution and resizing, a fine one by strided convolutions of which the last changes channels."""
    if x.side < like.side:
        return net.resize(net.conv(x, like.channels), like.side)
    while x.side > 2 * like.side:
        x = net.relu(net.conv(x, x.channels, stride=2))
    return net.conv(x, like.channels, stride=2) if x.side > like.side else x


def _head(net: Net, branches: list[Picture]) -> Picture:
    """A bottleneck a branch, then from the finest down: each halved and added to the next."""
    wide = [_bottleneck(net, branch, channels) for branch, channels in zip(branches, _HEAD, strict=True)]
    total = wide[0]
    for branch in wide[1:]:
        total = net.add(branch, net.relu(net.conv(total, branch.channels, stride=2)))
    return net.relu(net.conv(total, 2048))
