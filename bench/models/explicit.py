"""Transformers as published, whose attention writes its scores out (matrix product, softmax, matrix product), as MAGIS counts them.

Random weights; transformers' attention is "eager"; dropout as the name says, and nowhere where it says nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bench.models.btlm import BTLM, next_token_loss
from bench.models.language import GPT_NEO, hugging_face
from bench.models.vision import classification_loss
from bench.models.workload import Batch, Entry, images, keyword_loss, labels

_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_LENGTH, _TOKENS = 512, 50_257


class Logits(nn.Module):
    """A classifier of transformers as one that hands back its scores alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.model(pictures).logits
        return scores


def causal_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """transformers' own next-token loss."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _bert(dropout: float) -> nn.Module:
    return hugging_face("BertForSequenceClassification", "BertConfig", attn_implementation="eager", **dict.fromkeys(_DROPOUT, dropout))


def _vit() -> nn.Module:
    settings = {"attn_implementation": "eager", "num_labels": 1000} | dict.fromkeys(_DROPOUT, 0.0)
    return Logits(hugging_face("ViTForImageClassification", "ViTConfig", **settings))


def _gpt_neo() -> nn.Module:
    """Dropout is none by default."""
    made = hugging_face("GPTNeoForCausalLM", "GPTNeoConfig", attn_implementation="eager", **GPT_NEO)
    made.__dict__["loss_type"] = "ForCausalLM"  # what transformers chooses anyway, after a warning
    return made.to(torch.bfloat16)


def _btlm() -> nn.Module:
    return BTLM().to(torch.bfloat16)


def _sentences(batch_size: int) -> Batch:
    return labels(30_522, batch_size, _LENGTH), labels(2, batch_size)


def _pictures(batch_size: int) -> Batch:
    return images(batch_size, 3, 224, 224), labels(1000, batch_size)


def _texts(batch_size: int) -> Batch:
    return (labels(_TOKENS, batch_size, _LENGTH),)


_sentence_loss = keyword_loss("input_ids", "labels")
BERT = Entry("bert-base", partial(_bert, 0.0), _sentences, _sentence_loss, "transformers' BERT, 2 classes, float32", 32)
BERT_DROPOUT = Entry("bert-base, dropout 0.1", partial(_bert, 0.1), _sentences, _sentence_loss, "the same with its own dropout", 32)
VIT = Entry("vit-base", _vit, _pictures, classification_loss, "transformers' ViT, patches of 16, 1000 classes, float32", 64)
GPT_NEO_13 = Entry("gpt-neo-1.3B", _gpt_neo, _texts, causal_loss, "transformers' GPT-Neo, bfloat16", 32)
BTLM_3 = Entry("btlm-3B", _btlm, _texts, next_token_loss, "bench.models.btlm, bfloat16", 32)
