"""The same networks as published code builds them (timm), captured for inference: what the shapes of this folder stand for.

timm imports torchvision, whose compiled operators need not load here: `torchvision_shim` stands in for them.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import lowtide
from bench import torchvision_shim
from lowtide import optimize
from lowtide.ir.graph import Graph

SIDES = {"hrnet_w18_small": 256, "hrnet_w18_small_v2": 256, "hrnet_w32": 256, "nasnetalarge": 331}  # of the input picture, by name in timm


def has_timm() -> bool:
    """Whether timm is installed."""
    return importlib.util.find_spec("timm") is not None


def captured(name: str, *, fold: bool) -> Graph:
    """One inference of a network of `SIDES` at batch 1, captured on the meta device; with `fold`, batch norm is part of convolutions."""
    torchvision_shim.install()
    import timm

    with torch.device("meta"):
        model, picture = timm.create_model(name).eval(), torch.empty(1, 3, SIDES[name], SIDES[name])
    if fold:
        fold_batch_norm(model, picture)
    return optimize(model, (picture,), planning=lowtide.Planning(progress=False)).plan.graph


def fold_batch_norm(model: nn.Module, picture: Tensor) -> None:
    """Makes each batch norm that is given a convolution's result part of that convolution. `model` is in evaluation mode.

    Right where nothing else reads that result, as in all networks here: hooks on modules do not see who adds or concatenates it.
    """
    paths = {module: path for path, module in model.named_modules()}
    for convolution, norm in _pairs(model, picture):
        _replace(model, paths[convolution], fuse_conv_bn_eval(convolution, norm))
        _replace(model, paths[norm], nn.Identity())


def _pairs(model: nn.Module, picture: Tensor) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Found by running the model: which norm was given the very tensor that which convolution returned."""
    made: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # by identity; the tensor is held so that no other takes its identity
    found: list[tuple[nn.Conv2d, nn.BatchNorm2d]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            made[id(output)] = (module, output)
        elif type(module) is nn.BatchNorm2d and id(inputs[0]) in made:
            found.append((made[id(inputs[0])][0], module))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    with torch.no_grad():
        model(picture)
    for hook in hooks:
        hook.remove()
    return found


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
