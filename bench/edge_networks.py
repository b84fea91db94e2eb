"""Networks for small devices as quantised ONNX models with weights at random: what is planned depends on shapes alone.

The chains are those of msf-CNN's analysis (github.com/TinyPART/msf-CNN, analysis_optimization.py): without the additions of residual
blocks, without the pooling and the classifier behind the last convolution. MobileNetV2 with its additions is beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Block = tuple[int, int, int, int]  # channels out, expansion, stride, kernel


@dataclass
class Builder:
    """A model on its way: int8 numbers, scales that keep them spread out."""

    size: int
    seed: int = 0
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # by tensor: channels, extent

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.constants |= {"s": np.float32(1.0), "z": np.int8(0), "zx": np.int8(3), "half": np.float32(0.5)}
        self.shapes["x"] = (3, self.size)

    def conv(self, source: str, channels: int, kernel: int = 1, stride: int = 1, *, depthwise: bool = False) -> str:
        """A convolution with the padding that keeps the extent at stride 1, clipped to int8 as a device does."""
        name, (inside, extent) = f"c{len(self.nodes)}", self.shapes[source]
        per_group = 1 if depthwise else inside
        weights = self.rng.integers(-8, 8, (channels, per_group, kernel, kernel)).astype(np.int8)
        scale = np.float32(4.6 * np.sqrt(per_group) * kernel)
        self.constants |= {f"{name}w": weights, f"{name}y": scale, f"{name}b": self.rng.integers(-50, 50, channels).astype(np.int32)}
        pad = kernel // 2
        zero = "z" if source == "x" else "zx"
        self.nodes.append(
            helper.make_node(
                "QLinearConv", [source, "s", zero, f"{name}w", "s", "z", f"{name}y", "zx", f"{name}b"], [name], name=name,
                pads=[pad] * 4, strides=[stride] * 2, group=inside if depthwise else 1,
            )
        )  # fmt: skip
        self.shapes[name] = (channels, (extent + 2 * pad - kernel) // stride + 1)
        return name

    def add(self, one: str, other: str) -> str:
        name = f"a{len(self.nodes)}"
        args = [one, "half", "zx", other, "half", "zx", "s", "zx"]
        self.nodes.append(helper.make_node("QLinearAdd", args, [name], name=name, domain="com.microsoft"))
        self.shapes[name] = self.shapes[one]
        return name

    def block(self, source: str, block: Block, *, add: bool = False) -> str:
        """An inverted residual block: wider, depthwise, narrower."""
        channels, expansion, stride, kernel = block
        inside, _ = self.shapes[source]
        wide = self.conv(source, inside * expansion)
        narrow = self.conv(self.conv(wide, inside * expansion, kernel, stride, depthwise=True), channels)
        return self.add(narrow, source) if add and stride == 1 and channels == inside else narrow

    def model(self, name: str, result: str) -> onnx.ModelProto:
        channels, extent = self.shapes[result]
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("x", TensorProto.INT8, [1, 3, self.size, self.size])],
            [helper.make_tensor_value_info(result, TensorProto.INT8, [1, channels, extent, extent])],
            [numpy_helper.from_array(np.asarray(array), key) for key, array in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _inverted(name: str, size: int, blocks: Sequence[Block], last: int, *, add: bool) -> onnx.ModelProto:
    builder = Builder(size)
    now = builder.conv("x", 16, 3, 2)
    now = builder.conv(builder.conv(now, 16, 3, depthwise=True), 8)
    for block in blocks:
        now = builder.block(now, block, add=add)
    return builder.model(name, builder.conv(now, last) if last else now)


def mobilenet_v2(*, add: bool = False, size: int = 144) -> onnx.ModelProto:
    """MobileNetV2 of width 0.35 with msf-CNN's rounding of channels, down; its first expansion of 1 is a convolution, too."""
    builder, width = Builder(size), 0.35
    now = builder.conv("x", int(32 * width), 3, 2)
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, channels, repeats, stride in table:
        for at in range(repeats):
            now = builder.block(now, (int(channels * width), expansion, stride if at == 0 else 1, 3), add=add)
    return builder.model("MobileNetV2-0.35 at 144", builder.conv(now, int(1280 * width)))


VWW = ((16, 6, 2, 3), (16, 3, 1, 3), (16, 3, 1, 3), (24, 3, 2, 7), (24, 6, 1, 3), (24, 5, 1, 5), (40, 6, 2, 7), (40, 6, 1, 7),
       (48, 6, 1, 3), (48, 4, 1, 3), (96, 5, 2, 5), (96, 5, 1, 3), (96, 4, 1, 3), (160, 3, 1, 7))  # fmt: skip
IMAGENET = ((16, 3, 2, 7), (16, 5, 1, 3), (16, 5, 1, 7), (16, 4, 1, 5), (24, 5, 2, 5), (24, 5, 1, 5), (24, 5, 1, 5), (40, 5, 2, 3),
            (40, 6, 1, 7), (40, 4, 1, 5), (48, 5, 1, 5), (48, 5, 1, 7), (48, 5, 1, 3), (96, 6, 2, 3), (96, 5, 1, 7), (96, 4, 1, 3),
            (160, 5, 1, 7))  # fmt: skip


def mcunet_vww(*, add: bool = False) -> onnx.ModelProto:
    """MCUNetV2 for visual wake words at 5 frames a second, at 80 by 80."""
    return _inverted("MCUNetV2-vww5 at 80", 80, VWW, 0, add=add)


def mcunet_imagenet(*, add: bool = False) -> onnx.ModelProto:
    """MCUNet for ImageNet in 320 KB, at 176 by 176."""
    return _inverted("MCUNet-320K at 176", 176, IMAGENET, 0, add=add)
