"""Architectures of transformers, made small through the fields of their own configurations."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import nn

from bench.coverage.subject import Kwargs, Subject
from bench.coverage.transformers_small import OWN, SMALL, WORDS

_BATCH, _LENGTH = 2, 16


def _tokens(generator: torch.Generator) -> Kwargs:
    """Sentences, the second one padded at its end."""
    ids = torch.randint(5, WORDS - 2, (_BATCH, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, _LENGTH - 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _images(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(_BATCH, 3, size, size, generator=generator)


def _language(generator: torch.Generator, size: int) -> Kwargs:
    made = _tokens(generator)
    return made | {"labels": made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)}


def _unmasked(generator: torch.Generator, size: int) -> Kwargs:
    made = _tokens(generator)
    return {"input_ids": made["input_ids"], "labels": made["input_ids"].clone()}


def _translation(generator: torch.Generator, size: int) -> Kwargs:
    return _tokens(generator) | {"labels": torch.randint(5, WORDS - 2, (_BATCH, 8), generator=generator)}


def _classes(generator: torch.Generator, size: int) -> Kwargs:
    return _tokens(generator) | {"labels": torch.randint(2, (_BATCH,), generator=generator)}


def _pictures(generator: torch.Generator, size: int) -> Kwargs:
    return {"pixel_values": _images(size, generator), "labels": torch.randint(5, (_BATCH,), generator=generator)}


def _pixels(generator: torch.Generator, size: int) -> Kwargs:
    return {"pixel_values": _images(size, generator)}


def _pictures_and_words(generator: torch.Generator, size: int) -> Kwargs:
    return _tokens(generator) | {"pixel_values": _images(size, generator), "return_loss": True}


def _waves(generator: torch.Generator, size: int) -> Kwargs:
    return {"input_values": torch.randn(_BATCH, 400, generator=generator), "labels": torch.randint(5, (_BATCH,), generator=generator)}


def _spectra(generator: torch.Generator, size: int) -> Kwargs:
    return {
        "input_features": torch.randn(_BATCH, 16, 64, generator=generator),
        "labels": torch.randint(5, WORDS - 2, (_BATCH, 8), generator=generator),
    }


def _series(generator: torch.Generator, size: int) -> Kwargs:
    return {"past_values": torch.randn(_BATCH, 16, 1, generator=generator), "future_values": torch.randn(_BATCH, 4, 1, generator=generator)}


_BATCHES = {
    "causal": _language,
    "masked": _language,
    "unmasked": _unmasked,
    "translation": _translation,
    "classes": _classes,
    "pictures": _pictures,
    "pixels": _pixels,
    "contrast": _pictures_and_words,
    "waves": _waves,
    "spectra": _spectra,
    "series": _series,
}


def _shrunk(config: Any) -> Any:
    """A configuration with every known field at its small value, its parts as well."""
    for name, item in list(vars(config).items()):
        if hasattr(item, "to_dict") and hasattr(item, "model_type"):
            _shrunk(item)
        elif name in SMALL and _replaces(SMALL[name], item):
            _set(config, name, SMALL[name])
        elif isinstance(item, (list, tuple)) and name == "layer_types":
            _set(config, name, list(item)[:2])
    return config


def _set(config: Any, name: str, item: Any) -> None:
    """Set one field; a configuration may refuse a value or keep it under another name."""
    try:
        setattr(config, name, item)
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return


@cache
def _library() -> Any:
    import transformers

    from bench.torchvision_shim import install

    install()
    transformers.logging.set_verbosity_error()
    return transformers


def _build(model_type: str, model_class: str, task: str, own: Kwargs, size: int) -> tuple[nn.Module, Kwargs]:
    transformers = _library()
    kind = getattr(transformers, model_class)
    defaults = kind.config_class()
    fields = {name: item for name, item in SMALL.items() if _replaces(item, getattr(defaults, name, None))} | _stages(defaults)
    try:
        config = kind.config_class(**(fields | own)) if not _has_parts(defaults) else _shrunk(defaults)
    except Exception:  # a class that checks its fields against each other: one at a time, then
        config = _shrunk(defaults)
    for name, item in own.items():
        _set(config, name, item)
    torch.manual_seed(0)
    model: nn.Module = kind(config).train()
    return model, _BATCHES[task](torch.Generator().manual_seed(1), size)


def _replaces(small: Any, default: Any) -> bool:
    """Whether a field that a class gives `default` may take the value `small`: one number does not stand for a list of them."""
    return default is not None and isinstance(small, (list, tuple)) == isinstance(default, (list, tuple))


def _stages(defaults: Any) -> Kwargs:
    """One block a stage, for networks in stages: their widths stay."""
    return {
        name: [1] * len(getattr(defaults, name)) for name in ("depths", "depth") if isinstance(getattr(defaults, name, None), (list, tuple))
    }


def _has_parts(config: Any) -> bool:
    return any(hasattr(item, "model_type") for item in vars(config).values())


def _subject(model_type: str, model_class: str, task: str, size: int = 32) -> Subject:
    return Subject(f"transformers/{model_type}/{task}", partial(_build, model_type, model_class, task, OWN.get(model_type, {}), size))


_MODELS = (
    # Decoders.
    ("gpt2", "GPT2LMHeadModel", "causal"),
    ("gpt_neo", "GPTNeoForCausalLM", "causal"),
    ("gptj", "GPTJForCausalLM", "causal"),
    ("gpt_neox", "GPTNeoXForCausalLM", "causal"),
    ("gpt_bigcode", "GPTBigCodeForCausalLM", "causal"),
    ("llama", "LlamaForCausalLM", "causal"),
    ("mistral", "MistralForCausalLM", "causal"),
    ("qwen2", "Qwen2ForCausalLM", "causal"),
    ("qwen3", "Qwen3ForCausalLM", "causal"),
    ("gemma2", "Gemma2ForCausalLM", "causal"),
    ("gemma3_text", "Gemma3ForCausalLM", "causal"),
    ("phi", "PhiForCausalLM", "causal"),
    ("phi3", "Phi3ForCausalLM", "causal"),
    ("opt", "OPTForCausalLM", "causal"),
    ("bloom", "BloomForCausalLM", "causal"),
    ("falcon", "FalconForCausalLM", "causal"),
    ("mpt", "MptForCausalLM", "causal"),
    ("olmo2", "Olmo2ForCausalLM", "causal"),
    ("stablelm", "StableLmForCausalLM", "causal"),
    ("codegen", "CodeGenForCausalLM", "causal"),
    ("cohere", "CohereForCausalLM", "causal"),
    ("starcoder2", "Starcoder2ForCausalLM", "causal"),
    ("xglm", "XGLMForCausalLM", "causal"),
    ("ctrl", "CTRLLMHeadModel", "causal"),
    ("openai-gpt", "OpenAIGPTLMHeadModel", "unmasked"),
    ("xlnet", "XLNetLMHeadModel", "unmasked"),
    ("biogpt", "BioGptForCausalLM", "causal"),
    ("granite", "GraniteForCausalLM", "causal"),
    ("smollm3", "SmolLM3ForCausalLM", "causal"),
    ("glm4", "Glm4ForCausalLM", "causal"),
    ("exaone4", "Exaone4ForCausalLM", "causal"),
    ("persimmon", "PersimmonForCausalLM", "causal"),
    ("helium", "HeliumForCausalLM", "causal"),
    ("diffllama", "DiffLlamaForCausalLM", "causal"),
    ("modernbert-decoder", "ModernBertDecoderForCausalLM", "causal"),
    # Mixtures of experts, and recurrences.
    ("mixtral", "MixtralForCausalLM", "causal"),
    ("qwen2_moe", "Qwen2MoeForCausalLM", "causal"),
    ("qwen3_moe", "Qwen3MoeForCausalLM", "causal"),
    ("olmoe", "OlmoeForCausalLM", "causal"),
    ("gpt_oss", "GptOssForCausalLM", "causal"),
    ("deepseek_v3", "DeepseekV3ForCausalLM", "causal"),
    ("granitemoe", "GraniteMoeForCausalLM", "causal"),
    ("jamba", "JambaForCausalLM", "causal"),
    ("mamba", "MambaForCausalLM", "unmasked"),
    ("mamba2", "Mamba2ForCausalLM", "unmasked"),
    ("falcon_mamba", "FalconMambaForCausalLM", "unmasked"),
    ("rwkv", "RwkvForCausalLM", "unmasked"),
    ("recurrent_gemma", "RecurrentGemmaForCausalLM", "causal"),
    ("lfm2", "Lfm2ForCausalLM", "causal"),
    ("switch_transformers", "SwitchTransformersForConditionalGeneration", "translation"),
    # Encoders.
    ("bert", "BertForMaskedLM", "masked"),
    ("bert", "BertForSequenceClassification", "classes"),
    ("roberta", "RobertaForMaskedLM", "masked"),
    ("albert", "AlbertForMaskedLM", "masked"),
    ("distilbert", "DistilBertForMaskedLM", "masked"),
    ("electra", "ElectraForMaskedLM", "masked"),
    ("deberta", "DebertaForMaskedLM", "masked"),
    ("deberta-v2", "DebertaV2ForMaskedLM", "masked"),
    ("camembert", "CamembertForMaskedLM", "masked"),
    ("convbert", "ConvBertForMaskedLM", "masked"),
    ("squeezebert", "SqueezeBertForMaskedLM", "masked"),
    ("mobilebert", "MobileBertForMaskedLM", "masked"),
    ("fnet", "FNetForMaskedLM", "unmasked"),
    ("funnel", "FunnelForMaskedLM", "masked"),
    ("longformer", "LongformerForMaskedLM", "masked"),
    ("big_bird", "BigBirdForMaskedLM", "masked"),
    ("nystromformer", "NystromformerForMaskedLM", "unmasked"),
    ("yoso", "YosoForMaskedLM", "masked"),
    ("reformer", "ReformerModelWithLMHead", "unmasked"),
    ("roformer", "RoFormerForMaskedLM", "masked"),
    ("rembert", "RemBertForMaskedLM", "masked"),
    ("xlm", "XLMWithLMHeadModel", "masked"),
    ("modernbert", "ModernBertForMaskedLM", "masked"),
    ("ibert", "IBertForMaskedLM", "masked"),
    ("esm", "EsmForMaskedLM", "masked"),
    ("luke", "LukeForMaskedLM", "masked"),
    ("canine", "CanineForSequenceClassification", "classes"),
    # Encoders with decoders.
    ("t5", "T5ForConditionalGeneration", "translation"),
    ("bart", "BartForConditionalGeneration", "translation"),
    ("mbart", "MBartForConditionalGeneration", "translation"),
    ("pegasus", "PegasusForConditionalGeneration", "translation"),
    ("marian", "MarianMTModel", "translation"),
    ("m2m_100", "M2M100ForConditionalGeneration", "translation"),
    ("led", "LEDForConditionalGeneration", "translation"),
    ("longt5", "LongT5ForConditionalGeneration", "translation"),
    ("umt5", "UMT5ForConditionalGeneration", "translation"),
    ("prophetnet", "ProphetNetForConditionalGeneration", "translation"),
    ("blenderbot", "BlenderbotForConditionalGeneration", "translation"),
    # Sounds, series.
    ("whisper", "WhisperForConditionalGeneration", "spectra"),
    ("wav2vec2", "Wav2Vec2ForSequenceClassification", "waves"),
    ("hubert", "HubertForSequenceClassification", "waves"),
    ("patchtst", "PatchTSTForPrediction", "series"),
    ("patchtsmixer", "PatchTSMixerForPrediction", "series"),
    # Pictures.
    ("vit", "ViTForImageClassification", "pictures"),
    ("deit", "DeiTForImageClassification", "pictures"),
    ("beit", "BeitForImageClassification", "pictures"),
    ("dinov2", "Dinov2ForImageClassification", "pictures"),
    ("swin", "SwinForImageClassification", "pictures"),
    ("convnext", "ConvNextForImageClassification", "pictures"),
    ("resnet", "ResNetForImageClassification", "pictures"),
    ("segformer", "SegformerForImageClassification", "pictures"),
    ("poolformer", "PoolFormerForImageClassification", "pictures"),
    ("regnet", "RegNetForImageClassification", "pictures"),
    ("clip", "CLIPModel", "contrast"),
    ("vit_mae", "ViTMAEForPreTraining", "pixels"),
    ("mobilevit", "MobileViTForImageClassification", "pictures"),
    ("pvt", "PvtForImageClassification", "pictures"),
)

SUBJECTS = tuple(_subject(*model) for model in _MODELS)
