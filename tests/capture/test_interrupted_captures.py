"""Whatever ends a capture, nothing that is global has changed, and the model holds what it held."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _python_dispatch as dispatching

import lowtide
from lowtide.errors import CaptureError
from tests.captures import captured, net, world


def held(model):
    tables = [(module._parameters, module._buffers, module._modules, module.__dict__) for module in model.modules()]
    return [{name: id(item) for name, item in table.items()} for each in tables for table in each]


FOLLOWED = (
    str(Path(lowtide.__file__).parent / "capture"), contextlib.__file__, dispatching.__file__, torch.overrides.__file__,
    torch.autograd.grad_mode.__file__,
)  # fmt: skip


class Interruption:
    """Raises at one of the points where Python lets signals in: where functions are entered, and where calls end."""

    def __init__(self, error, at=None):
        self.error, self.at, self.count = error, at, 0

    def __call__(self, frame, event, argument):
        if event != "c_call" and frame.f_code.co_filename.startswith(FOLLOWED):
            self.count += 1
            if self.count == self.at:
                raise self.error

    def during(self, work):
        sys.setprofile(self)
        try:
            return work()
        finally:
            sys.setprofile(None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what a finaliser raises Python only tells
@pytest.mark.parametrize(("error", "points"), [(KeyboardInterrupt, 10), (MemoryError, 6)])
def test_whatever_is_raised_wherever_all_is_put_back(error, points):
    model = net()
    captured(model)
    counting = Interruption(error)
    counting.during(lambda: captured(model))
    before, of_model = world(), held(model)
    wrong, raised = [], 0
    for point in range(points):
        interruption = Interruption(error, at=1 + (point * counting.count + counting.count // 2) // points)
        try:
            interruption.during(lambda: captured(model))
        except (error, CaptureError) as stopped:
            raised += 1
            if world() != before or held(model) != of_model:
                wrong.append((interruption.at, stopped))
    assert wrong == []
    assert raised >= points // 2


class SetAside(Interruption):
    """Raises when torch has just set its modes aside, and nobody is bound yet to put them back."""

    def __call__(self, frame, event, argument):
        if event == "return" and frame.f_code is contextlib._GeneratorContextManager.__enter__.__code__:
            self.count += frame.f_back.f_code.co_name == "ask"  # of `real`
            if self.count == self.at:
                self.at = None
                if sys.version_info < (3, 11):
                    frame.f_locals.clear()  # which are made for this function alone, and last as long as the error
                raise self.error


def test_modes_that_were_set_aside_in_that_moment_are_not_put_back_later():
    model, interruption = net(), SetAside(MemoryError, at=1)
    captured(model)
    before = world()
    with contextlib.suppress(CaptureError):
        interruption.during(lambda: captured(model))
    assert interruption.at is None, "it was raised"
    assert world() == before
