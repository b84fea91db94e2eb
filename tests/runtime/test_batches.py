"""A batch unlike the captured one is refused, with the argument's name, what was expected, what came, and what helps."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide


class Takes(nn.Module):
    """Takes a tensor, a mapping with a tensor and a number, and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Any, options: Any, *, mask: Any = None) -> Any:
        return self.linear(x) * options["scale"] + options["shift"]


def good() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.ones(4, 3), {"shift": torch.zeros(3), "scale": 2}), {}


@pytest.fixture(scope="module")
def step() -> lowtide.Step:
    return lowtide.optimize(Takes(), good()[0], planning=lowtide.Planning(workspaces=False), shapes=lowtide.Shapes(on_new_shape="error"))


CHANGES = [
    (
        lambda x, o: (x[:3], o),
        r"batch \[0\]: expected float32\[4, 3\] .* got float32\[3, 3\].*; pad or cut it to 4 rows, or optimize the model for",
    ),
    (lambda x, o: (x.double(), o), r"batch \[0\]: expected float32.*got float64.*convert it with \.to\(torch\.float32\)"),
    (lambda x, o: (x.t().contiguous().t(), o), r"batch \[0\]: .*strides \[3, 1\].*strides \[1, 4\].*contiguous\(\)"),
    (lambda x, o: (x.to("meta"), o), r"batch \[0\]: expected .* on cpu, got .* on meta.*move it with \.to\('cpu'\)"),
    (lambda x, o: (x.tolist(), o), r"expected a batch of \[0\], \[1\]\['shift'\], \[1\]\['scale'\]; got \[0\]\[0\]\[0\]"),
    (lambda x, o: (None, o), r"batch \[0\]: expected float32\[4, 3\].*got a NoneType"),
    (lambda x, o: (x.to_sparse_csr(), o), r"batch \[0\]: expected float32.*got a tensor of layout torch\.sparse_csr; pass it dense"),
    (lambda x, o: (x.to_sparse(), o), r"got a tensor of layout torch\.sparse_coo"),
    (lambda x, o: (torch.nested.nested_tensor([x, x]), o), r"batch \[0\]: .*got a nested tensor"),
    (lambda x, o: (x, {**o, "more": {"deep": [x]}}), r"^\[1\]\['more'\]\['deep'\]\[0\] was not there: expected a batch"),
    (lambda x, o: (x, {"scale": 2}), r"^\[1\]\['shift'\] is missing: expected a batch"),
    (lambda x, o: (x,), r"expected a batch of .*\[1\]\['shift'\].*; got \[0\]$"),
    (lambda x, o: (x, o, x), r"; got .*\[2\]"),
    (
        lambda x, o: (x, {**o, "scale": 3}),
        r"batch \[1\]\['scale'\]: the step was captured with 2, got 3; values that are not tensors are fixed",
    ),
    (lambda x, o: (x, {**o, "scale": 2.0}), r"batch \[1\]\['scale'\]: the step was captured with 2, got 2\.0"),
    (lambda x, o: (x, {**o, "scale": torch.tensor(2)}), r"batch \[1\]\['scale'\]: the step was captured with 2, got tensor"),
    (lambda x, o: (x, {"scale": 2}), r"expected a batch of .*\['shift'\].*; got \[0\], \[1\]\['scale'\]"),
    (lambda x, o: (x, [o["shift"], 2]), r"; got \[0\], \[1\]\[0\], \[1\]\[1\]"),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_another_batch(step, change, message):
    with pytest.raises(lowtide.BatchError, match=message):
        step(*change(*good()[0]))


def test_a_loader_is_spoken_of_in_training_only():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = lowtide.optimize(
        model,
        {"x": {"rows": torch.ones(4, 3)}},
        loss=lambda model, x: model(x["rows"]).sum(),
        optimizer=optimizer,
        planning=lowtide.Planning(workspaces=False),
        shapes=lowtide.Shapes(on_new_shape="error"),
    )
    with pytest.raises(lowtide.BatchError, match=r"batch \['x'\]\['rows'\]: expected .*drop_last=True"):
        step(x={"rows": torch.ones(3, 3)})


def test_many_leaves_are_not_all_listed():
    class Sums(nn.Module):
        def forward(self, items: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(items).sum()

    step = lowtide.optimize(Sums(), ([torch.ones(1)] * 40,), planning=lowtide.Planning(workspaces=False))
    with pytest.raises(lowtide.BatchError, match=r"^\[0\]\[39\] is missing: expected .*, and 28 more; got .*and 27 more$"):
        step([torch.ones(1)] * 39)


def test_keyword_arguments_are_part_of_it(step):
    with pytest.raises(lowtide.BatchError, match=r"got .*\['mask'\]"):
        step(*good()[0], mask=torch.ones(3))


def test_a_batch_that_requires_gradients_is_data_only_where_there_are_none(step):
    args, _ = good()
    expected = step(*args)
    args[0].requires_grad_()
    with torch.no_grad():
        assert torch.equal(step(*args), expected)
    with pytest.raises(lowtide.BatchError, match=r"batch \[0\] is differentiated, and no derivative .* pass it detached"):
        step(*args)
    assert torch.equal(step(args[0].detach(), args[1]), expected)


def test_a_mapping_is_passed_by_keyword_and_anything_else_as_the_one_argument():
    model = Takes()
    named = lowtide.optimize(model, {"x": torch.ones(4, 3), "options": good()[0][1]}, planning=lowtide.Planning(workspaces=False))
    assert torch.equal(named(x=torch.ones(4, 3), options=good()[0][1]), model(*good()[0]))
    single = lowtide.optimize(nn.Linear(3, 2), torch.ones(1, 3), planning=lowtide.Planning(workspaces=False))
    assert single(torch.ones(1, 3)).shape == (1, 2)
    with pytest.raises(lowtide.BatchError, match=r"expected a batch of \['x'\]"):
        named(*good()[0])


def test_a_batch_leaf_of_an_array_type_is_told_apart():
    class Half(nn.Module):
        def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
            return x * float(scale[0])

    step = lowtide.optimize(Half(), (torch.ones(2), np.array([1.0, 2.0])), planning=lowtide.Planning(workspaces=False))
    assert step(torch.ones(2), np.array([1.0, 2.0])).tolist() == [1.0, 1.0]
    with pytest.raises(lowtide.BatchError, match=r"batch \[1\]: the step was captured with"):
        step(torch.ones(2), np.array([2.0, 2.0]))


def test_a_model_that_changed_shape_is_captured_anew():
    model = nn.Linear(3, 3)
    step = lowtide.optimize(model, torch.ones(1, 3), planning=lowtide.Planning(workspaces=False))
    model.weight = nn.Parameter(torch.ones(4, 3))
    model.bias = nn.Parameter(torch.ones(4))
    assert torch.equal(step(torch.ones(1, 3)), torch.full((1, 4), 4.0))


def test_a_model_that_changed_into_one_that_cannot_run_fails_as_eager_does():
    model = nn.Linear(3, 3)
    step = lowtide.optimize(model, torch.ones(1, 3), planning=lowtide.Planning(workspaces=False))
    model.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="same dtype") as eagers:
        model(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match=re.escape(str(eagers.value))):
        step(torch.ones(1, 3))


class Grows(nn.Module):
    """Makes a table for the size of its input at first sight, as position tables do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)
        return (self.linear(x) * self.table).sum()


def test_a_buffer_that_the_first_step_makes_anew_is_captured_as_it_is_then():
    def trained(optimized: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Grows()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def eager(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        x = torch.ones(2, 3)
        step = eager
        if optimized:
            step = lowtide.optimize(
                model, (x,), loss=lambda model, x: model(x), optimizer=optimizer, planning=lowtide.Planning(workspaces=False)
            )
        return [step(x) for _ in range(3)] + [tensor.detach() for tensor in model.state_dict().values()]

    assert all(torch.equal(one, other) for one, other in zip(trained(False), trained(True), strict=True))


def test_a_parameter_under_another_name_is_captured_anew():
    model = nn.Linear(3, 3)
    model.extra = nn.Parameter(torch.ones(1))
    step = lowtide.optimize(model, torch.ones(1, 3), planning=lowtide.Planning(workspaces=False))
    model.renamed = model._parameters.pop("extra")
    assert torch.equal(step(torch.ones(1, 3)), model(torch.ones(1, 3)).detach())
    assert {value.name for value in step.plan.graph.inputs} == {"weight", "bias", "renamed", "batch_0"}
