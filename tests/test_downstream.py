"""A user's program that `make test` has mypy read in strict mode: it also runs."""

from __future__ import annotations

from tests.downstream import bare, infer, train


def test_it_runs():
    assert train() > 0
    assert infer().plan.peak_bytes > 0
    assert bare() == (12, 12)
