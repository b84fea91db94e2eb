"""Planned without any GPU, a program is the one that it is on a GPU: the same operators, and the same peak.

Both are processes of their own, on the null device and with none, as a process has a device or has not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.programs import MODELS

pytestmark = pytest.mark.skipif(os.environ.get("NULL_CUDA") != "1", reason="asks the null device")
_MADE_WHOLE = "a gradient of a gradient"  # nodes are not told which gradients they may leave out, so that there is dead work between


def _programs(*options: str) -> Any:
    command = [sys.executable, "-m", "tests.null_cuda", *options, sys.executable, "-m", "tests.gpu.programs"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def programs() -> tuple[Any, Any]:
    return _programs(), _programs("--no-device")


@pytest.mark.parametrize("dtype", ["None", "torch.float16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_program_is_the_same_without_the_gpu(name: str, dtype: str, programs: tuple[Any, Any]) -> None:
    there, absent = (each[f"{name}, {dtype}"] for each in programs)
    assert there[0] == absent[0] > 0
    if name != _MADE_WHOLE:
        assert there == absent


def test_one_has_a_device_and_the_other_has_none(programs: tuple[Any, Any]) -> None:
    assert [each["device"] for each in programs] == [True, False]
