"""Ctrl-C during a capture is a KeyboardInterrupt wherever it comes, and changes nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lowtide.capture.care.failures import raised_in
from tests.imports import PACKAGE

_SCRIPT = """
import signal, sys, time
import torch
import lowtide

model, x = torch.nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), torch.ones(2, 3, 8)
optimizer = torch.optim.SGD(model.parameters())
loss = lambda model, x: model(x).square().mean()
lowtide.optimize(model, x, loss=loss, optimizer=optimizer)  # what is imported now is not interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
handler, weights = signal.getsignal(signal.SIGINT), [each.detach().clone() for each in model.parameters()]

class Passing:
    def __del__(self):
        pass

forward, model.forward = model.forward, lambda x: (Passing(), forward(x))[1]

def interrupted_at(name, turn):
    calls = 0

    def interrupt(frame, event, _):
        nonlocal calls
        if event == "call" and frame.f_code.co_name == name:
            calls += 1
            if calls == turn:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(interrupt)
    try:
        lowtide.optimize(model, x, loss=loss, optimizer=optimizer)
        time.sleep(10)  # on a busy machine that moment may be after all is planned
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)

came = [interrupted_at("find_torch_dispatch_rule", turn) for turn in range(1, 200, 9)]
came += [interrupted_at("remove", turn) for turn in range(1, 20, 3)]  # of weakref.py, called back at the end of what it refers to
came += [interrupted_at("__del__", 1)]
print(all(came), all(map(torch.equal, weights, model.parameters())), signal.getsignal(signal.SIGINT) is handler)
"""


def test_where_torch_can_take_no_exception_it_comes_a_moment_later():
    """Where C++ asks for a rule of its modes, it ended the process; in callbacks of weak references and in `__del__` it was lost."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert (done.returncode, done.stdout) == (0, "True True True\n"), done.stderr


def test_an_error_that_ctrl_c_leads_to_is_ctrl_c():
    """It may come where torch enters a mode, which torch then fails to leave."""

    def leave():
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("Attempted to unset FakeTensorMode, but there wasn't one active")

    with pytest.raises(KeyboardInterrupt), raised_in("loss(model, ...)"):
        leave()
