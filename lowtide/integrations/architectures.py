"""Models by the name of their architecture, on the meta device: a configuration of transformers, or a model of timm.

Nothing is loaded but the configuration: weights are none, so that a model of any size takes no memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.api.compare import Workload

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}
_PRECISIONS = ("amp", "bfloat16", "float32")


@dataclass(frozen=True)
class Setting:
    batch_size: int = 1
    length: int = 1024  # of texts, in tokens
    optimizer: str = "adamw"  # "none" for inference
    precision: str = "amp"  # weights in float32 and computation in bfloat16; or all in one

    def __post_init__(self) -> None:
        if self.optimizer != "none" and self.optimizer not in _OPTIMIZERS:
            raise ValueError(f"--optimizer: expected one of {', '.join(_OPTIMIZERS)} or none, got {self.optimizer!r}")
        if self.precision not in _PRECISIONS:
            raise ValueError(f"--dtype: expected one of {', '.join(_PRECISIONS)}, got {self.precision!r}")

    @property
    def trains(self) -> bool:
        return self.optimizer != "none"

    def __str__(self) -> str:
        weights = {"amp": "float32 weights under bfloat16 autocast"}.get(self.precision, f"all in {self.precision}")
        return f"{f'training by {self.optimizer}' if self.trains else 'inference'}, {weights}"


def named_model(name: str, setting: Setting) -> tuple[Workload, str]:
    """A model on the meta device with a batch, and in words what was assumed. Raises ValueError where no such model is known."""
    if (example := _of_timm(name, setting)) is None:
        example = _of_transformers(name, setting)
    model, batch, loss, what = example
    model.train(setting.trains)
    if not setting.trains:
        return Workload(_Autocast(model) if setting.precision == "amp" else model, batch, None, None), f"{what}; {setting}"
    return Workload(model, batch, _under_autocast(loss, setting), _OPTIMIZERS[setting.optimizer](model.parameters())), f"{what}; {setting}"


class _Autocast(nn.Module):
    """A model called as inference under autocast calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return self.model(*args, **kwargs)


def _under_autocast(loss: Callable[..., Tensor], setting: Setting) -> Callable[..., Tensor]:
    amp = setting.precision == "amp"

    def under(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if amp else nullcontext():
            return loss(model, *args, **kwargs)

    return under


Example = tuple[nn.Module, Any, Callable[..., Tensor], str]


def _of_timm(name: str, setting: Setting) -> Example | None:
    if os.path.exists(name) or (timm := _library("timm")) is None or not timm.is_model(name):
        return None
    with torch.device("meta"):
        model = _in_precision(timm.create_model(name), setting)
    size: tuple[int, ...] = dict(model.pretrained_cfg)["input_size"]  # type: ignore[arg-type]
    images = torch.empty(setting.batch_size, *size, dtype=_activations(setting), device="meta")
    classes = torch.empty(setting.batch_size, dtype=torch.int64, device="meta")
    batch = (images, classes) if setting.trains else (images,)
    shape = " x ".join(map(str, size))
    return model, batch, lambda model, images, classes: F.cross_entropy(model(images), classes), f"timm's {name}, {_images(setting, shape)}"


def _library(name: str) -> Any:
    """The library; None where it is not installed. Exits where it is and cannot be imported."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever its own imports raise, such as a torchvision of another torch
        raise ValueError(f"{name} is installed, but cannot be imported: {type(error).__name__}: {error}") from error


def _images(setting: Setting, shape: str) -> str:
    return f"{setting.batch_size} image{'s' if setting.batch_size > 1 else ''} of {shape}"


def _of_transformers(name: str, setting: Setting) -> Example:
    if (transformers := _library("transformers")) is None:
        raise ValueError(f"{name}: expected module:function; models of transformers can be named where it is installed, and here it is not")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except ImportError as error:  # a torchvision of another torch, say; transformers names the model alone
        raise ValueError(f"{name}: transformers cannot import its model: {error.__cause__ or error}") from error
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{name}: expected a folder or file with a transformers configuration, a name of timm's, or module:function; {first}"
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    with torch.device("meta"):
        try:
            classes = [getattr(transformers, each, None) for each in config.architectures or ()]
            kind = next((each for each in classes if each is not None), None)
            model = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
        except (ValueError, ImportError) as error:
            raise ValueError(f"{name}: no model could be made of this configuration: {str(error).partition(chr(10))[0][:300]}") from error
    batch, what = _batch(_in_precision(model, setting), config, setting)
    return model, batch, lambda model, **batch: model(**batch).loss, f"transformers' {type(model).__name__}, {what}"


def _batch(model: nn.Module, config: Any, setting: Setting) -> tuple[dict[str, Tensor], str]:
    """What a model of transformers is called with, by its class; labels where it trains."""
    kind = type(model).__name__
    texts = torch.empty(setting.batch_size, setting.length, dtype=torch.int64, device="meta")
    classes = torch.empty(setting.batch_size, dtype=torch.int64, device="meta")
    tokens = f"{setting.batch_size} x {setting.length} tokens without padding"
    if kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")) and model.main_input_name == "input_ids":
        if (most := getattr(config, "max_position_embeddings", None)) is not None and setting.length > most:
            raise ValueError(f"--length: expected at most {most}, which is what {kind} takes here, got {setting.length}")
        labels = {"labels": texts} if setting.trains or config.is_encoder_decoder else {}
        return {"input_ids": texts} | labels, tokens
    if kind.endswith("ForSequenceClassification"):
        return {"input_ids": texts} | ({"labels": classes} if setting.trains else {}), tokens
    if kind.endswith("ForImageClassification"):
        given = getattr(config, "image_size", 224)  # those of any size say none
        side = given if isinstance(given, int) else max(given)
        shape = (config.num_channels, side, side)
        images = torch.empty(setting.batch_size, *shape, dtype=_activations(setting), device="meta")
        return {"pixel_values": images} | ({"labels": classes} if setting.trains else {}), _images(setting, " x ".join(map(str, shape)))
    raise ValueError(
        f"{kind}: expected a model for causal or masked language modelling, conditional generation from text, or classification of texts "
        "or images; give a function of your own, module:function, that returns (model, batch, loss, optimizer)"
    )


def _in_precision(model: nn.Module, setting: Setting) -> nn.Module:
    return model.bfloat16() if setting.precision == "bfloat16" else model


def _activations(setting: Setting) -> torch.dtype:
    return torch.bfloat16 if setting.precision == "bfloat16" else torch.float32
