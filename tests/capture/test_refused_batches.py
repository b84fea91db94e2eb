"""Batches and arguments that cannot be meant are refused: the message says what, where and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from bench.in_values import in_values
from tests.refusals import Function, refused, square


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.ones(6, 4, requires_grad=True), r"batch.* requires gradients.*detached"),
        (torch.ones(6, 4).to_sparse(), r"batch.* is a tensor of layout torch\.sparse_coo"),
    ],
)
def test_batches_that_cannot_be_captured(batch, message):
    refused(lambda model, x: model(x).sum(), message, batch=(batch,))


def test_micro_batches_that_do_not_divide_the_batch():
    refused(
        lambda model, x: model(x).sum(), r"batch\[0\]\[0\] has 6 rows, which 4 micro-batches cannot share equally|batch 0 has 6 rows",
        accumulate=4, error=lowtide.BatchError,
    )  # fmt: skip


def test_micro_batches_with_more_results_than_the_loss():
    refused(lambda model, x: (model(x).sum(), x), r"accumulate > 1, loss\(\) must return the loss alone", accumulate=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss": square}, TypeError, "optimizer: a training step needs both"),
        ({"after_backward": print}, TypeError, "belong to training"),
        ({"accumulate": 0, "loss": square, "optimizer": optim.SGD([torch.ones(1)], 0.1)}, ValueError, "accumulate: expected a positive"),
        ({"optimizer": 3, "loss": square}, TypeError, "optimizer: expected a torch.optim.Optimizer, or a list of them.*got a int"),
        ({"device": "cuda"}, ValueError, "device: the model lies on cpu"),
        ({"exact": "no"}, TypeError, "exact: expected True or False, got 'no'"),
        ({"swap": 1}, TypeError, "swap: expected True or False, got 1"),
        ({"state": "card"}, ValueError, "state: expected one of"),
        ({"workspaces": "yes"}, TypeError, "workspaces: expected True or False, or None"),
        ({"progress": "bar"}, TypeError, "progress: expected True or False, or None"),
        ({"arena": "yes"}, ValueError, "arena: expected one of 'limit', 'always', 'auto', 'never', got 'yes'"),
        ({"placer": "exact"}, TypeError, "placer: expected a value like lowtide.placement.Exact"),
        ({"search": "thorough"}, TypeError, "search: expected a lowtide.Sweep, got 'thorough'; a level of effort is given as `effort`"),
        ({"effort": lowtide.Sweep()}, TypeError, "effort: expected .* a lowtide.Sweep is given as `search`"),
        ({"solver": "exact"}, TypeError, "solver: expected a value like lowtide.schedule.Best"),
        ({"solver": lowtide.schedule.Best}, TypeError, "solver: expected a value like"),
        ({"callback": "print"}, TypeError, "callback: expected a function"),
        ({"simulate": 3}, TypeError, "simulate: expected the name of a machine"),
        ({"plan": 5}, TypeError, r"plan: expected a Plan, or the path .*step\.save\(path\).* got a int"),
        ({"simulate": "v100"}, ValueError, "simulate: expected one of .*h100.*, got 'v100'"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments, error, message):
    with pytest.raises(error, match=message):
        lowtide.optimize(nn.Linear(4, 4), torch.ones(6, 4), **in_values(**arguments))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: lowtide.order(3), "problem: expected a lowtide.OrderProblem, or the path of a JSON file, got 3"),
        (lambda: lowtide.place(3), "problem: expected a lowtide.PlaceProblem, or the path of a CSV file, got 3"),
        (lambda: lowtide.order("none.json", "exact"), "solver: expected a value like lowtide.schedule.Best"),
        (lambda: lowtide.place("none.csv", "exact"), "solver: expected a value like lowtide.placement.Exact"),
        (lambda: lowtide.explain(nn.Linear(4, 4), torch.ones(6, 4), run=lowtide.Run(swap="no")), "swap: expected True or False"),
    ],
)
def test_values_of_another_kind(ask, message):
    with pytest.raises(TypeError, match=message):
        ask()


def test_a_model_on_the_meta_device_is_planned_and_not_run():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    step = lowtide.optimize(model, torch.ones(6, 4), loss=square, optimizer=optim.Adam(model.parameters()))
    assert step.plan.peak_bytes > step.plan.resident_bytes > 0
    with pytest.raises(lowtide.StepError, match=r"meta device: .*to_empty"):
        step(torch.ones(6, 4))


def test_lazy_conjugates_within_a_program_are_eagers():
    def product(x: Tensor) -> Tensor:
        return torch.view_as_real((torch.complex(x, x).conj() * torch.complex(x, 2 * x)).resolve_conj())

    x = torch.rand(2)
    assert torch.equal(lowtide.optimize(Function(product), x, planning=lowtide.Planning(workspaces=False))(x), product(x))


def test_a_plan_for_another_machine_is_not_run():
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    step = lowtide.optimize(model, (x,), planning=lowtide.Planning(simulate="a100"))
    assert step.plan.provenance.device == "a100"
    with pytest.raises(lowtide.StepError, match=r"for another machine.*without `Planning\(simulate=\.\.\.\)`"):
        step(x)
    with pytest.raises(ValueError, match="expected one of cpu, rtx3090, rtx4090, l40s, a100, h100, h200, got 'abacus'"):
        lowtide.optimize(model, (x,), planning=lowtide.Planning(simulate="abacus"))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda x: x.to_sparse_csr(), r"batch.* is a tensor of layout torch\.sparse_csr: plain dense tensors.*padded"),
        (lambda x: torch.nested.nested_tensor([x, x]), "batch.* is a nested tensor: plain dense tensors"),
        (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), "batch.* is a nested tensor: plain dense tensors"),
    ],
    ids=["csr", "nested", "jagged"],
)
def test_tensors_that_are_not_dense(batch, message):
    refused(square, message, batch=(batch(torch.ones(6, 4)),))


def test_a_lazy_conjugate_in_the_batch():
    x = torch.complex(torch.ones(6, 4), torch.ones(6, 4))
    refused(lambda model, x: model(x.abs()).sum(), r"batch.* is a lazy conjugate.*resolve_conj\(\)", batch=(x.conj(),))
    step = lowtide.optimize(Function(lambda x: x * 2), x, planning=lowtide.Planning(workspaces=False))
    with pytest.raises(lowtide.BatchError, match=r"batch \[0\]: expected complex64.*got a lazy conjugate.*resolve_conj\(\)"):
        step(x.conj())
