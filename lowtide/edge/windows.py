"""What each entry of an operator's result reads of its inputs, axis by axis: what lets an operator run slice by slice.

An operator that is not here reads all of its inputs before it has a result, and is never cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowtide.edge.graph import EdgeGraph, EdgeNode
from lowtide.edge.operators import IN_PLACE

LOAD = "Load"  # copies slices of a tensor into a ring, so that the tensor may be written over
CUT_DOMAIN = "lowtide.cut"


@dataclass(frozen=True, slots=True)
class SliceWindow:
    """Entry y of the result reads the entries from `y * stride - before`, `kernel` of them, of an input; those outside are padding."""

    kernel: int = 1  # with the gaps of a dilation
    stride: int = 1
    before: int = 0

    def span(self, low: Any, high: Any) -> tuple[Any, Any]:
        """[low, high) of an input that the entries [low, high) of the result read, padding with it."""
        return low * self.stride - self.before, (high - 1) * self.stride - self.before + self.kernel

    def reads_padding_alone(self, extent: int, count: int) -> bool:
        """Whether the first or the last of so many entries of a result reads nothing of an input's extent."""
        return self.kernel <= self.before or (count - 1) * self.stride - self.before >= extent


@dataclass(frozen=True, slots=True)
class NodeWindows:
    """How an operator reads its inputs: along `axes` of its result it can be cut."""

    axes: frozenset[int]
    of_input: Mapping[int, Mapping[int, SliceWindow]]  # by tensor, then by axis; an input, or an axis, that is not here is read as a whole
    is_number_by_number: bool = True  # no window is wider than one entry
    weights: frozenset[int] = frozenset()  # of which an entry along axis 1 of the result reads its own entry of axis 0

    def window(self, tensor: int, axis: int) -> SliceWindow | None:
        return self.of_input.get(tensor, {}).get(axis)


def is_weight(graph: EdgeGraph, tensor: int) -> bool:
    """Whether a tensor is the same at every run."""
    return graph.tensors[tensor].constant and tensor not in graph.inputs


def reads_of(graph: EdgeGraph, node: EdgeNode) -> NodeWindows | None:
    """The windows of an operator; None where it is not known to be made of them."""
    if node.views or node.workspace_bytes or sum(bool(graph.tensors[at].dtype) for at in node.outputs) != 1:
        return None
    if node.kind == "Cut" or len(graph.tensors[node.outputs[0]].shape) < 2:
        return None
    if "body" in node.attributes:
        return _of_group(graph, node)
    if node.domain == "aten":
        return _of_aten(graph, node)
    if node.kind == LOAD:
        return _number_by_number(graph, node, ())
    return _of_onnx(graph, node)


def _of_onnx(graph: EdgeGraph, node: EdgeNode) -> NodeWindows | None:
    kind, values = node.kind, node.attributes
    if values.get("channels_last") or values.get("ceil_mode"):
        return None
    weights = {"Conv": 1, "ConvInteger": 1, "FusedConv": 1, "QLinearConv": 3}.get(kind)
    if weights is not None and is_weight(graph, node.inputs[weights]) and not (kind == "FusedConv" and len(node.inputs) > 3):
        return _by_channels(graph, node, _windowed(graph, node, graph.tensors[node.inputs[weights]].shape[2:]), values.get("group", 1))
    if kind in ("MaxPool", "AveragePool", "QLinearAveragePool"):
        return _by_channels(graph, node, _windowed(graph, node, values["kernel_shape"]))
    if kind in ("MatMul", "QLinearMatMul", "MatMulInteger"):
        other = node.inputs[3 if kind == "QLinearMatMul" else 1]
        return _by_rows(graph, node, node.inputs[0], other)
    if kind == "Softmax":
        axes = range(len(graph.tensors[node.outputs[0]].shape))
        return _number_by_number(graph, node, (axes[values.get("axis", -1)],))
    if kind in ("QuantizeLinear", "DequantizeLinear"):
        scales = [graph.tensors[at].shape for at in node.inputs[1:] if at >= 0]
        if all(shape in ((), (1,)) for shape in scales):
            return _number_by_number(graph, node, (), apart=(1, 2))
        whole = values.get("axis", 1) % len(graph.tensors[node.outputs[0]].shape)
        return None if any(len(shape) > 1 for shape in scales) else _number_by_number(graph, node, (whole,), apart=(1, 2))
    if kind == "BatchNormalization":
        return _number_by_number(graph, node, (1,), apart=(1, 2, 3, 4))
    return _number_by_number(graph, node, ()) if kind in IN_PLACE else None


