"""Is one step for a range the same training at every shape, and does it take what it promised?

    python -m bench.dynamic.equal [--only NAME ...] [--steps 40] [--shapes 30]

Every network is trained for so many steps on batches of random shapes of its range, by eager PyTorch and by lowtide, dropout on: without a
limit, and within two. Losses, parameters, buffers, optimizer state and the random generator's state are compared bit for bit after each
step. Then one step each of so many other shapes is measured under the profiler, and compared with what its plan promised and the limit.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lowtide
from bench import torchvision_shim
from bench.bits import same_bits
from bench.results import Results, with_kept

COLUMNS = (
    "network", "memory", "steps", "shapes", "different", "parts", "members", "seconds_to_step", "measured", "over_limit", "unkept",
    "worst_bytes_off",
)  # fmt: skip
_MIB = 2**20
WHISPER = {
    "vocab_size": 100, "num_mel_bins": 8, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 50, "max_target_positions": 64,
    "dropout": 0.1, "attention_dropout": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A network, its batches by a number for each dimension, and what is said of them."""

    make: Callable[[], nn.Module]
    batch: Callable[..., dict[str, torch.Tensor]]
    dynamic: dict[str, dict[int, Any]]
    ranges: tuple[tuple[int, int, int], ...]  # of each dimension: from, to, by which step shapes are drawn
    loss: Callable[..., Any] = lambda model, **batch: model(**batch).loss
    limits: tuple[str, ...] = ("75%", "60%")  # that it can keep to at the largest shape

    def shape(self, draws: random.Random) -> tuple[int, ...]:
        """A shape of the range."""
        return tuple(draws.randrange(least, most + 1, step) for least, most, step in self.ranges)


def networks() -> dict[str, Trained]:
    """Those that are tried, small."""
    torchvision_shim.install()
    import torchvision
    import transformers as hf

    hf.logging.set_verbosity_error()
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100}
    t5 = hf.T5Config(num_layers=2, d_model=64, d_ff=128, d_kv=16, num_heads=4, vocab_size=100, decoder_start_token_id=0)
    return {
        "gpt2": _text(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=64))),
        "llama": _text(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_key_value_heads=2))),
        "bert": _text(lambda: hf.BertForMaskedLM(hf.BertConfig(**small))),
        "t5": _text(lambda: hf.T5ForConditionalGeneration(t5)),
        "resnet50": _pictures(lambda: torchvision.models.resnet50(num_classes=10), {0: ("rows", 2, 24)}, ((2, 24, 1),), ("85%", "75%")),
        "whisper": _spectra(lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER))),
        "unet": _pictures(_UNet, {0: ("rows", 2, 8), 2: ("side", 32, 96, 4), 3: "side"}, ((2, 8, 1), (32, 96, 4)), ("90%", "80%")),
    }


def _text(make: Callable[[], nn.Module]) -> Trained:
    names = ("input_ids", "attention_mask", "labels")

    def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 100, (rows, length))
        return dict(zip(names, (tokens, torch.ones_like(tokens), tokens.clone()), strict=True))

    dynamic: dict[str, dict[int, Any]] = {name: {0: "rows", 1: "length"} for name in names}
    return Trained(make, batch, dynamic | {"input_ids": {0: ("rows", 2, 16), 1: ("length", 8, 64)}}, ((2, 16, 1), (8, 64, 1)))


def _spectra(make: Callable[[], nn.Module]) -> Trained:
    """Spectra of one length, as Whisper takes them, and texts of others."""

    def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
        return {"input_features": torch.randn(rows, 8, 100), "labels": torch.randint(0, 100, (rows, length))}

    dynamic: dict[str, dict[int, Any]] = {"input_features": {0: ("rows", 2, 8)}, "labels": {0: "rows", 1: ("length", 4, 48)}}
    return Trained(make, batch, dynamic, ((2, 8, 1), (4, 48, 1)))


def _pictures(
    make: Callable[[], nn.Module],
    extents: dict[int, Any],
    ranges: tuple[tuple[int, int, int], ...],
    limits: tuple[str, ...] = ("75%", "60%"),
) -> Trained:
    def batch(rows: int, side: int = 64) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(rows, 3, side, side)}

    return Trained(make, batch, {"x": extents}, ranges, lambda model, x: model(x).square().mean(), limits)


