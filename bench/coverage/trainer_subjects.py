"""trl's Trainers with `LowtideMixin` before them: what two updates of two batches each leave, and what they log."""

from __future__ import annotations

import tempfile
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import lowtide
from bench.coverage.subject import Kwargs, Subject

_TEXTS = ["a b c d", "e f g", "h i j k l m", "n o p a", "b d f", "a c e g i", "c b a", "p o n m"]
_PROMPTS = ["a b", "c d", "e", "f g", "a b", "c d", "o", "m n"]
_PAIRS = {"prompt": _PROMPTS, "chosen": _TEXTS, "rejected": _TEXTS[::-1]}
_SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
_TRAINERS: dict[str, tuple[str, Kwargs, dict[str, list[str]]]] = {  # by subject: the trainer, its configuration, its data
    "SFT": ("SFT", {}, {"text": _TEXTS}),
    "SFT_of_completions": ("SFT", {}, {"prompt": _PROMPTS, "completion": _TEXTS}),
    "SFT_packed": ("SFT", {"packing": True, "max_length": 8}, {"text": _TEXTS}),
    "DPO": ("DPO", {}, _PAIRS),
    "Reward": ("Reward", {}, {"chosen": _TEXTS, "rejected": _TEXTS[::-1]}),
}
_TIMES = ("runtime", "per_second", "flos")


def _tokenizer() -> Any:
    library, transformers = import_module("tokenizers"), import_module("transformers")
    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnop"]
    made = library.Tokenizer(library.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def _model(kind: str) -> nn.Module:
    from bench.torchvision_shim import install

    install()
    torch.manual_seed(0)
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(**_SMALL, bos_token_id=1, eos_token_id=2, num_labels=1)
    made: nn.Module = getattr(transformers, "LlamaForSequenceClassification" if kind == "Reward" else "LlamaForCausalLM")(config)
    return made


def _train(name: str, planned: bool) -> dict[str, torch.Tensor]:
    """Weights, and numbers of the log."""
    kind, settings, data = _TRAINERS[name]
    model = _model(kind)
    trl, datasets = import_module("trl"), import_module("datasets")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # of which DPO loads its reference
        model.config._name_or_path = model.name_or_path = folder
        arguments = getattr(trl, f"{kind}Config")(
            folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, report_to=[], use_cpu=True,
            save_strategy="no", logging_steps=1, optim="adamw_torch", bf16=False, gradient_checkpointing=False, disable_tqdm=True,
            **settings,
        )  # fmt: skip
        base = getattr(trl, f"{kind}Trainer")
        more: Kwargs = {"optimize": {"planning": lowtide.Planning(progress=False)}} if planned else {}
        if planned:
            base = type("Mine", (import_module("lowtide.integrations.transformers").LowtideMixin, base), {})
        # named, so that `datasets` need not pickle the table, which some releases of pyarrow do not allow
        rows = datasets.Dataset(datasets.table.InMemoryTable.from_pydict(data), fingerprint=name)
        trainer = base(model=model, args=arguments, train_dataset=rows, processing_class=_tokenizer(), **more)
        trainer.train()
    found = dict(model.state_dict())
    for at, entry in enumerate(trainer.state.log_history):
        found |= {
            f"log {at} {key}": torch.tensor(float(number), dtype=torch.float64)
            for key, number in entry.items()
            if not any(time in key for time in _TIMES)
        }
    return found


def _build(name: str) -> tuple[nn.Module, Kwargs]:
    return _model(_TRAINERS[name][0]).train(), {"input_ids": torch.randint(0, 64, (2, 12))}


SUBJECTS = tuple(Subject(f"trl/{name}", partial(_build, name), partial(_train, name)) for name in _TRAINERS if find_spec("trl") is not None)