def _of_aten(graph: EdgeGraph, node: EdgeNode) -> NodeWindows | None:
    values = node.attributes["args"]
    if node.kind == "convolution" and not values[6] and is_weight(graph, node.inputs[values[1].position]):
        kernel = graph.tensors[node.inputs[values[1].position]].shape[2:]
        return _by_channels(graph, node, _aten_windows(graph, node, kernel, values[3], values[4], values[5]), values[8])
    if node.attributes["kwargs"] and not node.in_place:
        return None
    if node.kind == "max_pool2d_with_indices":
        kernel, stride, padding, dilation, ceil = _filled(values, (), 0, 1, False)
        reads = _aten_windows(graph, node, _listed(kernel, 2), stride or kernel, padding, dilation)
        return None if ceil else _by_channels(graph, node, reads)
    if node.kind == "avg_pool2d":
        kernel, stride, padding, ceil, _, divisor = _filled(values, (), 0, False, True, None)
        odd = ceil or divisor or any(_listed(padding, 2))  # an average counts its padding, or does not
        return None if odd else _by_channels(graph, node, _aten_windows(graph, node, _listed(kernel, 2), stride or kernel, padding, 1))
    if node.kind in ("mm", "addmm"):
        first = 1 if node.kind == "addmm" else 0
        return _by_rows(graph, node, node.inputs[values[first].position], node.inputs[values[first + 1].position])
    if node.kind == "_native_batch_norm_legit_no_training":
        return _number_by_number(graph, node, (1,), apart=tuple(range(1, len(node.inputs))))
    return _number_by_number(graph, node, ()) if node.in_place else None


def _filled(values: Sequence[Any], *defaults: Any) -> list[Any]:
    """The arguments behind the first one, with the defaults of those behind the second."""
    return [*values[1:], *defaults[len(values) - 2 :]]


def without_weights(body: EdgeGraph) -> tuple[EdgeGraph, tuple[EdgeNode, ...]]:
    """A group in which what is computed from weights alone is a weight, too, as of QDQ's dequantised ones; its other operators."""
    weights: set[int] = set()
    for node in body.nodes:
        if all(at < 0 or at in weights or is_weight(body, at) for at in node.inputs):
            weights.update(node.outputs)
    if not weights:
        return body, body.nodes
    tensors = tuple(replace(tensor, constant=True) if at in weights else tensor for at, tensor in enumerate(body.tensors))
    return replace(body, tensors=tensors), tuple(node for node in body.nodes if node.outputs[0] not in weights)


def _of_group(graph: EdgeGraph, node: EdgeNode) -> NodeWindows | None:
    """A group is cut as its one operator with windows is, the others go number by number."""
    body, nodes = without_weights(node.attributes["body"])
    members = [each for member in nodes if (each := reads_of(body, member)) is not None]
    if len(members) < len(nodes) or sum(not each.is_number_by_number for each in members) > 1:
        return None
    wide = next((each for each in members if not each.is_number_by_number), None)
    axes = frozenset.intersection(*(each.axes for each in members)) - {1 for each in members if each.weights}
    outer = [tensor for tensor in node.inputs if not is_weight(graph, tensor)]
    inside: dict[int, Mapping[int, SliceWindow]] = {}  # by tensor of the body: how the group's result reads it
    for member, reads in zip(reversed(nodes), reversed(members), strict=True):
        after = inside.get(member.outputs[0], dict.fromkeys(axes, SliceWindow()))
        for tensor in reads.of_input:
            by_axis = {axis: (reads.of_input[tensor].get(axis) if reads is wide else after.get(axis)) for axis in axes}
            windows = {axis: window for axis, window in by_axis.items() if window is not None}
            if inside.setdefault(tensor, windows) != windows:
                return None
    of_input = {one: inside.get(at, {}) for one, at in zip(outer, body.inputs, strict=True)}
    return NodeWindows(axes, of_input, wide is None)


