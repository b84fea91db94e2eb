"""Operations are counted as torch's own counter does, and a roofline follows from them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import lowtide
from bench.models import get
from bench.models.workload import plain_sgd
from lowtide.capture.program import TrainingProgram, capture_training
from lowtide.capture.trace import Given
from lowtide.cost.device import compute_dtype, node_flops, node_moved_bytes
from lowtide.cost.presets import PRESETS
from lowtide.ir.graph import Kind, Node, Storage, Value
from lowtide.ir.operators import nodes


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.second = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.lift, self.mix = nn.Linear(4, 16), nn.Linear(16, 48)

    def forward(self, x):
        x = self.up(self.second(F.relu(self.conv(x)))).flatten(2).transpose(1, 2)
        q, k, v = self.mix(self.lift(x)).chunk(3, -1)
        return (torch.softmax(q @ k.transpose(1, 2), -1) @ v).mean()


def test_operations_equal_torchs_own_count():
    torch.manual_seed(0)
    model, x = _Net(), torch.randn(2, 3, 16, 16)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lowtide.optimize(model, (x,), loss=lambda model, x: model(x), optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    assert sum(map(node_flops, step.plan.graph.nodes)) == counter.get_total_flops()


# A network for every operator that torch has a formula for: convolutions (of pictures, clips, transposed, by channel), products, attention.
NETWORKS = ("resnet50", "mobilenet_v2", "r3d_18", "unet", "unetplusplus", "vit_b_16", "transformer", "bert-base", "gpt2")


def _meta(argument):
    """A graph's argument as torch's formulas take it."""
    if isinstance(argument, Value):
        return torch.empty_strided(argument.shape, argument.stride, dtype=getattr(torch, argument.dtype), device="meta")
    return tuple(map(_meta, argument)) if isinstance(argument, tuple) else argument


def _torchs_count(node):
    """What torch counts for a node, None where it has no formula for the operator, or a wrong one."""
    namespace, name, _ = node.op.split(".") if node.op.count(".") == 2 else ("py", "", "")
    packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
    grouped = name == "convolution_backward" and node.args[9] != 1  # it takes the weight for an ungrouped one
    if packet not in flop_registry or grouped:
        return None
    made = tuple(_meta(output) for output in node.outputs)
    return flop_registry[packet](*map(_meta, node.args), out_val=made[0] if len(made) == 1 else made)


@pytest.mark.parametrize("name", NETWORKS)
def test_each_operator_of_a_network_counts_as_torch_has_it(name):
    work = get(name).build(2, "meta")
    program = TrainingProgram(work.model, work.loss, plain_sgd(work.model), None, 1)
    graph = capture_training(program, Given(work.batch, {}, torch.device("cpu")))[-1].graph
    counted = {node: expected for node in graph.nodes if (expected := _torchs_count(node)) is not None}
    assert len(counted) >= 40
    assert [(node.op, node_flops(node), expected) for node, expected in counted.items() if node_flops(node) != expected] == []
    products = ("mm", "bmm", "convolution", "scaled_dot_product")
    assert [node.op for node in graph.nodes if any(part in node.op for part in products) and not node_flops(node)] == []


def _value(name, *shape, stride=None, dtype="float32", storage=None):
    return Value(name, storage or Storage(name, 0, "cpu", Kind.ACTIVATION), dtype, shape, stride or (1,) * len(shape))


def test_a_depthwise_convolution_counts_its_own_channel_only():
    """torch's counter takes the gradient of a grouped weight for an ungrouped one."""
    x, weight, out = _value("x", 2, 8, 8, 8), _value("w", 8, 1, 3, 3), _value("o", 2, 8, 6, 6)
    once = 2 * (2 * 8 * 6 * 6) * 9
    shared = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 8)
    assert node_flops(Node("aten.convolution.default", (x, weight, *shared), (out,))) == once
    backward = Node("aten.convolution_backward.default", (out, x, weight, *shared, (True, True, False)), (x, weight, None))
    assert node_flops(backward) == 2 * once


