"""nn.Transformer, and language models of transformers, made from their configurations: nothing is downloaded.

Dropout and attention (scaled dot product) are the libraries' defaults; caches for generation are off.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bench.models.workload import Batch, Entry, images, keyword_loss, labels

# What their hubs' config.json says where it is not the class's default.
_XLM_ROBERTA = {"vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
GPT_NEO = {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "attention_types": [[["global", "local"], 12]], "vocab_size": 50_257}


def regression_loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Mean square distance between what comes out and what went in."""
    return mse_loss(model(source, target), target)


def _transformer_batch(batch_size: int) -> Batch:
    return images(10, batch_size, 512), images(20, batch_size, 512)


def _class_batch(vocabulary: int, length: int, batch_size: int) -> Batch:
    return labels(vocabulary, batch_size, length), labels(2, batch_size)


def _token_batch(vocabulary: int, length: int, batch_size: int) -> Batch:
    tokens = labels(vocabulary, batch_size, length)
    return tokens, tokens.clone()


def _transformer() -> nn.Module:
    """The defaults: 6 + 6 layers, d_model 512, 8 heads, dropout 0.1."""
    with warnings.catch_warnings():
        # It says that a fast path for inference does not apply.
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        return nn.Transformer()


def hugging_face(model: str, config: str, **settings: Any) -> nn.Module:
    """A model of transformers with random weights. Imported here: transformers takes seconds."""
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made


def language_model(model: str, config: str, **settings: Any) -> nn.Module:
    made = hugging_face(model, config, **settings)
    made.__dict__["loss_type"] = "ForCausalLM"  # what transformers chooses anyway, after a warning
    return made


def _classifier(name: str, model: str, config: str, vocabulary: int, length: int, **settings: Any) -> Entry:
    note = f"transformers.{model}, {length} tokens of {vocabulary:,}, 2 classes"
    make = partial(hugging_face, model, config, **settings)
    return Entry(name, make, partial(_class_batch, vocabulary, length), keyword_loss("input_ids", "labels"), note)


def _generator(name: str, model: str, config: str, length: int, batch_size: int, **settings: Any) -> Entry:
    note = f"transformers.{model}, {length} tokens of 50,257, next-token loss"
    make = partial(language_model, model, config, **settings)
    loss = keyword_loss("input_ids", "labels", use_cache=False)
    return Entry(name, make, partial(_token_batch, 50_257, length), loss, note, batch_size)


ENTRIES = (
    Entry(
        "transformer",
        _transformer,
        _transformer_batch,
        regression_loss,
        "nn.Transformer, 6 + 6 layers, d_model 512, source (10, n, 512), target (20, n, 512), mean squares",
    ),
    _classifier("bert-base", "BertForSequenceClassification", "BertConfig", 30_522, 128),
    _classifier("xlm-roberta-base", "XLMRobertaForSequenceClassification", "XLMRobertaConfig", 250_002, 128, **_XLM_ROBERTA),
    _generator("gpt2", "GPT2LMHeadModel", "GPT2Config", 256, 2),
    _generator("gpt-neo-1.3B", "GPTNeoForCausalLM", "GPTNeoConfig", 512, 1, **GPT_NEO),
)
