"""A small capture, and all that a capture could leave changed in the process."""

import builtins
import json
import logging
import math
import random

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.sym_node import SymNode
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch as dispatching

from lowtide.capture.program import TrainingProgram, capture_training
from lowtide.capture.trace import Given

X = torch.linspace(-1, 1, 12).view(4, 3)
HOSTS = (
    math, builtins, json.JSONEncoder, logging.Logger, nn.Module, torch.Tensor, torch.amp.GradScaler, torch.random, random, random._inst,
    np.random, FakeTensor, SymNode,
)  # fmt: skip
LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))


def mean_square(model, x):
    return model(x).square().mean()


def captured(model=None, loss=mean_square, optimizer=torch.optim.Adam, **settings):
    model = net() if model is None else model
    program = TrainingProgram(model, loss, optimizer(model.parameters(), 0.1))
    return capture_training(program, Given((X,), {}, torch.device("cpu")), **settings)


def world():
    """What a capture could leave changed."""
    tables = {name: dict(item) for name, item in vars(torch_module).items() if name.startswith("_global") and isinstance(item, dict)}
    tables |= {name: dict(item) for name, item in vars(torch_optimizer).items() if name.startswith("_global") and isinstance(item, dict)}
    return {
        "names": {
            (str(host), name): id(item) for host in HOSTS for name, item in list(vars(host).items()) if name != "__warningregistry__"
        },
        "hooks": tables,
        "logging": [list(logging.getLogger(name).filters) for name in LOGGERS],
        "modes": (
            _get_current_function_mode_stack(),
            dispatching._get_current_dispatch_mode_stack(),
            dispatching._is_in_torch_dispatch_mode,
        ),
        "switches": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_multithreading_enabled()),
        "keys": str(torch._C._dispatch_tls_local_include_set()) + str(torch._C._dispatch_tls_local_exclude_set()),
        "draws": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=False))),
    }
