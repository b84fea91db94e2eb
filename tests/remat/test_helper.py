"""A second thread changes nothing of what a search finds."""

import threading

import numpy as np
import pytest

from lowtide.base import process
from lowtide.base.process import Helper
from lowtide.remat import sweep
from lowtide.remat.sweep import Sweep
from tests.sequences import stored_chain


@pytest.mark.parametrize("processors", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
def test_everything_is_made_in_its_order(monkeypatch, processors, count):
    monkeypatch.setattr(process, "processors", lambda: processors)
    threads = set()

    def squared(number):
        threads.add(threading.get_ident())
        return number * number

    with Helper(True) as both:
        assert list(both.made_of(range(count), squared)) == [number * number for number in range(count)]
    assert len(threads) == min(processors, count)


def test_an_error_of_either_thread_is_raised(monkeypatch):
    monkeypatch.setattr(process, "processors", lambda: 2)
    for bad in (0, 1):
        with Helper(True) as both, pytest.raises(ZeroDivisionError):
            list(both.made_of([1 - bad, bad], lambda number: 1 // number))


def test_the_archive_is_the_same(monkeypatch):
    monkeypatch.setattr(process, "processors", lambda: 2)
    found = []
    for large in (1, 10_000):
        monkeypatch.setattr(sweep, "_LARGE", large)
        archive = Sweep(max_states=1500).explore([stored_chain(8)], [[np.arange(16, dtype=np.int32)]])
        found.append([(point.peak_bytes, point.time_us, point.sequence.tolist()) for point in archive.points])
    assert found[0] == found[1]
