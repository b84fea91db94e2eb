"""Operations are counted as torch's own counter does, and a roofline follows from them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.cost.device import PRESETS
from lowtide.cost.flops import compute_dtype, node_flops, node_moved_bytes
from lowtide.ir.graph import Kind, Node, Storage, Value


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
    step = lowtide.optimize(model, (x,), loss=lambda model, x: model(x), optimizer=optimizer, workspaces=False)
    assert sum(map(node_flops, step.plan.graph.nodes)) == counter.get_total_flops()


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


def test_the_roofline_is_the_longer_of_arithmetic_and_bytes():
    device = next(each for each in PRESETS if each.name == "rtx3090")
    x, y, out = (_value(name, 4096, 4096) for name in "xyo")
    arithmetic_us = 1e6 * 2 * 4096**3 / (35.6e12 * 0.6)
    assert device.node_us(Node("aten.mm.default", (x, y), (out,))) == pytest.approx(5 + arithmetic_us)
    moving_us = 1e6 * 3 * 4 * 4096**2 / (936e9 * 0.6)
    assert device.node_us(Node("aten.add.Tensor", (x, y), (out,))) == pytest.approx(5 + moving_us)
    assert device.node_us(Node("aten.view.default", (x, (16,)), (_value("v", 16, storage=x.storage),))) == 0
    assert device.store_us(12_000_000) == pytest.approx(5 + 1000)
