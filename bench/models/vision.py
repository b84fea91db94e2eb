"""Image and video classifiers of torchvision, and the segmentation networks of `unet`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.models.unets import UNet, UNetPlusPlus
from bench.models.workload import Batch, Entry, images, labels

_CLASSES = 1000
_ACTIONS = 400  # of Kinetics


def classification_loss(model: nn.Module, pictures: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of the model's scores."""
    return cross_entropy(model(pictures), classes)


def segmentation_loss(model: nn.Module, pictures: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy of each pixel; of a network with several outputs their mean (deep supervision: section 3.2 of the U-Net++ paper)."""
    outputs = model(pictures)
    scores = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum((cross_entropy(score, masks) for score in scores), start=pictures.new_zeros(())) / len(scores)


def _picture_batch(side: int, batch_size: int) -> Batch:
    return images(batch_size, 3, side, side), labels(_CLASSES, batch_size)


def _clip_batch(batch_size: int) -> Batch:
    return images(batch_size, 3, 16, 112, 112), labels(_ACTIONS, batch_size)


def _mask_batch(batch_size: int) -> Batch:
    return images(batch_size, 1, 256, 256), labels(2, batch_size, 256, 256)


def _torchvision(name: str, **settings: object) -> nn.Module:
    """A torchvision model with random weights. Imported here: torchvision takes seconds."""
    from torchvision import models

    model: nn.Module = models.get_model(name, weights=None, **settings)
    return model


def _classifier(name: str, **settings: object) -> Entry:
    make_batch: Callable[[int], Batch] = partial(_picture_batch, 224)
    note = f"torchvision.models.{name}, 3x224x224, 1000 classes, cross-entropy"
    return Entry(name, partial(_torchvision, name, **settings), make_batch, classification_loss, note)


ENTRIES = (
    _classifier("alexnet"),
    _classifier("vgg11"),
    _classifier("vgg16"),
    _classifier("resnet18"),
    _classifier("resnet50"),
    _classifier("mobilenet_v2"),
    _classifier("mnasnet0_5"),
    _classifier("squeezenet1_0"),
    Entry(
        "r3d_18",
        partial(_torchvision, "r3d_18", num_classes=_ACTIONS),
        _clip_batch,
        classification_loss,
        "torchvision.models.video.r3d_18, clips of 3x16x112x112, 400 actions, cross-entropy",
    ),
    _classifier("vit_b_16"),
    Entry("unet", UNet, _mask_batch, segmentation_loss, "U-Net, padded, 64 to 1024 channels, 1x256x256, 2 classes, cross-entropy", 1),
    Entry(
        "unetplusplus",
        UNetPlusPlus,
        _mask_batch,
        segmentation_loss,
        "U-Net++, deep supervision, 32 to 512 channels, 1x256x256, 2 classes, mean cross-entropy",
        1,
    ),
)