def test_attention_counts_its_products():
    q, k, v, out = (_value(name, 2, 4, length, 8) for name, length in (("q", 5), ("k", 7), ("v", 7), ("o", 5)))
    forward = Node("aten._scaled_dot_product_flash_attention_for_cpu.default", (q, k, v), (out,))
    assert node_flops(forward) == 2 * (2 * 4) * (5 * 7 * 8) * 2
    backward = Node("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", (out, q, k, v), (q,))
    assert node_flops(backward) == 5 * 2 * (2 * 4) * (5 * 7 * 8)


def test_bytes_are_those_of_values_and_a_broadcast_is_read_once():
    wide, narrow, out = _value("w", 4, 8, stride=(0, 1)), _value("n", 4, 8, dtype="bfloat16"), _value("o", 4, 8)
    node = Node("aten.add.Tensor", (wide, narrow), (out,))
    assert node_moved_bytes(node) == 8 * 4 + 32 * 2 + 32 * 4
    assert compute_dtype(node) == "float32"
    view = Node("aten.view.default", (wide,), (_value("v", 32, storage=wide.storage),))
    assert node_moved_bytes(view) == 0


def test_products_with_vectors():
    matrix, row, column, number = _value("m", 4, 8), _value("r", 8), _value("c", 4), _value("n")
    assert node_flops(Node("aten.mv.default", (matrix, row), (column,))) == 2 * 4 * 8
    assert node_flops(Node("aten.addmv.default", (column, matrix, row), (column,))) == 2 * 4 * 8
    assert node_flops(Node("aten.dot.default", (row, row), (number,))) == 2 * 8
    assert node_flops(Node("aten.addr.default", (matrix, column, row), (matrix,))) == 2 * 4 * 8


TABLE, ROWS = _value("table", 1000, 16), _value("rows", 5, 16)
NUMBERS, CHOICES = _value("numbers", 5, dtype="int64"), _value("choices", 5, 16, dtype="int64")
PIXELS = _value("pixels", 2, 8, 8, dtype="int64")
PICTURE, POOLED, LOSS = _value("picture", 2, 3, 8, 8), _value("pooled", 2, 3, 4, 4), _value("loss")


@pytest.mark.parametrize(
    ("op", "args", "made", "moved_bytes"),
    [
        ("embedding.default", (TABLE, NUMBERS), ROWS, 5 * 8 + 2 * 5 * 16 * 4),
        ("index_select.default", (TABLE, 0, NUMBERS), ROWS, 5 * 8 + 2 * 5 * 16 * 4),
        ("index.Tensor", (TABLE, (NUMBERS,)), ROWS, 5 * 8 + 2 * 5 * 16 * 4),
        ("gather.default", (TABLE, 0, CHOICES), ROWS, 5 * 16 * 8 + 2 * 5 * 16 * 4),
        ("take.default", (TABLE, NUMBERS), _value("taken", 5), 5 * 8 + 2 * 5 * 4),
        ("nll_loss2d_forward.default", (PICTURE, PIXELS, None, 1, -100), LOSS, 128 * 4 + 128 * 8 + 4),
        ("nll_loss_forward.default", (ROWS, NUMBERS, None, 1, -100), LOSS, 5 * 4 + 5 * 8 + 4),
        ("nll_loss_backward.default", (LOSS, ROWS, NUMBERS, None, 1, -100, LOSS), ROWS, 4 + 5 * 8 + 5 * 16 * 4),
        ("max_pool2d_with_indices_backward.default", (POOLED, PICTURE, (2, 2)), PICTURE, 4 * 2 * 3 * (16 + 64)),
        ("_adaptive_avg_pool2d_backward.default", (POOLED, PICTURE), PICTURE, 4 * 2 * 3 * (16 + 64)),
        ("zeros_like.default", (TABLE,), _value("zeros", 1000, 16), 1000 * 16 * 4),
        ("new_zeros.default", (TABLE, (5, 16)), ROWS, 5 * 16 * 4),
        ("bernoulli.p", (TABLE, 0.1), _value("mask", 1000, 16), 1000 * 16 * 4),
        ("bernoulli.default", (TABLE,), _value("mask", 1000, 16), 2 * 1000 * 16 * 4),
        ("empty_like.default", (TABLE,), _value("nothing", 1000, 16), 0),
        ("slice_backward.default", (ROWS, (1000, 16), 0, 0, 5, 1), TABLE, (1000 + 5) * 16 * 4),
    ],
)
def test_what_is_not_touched_is_not_moved(op, args, made, moved_bytes):
    made = replace(made, storage=Storage("made", 0, "cpu", Kind.ACTIVATION))
    assert node_moved_bytes(Node(f"aten.{op}", args, (made,))) == moved_bytes


