"""Networks of other libraries (diffusers, MONAI, segmentation_models_pytorch, torch_geometric, ...), those of which are installed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bench.coverage.subject import Kwargs, Subject

ResultSpec = tuple[nn.Module, tuple[Any, ...] | Kwargs]


def _images(size: int, count: int = 2, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, size, size)


# diffusers: networks that predict noise, and autoencoders.


def _diffusers(name: str, batch: Callable[[], Kwargs], **config: Any) -> ResultSpec:
    torch.manual_seed(0)
    return getattr(import_module("diffusers"), name)(**config).train(), batch()


def _noised(channels: int = 3, size: int = 16, **more: Any) -> Kwargs:
    return {"sample": _images(size, channels=channels), "timestep": torch.tensor([3, 7]), **more}


def _latents(**more: Any) -> Kwargs:
    return {"hidden_states": _images(8, channels=4), "timestep": torch.tensor([3, 7]), **more}


_BLOCKS = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
_DIFFUSERS: dict[str, Callable[[], ResultSpec]] = {
    "UNet2DModel": lambda: _diffusers(
        "UNet2DModel", _noised, sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **_BLOCKS,
    ),
    "UNet2DConditionModel": lambda: _diffusers(
        "UNet2DConditionModel", lambda: _noised(4, encoder_hidden_states=torch.randn(2, 5, 16)), sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, **_BLOCKS,
    ),
    "AutoencoderKL": lambda: _diffusers(
        "AutoencoderKL", lambda: {"sample": _images(16)}, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "VQModel": lambda: _diffusers(
        "VQModel", lambda: {"sample": _images(16)}, block_out_channels=(16,), norm_num_groups=8, num_vq_embeddings=8
    ),
    "DiTTransformer2DModel": lambda: _diffusers(
        "DiTTransformer2DModel", lambda: _latents(class_labels=torch.tensor([1, 2])), num_attention_heads=2, attention_head_dim=8,
        in_channels=4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    ),
    "PixArtTransformer2DModel": lambda: _diffusers(
        "PixArtTransformer2DModel", lambda: _latents(encoder_hidden_states=torch.randn(2, 5, 16)), num_attention_heads=2,
        attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2, cross_attention_dim=16,
        caption_channels=16, norm_num_groups=4, use_additional_conditions=False,
    ),
    "SD3Transformer2DModel": lambda: _diffusers(
        "SD3Transformer2DModel", lambda: _latents(encoder_hidden_states=torch.randn(2, 5, 16), pooled_projections=torch.randn(2, 16)),
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
        caption_projection_dim=16, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    ),
}  # fmt: skip

# MONAI: networks on volumes and slices.


def _monai(name: str, *batch: torch.Tensor, **config: Any) -> ResultSpec:
    torch.manual_seed(0)
    return getattr(import_module("monai.networks.nets"), name)(**config).train(), batch


def _volume(size: int = 32) -> torch.Tensor:
    return torch.randn(1, 1, size, size, size)


_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_MONAI: dict[str, Callable[[], ResultSpec]] = {
    "UNet": lambda: _monai("UNet", _images(32, channels=1), **_FLAT, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
    "AttentionUnet": lambda: _monai("AttentionUnet", _images(32, channels=1), **_FLAT, channels=(8, 16, 32), strides=(2, 2)),
    "BasicUNetPlusPlus": lambda: _monai("BasicUNetPlusPlus", _images(32, channels=1), **_FLAT, features=(8, 8, 16, 16, 32, 8)),
    "SegResNet": lambda: _monai("SegResNet", _volume(16), init_filters=8, out_channels=2),
    "DynUNet": lambda: _monai(
        "DynUNet", _images(32, channels=1), **_FLAT, kernel_size=(3, 3, 3), strides=(1, 2, 2), upsample_kernel_size=(2, 2),
        filters=(8, 16, 32),
    ),
    "UNETR": lambda: _monai(
        "UNETR", _images(32, channels=1), **_FLAT, img_size=32, feature_size=4, hidden_size=32, mlp_dim=64, num_heads=4
    ),
    "SwinUNETR": lambda: _monai("SwinUNETR", _images(64, 1, 1), **_FLAT, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8)),
    "VNet": lambda: _monai("VNet", _volume(), spatial_dims=3, in_channels=1, out_channels=2),
    "ViT": lambda: _monai(
        "ViT", _images(32, channels=1), in_channels=1, img_size=32, patch_size=8, hidden_size=32, mlp_dim=64, num_layers=2, num_heads=4,
        classification=True, num_classes=3, spatial_dims=2,
    ),
    "DiffusionModelUNet": lambda: _monai(
        "DiffusionModelUNet", _images(16, channels=1), torch.tensor([3, 7]), **{**_FLAT, "out_channels": 1}, channels=(8, 16),
        attention_levels=(False, True), num_res_blocks=1, num_head_channels=8, norm_num_groups=8,
    ),
    "AutoencoderKL": lambda: _monai(
        "AutoencoderKL", _images(16, channels=1), **{**_FLAT, "out_channels": 1}, channels=(8, 16), latent_channels=2, num_res_blocks=1,
        norm_num_groups=8, attention_levels=(False, False),
    ),
    "HighResNet": lambda: _monai("HighResNet", _images(16, channels=1), **_FLAT),
}  # fmt: skip

# segmentation_models_pytorch: decoders on an encoder without downloaded weights.


def _segmentation(name: str) -> ResultSpec:
    torch.manual_seed(0)
    made = getattr(import_module("segmentation_models_pytorch"), name)
    return made(encoder_name="resnet18", encoder_weights=None, classes=2).train(), (_images(64 if name != "PAN" else 128),)


_SEGMENTATION = ("Unet", "UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3Plus", "Linknet", "MAnet", "PAN", "UPerNet", "Segformer")


# torch_geometric: messages along edges.


class _Graphs(nn.Module):
    """Two layers of messages, and the mean over each of two graphs."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        pool = import_module("torch_geometric.nn").global_mean_pool
        for layer in self.layers:
            x = layer(x, edges).relu()
        return self.head(pool(x, batch, size=2))


