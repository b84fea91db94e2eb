"""The values that optimize and explain take: each is checked when it is made, and an old keyword is led to its value."""

import inspect

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api.options import PLACES, VALUES


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: lowtide.Training(accumulate=0), ValueError, "accumulate: expected a positive number .* got 0"),
        (lambda: lowtide.Training(after_backward=3), TypeError, "after_backward: expected a function .* got a int"),
        (lambda: lowtide.Training(scaler=3), TypeError, "scaler: expected a torch.amp.GradScaler, got a int"),
        (lambda: lowtide.Shapes(dynamic=3), TypeError, "dynamic: expected a mapping .* got 3"),
        (lambda: lowtide.Shapes(batches=[3]), TypeError, 'batches: expected them with dynamic="auto" alone'),
        (lambda: lowtide.Shapes(on_new_shape="grow"), ValueError, "on_new_shape: expected one of .*'extend'.* or None, got 'grow'"),
        (lambda: lowtide.Parallel(shard="all"), ValueError, "shard: expected one of .*'gradients'.* or None, got 'all'"),
        (lambda: lowtide.Planning(effort="more"), ValueError, "effort: expected one of .*'quick'.* got 'more'"),
        (lambda: lowtide.Planning(effort="quick", search=lowtide.Sweep()), TypeError, "effort and search: expected one of them"),
        (lambda: lowtide.Planning(workspaces="no"), TypeError, "workspaces: expected True or False, or None, got 'no'"),
        (lambda: lowtide.Planning(simulate=3), TypeError, "simulate: expected the name of a machine"),
        (lambda: lowtide.Planning(device=5), TypeError, 'device: expected "cpu", "cuda" or a torch.device, got 5'),
        (lambda: lowtide.Planning(device="gpu"), ValueError, "device: expected .* got 'gpu'"),
        (lambda: lowtide.Run(kernels="xla"), ValueError, "kernels: expected one of 'auto', 'eager', 'compiled', got 'xla'"),
        (lambda: lowtide.Run(arena="yes"), ValueError, "arena: expected one of 'limit', 'always', 'auto', 'never', got 'yes'"),
        (lambda: lowtide.Run(swap="no"), TypeError, "swap: expected True or False, got 'no'"),
        (lambda: lowtide.Run(state="card"), ValueError, "state: expected one of 'device', 'swap', 'host', got 'card'"),
        (lambda: lowtide.Run(swap=False, state="host"), ValueError, 'state: expected "device" where nothing is swapped .*got "host"'),
        (lambda: lowtide.Run(swap=False, state="swap"), ValueError, 'state: expected "device" where nothing is swapped .*got "swap"'),
    ],
)
def test_a_value_says_what_was_expected(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("verb", [lowtide.optimize, lowtide.explain])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accumulate": 4}, r"accumulate: give it as training=lowtide\.Training\(accumulate=4\)"),
        ({"kernels": "compiled"}, r"kernels: give it as run=lowtide\.Run\(kernels='compiled'\)"),
        ({"process_group": object()}, r"process_group: give it as parallel=lowtide\.Parallel\(group=\.\.\.\)"),
        ({"run": lowtide.Planning()}, r"run: expected a lowtide\.Run, got a Planning"),
    ],
)
def test_what_belongs_into_a_value_is_led_there(verb, given, message):
    with pytest.raises(TypeError, match=message):
        verb(nn.Linear(2, 2), torch.ones(1, 2), **given)


def test_both_verbs_show_their_arguments_and_no_more():
    for verb in (lowtide.optimize, lowtide.explain):
        names = set(inspect.signature(verb).parameters)
        assert len(names) <= 13
        assert not names & PLACES.keys()
        assert names & VALUES.keys()
