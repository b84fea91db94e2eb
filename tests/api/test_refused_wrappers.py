"""Models within wrappers whose work a step would leave out."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import CaptureError


def test_data_parallel_is_refused():
    model = nn.DataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CaptureError, match="what DataParallel does over processes or devices is no part of this: give the module within"):
        lowtide.optimize(model, torch.ones(2, 4), loss=lambda model, x: model(x).sum(), optimizer=optimizer)
    with pytest.raises(CaptureError, match=r"`model\.module`"):
        lowtide.explain(model, torch.ones(2, 4))