def _geometric(name: str, *args: Any, **config: Any) -> ResultSpec:
    torch.manual_seed(0)
    cls = getattr(import_module("torch_geometric.nn"), name)
    layers = [cls(size, 16, *args, **config) for size in (8, 16)]
    edges = torch.randint(0, 20, (2, 60))
    return _Graphs(layers).train(), (torch.randn(20, 8), edges, torch.arange(20) // 10)


def _all_pairs(places: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Edges within two molecules of three atoms, and their lengths."""
    edges = torch.tensor([(a, b) for a in range(6) for b in range(6) if a != b and a // 3 == b // 3]).T
    return edges, (places[edges[0]] - places[edges[1]]).norm(dim=-1)


def _isomorphism() -> ResultSpec:
    torch.manual_seed(0)
    cls = import_module("torch_geometric.nn").GINConv
    layers = [cls(nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, 16))) for size in (8, 16)]
    return _Graphs(layers).train(), (torch.randn(20, 8), torch.randint(0, 20, (2, 60)), torch.arange(20) // 10)


_GEOMETRIC: dict[str, Callable[[], ResultSpec]] = {
    "GCNConv": lambda: _geometric("GCNConv"),
    "GATConv": lambda: _geometric("GATConv"),
    "GATv2Conv": lambda: _geometric("GATv2Conv"),
    "SAGEConv": lambda: _geometric("SAGEConv"),
    "TransformerConv": lambda: _geometric("TransformerConv"),
    "GINConv": _isomorphism,
    "SchNet": lambda: (
        import_module("torch_geometric.nn").SchNet(
            hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, interaction_graph=_all_pairs
        ),
        (torch.tensor([6, 1, 1, 8, 1, 6]), torch.randn(6, 3), torch.tensor([0, 0, 0, 1, 1, 1])),
    ),
}

# Adapters of peft on a small language model.


def _adapted(config: str, **settings: Any) -> ResultSpec:
    torch.manual_seed(0)
    peft, transformers = import_module("peft"), import_module("transformers")
    small = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(small)
    tokens = torch.randint(0, 64, (2, 12))
    adapted = peft.get_peft_model(model, getattr(peft, config)(task_type="CAUSAL_LM", **settings))
    return adapted.train(), {"input_ids": tokens, "labels": tokens}


_WHERE = {"target_modules": ["c_attn"]}
_LINEAR = {"target_modules": ["lm_head"]}
_PEFT: dict[str, Callable[[], ResultSpec]] = {
    "LoraConfig": lambda: _adapted("LoraConfig", r=4, **_WHERE, fan_in_fan_out=True),
    "DoRA": lambda: _adapted("LoraConfig", r=4, use_dora=True, **_LINEAR),
    "AdaLoraConfig": lambda: _adapted("AdaLoraConfig", init_r=4, target_r=2, total_step=10, **_LINEAR),
    "LoHaConfig": lambda: _adapted("LoHaConfig", r=4, **_LINEAR),
    "LoKrConfig": lambda: _adapted("LoKrConfig", r=4, **_LINEAR),
    "IA3Config": lambda: _adapted("IA3Config", target_modules=["lm_head"], feedforward_modules=[]),
    "OFTConfig": lambda: _adapted("OFTConfig", oft_block_size=4, **_LINEAR),
    "BOFTConfig": lambda: _adapted("BOFTConfig", boft_block_size=4, **_LINEAR),
    "VeraConfig": lambda: _adapted("VeraConfig", r=4, **_LINEAR),
    "FourierFTConfig": lambda: _adapted("FourierFTConfig", n_frequency=8, **_LINEAR),
    "LNTuningConfig": lambda: _adapted("LNTuningConfig", target_modules=["ln_1"]),
    "PromptTuningConfig": lambda: _adapted("PromptTuningConfig", num_virtual_tokens=4),
    "PrefixTuningConfig": lambda: _adapted("PrefixTuningConfig", num_virtual_tokens=4),
    "PromptEncoderConfig": lambda: _adapted("PromptEncoderConfig", num_virtual_tokens=4),
    "HRAConfig": lambda: _adapted("HRAConfig", r=4, **_LINEAR),
}


def _adapted_llama(config: str, more: Kwargs | None = None, use_cache: bool = True, **settings: Any) -> ResultSpec:
    """Methods that want an `nn.Linear`, or a model of this kind."""
    torch.manual_seed(0)
    peft, transformers = import_module("peft"), import_module("transformers")
    small = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32,
        use_cache=use_cache,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(small)
    tokens = torch.randint(0, 64, (2, 12))
    adapted = peft.get_peft_model(model, getattr(peft, config)(task_type="CAUSAL_LM", **settings))
    return adapted.train(), {"input_ids": tokens, "labels": tokens, **(more or {})}


def _mixed_adapters() -> ResultSpec:
    """Adapters of files, weighed by a network of their own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: f"{folder}/{name}" for name in "01"}
        for path in paths.values():
            adapted, _ = _adapted_llama("LoraConfig", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            adapted.save_pretrained(path)
        return _adapted_llama("XLoraConfig", use_cache=False, hidden_size=32, xlora_depth=2, adapters=paths)


_TASKS = {"task_ids": torch.tensor([0, 1])}
_SETTINGS: dict[str, Kwargs] = {  # of methods that are put beside projections
    "AdamssConfig": {"num_subspaces": 2},
    "BeftConfig": {},
    "C3AConfig": {"block_size": 8},
    "DeftConfig": {"r": 4},
    "DeloraConfig": {"r": 4},
    "FrodConfig": {"progressbar": False},
    "GloraConfig": {"r": 4},
    "GraloraConfig": {"r": 4},
    "HiraConfig": {"r": 4},
    "LilyConfig": {"r": 4},
    "MissConfig": {"r": 4},
    "ShiraConfig": {"r": 4, "random_seed": 0},
    "OSFConfig": {"effective_rank": 4},
    "PeanutConfig": {"r": 4, "depth": 1},
    "PsoftConfig": {"r": 4},
    "PveraConfig": {"r": 4},
    "RandLoraConfig": {"r": 4},
    "RoadConfig": {"group_size": 8},
    "SupertuningConfig": {"sparsity": 0.9},
    "TinyLoraConfig": {"r": 2, "u": 8},
    "UniLoraConfig": {"r": 4, "theta_d_length": 16},
    "VBLoRAConfig": {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2},
    "WaveFTConfig": {"n_frequency": 16},
}
_PEFT |= {
    **{
        name: partial(_adapted_llama, name, target_modules=["v_proj"] if name == "BeftConfig" else ["q_proj", "v_proj"], **settings)
        for name, settings in _SETTINGS.items()
    },
    "PolyConfig": lambda: _adapted_llama("PolyConfig", _TASKS, r=4, n_tasks=2, n_skills=2, target_modules=["q_proj", "v_proj"]),
    "MultitaskPromptTuningConfig": lambda: _adapted_llama("MultitaskPromptTuningConfig", _TASKS, num_tasks=2, num_virtual_tokens=4),
    "AdaptionPromptConfig": lambda: _adapted_llama("AdaptionPromptConfig", adapter_len=4, adapter_layers=1),
    "CartridgeConfig": lambda: _adapted_llama("CartridgeConfig", num_virtual_tokens=4),
    "CPTConfig": lambda: _adapted_llama("CPTConfig", cpt_token_ids=[1, 2, 3], cpt_mask=[1] * 3, cpt_tokens_type_mask=[1, 2, 3]),
    "ShadowConfig": lambda: _adapted_llama("ShadowConfig"),
    "XLoraConfig": _mixed_adapters,
    "TrainableTokensConfig": lambda: _adapted_llama("TrainableTokensConfig", token_indices=[1, 2], target_modules=["embed_tokens"]),
}


# Others.


def _seeded(made: Callable[[], ResultSpec]) -> ResultSpec:
    from bench.torchvision_shim import install

    install()  # several import torchvision
    torch.manual_seed(0)
    model, batch = made()
    return model.train(), batch


def _clip() -> ResultSpec:
    text = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
    return import_module("open_clip").CLIP(32, vision, text), (_images(32), torch.randint(0, 64, (2, 12)))


class _Flow(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        flows = import_module("normflows")
        layers: list[nn.Module] = []
        for _ in range(2):
            if kind == "coupling":
                layers += [
                    flows.flows.AffineCouplingBlock(flows.nets.MLP([2, 16, 16, 4], init_zeros=True)),
                    flows.flows.Permute(4, mode="swap"),
                ]
            else:
                layers += [flows.flows.AutoregressiveRationalQuadraticSpline(4, 1, 8), flows.flows.LULinearPermute(4)]
        self.flow = flows.NormalizingFlow(flows.distributions.DiagGaussian(4), layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.flow.forward_kld(x)
        return loss


class _Equivariant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        o3 = import_module("e3nn.o3")
        self.mix, self.gate = o3.FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1x1o", "4x0e+2x1o"), o3.Linear("4x0e+2x1o", "2x0e")
        self.sphere = o3.spherical_harmonics

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.gate(self.mix(x, self.sphere("1x0e+1x1o", edges, normalize=True)))
        return made


def _words(decoder: bool, **config: Any) -> ResultSpec:
    x = import_module("x_transformers")
    layers = (x.Decoder if decoder else x.Encoder)(dim=32, depth=2, heads=2, **config)
    return x.TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers), (torch.randint(0, 64, (2, 12)),)


def _sentences() -> ResultSpec:
    transformers = import_module("transformers")
    modules = import_module("sentence_transformers.models")
    small = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64)

    class Sentences(nn.Module):
        """A sentence's vector, as SentenceTransformer makes it."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.pooling = transformers.BertModel(small), modules.Pooling(32, "mean")

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            words = self.words(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            made: torch.Tensor = self.pooling({"token_embeddings": words, "attention_mask": attention_mask})["sentence_embedding"]
            return made

    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return Sentences(), {"input_ids": torch.randint(0, 64, (2, 12)), "attention_mask": mask}


def _contrasted(loss: str, **settings: Any) -> ResultSpec:
    """A loss of sentence_transformers around a model of its own, on pairs of sentences."""
    library = import_module("sentence_transformers")
    transformers, modules = import_module("transformers"), import_module("sentence_transformers.models")
    small = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=64)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(small)

        def forward(self, features: Kwargs) -> Kwargs:
            words = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"]).last_hidden_state
            return {**features, "token_embeddings": words}

    model = library.SentenceTransformer(modules=[Words(), modules.Pooling(32, "mean")], device="cpu")
    made = getattr(import_module("sentence_transformers.losses"), loss)(model, **settings)
    texts = [{"input_ids": torch.randint(0, 64, (4, 8)), "attention_mask": torch.ones(4, 8, dtype=torch.long)} for _ in range(2)]
    return made, (texts, torch.rand(4))


_OTHERS: dict[str, Callable[[], ResultSpec]] = {
    "open_clip/CLIP": _clip,
    "normflows/coupling": lambda: (_Flow("coupling"), (torch.randn(6, 4),)),
    "normflows/splines": lambda: (_Flow("splines"), (torch.randn(6, 4),)),
    "e3nn/tensor_product": lambda: (_Equivariant(), (torch.randn(5, 10), torch.randn(5, 3))),
    "x_transformers/decoder": lambda: _words(True),
    "x_transformers/rotary": lambda: _words(True, rotary_pos_emb=True, ff_swish=True, ff_glu=True, use_rmsnorm=True),
    "x_transformers/encoder": lambda: _words(False, rel_pos_bias=True),
    "sentence_transformers/mean": _sentences,
    **{
        f"sentence_transformers/{loss}": partial(_contrasted, loss, **settings)
        for loss, settings in {
            "MultipleNegativesRankingLoss": {},
            "CachedMultipleNegativesRankingLoss": {"mini_batch_size": 2},
            "CosineSimilarityLoss": {},
            "CoSENTLoss": {},
            "ContrastiveLoss": {},
        }.items()
    },
}


def _all() -> dict[str, Callable[[], ResultSpec]]:
    return {
        **{f"diffusers/{name}": made for name, made in _DIFFUSERS.items()},
        **{f"monai/{name}": made for name, made in _MONAI.items()},
        **{f"segmentation_models_pytorch/{name}": partial(_segmentation, name) for name in _SEGMENTATION},
        **{f"torch_geometric/{name}": made for name, made in _GEOMETRIC.items()},
        **{f"peft/{name}": made for name, made in _PEFT.items()},
        **_OTHERS,
    }


SUBJECTS = tuple(Subject(name, partial(_seeded, made)) for name, made in _all().items() if find_spec(name.split("/")[0]) is not None)
