"""The eleven networks of MODeL's experiments, each with two sizes of input.

"paper" are the inputs of MODeL's published benchmark program: clips of one frame for ResNet3D, a sentence of four tokens ("Hello world"
between two marks) for BERT and XLM-R; its ResNet is resnet18 and its VGG vgg11. GPT-2, which is not in the paper, gets four tokens like
the other language models. "list" are the inputs of `bench.models`: clips of 16 frames, 128 and 256 tokens. All else is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from bench.models import MODELS, Entry
from bench.models.workload import Batch, images, labels

INPUTS = ("paper", "list")
_TOKENS = 4
_VOCABULARY = {"bert-base": 30_522, "xlm-roberta-base": 250_002}

# The paper's name, and that of `bench.models`.
NETWORKS = {
    "AlexNet": "alexnet",
    "VGG": "vgg11",
    "ResNet": "resnet18",
    "ResNet3D": "r3d_18",
    "Transformer": "transformer",
    "BERT": "bert-base",
    "XLM-R": "xlm-roberta-base",
    "MobileNet": "mobilenet_v2",
    "MNASNet": "mnasnet0_5",
    "ViT": "vit_b_16",
    "GPT-2": "gpt2",
}


def network(name: str, inputs: str) -> Entry:
    """A network by the paper's name, with the inputs of `INPUTS`."""
    if inputs not in INPUTS:
        raise ValueError(f"inputs: expected one of {', '.join(INPUTS)}, got {inputs}")
    entry = MODELS[NETWORKS[name]]
    if inputs == "list" or entry.name not in _PAPER_BATCHES:
        return entry
    return dataclasses.replace(entry, make_batch=_PAPER_BATCHES[entry.name])


def _one_frame(batch_size: int) -> Batch:
    return images(batch_size, 3, 1, 112, 112), labels(400, batch_size)


def _sentence(vocabulary: int, batch_size: int) -> Batch:
    return labels(vocabulary, batch_size, _TOKENS), labels(2, batch_size)


def _text(batch_size: int) -> Batch:
    tokens = labels(50_257, batch_size, _TOKENS)
    return tokens, tokens.clone()


_PAPER_BATCHES: dict[str, Callable[[int], Batch]] = {
    "r3d_18": _one_frame,
    **{name: partial(_sentence, count) for name, count in _VOCABULARY.items()},
    "gpt2": _text,
}