@pytest.mark.parametrize(
    ("op", "args", "moved_bytes"),
    [
        ("copy_.default", (TABLE, _value("source", 1000, 16)), 2 * 1000 * 16 * 4),
        ("index_put_.default", (TABLE, (NUMBERS,), ROWS), 5 * 8 + 2 * 5 * 16 * 4),
        ("index_put_.default", (TABLE, (NUMBERS,), ROWS, True), 5 * 8 + 3 * 5 * 16 * 4),
        ("index_add_.default", (TABLE, 0, NUMBERS, ROWS), 5 * 8 + 3 * 5 * 16 * 4),
        ("index_copy_.default", (TABLE, 0, NUMBERS, ROWS), 5 * 8 + 2 * 5 * 16 * 4),
        ("scatter_add_.default", (TABLE, 0, CHOICES, ROWS), 5 * 16 * 8 + 3 * 5 * 16 * 4),
        ("scatter_.src", (TABLE, 0, CHOICES, ROWS), 5 * 16 * 8 + 2 * 5 * 16 * 4),
        ("scatter_.value", (TABLE, 0, CHOICES, 1.0), 5 * 16 * 8 + 5 * 16 * 4),
    ],
)
def test_what_is_written_in_places_moves_those_places(op, args, moved_bytes):
    after = Value("after", TABLE.storage, "float32", (1000, 16), (16, 1), version=1)
    assert node_moved_bytes(Node(f"aten.{op}", args, (None,), writes=((TABLE, after),))) == moved_bytes


def test_half_a_convolutions_backward_pass_reads_half():
    x, weight, gradient = _value("x", 2, 8, 8, 8), _value("w", 8, 8, 3, 3), _value("o", 2, 8, 6, 6)
    rest, of_x, of_w = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1), _value("dx", 2, 8, 8, 8), _value("dw", 8, 8, 3, 3)
    of_input = Node("aten.convolution_backward.default", (gradient, x, weight, *rest, (True, False, False)), (of_x, None, None))
    of_weight = Node("aten.convolution_backward.default", (gradient, x, weight, *rest, (False, True, False)), (None, of_w, None))
    assert node_moved_bytes(of_input) == 4 * (2 * 8 * 36 + 8 * 8 * 9 + 2 * 8 * 64)
    assert node_moved_bytes(of_weight) == 4 * (2 * 8 * 36 + 2 * 8 * 64 + 8 * 8 * 9)


def test_the_roofline_is_the_longer_of_arithmetic_and_bytes():
    device = next(each for each in PRESETS if each.name == "rtx3090")
    x, y, out = (_value(name, 4096, 4096) for name in "xyo")
    arithmetic_us = 1e6 * 2 * 4096**3 / (35.6e12 * 0.6)
    assert device.node_us(Node("aten.mm.default", (x, y), (out,))) == pytest.approx(5 + arithmetic_us)
    moving_us = 1e6 * 3 * 4 * 4096**2 / (936e9 * 0.6)
    assert device.node_us(Node("aten.add.Tensor", (x, y), (out,))) == pytest.approx(5 + moving_us)
    assert device.node_us(Node("aten.view.default", (x, (16,)), (_value("v", 16, storage=x.storage),))) == 0
    assert device.store_us(12_000_000) == pytest.approx(5 + 1000)
    one_by_one = replace(device, moves_beside=False)
    assert one_by_one.node_us(Node("aten.mm.default", (x, y), (out,))) == pytest.approx(5 + arithmetic_us + moving_us)


def _shaped(*shapes):
    return [_value(f"v{number}", *shape) for number, shape in enumerate(shapes)]


