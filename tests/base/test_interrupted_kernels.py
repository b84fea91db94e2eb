"""An interrupt from the keyboard while a kernel runs."""

from __future__ import annotations

import os
import signal
import threading
from typing import NamedTuple

import numpy as np
import pytest

from lowtide.base.kernels import SWITCHED_OFF, kernel


class Sums(NamedTuple):
    """Made by numba of Python's own class: there Python looks for interrupts."""

    once: float
    twice: float


@kernel
def sums(numbers, turns):
    """Takes long."""
    found = 0.0
    for _ in range(turns):
        for number in numbers:
            found += number
    return Sums(found, 2 * found)


@pytest.mark.skipif(SWITCHED_OFF, reason="kernels are Python")
def test_an_interrupt_comes_through_as_one():
    numbers = np.ones(1000)
    assert sums(numbers, 1) == (1000.0, 2000.0)
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell has interrupts ignored
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  (it may come at any turn)
            timer.start()
            while True:
                sums(numbers, 20_000)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(SWITCHED_OFF, reason="kernels are Python")
def test_other_errors_come_through_as_they_are():
    with pytest.raises(TypeError, match="argument"):
        sums(np.ones(3))
