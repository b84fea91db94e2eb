"""Training on the device, by eager and by lowtide: the same bits, and the peak that was promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import lowtide
from bench.bits import same_bits
from bench.models import MODELS
from bench.models.workload import Workload
from bench.on_gpu.ground import Ground, Row, twin
from lowtide.api import compare

_STEPS = 3
_GRAPHED_STEPS = 6  # of which the last are replays


@dataclass(frozen=True)
class Exact:
    """A network, how it is trained, and what stands in for it on a CPU."""

    network: str  # of bench.models, or of the coverage bench where it has a slash
    batch_size: int
    flavour: str  # one of FLAVOURS
    stand_in: str  # of the coverage bench

    @property
    def name(self) -> str:
        """Of the row."""
        return f"exact: {self.network}, {self.flavour}"


CASES = (
    Exact("resnet50", 16, "float32", "timm/resnext26ts"),
    Exact("resnet50", 16, "channels_last", "torchvision/mnasnet0_5"),
    Exact("resnet50", 16, "float32, graph", "timm/resnext26ts"),
    Exact("gpt2", 4, "bf16, graph", "transformers/gpt2/causal"),
    Exact("gpt2", 4, "bf16", "transformers/gpt2/causal"),
    Exact("bert-base", 8, "float32", "transformers/roberta/masked"),
    Exact("vit_b_16", 16, "bf16, flash", "transformers/dinov2/pictures"),
    Exact("vit_b_16", 16, "bf16, efficient", "transformers/dinov2/pictures"),
    Exact("mobilenet_v2", 32, "channels_last", "torchvision/mnasnet0_5"),
    Exact("unet", 4, "bf16", "timm/hrnet_w18_small"),
    Exact("unetplusplus", 2, "float32", "timm/dla34"),
    Exact("transformer", 8, "float32", "torch.nn/attention"),
    Exact("torch.nn/lstm_deep", 0, "float32", "torch.nn/lstm_deep"),  # drops between its layers
    Exact("transformers/smollm3/causal", 0, "bf16", "transformers/smollm3/causal"),
    Exact("transformers/whisper/spectra", 0, "float32", "transformers/whisper/spectra"),
    Exact("timm/coatnet_nano_rw_224", 0, "bf16", "timm/coatnet_nano_rw_224"),
)


def rows(case: Exact, ground: Ground) -> Iterator[Row]:
    """One row: equal or not, promised and measured."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    made = _flavoured(case, ground)
    graph = "graph" in case.flavour
    expected, _ = _trained(twin(made), None, ground, graph)
    got, found = _trained(twin(made), lowtide.optimize, ground, graph)
    different = [key for key in expected | got if key not in expected or key not in got or not same_bits(expected[key], got[key])]
    verdict = "right" if not different else "different"
    if ground.computes_nothing:
        verdict, different = "ran", []
    if different:
        again, _ = _trained(twin(made), None, ground, graph)
        verdict = "eager differs" if any(not same_bits(expected[key], again[key]) for key in expected) else verdict
    yield {"verdict": verdict, "why": ", ".join(different[:3])} | found


def _flavoured(case: Exact, ground: Ground) -> Workload:
    network = case.stand_in if ground.dry else case.network
    made = ground.subject(network) if "/" in network else ground.moved(MODELS[network].build(case.batch_size))
    if case.flavour == "channels_last":
        model: Any = made.model
        batch = tuple(item.contiguous(memory_format=torch.channels_last) if item.ndim == 4 else item for item in made.batch)
        made = Workload(model.to(memory_format=torch.channels_last), batch, made.loss)
    return Workload(made.model, made.batch, partial(_loss, made.loss, case.flavour, ground.device))


def _loss(loss: Callable[..., torch.Tensor], flavour: str, device: str, model: torch.nn.Module, *batch: Any) -> torch.Tensor:
    """The loss under what the flavour says."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    asked = [backend for name, backend in backends.items() if name in flavour]
    with torch.autocast(device, torch.bfloat16, enabled="bf16" in flavour), sdpa_kernel([*asked, SDPBackend.MATH] if asked else list(_ALL)):
        return loss(model, *batch)


def _all() -> tuple[Any, ...]:
    from torch.nn.attention import SDPBackend

    return (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


_ALL = _all()


def _trained(made: Workload, optimize: Callable[..., Any] | None, ground: Ground, graph: bool) -> tuple[dict[str, torch.Tensor], Row]:
    """What some steps leave, by name, and the figures of the step where lowtide made it: as a graph at a rate that falls at each step."""
    settings = {"capturable": ground.on_gpu} if graph else {"foreach": False}
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4, **settings)  # type: ignore[arg-type]
    work = compare.Workload(made.model, made.batch, made.loss, optimizer)
    step = (
        None
        if optimize is None
        else optimize(
            made.model,
            made.batch,
            loss=made.loss,
            optimizer=optimizer,
            planning=lowtide.Planning(progress=False),
            run=lowtide.Run(graph="auto" if graph else "never"),
        )
    )
    call = compare.eager_step(work) if step is None else partial(step, *made.batch)
    torch.manual_seed(1)
    found = {}
    for index in range(_GRAPHED_STEPS if graph else _STEPS):
        found[f"loss {index}"] = call()
        if graph:
            optimizer.param_groups[0]["lr"] *= 0.9
    if graph and ground.on_gpu and step is not None and step.graph.replays < _GRAPHED_STEPS - 3:
        raise ValueError(f"expected replays of a graph, got {step.graph}")
    found |= {f"model {key}": item.clone() for key, item in made.model.state_dict().items() if isinstance(item, torch.Tensor)}
    for index, entries in optimizer.state_dict()["state"].items():
        found |= {f"optimizer {index} {key}": item.clone() for key, item in entries.items() if isinstance(item, torch.Tensor)}
    return found, {} if step is None else _figures(step, call, ground)


def _figures(step: Any, call: Callable[[], Any], ground: Ground) -> Row:
    promised = step.plan.peak_bytes - step.plan.resident_bytes
    return {
        "promised_bytes": promised,
        "measured_bytes": ground.above_bytes(call),
        "reserved_bytes": ground.reserved_bytes(call),
        "operators": len(step.plan.graph.nodes),
        "peak_share": step.plan.peak_bytes / step.plan.eager_peak_bytes,
    }
