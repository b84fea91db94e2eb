"""Tests of a GPU also run on the null device (`tests/null_cuda`): all but those that ask for numbers or seconds, which it does not have."""

from __future__ import annotations

import os

import pytest
import torch

NULL = os.environ.get("NULL_CUDA") == "1"


@pytest.fixture(autouse=True)
def _as_far_as_it_goes(request: pytest.FixtureRequest) -> None:
    """Skips what the marker `computes` is on, where nothing is computed."""
    if NULL and request.node.get_closest_marker("computes"):
        pytest.skip("the null device has no numbers and no times")


@pytest.fixture(autouse=True, scope="session")
def _no_attention_of_cudnn() -> None:
    """On the null device cuDNN is torch's older path, which has none."""
    if NULL and torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)
