"""What users do to a model between steps changes what the next step does, as it does eagerly."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import lowtide
from tests.api.networks import adamw, convnet, cross_entropy, pictures, sgd, workload
from tests.training import check


def test_modes_and_flags_change_between_steps():
    def between(model, optimizer):
        def change(step):
            model.eval() if step == 0 else model.train()
            model[4].requires_grad_(step != 2)
            model[1].train(step != 3)

        return change

    check(workload(convnet, pictures, cross_entropy), steps=6, between=between)


def test_layers_freeze_and_thaw():
    def between(model, optimizer):
        return lambda step: model[0].requires_grad_(step % 2 == 1)

    check(workload(convnet, pictures, cross_entropy, sgd), steps=5, between=between)


def test_eager_evaluation_between_steps():
    def between(model, optimizer):
        def evaluate(step):
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 3, 8, 8))
            model.train()
            model(torch.ones(2, 3, 8, 8))  # advances the statistics and the generator

        return evaluate

    check(workload(convnet, pictures, cross_entropy), between=between)


def test_moving_average_of_the_weights_between_steps():
    def between(model, optimizer):
        shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

        def average(step):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    shadow[name].lerp_(parameter, 0.5)
                    parameter.copy_(shadow[name])

        return average

    check(workload(convnet, pictures, cross_entropy), between=between)


def test_settings_of_modules_change_between_steps():
    def between(model, optimizer):
        def change(step):
            model[7].p = model[12].p = 0.1 * step
            model[1].momentum = 0.3 if step else 0.2

        return change

    check(workload(convnet, pictures, cross_entropy), steps=4, between=between)


@pytest.mark.filterwarnings("ignore:.*is no parameter of the model")
def test_a_layer_made_anew_is_trained_once_the_optimizer_has_it():
    def between(model, optimizer):
        def replace(step):
            if step == 2:
                torch.manual_seed(7)
                model[-1] = torch.nn.Linear(model[-1].in_features, model[-1].out_features)
                optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.02})

        return replace

    check(workload(convnet, pictures, cross_entropy, adamw), steps=5, between=between)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = torch.nn.Embedding(10, 10), torch.nn.Linear(10, 10), torch.nn.Linear(10, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.table(tokens))).flatten(0, -2)


@pytest.mark.filterwarnings("ignore:.*is no parameter of the model")
def test_weights_are_tied_midway():
    def between(model, optimizer):
        def tie(step):
            if step == 2:
                model.head.weight = model.table.weight

        return tie

    def words() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(8).view(2, 4), torch.arange(8)

    check(workload(Tied, words, cross_entropy, adamw), steps=5, between=between)


def test_threads_that_train_by_one_step_take_turns():
    """As many updates as calls, one after another: the same batch in any order gives eager's weights."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(32, 64)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.Adam(each.parameters()) for each in (model, twin))
    step = lowtide.optimize(model, (x,), loss=lambda model, x: model(x).square().mean(), optimizer=optimizer)
    with ThreadPoolExecutor(4) as pool:
        losses = sorted(result.item() for result in pool.map(step, [x] * 40))
    expected = []
    for _ in range(40):
        other.zero_grad()
        loss = twin(x).square().mean()
        loss.backward()
        other.step()
        expected.append(loss.item())
    assert losses == sorted(expected)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
