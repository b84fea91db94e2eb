"""Kernels run as plain Python, so that one can step through them: the same sequences come out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.evictions import evicted
from tests.sequences import RULES


def test_eviction_is_the_same_where_numba_is_switched_off() -> None:
    here = Path(__file__).parents[2]
    code = "import json; from tests.evictions import evicted; print(json.dumps(evicted()))"
    settings = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(here)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=settings, cwd=here, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads(json.dumps(evicted()))
    assert json.loads(done.stdout) == expected
    assert any(len(sequence) > len(set(sequence)) for sequence, *_ in expected)  # something is computed again
    assert any(max(sequence, default=0) >= 12 for sequence, *_ in expected[-len(RULES) :])  # something is stored
