"""Families of a real training step: one capture, and on each shape what the plan of that shape computes and promises."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import lowtide
from lowtide.capture.program import TrainingProgram, capture_training
from lowtide.capture.trace import Given
from lowtide.cost.measures import Measures
from lowtide.cost.memory import order_problem
from lowtide.cost.presets import preset
from lowtide.cost.workspaces import measure_workspaces
from lowtide.ir.graph import Value
from lowtide.ir.shapes.dimension import Dimension, Varying, VaryingExtent
from lowtide.ir.shapes.points import at
from lowtide.lower.python import lower
from lowtide.planning.candidate import equal_graphs
from lowtide.planning.request import Budget
from lowtide.ranges import candidate as measured
from lowtide.ranges.candidate import Ranged, sample_points
from lowtide.ranges.planner import RangePlanner
from lowtide.runtime.program import Program
from tests.planned import plan
from tests.planning.networks import REQUEST

DEVICE = preset("rtx3090")
LENGTH = Dimension("length", 8, 128)


class Attention(nn.Module):
    """One head whose scores grow with the square of the length, beside a shortcut, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.perceptron = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v)
        return x + self.perceptron(x)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@pytest.fixture(scope="module")
def planner():
    """A step that was captured over its length; times by roofline, workspaces as they were measured on this machine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), Attention(), Attention(), nn.Linear(16, 5))
    x, y = batch(32)
    varying = Varying((LENGTH,), (VaryingExtent(0, 1, "length", "x"), VaryingExtent(1, 1, "length", "y")))
    program = TrainingProgram(model, loss, optim.SGD(model.parameters(), lr=0.1, foreach=False))
    captured = capture_training(program, Given((x, y), {}, torch.device("cpu"), varying))[-1]
    points = sample_points((LENGTH,), 5)
    found = []
    for graph in equal_graphs(captured.graph):
        graphs = [at(graph, point) for point in points]
        spaces = [measure_workspaces(each.nodes).nbytes for each in graphs]
        found.append(Ranged.of(graph, Measures.of(graph, points, spaces, [DEVICE.graph_us(each) for each in graphs])))
    return RangePlanner([found])


def batch(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(3, length, 4, generator=generator), torch.randint(5, (3, length), generator=generator)


def inputs_of(values: tuple[Value, ...], length: int) -> list[object]:
    """Made-up values for all that a program reads: the batch by its shapes, all else at random."""
    generator, (x, y) = torch.Generator().manual_seed(1), batch(length)
    own = {tuple(x.shape): x, tuple(y.shape): y}
    made: list[object] = []
    for value in values:
        shape = tuple(int(size) for size in value.shape)
        made.append(0.1 if value.dtype == "scalar" else own[shape] if shape in own else torch.randn(shape, generator=generator) / 4)
    return [each.clone() if isinstance(each, Tensor) else each for each in made]


@pytest.mark.parametrize("share", [None, 0.7, 0.55])
def test_each_shape_computes_what_its_own_plan_computes(planner, share):
    limit = Budget(None if share is None else int(share * planner.eager_peak_bytes(1)))
    (family,) = planner.families(replace(REQUEST, budget=limit))
    for length in (8, 37, 100, 128):
        point = {"length": length}
        own = family.plan(point)
        decision = family.choose(point).decision
        program, numeric = Program(lower(decision)), at(decision.graph, point)
        one, other = inputs_of(numeric.inputs, length), inputs_of(numeric.inputs, length)
        for found, expected in zip(program(one), Program(lower(own))(other), strict=True):
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
        for found, expected in zip(one, other, strict=True):  # what was written in place
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_times_stay_near_those_of_each_shapes_own_plan(planner, share):
    asked = replace(REQUEST, budget=Budget(int(share * planner.eager_peak_bytes(1))))
    (family,) = planner.families(asked)
    for length in (20, 75, 100, 111, 120, 128):
        point = {"length": length}
        exact = [replace(each.at(point), node_us=DEVICE.graph_us(each.at(point).graph)) for each in planner.programs[0]]
        own, member = plan(exact, asked), family.choose(point)
        assert sum(DEVICE.graph_us(at(member.decision.graph, point))) <= 1.05 * own.cost_report.time_us


def test_what_is_promised_in_between_is_near_what_is_measured_there(planner):
    for ranged in planner.programs[0]:
        for length in (13, 50, 77, 120):
            point = {"length": length}
            spaces = measure_workspaces(at(ranged.graph, point).nodes).nbytes
            (family,) = planner.families(REQUEST)
            said, peak_bytes = ranged.measures.workspaces_at(point), family.peak_bytes(point)
            assert all(abs(one - other) <= 0.01 * peak_bytes for one, other in zip(said, spaces, strict=True))


def test_the_short_way_to_an_ordering_problem_leads_where_the_long_one_does(planner):
    for ranged in planner.programs[0]:
        for length in (13, 64, 128):
            candidate = ranged.uncached_at({"length": length})
            found, expected = candidate.order_problem(8), order_problem(candidate.graph, candidate.workspace_bytes, round_to=8)
            for name in (each.name for each in fields(expected)):
                assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_what_is_the_same_at_every_point_is_asked_for_once(monkeypatch):
    model, asked = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5)), []
    once = measured.measure_workspaces
    monkeypatch.setattr(measured, "measure_workspaces", lambda nodes, **more: asked.append(len(nodes)) or once(nodes, **more))
    optimizer = optim.SGD(model.parameters(), lr=0.1, foreach=False)
    dynamic = {0: {1: ("length", 2, 64)}, 1: {1: "length"}}
    lowtide.optimize(model, batch(32), loss=loss, optimizer=optimizer, shapes=lowtide.Shapes(dynamic=dynamic))
    assert len(asked) >= 3
    assert 0 < asked[1] < asked[0]
