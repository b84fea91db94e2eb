"""transformers' own models of several families: what Trainer makes of them, lowtide's makes, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainers import outcome
from tests.training import differences

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from lowtide.integrations.transformers import LowtideMixin, LowtideTrainer  # noqa: E402

_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "num_mel_bins": 8, "vocab_size": 64}
    positions = {"max_source_positions": 10, "max_target_positions": 16, "suppress_tokens": [], "begin_suppress_tokens": []}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**tokens, **layers, **positions, **_HEADS))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **_SIZES))


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=64, num_labels=3, **_SIZES))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=64, num_key_value_heads=1, num_local_experts=4, **_SIZES))


def drawn(name: str, count: int) -> list[dict[str, torch.Tensor]]:
    """Rows for a model, the same at each call."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 64, (count, 8), generator=generator)
    classes = torch.arange(count) % 3
    columns = {
        "vit": {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator), "labels": classes},
        "bert": {"input_ids": tokens, "labels": classes},
        "whisper": {"input_features": torch.randn(count, 8, 20, generator=generator), "labels": tokens},
    }.get(name, {"input_ids": tokens, "labels": tokens})
    return [{key: column[row] for key, column in columns.items()} for row in range(count)]


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def trained(kind: Any, make: Callable[[], nn.Module], said: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = make()
    generates = "predict_with_generate" in said
    arguments = transformers.Seq2SeqTrainingArguments if generates else transformers.TrainingArguments
    usual = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", "optim": "adamw_torch"}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2}
    given = {"eval_dataset": drawn(make.__name__, 2)} if generates else {}
    made = kind(
        model, arguments(str(folder), **{**usual, **quiet, **said}), train_dataset=drawn(make.__name__, 7), data_collator=stacked, **given
    )
    made.train()
    return outcome(made)


@pytest.mark.filterwarnings("ignore")  # what transformers says of such small models
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (t5, {"predict_with_generate": True, "eval_strategy": "epoch", "generation_max_length": 4}),
        (whisper, {"max_grad_norm": 0.0}),
        (vit, {"gradient_accumulation_steps": 3}),  # two updates, the last of one batch
        (bert, {"label_smoothing_factor": 0.1, "optim": "adafactor"}),
        (mixtral, {"optim": "sgd", "gradient_accumulation_steps": 2}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_is_trained_as_by_trainer(make: Callable[[], nn.Module], said: dict[str, Any], tmp_path: Path):
    own: Any = transformers.Trainer
    ours: Any = LowtideTrainer
    if "predict_with_generate" in said:
        own = transformers.Seq2SeqTrainer
        ours = type("Ours", (LowtideMixin, own), {})
    expected, found = trained(own, make, said, tmp_path), trained(ours, make, said, tmp_path)
    assert not (told := differences(expected, found)), "\n".join(told[:8])
