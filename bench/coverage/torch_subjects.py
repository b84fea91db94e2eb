"""Architectures of timm, torchvision and torch.nn."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.coverage.subject import Kwargs, Subject

_TIMM = (
    ("resnet26", 64),
    ("resnext26ts", 64),
    ("seresnet18", 64),
    ("efficientnet_b0", 64),
    ("mobilenetv3_small_050", 64),
    ("mnasnet_050", 64),
    ("ghostnet_050", 64),
    ("vit_tiny_patch16_224", 224),
    ("deit_tiny_patch16_224", 224),
    ("beit_base_patch16_224", 224),
    ("cait_xxs24_224", 224),
    ("xcit_nano_12_p16_224", 224),
    ("coat_lite_tiny", 224),
    ("coatnet_nano_rw_224", 224),
    ("convit_tiny", 224),
    ("convmixer_768_32", 64),
    ("convnext_atto", 64),
    ("crossvit_tiny_240", 240),
    ("cspresnet50", 64),
    ("davit_tiny", 224),
    ("densenet121", 64),
    ("dla34", 64),
    ("dpn48b", 64),
    ("edgenext_xx_small", 64),
    ("efficientformer_l1", 224),
    ("eva02_tiny_patch14_224", 224),
    ("fastvit_t8", 64),
    ("focalnet_tiny_srf", 224),
    ("gcvit_xxtiny", 224),
    ("hrnet_w18_small", 64),
    ("inception_next_tiny", 64),
    ("levit_128s", 224),
    ("maxvit_nano_rw_256", 256),
    ("mixer_s32_224", 224),
    ("mobilevit_xxs", 64),
    ("mobilevitv2_050", 64),
    ("nfnet_f0", 64),
    ("pit_ti_224", 224),
    ("poolformer_s12", 64),
    ("pvt_v2_b0", 64),
    ("regnetx_002", 64),
    ("repvgg_a0", 64),
    ("res2net50_14w_8s", 64),
    ("resmlp_12_224", 224),
    ("sequencer2d_s", 224),
    ("skresnet18", 64),
    ("swin_tiny_patch4_window7_224", 224),
    ("swinv2_cr_tiny_224", 224),
    ("tiny_vit_5m_224", 224),
    ("twins_svt_small", 224),
    ("visformer_tiny", 224),
    ("volo_d1_224", 224),
    ("xception41", 96),
)

_TORCHVISION = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_y_400mf",
    "resnet18",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "swin_t",
    "swin_v2_t",
    "vgg11_bn",
    "vit_b_16",
    "wide_resnet50_2",
)
_TORCHVISION_SIZES = {"inception_v3": 128, "vit_b_16": 224, "maxvit_t": 224, "alexnet": 96}


def _images(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)),)


def _timm(name: str, size: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from bench.torchvision_shim import install

    install()
    import timm

    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10, drop_path_rate=None).train(), _images(size)


def _torchvision(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from bench.torchvision_shim import install

    install()
    import torchvision

    torch.manual_seed(0)
    weightless: Kwargs = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = getattr(torchvision.models, name)(num_classes=10, **weightless).train()
    return model, _images(_TORCHVISION_SIZES.get(name, 64))


class _Padded(nn.Module):
    """An encoder under a causal mask and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.encoder(x, mask=mask, src_key_padding_mask=padding)


class _Alignment(nn.Module):
    """CTC over what a recurrent layer says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.loss = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 6), nn.CTCLoss()

    def forward(self, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, target_lengths: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(x)[0]).log_softmax(-1).transpose(0, 1)
        return self.loss(logits, targets, lengths, target_lengths)


class _Mixture(nn.Module):
    """A density of torch.distributions, which checks its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, deviation = self.body(x).chunk(2, -1)
        return -torch.distributions.Normal(mean, nn.functional.softplus(deviation) + 0.1).log_prob(y)


class _Spectrum(nn.Module):
    """A filter in the domain of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.randn(8, 9, 2)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=16))


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(3))


def _convolutional(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))


def _padding() -> torch.Tensor:
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 8:] = True
    return padding


_TORCH: dict[str, Any] = {
    "lstm": lambda: (nn.LSTM(16, 32), (_normal(10, 4, 16),)),
    "lstm_deep": lambda: (nn.LSTM(16, 32, 2, bidirectional=True, dropout=0.2, batch_first=True), (_normal(4, 10, 16),)),
    "lstm_projected": lambda: (nn.LSTM(16, 32, proj_size=8), (_normal(10, 4, 16),)),
    "gru": lambda: (nn.GRU(16, 32, 2), (_normal(10, 4, 16),)),
    "rnn": lambda: (nn.RNN(16, 32, 2, nonlinearity="relu"), (_normal(10, 4, 16),)),
    "transformer": lambda: (nn.Transformer(32, 4, 2, 2, 64), (_normal(12, 2, 32), _normal(6, 2, 32))),
    "encoder_masked": lambda: (_Padded(), (_normal(2, 12, 32), _padding())),
    "attention": lambda: (nn.MultiheadAttention(32, 4, dropout=0.1), (_normal(12, 2, 32),) * 3),
    "ctc": lambda: (_Alignment(), (_normal(2, 12, 8), _whole(6, 2, 4), torch.tensor([12, 10]), torch.tensor([4, 3]))),
    "distribution": lambda: (_Mixture(), (_normal(6, 8), _normal(6, 2))),
    "spectrum": lambda: (_Spectrum(), (_normal(4, 8, 16),)),
    "embedding_bag": lambda: (nn.EmbeddingBag(50, 16, mode="mean"), (_whole(50, 4, 6),)),
    "adaptive_softmax": lambda: (nn.AdaptiveLogSoftmaxWithLoss(16, 50, [10, 30]), (_normal(8, 16), _whole(50, 8))),
    "instance_norm": lambda: (_convolutional(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)), _images(16)),
    "batch_norm_cumulative": lambda: (_convolutional(nn.BatchNorm2d(8, momentum=None)), _images(16)),
    "group_norm": lambda: (_convolutional(nn.GroupNorm(2, 8)), _images(16)),
    "rrelu": lambda: (nn.Sequential(nn.Linear(8, 16), nn.RReLU(), nn.Linear(16, 4)), (_normal(4, 8),)),
    "spectral_norm": lambda: (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), nn.Linear(16, 4)), (_normal(4, 8),)),
    "weight_norm": lambda: (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.Linear(16, 4)), (_normal(4, 8),)),
    "bilinear": lambda: (nn.Bilinear(8, 6, 4), (_normal(4, 8), _normal(4, 6))),
    "conv_transpose": lambda: (nn.Sequential(nn.ConvTranspose2d(3, 8, 3, 2), nn.PReLU(), nn.Conv2d(8, 4, 1)), _images(8)),
    "pixel_shuffle": lambda: (
        nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bilinear")),
        _images(8),
    ),
    "fractional_pool": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.FractionalMaxPool2d(2, output_size=4)), _images(16)),
}


def _nn(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: tuple[nn.Module, tuple[torch.Tensor, ...]] = _TORCH[name]()
    return made[0].train(), made[1]


SUBJECTS = (
    *(Subject(f"timm/{name}", partial(_timm, name, size)) for name, size in _TIMM),
    *(Subject(f"torchvision/{name}", partial(_torchvision, name)) for name in _TORCHVISION),
    *(Subject(f"torch.nn/{name}", partial(_nn, name)) for name in _TORCH),
)