class _UNet(nn.Module):
    """Two levels down and up, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_block(*widths) for widths in ((3, 16), (16, 32), (32, 64)))
        self.up = nn.ModuleList(_block(*widths) for widths in ((96, 32), (48, 16)))
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.down:
            x = block(nn.functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for block, beside in zip(self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), beside], 1))
        return self.head(x)


def _block(wide: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(wide, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(networks()), metavar="NAME")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shapes", type=int, default=30, help="that are measured")
    parser.add_argument("--memory", nargs="+", help='limits, "none" for none; by default none, and two of the network\'s own')
    parser.add_argument("--keep", action="store_true", help="keep the rows of the saved table that are not measured now")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.only:
        limits = options.memory or ["none", *networks()[name].limits]
        for memory in (None if each == "none" else each for each in limits):
            rows.append({"network": name} | trained_row(networks()[name], memory, options.steps, options.shapes))
            print(rows[-1], flush=True)
            results = Results(
                "dynamic_equal", "One step for a range of shapes, bit for bit and byte for byte", COLUMNS,
                with_kept("dynamic_equal", rows, ("network", "memory")) if options.keep else tuple(rows),
                (
                    "different: steps after which something is not equal to the last bit; parts: of the range, captured apart",
                    "unkept: measured peaks more than 1 % and more than 1 MiB off their promise; over_limit: above the limit",
                ),
            )  # fmt: skip
            results.save()
    results.print()


def trained_row(trained: Trained, memory: str | None, steps: int, shapes: int) -> dict[str, Any]:
    """Train twice and compare, then measure."""
    draws = random.Random(0)
    torch.manual_seed(0)
    model = trained.make()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, twin))
    start = time.perf_counter()
    example = trained.batch(*trained.shape(draws))
    step = lowtide.optimize(
        model,
        example,
        loss=trained.loss,
        optimizer=optimizer,
        memory=memory,
        shapes=lowtide.Shapes(dynamic=trained.dynamic),
        planning=lowtide.Planning(progress=False),
    )
    seconds = time.perf_counter() - start
    seen = [trained.shape(draws) for _ in range(steps)]
    different = sum(not _equal_step(step, trained, shape, turn, (model, optimizer), (twin, other)) for turn, shape in enumerate(seen))
    off, over = _measured(step, trained, memory, [trained.shape(draws) for _ in range(shapes)])
    served = step._maker._served  # type: ignore[union-attr]
    return {
        "memory": memory or "", "steps": steps, "shapes": len(set(seen)), "different": different, "parts": len(served),
        "members": max(len(family.members) for each in served for family in each.families), "seconds_to_step": round(seconds, 1),
        "measured": shapes, "over_limit": over, "unkept": sum(bad for _, bad in off), "worst_bytes_off": max(abs(by) for by, _ in off),
    }  # fmt: skip


def _equal_step(step: Any, trained: Trained, shape: tuple[int, ...], seed: int, ours: Any, theirs: Any) -> bool:
    """Whether a step leaves what eager's leaves."""
    batch = trained.batch(*shape)
    torch.manual_seed(seed)
    loss = step(**batch)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    theirs[1].zero_grad()
    expected = trained.loss(theirs[0], **batch)
    expected.backward()
    theirs[1].step()
    pairs = [(loss, expected.detach()), (after, torch.get_rng_state()), *zip(_state(*ours), _state(*theirs), strict=True)]
    return all(same_bits(one, two) for one, two in pairs)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [item for entries in optimizer.state_dict()["state"].values() for item in entries.values()]
    return [*model.state_dict().values(), *(item for item in held if isinstance(item, torch.Tensor))]


def _measured(step: Any, trained: Trained, memory: str | None, shapes: list[tuple[int, ...]]) -> tuple[list[tuple[int, bool]], int]:
    """By shape how many bytes the peak was off its promise, and whether that is too many; and how many were above the limit."""
    limit = step.plan_for(**trained.batch(*(most for _, most, _ in trained.ranges))).eager_peak_bytes * float((memory or "inf%")[:-1]) / 100
    off, over = [], 0
    for shape in shapes:
        batch = trained.batch(*shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measured = step.measure(**batch).peak_bytes
        promised = step.plan_for(**batch).peak_bytes
        off.append((measured - promised, abs(measured - promised) > max(_MIB, promised // 100)))
        over += measured > limit
    return off, over


if __name__ == "__main__":
    main()
