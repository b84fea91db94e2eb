"""Chains of quantised operators at random, with residual additions: what can be cut into slices."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lowtide.edge.graph import EdgeGraph

SCALES = {"s": np.float32(1.0), "z": np.int8(2), "half": np.float32(0.5), "wz": np.int8(0)}


class Chain:
    """A model of int8 maps [1, channels, height, width] that grows at its end."""

    def __init__(self, seed: int, height: int, width: int, *, qdq: bool = False) -> None:
        self.qdq = qdq  # convolutions of dequantised numbers, whose results are quantised
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = dict(SCALES)
        self.channels = {"x": 3}
        self.extents = {"x": (height, width)}
        self.now = "x"

    def _made(self, name: str, channels: int, extents: tuple[int, int]) -> None:
        self.now, self.channels[name], self.extents[name] = name, channels, extents

    def conv(self, channels: int, kernel: int, stride: int = 1, dilation: int = 1, pads: tuple[int, ...] = (0, 0, 0, 0), group: int = 1):
        source, name = self.now, f"t{len(self.nodes)}"
        weights = self.rng.integers(-8, 8, (channels, self.channels[source] // group, kernel, kernel)).astype(np.int8)
        self.constants[f"{name}w"] = weights
        self.constants[f"{name}y"] = np.float32(4.6 * np.sqrt(weights[0].size))
        inputs = [source, "s", "z", f"{name}w", "s", "wz", f"{name}y", "z"]
        values = {"pads": pads, "strides": [stride] * 2, "dilations": [dilation] * 2, "group": group}
        if self.qdq:
            self.nodes.append(helper.make_node("DequantizeLinear", inputs[:3], [f"{name}d"]))
            self.nodes.append(helper.make_node("DequantizeLinear", inputs[3:6], [f"{name}v"]))
            self.nodes.append(helper.make_node("Conv", [f"{name}d", f"{name}v"], [f"{name}c"], **values))
            self.nodes.append(helper.make_node("QuantizeLinear", [f"{name}c", *inputs[6:]], [name], name=name))
        else:
            self.nodes.append(helper.make_node("QLinearConv", inputs, [name], name=name, **values))
        wide = (kernel - 1) * dilation + 1
        extents = [(each + pads[at] + pads[at + 2] - wide) // stride + 1 for at, each in enumerate(self.extents[source])]
        self._made(name, channels, (extents[0], extents[1]))

    def pool(self, kind: str, kernel: int, stride: int, pad: int) -> None:
        source, name = self.now, f"t{len(self.nodes)}"
        extents = [(each + 2 * pad - kernel) // stride + 1 for each in self.extents[source]]
        values = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        self.nodes.append(helper.make_node(kind, [source], [name], name=name, **values))
        self._made(name, self.channels[source], (extents[0], extents[1]))

    def relu(self) -> None:
        """As QDQ: one group."""
        source, name = self.now, f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node("DequantizeLinear", [source, "s", "z"], [f"{name}f"]))
        self.nodes.append(helper.make_node("Relu", [f"{name}f"], [f"{name}r"]))
        self.nodes.append(helper.make_node("QuantizeLinear", [f"{name}r", "s", "z"], [name], name=name))
        self._made(name, self.channels[source], self.extents[source])

    def add(self, other: str) -> None:
        source, name = self.now, f"t{len(self.nodes)}"
        args = [source, "half", "z", other, "half", "z", "s", "z"]
        self.nodes.append(helper.make_node("QLinearAdd", args, [name], name=name, domain="com.microsoft"))
        self._made(name, self.channels[source], self.extents[source])

    def model(self) -> onnx.ModelProto:
        shape = [1, self.channels[self.now], *self.extents[self.now]]
        graph = helper.make_graph(
            self.nodes,
            "chain",
            [helper.make_tensor_value_info("x", TensorProto.INT8, [1, 3, *self.extents["x"]])],
            [helper.make_tensor_value_info(self.now, TensorProto.INT8, shape)],
            [numpy_helper.from_array(np.asarray(array), key) for key, array in self.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], ir_version=8)


def random_chain(seed: int, most: int = 6, smallest: int = 9, *, qdq: bool = False) -> onnx.ModelProto:
    """Up to `most` steps: convolutions of every kind, pools, activations, and residual additions around some of them."""
    rng = np.random.default_rng(seed)
    chain = Chain(seed, int(rng.integers(smallest, smallest + 6)), int(rng.integers(smallest, smallest + 6)), qdq=qdq)
    for _ in range(int(rng.integers(2, most + 1))):
        before, channels = chain.now, chain.channels[chain.now]
        small = min(chain.extents[before]) < 7
        match rng.integers(0, 6):
            case 0:
                chain.conv(int(rng.integers(1, 7)), 1)
            case 1:
                stride = 1 if small else int(rng.integers(1, 3))
                chain.conv(int(rng.integers(1, 7)), 3, stride, pads=tuple(int(each) for each in rng.integers(0, 2, 4)))
            case 2:
                kernel = 3 if small else int(rng.choice([3, 5]))
                chain.conv(channels, kernel, pads=(kernel // 2,) * 4, group=channels)
            case 3:
                chain.conv(channels, 3, dilation=2, pads=(2, 2, 2, 2))
                chain.add(before)
            case 4:
                chain.pool(str(rng.choice(["MaxPool"])), 3, 1 if small else 2, 1)
            case _:
                chain.relu()
                chain.conv(channels, 3, pads=(1, 1, 1, 1))
                chain.add(before)
    return chain.model()


def inputs_of(graph: EdgeGraph, seed: int) -> dict[str, np.ndarray]:
    tensor = graph.tensors[graph.inputs[0]]
    return {"x": np.random.default_rng(seed).integers(-100, 100, tensor.shape).astype(np.int8)}
