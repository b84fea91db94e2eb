"""What users do to a model between steps changes what the next step does, as it does eagerly."""

from __future__ import annotations

import torch

from tests.api.networks import convnet, cross_entropy, pictures, sgd, workload
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
