"""What MAGIS was measured on (its table 2), and what it and others reached there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.models import explicit, get, magis
from bench.models.workload import Entry


@dataclass(frozen=True)
class Limited:
    """What somebody reached: a share of the peak, and the time beyond that without a limit as a share of it."""

    share: float
    overhead: float


@dataclass(frozen=True)
class Known:
    """What is known of a network under other tools, by the limit that was set. Nothing where nobody tells, or the limit was not met."""

    magis: Mapping[str, Limited]  # MAGIS as released, of the lean network, on the same cost model
    eviction: Mapping[float, float]  # overhead by share of memory: eviction with look-ahead alone, no search
    evicted: str = ""  # the network that eviction was tried on


@dataclass(frozen=True)
class Case:
    """A network with the batch of the table."""

    name: str
    published: tuple[Entry, ...]  # as its authors describe it; variants after the first
    lean: Entry  # as MAGIS's code writes it
    batch_size: int
    known: Known
    wanted: tuple[float, float]  # what is wanted of all moves together: overhead at 80 % and at 40 % of the peak


_LEAN: Mapping[str, Entry] = {entry.name.removesuffix(", lean"): entry for entry in magis.ENTRIES}


def _magis(*reached: tuple[float, float]) -> Mapping[str, Limited]:
    """What MAGIS reached at each of its limits, as far as it did."""
    return {limit: Limited(*each) for limit, each in zip(("80 %", "40 %", "+10 %"), reached, strict=False)}


_RESNET = Known(_magis((0.797, 0.378), (0.396, 0.179), (0.203, 0.099)), {0.8: 0.047, 0.4: 0.157}, "resnet50")
_BERT = Known(_magis((0.774, 0.002), (0.309, 0.014), (0.126, 0.1)), {0.8: 0.03, 0.4: 0.188}, "bert-base")
_VIT = Known(_magis((0.787, 0.004), (0.332, 0.021), (0.332, 0.022)), {0.8: 0.015, 0.4: 0.121}, "vit_b_16")
_UNET = Known(_magis((0.798, 0.15), (0.491, 1.05), (0.686, 0.1)), {})
_UNET_PLUS_PLUS = Known(_magis((0.794, 0.13), (0.4, 2.09), (0.558, 0.1)), {})
_GPT_NEO = Known(_magis((0.707, 0.001)), {})

CASES = (
    Case("ResNet-50", (get("resnet50"),), _LEAN["resnet50"], 64, _RESNET, (0.01, 0.06)),
    Case("BERT-base", (explicit.BERT, explicit.BERT_DROPOUT), _LEAN["bert-base"], 32, _BERT, (0.003, 0.02)),
    Case("ViT-base", (explicit.VIT, get("vit_b_16")), _LEAN["vit-base"], 64, _VIT, (0.002, 0.02)),
    Case("U-Net", (get("unet"),), _LEAN["unet"], 32, _UNET, (0.005, 0.05)),
    Case("U-Net++", (get("unetplusplus"),), _LEAN["unetplusplus"], 16, _UNET_PLUS_PLUS, (0.014, 0.09)),
    Case("GPT-Neo-1.3B", (explicit.GPT_NEO_13,), _LEAN["gpt-neo-1.3B"], 32, _GPT_NEO, (0.002, 0.02)),
    Case("BTLM-3B", (explicit.BTLM_3,), _LEAN["btlm-3B"], 32, Known({}, {}), (0.0, 0.02)),
)

NOTES = (
    "a whole training step with plain SGD, captured on the meta device, timed by the roofline of rtx3090; no temporaries of operators",
    "published: the network as its authors describe it; lean: as MAGIS's code has it (no embeddings, heads, biases, batch normalisation)",
    "attention writes its scores out, but in vit_b_16, torchvision's; there is no dropout but where the name says so",
    "shares are of eager PyTorch's peak, parameters included; overheads of the time without recomputation",
    "resident_share: parameters, buffers and batch; floor_share: with the arguments and results of the largest operator: no plan is below",
    "MAGIS as released: after 60 s of search (GPT-Neo: 180 s) on the same rates, with fission; of BERT at +10 % the best of its runs",
    "proven: what no sequence of any graph that was tried takes less than, within the peak of the plan at that limit",
    "recompute, swap: every number as it is; split: with swapping, sets of operators part by part and algebra's rules (exact=False)",
    "eviction: with look-ahead, one pass, no search; eviction_saved: by how much less time recomputation costs here, mean of both limits",
    "MAGIS's paper, on a 3090: at +5 % 25-70 % of the peak, at +10 % 15-60 %; at 80 % of the peak at most +5 %, at 40 % at most +15 %",
)
EFFORT_NOTES = (
    "states: schedules built and costed; states_per_s: by processor time of the search, one thread",
    "planning_s: from the model to the checked plan, by the wall's clock on a shared machine; planning_cpu_s: processor time",
    "no clock ends the search; operators: of the captured step, without views; kept: without recomputation",
)