PICTURES, KERNEL, MADE = (2, 8, 6, 6), (4, 8, 3, 3), (2, 4, 4, 4)
HEADS = [(2, 4, length, 8) for length in (5, 7, 7, 5)]
RULED = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
FORWARD, BACKWARD = 2 * 8 * (5 * 7) * (8 + 8), 2 * 8 * (5 * 7) * 5 * 8

# By row: the arguments of a call, the shape of its result, and its multiplications and additions, counted by hand.
COUNTED = {
    "aten.mm": (_shaped((3, 4), (4, 5)), (3, 5), 2 * 3 * 4 * 5),
    "aten.matmul": (_shaped((2, 3, 4), (4, 5)), (2, 3, 5), 2 * 2 * 3 * 4 * 5),
    "aten.bmm": (_shaped((2, 3, 4), (2, 4, 5)), (2, 3, 5), 2 * 2 * 3 * 4 * 5),
    "aten.addmm": (_shaped((5,), (3, 4), (4, 5)), (3, 5), 2 * 3 * 4 * 5),
    "aten.baddbmm": (_shaped((5,), (2, 3, 4), (2, 4, 5)), (2, 3, 5), 2 * 2 * 3 * 4 * 5),
    "aten.addbmm": (_shaped((3, 5), (2, 3, 4), (2, 4, 5)), (3, 5), 2 * 2 * 3 * 4 * 5),
    "aten.mv": (_shaped((3, 4), (4,)), (3,), 2 * 3 * 4),
    "aten.dot": (_shaped((4,), (4,)), (), 2 * 4),
    "aten.vdot": (_shaped((4,), (4,)), (), 2 * 4),
    "aten.addmv": (_shaped((3,), (3, 4), (4,)), (3,), 2 * 3 * 4),
    "aten.addr": (_shaped((3, 4), (3,), (4,)), (3, 4), 2 * 3 * 4),
    **dict.fromkeys(
        ("aten.convolution", "aten.convolution_overrideable"), ([*_shaped(PICTURES, KERNEL), *RULED], MADE, 2 * (2 * 4 * 16) * (8 * 9))
    ),
    "aten.convolution_backward": ([*_shaped(MADE, PICTURES, KERNEL), *RULED], PICTURES, 2 * (2 * 4 * 16) * (8 * 9)),
    "aten.convolution_backward_overrideable": ([*_shaped(MADE, PICTURES, KERNEL), *RULED[1:]], PICTURES, 2 * (2 * 4 * 16) * (8 * 9)),
    **{
        row.name: (_shaped(*HEADS[:3]), HEADS[3], FORWARD)
        for row in nodes.ROWS.values()
        if row.flops is not None and "attention" in row.name and "backward" not in row.name
    },
    **{
        row.name: (_shaped(HEADS[3], *HEADS[:3]), HEADS[0], BACKWARD)
        for row in nodes.ROWS.values()
        if row.flops is not None and "attention" in row.name and "backward" in row.name
    },
}


COUNTED |= {f"lowtide.{name}_in_layout": COUNTED[f"aten.{name}"] for name in ("mm", "bmm", "addmm", "baddbmm", "addbmm")}


@pytest.mark.parametrize("name", [row.name for row in nodes.ROWS.values() if row.flops is not None])
def test_every_row_counts_what_is_multiplied_and_added(name):
    args, made, operations = COUNTED[name]
    assert node_flops(Node(name if name.count(".") == 2 else f"{name}.default", tuple(args), (_value("made", *made),))) == operations


def test_every_row_of_moved_bytes_is_among_the_calls_above():
    called = {f"aten.{mark.args[1][i][0].split('.')[0]}" for mark in _marks() for i in range(len(mark.args[1]))}
    moved = {row.name for row in nodes.ROWS.values() if row.moved_bytes is not None and row.name.startswith("aten.")}
    assert {name for name in moved - called if not name.startswith("aten.convolution")} == set()  # lowtide's own: tests/kernels


def _marks():
    tests = (test_what_is_not_touched_is_not_moved, test_what_is_written_in_places_moves_those_places)
    return [mark for test in tests for mark in test.pytestmark if mark.name == "parametrize"]