def _windowed(graph: EdgeGraph, node: EdgeNode, kernel: Sequence[int]) -> NodeWindows | None:
    """An operator of ONNX with a kernel over its input's last axes."""
    count, values = len(kernel), node.attributes
    strides, dilations = (values.get(name) or [1] * count for name in ("strides", "dilations"))
    whole, result = graph.tensors[node.inputs[0]].shape, graph.tensors[node.outputs[0]].shape
    auto = values.get("auto_pad", b"NOTSET")
    auto = auto.decode() if isinstance(auto, bytes) else auto
    windows = {}
    for at in range(count):
        axis, wide = at + 2, (kernel[at] - 1) * dilations[at] + 1
        missing = max(0, (result[axis] - 1) * strides[at] + wide - whole[axis])
        given = (values.get("pads") or [0] * 2 * count)[at]
        before = {"SAME_UPPER": missing // 2, "SAME_LOWER": missing - missing // 2, "VALID": 0}.get(auto, given)
        windows[axis] = SliceWindow(wide, strides[at], before)
    return _alone(graph, node, node.inputs[0], windows)


def _aten_windows(graph: EdgeGraph, node: EdgeNode, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> NodeWindows | None:
    count = len(kernel)
    strides, paddings, dilations = _listed(stride, count), _listed(padding, count), _listed(dilation, count)
    windows = {at + 2: SliceWindow((kernel[at] - 1) * dilations[at] + 1, strides[at], paddings[at]) for at in range(count)}
    return _alone(graph, node, node.inputs[node.attributes["args"][0].position], windows)


def _listed(value: Any, count: int) -> Sequence[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _alone(graph: EdgeGraph, node: EdgeNode, tensor: int, windows: Mapping[int, SliceWindow]) -> NodeWindows | None:
    """Windows over one input, the only one that is no weight."""
    if any(at >= 0 and at != tensor and not is_weight(graph, at) for at in node.inputs) or is_weight(graph, tensor):
        return None
    whole, result = graph.tensors[tensor].shape, graph.tensors[node.outputs[0]].shape
    if len(whole) != max(windows, default=0) + 1:
        return None
    if any(window.reads_padding_alone(whole[axis], result[axis]) for axis, window in windows.items()):
        return None  # such a slice has nothing to be made of
    return NodeWindows(frozenset(windows), {tensor: windows}, all(each == SliceWindow() for each in windows.values()))


def _by_channels(graph: EdgeGraph, node: EdgeNode, reads: NodeWindows | None, groups: int | None = None) -> NodeWindows | None:
    """The same along axis 1, too: each channel reads its own one (None: of a pooling), or with a single group all of them."""
    channels = graph.tensors[node.outputs[0]].shape[1]
    if reads is None or channels < 2 or groups not in (None, 1, channels) or 1 in reads.axes:
        return reads
    ((tensor, windows),) = reads.of_input.items()
    if groups == channels and graph.tensors[tensor].shape[1] != channels:
        return reads
    own = {} if groups == 1 else {1: SliceWindow()}
    weights = frozenset(at for at in node.inputs if at >= 0 and is_weight(graph, at) and graph.tensors[at].shape[:1] == (channels,))
    return NodeWindows(reads.axes | {1}, {tensor: {**own, **windows}}, False, weights)


def _by_rows(graph: EdgeGraph, node: EdgeNode, rows: int, weights: int) -> NodeWindows | None:
    """[..., m, k] @ [k, n] with weights: each row of the result reads one row."""
    shape = graph.tensors[node.outputs[0]].shape
    others = [graph.tensors[at].shape for at in node.inputs if at >= 0 and at not in (rows, weights)]
    if not is_weight(graph, weights) or len(graph.tensors[weights].shape) != 2 or len(graph.tensors[rows].shape) != len(shape):
        return None
    if any(each not in ((), (1,)) for each in others) and node.kind != "addmm":
        return None
    windows = {axis: SliceWindow() for axis, extent in enumerate(shape[:-1]) if extent > 1}
    others_are_weights = all(is_weight(graph, at) for at in node.inputs if at not in (-1, rows))
    return NodeWindows(frozenset(windows), {rows: windows}) if others_are_weights else None


def _number_by_number(graph: EdgeGraph, node: EdgeNode, whole: Sequence[int], apart: Sequence[int] = ()) -> NodeWindows:
    """Each number reads the numbers at its own place, but along the axes `whole`; broadcast inputs have one place for many.

    `apart`: weights by position that lie along an axis of `whole`, whatever their rank, or along none.
    """
    shape = graph.tensors[node.outputs[0]].shape
    axes = set(range(len(shape))) - {*whole}
    of_input: dict[int, Mapping[int, SliceWindow]] = {}
    for position, tensor in enumerate(node.inputs):
        if tensor < 0 or position in apart:
            continue
        own = (1,) * (len(shape) - len(graph.tensors[tensor].shape)) + graph.tensors[tensor].shape
        along = {axis for axis, extent in enumerate(own) if extent != 1}
        if is_weight(graph, tensor) or len(graph.tensors[tensor].shape) != len(shape):
            axes -= along  # such inputs are not cut along with the result
        else:
            of_input[tensor] = {axis: SliceWindow() for axis in along}
    kept = frozenset(axis for axis in axes if shape[axis] > 1)
    return NodeWindows(kept, {tensor: {axis: window for axis, window in each.items() if axis in kept} for tensor, each in of_input.items()})
