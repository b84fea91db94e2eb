"""Networks as shapes: each call adds one operator that makes one tensor, and the whole is an ordering problem.

Square pictures, batch 1, fp32, padding that keeps the side; weights are resident in any order and count nowhere. Batch norm is folded
into the convolution before it, ReLU may work in place, an addition may not. The input is donated: it lives to its last use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.problems.order import OrderProblem, Task

ELEMENT_BYTES = 4  # fp32


@dataclass(frozen=True)
class Picture:
    """A tensor of [channels, side, side], made by operator `index`."""

    index: int
    channels: int
    side: int

    @property
    def nbytes(self) -> int:
        """Its size in fp32."""
        return ELEMENT_BYTES * self.channels * self.side * self.side


class Net:
    """Operators in the order in which they are called; `problem()` is what they add up to."""

    def __init__(self, channels: int, side: int) -> None:
        self.input = Picture(0, channels, side)
        self._tensor_bytes = [self.input.nbytes]
        self._tasks: list[Task] = []
        self._read: set[int] = set()

    def conv(self, x: Picture, channels: int, stride: int = 1) -> Picture:
        """A convolution of any kernel, with its bias, folded batch norm and 'same' padding."""
        return self._operator("Conv", [x], channels, _strided(x.side, stride))

    def depthwise(self, x: Picture, stride: int = 1) -> Picture:
        """A convolution of each channel for itself."""
        return self._operator("DWConv", [x], x.channels, _strided(x.side, stride))

    def separable(self, x: Picture, channels: int, stride: int = 1) -> Picture:
        """ReLU, depthwise and pointwise convolution; dilation changes no shape."""
        return self.conv(self.depthwise(self.relu(x), stride), channels)

    def relu(self, x: Picture) -> Picture:
        """In place where `x` dies here."""
        return self._operator("Relu", [x], x.channels, x.side, inplace=True)

    def pool(self, x: Picture, stride: int = 1) -> Picture:
        """The average or maximum of windows."""
        return self._operator("Pool", [x], x.channels, _strided(x.side, stride))

    def batch_norm(self, x: Picture) -> Picture:
        """One that no convolution stands before, so that it cannot be folded."""
        return self._operator("BatchNorm", [x], x.channels, x.side)

    def add(self, x: Picture, y: Picture) -> Picture:
        """The sum of two, never in place."""
        return self._elementwise("Add", [x, y])

    def weighted_sum(self, xs: Sequence[Picture], channels: int | None = None) -> Picture:
        """The sum of several with learned weights; of one stack of them, whose parts have `channels`."""
        return self._elementwise("WSum", xs, channels)

    def mean(self, xs: Sequence[Picture], channels: int | None = None) -> Picture:
        """The mean of several; of one stack of them, whose parts have `channels`."""
        return self._elementwise("Mean", xs, channels)

    def concat(self, xs: Sequence[Picture]) -> Picture:
        """Several along their channels."""
        return self._operator("Concat", xs, sum(x.channels for x in xs), xs[0].side)

    def pad(self, x: Picture, by: int = 1) -> Picture:
        """Zeros at two borders."""
        return self._operator("Pad", [x], x.channels, x.side + by)

    def cut(self, x: Picture, by: int = 1) -> Picture:
        """Without the other two borders, as a copy."""
        return self._operator("Slice", [x], x.channels, x.side - by)

    def resize(self, x: Picture, side: int) -> Picture:
        """Brought to another side."""
        return self._operator("Resize", [x], x.channels, side)

    def classifier(self, x: Picture, classes: int) -> Picture:
        """Global average pooling, squeeze (which may keep its memory) and a linear layer: the scores."""
        pooled = self._operator("GAP", [x], x.channels, 1)
        flat = self._operator("Squeeze", [pooled], x.channels, 1, inplace=True)
        return self._operator("Gemm", [flat], classes, 1)

    def problem(self) -> OrderProblem:
        """All operators; what nobody reads is an output and lives to the end."""
        kept = [tensor for tensor in range(len(self._tensor_bytes)) if tensor not in self._read]
        return OrderProblem.of(self._tensor_bytes, self._tasks, kept=kept)

    def _elementwise(self, op: str, xs: Sequence[Picture], channels: int | None = None) -> Picture:
        shapes = {(x.channels, x.side) for x in xs}
        if len(shapes) != 1:
            raise ValueError(f"{op}_{len(self._tensor_bytes)}: expected tensors of one shape, got (channels, side) {sorted(shapes)}")
        return self._operator(op, xs, xs[0].channels if channels is None else channels, xs[0].side)

    def _operator(self, op: str, xs: Sequence[Picture], channels: int, side: int, *, inplace: bool = False) -> Picture:
        made = Picture(len(self._tensor_bytes), channels, side)
        reads = tuple(dict.fromkeys(x.index for x in xs))  # x + x reads one tensor
        takes = ((reads[0], 0),) if inplace and xs[0].nbytes == made.nbytes else ()
        self._tasks.append(Task(f"{op}_{made.index}", makes=(made.index,), reads=reads, takes=takes))
        self._tensor_bytes.append(made.nbytes)
        self._read.update(reads)
        return made


def _strided(side: int, stride: int) -> int:
    """The side that 'same' padding leaves."""
    return -(-side // stride)
