"""Any program of views, writes in place and arithmetic computes what eager computes, in any order that its graph allows."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

import lowtide
from bench.in_values import in_values
from lowtide.schedule import Best
from tests import programs
from tests.programs import Line, RandomOrder, Script, Scripted
from tests.training import copied, differences

_unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
_SOLVERS = (Best(), RandomOrder(1), RandomOrder(2))
# What cannot be captured, and says so.
_HONEST = (
    "another layout or dtype",
    "written in place through a view",
    "of the caller and of the step in one call",
    "reshapes a tensor of the caller",
    "may have closed a circle",
)


@settings(_unhurried, max_examples=12)
@given(programs.scripts(training=False))
def test_inference(script: Script):
    with torch.no_grad():
        expected = run_twice(Scripted(script), lambda model: model)
    for solver in _SOLVERS:
        found = run_twice(Scripted(script), partial(_optimized, solver=solver))
        assert not (told := differences(expected, found)), "\n".join(told)


_CIRCLE = Script(  # writes in place after which autograd's graph holds itself: eager leaks it at each step
    lines=(
        *(Line("maximum", 19, 34, 0, False), Line("chunk", 16, 0, 0, False), Line("mask_assign", 0, 0, 0, True)),
        *(Line("squeeze", 22, 36, 0, True), Line("transpose", 12, 15, 0, False), Line("add", 0, 0, 0, True)),
        Line("add_", 25, 26, 0, False),
    ),
    results=(0,),
)


@settings(_unhurried, max_examples=6)
@given(programs.scripts(training=True), st.booleans())
@example(_CIRCLE, False)
def test_training(script: Script, momentum: bool):
    expected = _eager_outcome(script, momentum)
    for solver in _SOLVERS:
        found = run_twice(Scripted(script), partial(_optimized_step, momentum, solver))
        assert not (told := differences(expected, found)), "\n".join(told)


def _eager_outcome(script: Script, momentum: bool):
    """What eager leaves; nothing to compare with where autograd refuses the program as a whole."""
    try:
        return run_twice(Scripted(script), lambda model: _eager_step(model, momentum))
    except RuntimeError:
        assume(False)


def _eager_step(model: Scripted, momentum: bool):
    optimizer = _sgd(model, momentum)

    def step(*batch: torch.Tensor):
        optimizer.zero_grad()
        result = programs.loss(model, *batch)
        result[0].backward()
        optimizer.step()
        return [part.detach() for part in result]

    return step


def _sgd(model: Scripted, momentum: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5 if momentum else 0.0, foreach=False)


def _optimized_step(momentum: bool, solver: object, model: Scripted):
    return _optimized(model, loss=programs.loss, optimizer=_sgd(model, momentum), solver=solver)


def _optimized(model: Scripted, **arguments: object):
    check = "auto" if arguments["solver"] == Best() else "never"  # a second look does not see the order
    try:
        return lowtide.optimize(model, programs.batch(), **in_values(workspaces=False, check=check, **arguments))
    except lowtide.CaptureError as error:
        reason = next((reason for reason in _HONEST if reason in str(error)), None)
        if reason is None:
            raise
        event(f"refused: {reason}")
        assume(False)


def run_twice(model: Scripted, make):
    """Two calls: their results, what became of their batches, of the model and of the generator, and who shares memory with whom."""
    torch.manual_seed(0)
    step = make(model)
    calls = []
    for turn in (0, 1):
        batch = programs.batch(turn)
        results = step(*batch)
        calls.append((copied(list(results)), copied(batch), _sharing(results, (*batch, *model.parameters(), *model.buffers()))))
    return calls, copied(dict(model.state_dict())), copied(model.constant), torch.get_rng_state()


def _sharing(results, owned) -> list[list[bool]]:
    """Which results lie on memory that the caller owns, and which on the same."""
    everything = [*results, *owned]
    return [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in everything] for a in results]
