"""Random training programs, eager and optimized side by side: autocast, functions of one's own, views written in place, complex numbers.

    python -m bench.random_networks [--first 0] [--count 260] [--limits]

A number names a program, and gives the same one each time. Four steps are compared to the last bit: losses, parameters, buffers, the
optimizer's state and the random generator. Where no program differs, and the measured peak is within the promised one, that is all.
"""

from __future__ import annotations

import argparse
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from bench.bits import same_bits
from bench.results import Results
from lowtide.cost.profiler import measure_memory

COLUMNS = ("verdict", "programs", "which", "example")
_WIDTH, _ROWS, _STEPS = 8, 4, 4


class _Doubled(torch.autograd.Function):
    """Whose gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1.5)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


Layer = Callable[["Network", nn.ModuleDict, str, Tensor, list[Tensor]], Tensor]


def _linear(net: Network, parts: nn.ModuleDict, name: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    made: Tensor = parts[name](x)
    return made


def _autocast(net: Network, parts: nn.ModuleDict, name: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return ((parts[name](x) @ x.T).softmax(-1) @ x).float()


def _written(net: Network, parts: nn.ModuleDict, name: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    y = x * 1.5
    y[:, ::2].mul_(0.5)
    y[1:, 3:].add_(x[:-1, 3:].detach())
    y.view(-1)[:_WIDTH].tanh_()
    return y


def _spectrum(net: Network, parts: nn.ModuleDict, name: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    found = torch.fft.rfft(x, dim=-1)
    return torch.fft.irfft(found * torch.polar(torch.ones_like(found.real), found.angle() * 0.5), n=_WIDTH, dim=-1)


def _complex(net: Network, parts: nn.ModuleDict, name: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    z = torch.view_as_complex(x.reshape(_ROWS, -1, 2).contiguous()) * torch.complex(net.scale, -net.scale)
    return torch.view_as_real(z * z.conj() + z.exp() * 0.1).flatten(1)


def _attention(net: Network, parts: nn.ModuleDict, name: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    q = parts[name](x).view(1, _ROWS, 2, -1).transpose(1, 2)
    made = functional.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.1 if net.training else 0.0)
    return made.transpose(1, 2).reshape(_ROWS, -1)


def _statistics(net: Network, parts: nn.ModuleDict, name: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - net.mean


def _earlier(net: Network, parts: nn.ModuleDict, name: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    return x + seen[len(seen) // 2] * torch.sigmoid(seen[0])


_LAYERS: dict[str, tuple[Layer, Callable[[], nn.Module] | None]] = {
    "linear": (_linear, lambda: nn.Linear(_WIDTH, _WIDTH)),
    "norm": (_linear, lambda: nn.LayerNorm(_WIDTH)),
    "batch norm": (_linear, lambda: nn.BatchNorm1d(_WIDTH)),
    "dropout": (_linear, lambda: nn.Dropout(0.2)),
    "in place": (_linear, lambda: nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(inplace=True), nn.Hardtanh(inplace=True))),
    "autocast": (_autocast, lambda: nn.Linear(_WIDTH, _WIDTH)),
    "attention": (_attention, lambda: nn.Linear(_WIDTH, _WIDTH)),
    "written": (_written, None),
    "spectrum": (_spectrum, None),
    "complex": (_complex, None),
    "statistics": (_statistics, None),
    "earlier": (_earlier, None),
    "own function": (lambda net, parts, name, x, seen: _Doubled.apply(x), None),
    "straight through": (lambda net, parts, name, x, seen: x + _Straight.apply(x * 3), None),
    "parts": (lambda net, parts, name, x, seen: torch.cat([part.flip(-1) for part in x.chunk(2, -1)], -1), None),
    "sorted": (lambda net, parts, name, x, seen: x.sort(-1).values + x.cumsum(-1) * 0.1, None),
    "chosen": (lambda net, parts, name, x, seen: torch.where(x > x.median(), x, x.expm1().clamp(max=2)), None),
    "drawn": (lambda net, parts, name, x, seen: x + torch.randn_like(x) * 0.01, None),
    "float64": (lambda net, parts, name, x, seen: torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True).float() + x, None),
}  # fmt: skip


class Network(nn.Module):
    """Random layers one after the other."""

    mean: Tensor

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds, self.scale = kinds, nn.Parameter(torch.ones(_WIDTH // 2))
        self.register_buffer("mean", torch.zeros(_WIDTH))
        made = {str(at): maker() for at, kind in enumerate(kinds) if (maker := _LAYERS[kind][1]) is not None}
        self.parts, self.head = nn.ModuleDict(made), nn.Linear(_WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for at, kind in enumerate(self.kinds):
            seen.append(_LAYERS[kind][0](self, self.parts, str(at), seen[-1], seen))
        made: Tensor = self.head(seen[-1])
        return made


_OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, foreach=False),
    lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=False),
    lambda parameters: torch.optim.RMSprop(parameters, 1e-3, foreach=False),
)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=260)
    parser.add_argument("--limits", action="store_true", help="each within 80 %% of eager's peak, where that can be had")
    options = parser.parse_args()
    found: dict[str, list[tuple[int, str]]] = {}
    warnings.simplefilter("ignore")
    for number in range(options.first, options.first + options.count):
        verdict, why = trial(number, options.limits)
        found.setdefault(verdict, []).append((number, why))
        if verdict != "right":
            print(number, verdict, why, flush=True)
    print(Counter({verdict: len(rows) for verdict, rows in found.items()}))
    rows = tuple(
        {"verdict": verdict, "programs": len(rows), "which": " ".join(str(number) for number, _ in rows[:20]), "example": rows[0][1]}
        for verdict, rows in found.items()
    )
    name = "random_networks_limited" if options.limits else "random_networks"
    Results(
        name, "Random training programs, eager and optimized, bit for bit", COLUMNS, rows, ("right: equal, and as small as promised",)
    ).save()


def trial(number: int, limited: bool) -> tuple[str, str]:
    """What becomes of a program, and why."""
    try:
        expected, _ = _run(number, None)
    except RuntimeError as error:
        return "not in eager", str(error)[:300]
    try:
        got, (promised, measured) = _run(number, "80%" if limited else "none")
    except lowtide.BudgetError:
        return trial(number, False)
    except lowtide.LowtideError as error:
        return "refused", str(error)[:300]
    except Exception:
        return "raised", traceback.format_exc()[-300:]
    different = [key for key in expected if not same_bits(expected[key], got[key])]
    if different:
        again, _ = _run(number, None)
        same = all(same_bits(expected[key], again[key]) for key in expected)
        return "different" if same else "eager differs", f"{len(different)} of {len(expected)}: {', '.join(different[:4])}"
    return ("right", "") if measured <= promised else ("more memory", f"{measured} bytes measured, {promised} promised")


def _run(number: int, memory: str | None) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """All that some steps leave, by name, and the bytes above what is resident, promised and measured in the last of them."""
    draw = random.Random(number)
    kinds = draw.choices(list(_LAYERS), k=draw.randint(2, 9))
    make = draw.choice(_OPTIMIZERS)
    torch.manual_seed(number)
    model = Network(kinds)
    optimizer, batches = make(model.parameters()), [(torch.randn(_ROWS, _WIDTH), torch.randint(0, 3, (_ROWS,))) for _ in range(_STEPS)]
    step: Any = None
    if memory is not None:
        step = lowtide.optimize(
            model,
            batches[0],
            loss=_loss,
            optimizer=optimizer,
            memory=None if memory == "none" else memory,
            planning=lowtide.Planning(progress=False),
        )
    found: dict[str, Tensor] = {}
    for at, batch in enumerate(batches):
        if step is None:
            optimizer.zero_grad()
            loss = _loss(model, *batch)
            loss.backward()
            optimizer.step()
        else:
            loss = step(*batch)
        found[f"loss {at}"] = loss.detach()
    found |= {key: item.clone() for key, item in model.state_dict().items()} | {"random state": torch.get_rng_state()}
    for at, entries in optimizer.state_dict()["state"].items():
        found |= {f"state {at}.{key}": item.clone() for key, item in entries.items() if isinstance(item, Tensor)}
    if step is None:
        return found, (0, 0)
    measured = measure_memory(lambda: step(*batches[-1])).above_bytes
    return found, (step.plan.peak_bytes - step.plan.resident_bytes, measured)


if __name__ == "__main__":
    main()
