"""The networks of AGO's figures 10 to 12, and small ones of timm that nobody tuned for; all with random weights, batch 1, float32.

Norms get statistics and weights that are not 0 and 1, so that folding them wrongly shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench import torchvision_shim

_SIDES = (56, 112, 224)
_TORCHVISION = {
    "mobilenet_v2": "mobilenet_v2",
    "mnasnet": "mnasnet1_0",
    "squeezenet": "squeezenet1_0",
    "shufflenet_v2": "shufflenet_v2_x1_0",
}
_TIMM = (
    "efficientnet_b0",
    "ghostnet_100",
    "mobilenetv3_small_100",
    "edgenext_xx_small",
    "repvgg_a0",
    "regnety_002",
    "resnet18",
    "convnext_atto",
)
_TOKENS = 128


@dataclass(frozen=True)
class Case:
    """A network and its example."""

    name: str  # "mobilenet_v2 56"
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]

    def built(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The network in evaluation mode and its arguments: the same in each process."""
        torch.manual_seed(0)
        model, args = self.make()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                _at_random(module)
        return model.eval().requires_grad_(False), args


class Hidden(nn.Module):
    """A language model whose result is one tensor, which every exporter knows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """The last hidden states: [batch, tokens, features]."""
        hidden: Tensor = self.model(input_ids=tokens).last_hidden_state
        return hidden


def paper_cases() -> tuple[Case, ...]:
    """AGO's fourteen."""
    pictures = (Case(f"{name} {side}", _torchvision(found, side)) for name, found in _TORCHVISION.items() for side in _SIDES)
    return (*pictures, Case(f"bert_tiny {_TOKENS}", _bert_tiny), Case("mobilevit 224", _timm("mobilevit_s")))


def other_cases() -> tuple[Case, ...]:
    """Eight that nothing was tuned for."""
    return tuple(Case(f"{name} 224", _timm(name)) for name in _TIMM)


def pair_cases() -> tuple[Case, ...]:
    """AGO's figure 13: two complex operators and the simple ones between, of MobileNet-V2's second stage, at two batch sizes."""
    pairs = (("pointwise", "depthwise"), ("depthwise", "pointwise"), ("pointwise", "pointwise"), ("depthwise", "depthwise"))
    return tuple(Case(f"pair {one} {two} {batch}", _pair(one, two, batch)) for one, two in pairs for batch in (1, 4))


def all_cases() -> tuple[Case, ...]:
    """What there is."""
    return (*paper_cases(), *other_cases(), *pair_cases())


def case(name: str) -> Case:
    """By name. Raises KeyError for one that is none."""
    return {each.name: each for each in all_cases()}[name]


def _pair(one: str, two: str, batch: int) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    """Each operator with a norm and a clamp behind it, as in the network; pointwise ones go from 24 channels to 144, and back."""

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        given = 24 if one == "pointwise" else 144
        widths = [given, 144, 24 if two == "pointwise" else 144]
        parts: list[nn.Module] = []
        for kind, inner, outer in zip((one, two), widths, widths[1:], strict=False):
            deep = kind == "depthwise"
            parts += [nn.Conv2d(inner, outer, 3 if deep else 1, padding=int(deep), groups=inner if deep else 1, bias=False)]
            parts += [nn.BatchNorm2d(outer), nn.ReLU6()]
        return nn.Sequential(*parts), (torch.randn(batch, given, 56, 56),)

    return make


def _torchvision(name: str, side: int) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torchvision_shim.install()
        from torchvision import models

        return models.get_model(name, weights=None), (torch.randn(1, 3, side, side),)

    return make


def _timm(name: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torchvision_shim.install()
        import timm

        return timm.create_model(name, pretrained=False), (torch.randn(1, 3, 224, 224),)

    return make


def _bert_tiny() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torchvision_shim.install()  # transformers imports torchvision where it is
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    model = BertModel(config, add_pooling_layer=False)
    return Hidden(model), (torch.randint(0, config.vocab_size, (1, _TOKENS)),)


def _at_random(norm: nn.modules.batchnorm._BatchNorm) -> None:
    with torch.no_grad():
        if norm.running_mean is not None and norm.running_var is not None:
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
        if norm.affine:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.1)
