"""Every optimizer of torch's own test database, of timm and of transformers, trained by lowtide and by the plain loop, bit for bit.

    python -m bench.optimizers_db [--only ADAM] [--steps 300] [--no-save]

Each configuration trains the same small network eagerly and as a captured step, with torch's optimizers also fused and over lists. A
scheduler changes the learning rate, and there are steps enough for RAdam to change its formula. One row a configuration that eager PyTorch
runs in this loop:

right      parameters, optimizer state and losses are the same bits after every step
refused    with a CaptureError, whose sentence is in the table
different  the bits differ
raised     any other exception
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import lowtide
from bench import torchvision_shim
from bench.results import Results
from bench.sweep import portable
from lowtide.ir import tree


@dataclass(frozen=True)
class Configuration:
    """One optimizer with its settings."""

    source: str  # "torch", "timm", "transformers"
    name: str
    settings: str
    make: Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Verdict:
    """What became of one configuration."""

    outcome: str
    reason: str = ""


class Matrices(nn.Module):
    """What every optimizer takes, Muon too: matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of three classes."""
        return self.last(functional.relu(self.first(x)))


class Mixed(nn.Module):
    """Matrices, vectors, a convolution's kernel, a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of three classes."""
        return self.body(x.reshape(-1, 2, 6))


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of the loop."""
    return functional.cross_entropy(model(x), y)


def of_torch() -> Iterator[Configuration]:
    """Each input of `torch.testing._internal.common_optimizers.optim_db`, also fused and over lists, `differentiable`, with two groups."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for given in info.optim_inputs_func(device="cpu"):
            for how in ({}, *({each: True} for each in ("foreach", "fused") if each in info.supported_impls)):
                yield _of_torch(info.optim_cls, given.desc, dict(given.kwargs) | how)
        if "differentiable" in info.supported_impls:
            yield _of_torch(info.optim_cls, "differentiable", {"differentiable": True})
        yield Configuration("torch", info.optim_cls.__name__, "two groups", _grouped(info.optim_cls))


def _of_torch(cls: type[torch.optim.Optimizer], what: str, settings: dict[str, Any]) -> Configuration:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        given = {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in settings.items()}
        return cls(model.parameters(), **given)

    said = ", ".join(f"{key}={item}" for key, item in settings.items())
    return Configuration("torch", cls.__name__, said or what, make)


def _grouped(cls: type[torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        return cls([{"params": [first]}, {"params": others, "lr": 0.003}])

    return make


def of_timm() -> Iterator[Configuration]:
    """Each name that `timm.optim` knows, which wants no library of its own."""
    from timm.optim import create_optimizer_v2, list_optimizers

    for name in list_optimizers(exclude_filters=["fused*", "bnb*"]):
        yield Configuration("timm", name, "lr=0.01, weight_decay=0.05", partial(create_optimizer_v2, opt=name, lr=0.01, weight_decay=0.05))
    for name in ("lookahead_sgd", "lookahead_adamw"):
        yield Configuration("timm", name, "lr=0.01", partial(create_optimizer_v2, opt=name, lr=0.01))


def of_transformers() -> Iterator[Configuration]:
    """transformers' own Adafactor."""
    fixed = {"lr": 1e-3, "relative_step": False}
    for settings in ({}, fixed | {"scale_parameter": False}, fixed | {"beta1": 0.9}):
        said = ", ".join(f"{key}={item}" for key, item in settings.items())
        yield Configuration("transformers", "Adafactor", said, partial(_of_transformers, settings))


def _of_transformers(settings: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), **settings)


def workload(configuration: Configuration, network: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and its optimizer, the same at each call."""
    torch.manual_seed(0)
    model = network()
    return model, configuration.make(model)


def train(configuration: Configuration, network: type[nn.Module], steps: int, captured: bool) -> list[Any]:
    """What training leaves behind after each step."""
    model, optimizer = workload(configuration, network)
    width = 6 if network is Matrices else 12
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, width, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(steps)]
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, steps) if optimizer.param_groups[0].get("lr") is not None else None
    step = (
        lowtide.optimize(
            model, data[0], loss=cross_entropy, optimizer=optimizer, planning=lowtide.Planning(workspaces=False, progress=False)
        )
        if captured
        else None
    )
    left = []
    for x, y in data:
        value = step(x, y) if step is not None else _eager(model, optimizer, x, y)
        if schedule is not None:
            schedule.step()
        left.append(copy.deepcopy((value, dict(model.state_dict()), optimizer.state_dict())))
    return left


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = cross_entropy(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def verdict(configuration: Configuration, steps: int) -> Verdict | None:
    """What becomes of one configuration; None where eager PyTorch does not run it."""
    network: type[nn.Module] = Matrices if "muon" in configuration.name.lower() and configuration.source == "torch" else Mixed
    try:
        expected = train(configuration, network, steps, captured=False)
    except Exception:  # whatever it is: it is eager's
        return None
    try:
        found = train(configuration, network, steps, captured=True)
    except lowtide.CaptureError as error:
        return Verdict("refused", str(error))
    except Exception as error:
        return Verdict("raised", f"{type(error).__name__}: {error}")
    for turn, (one, two) in enumerate(zip(expected, found, strict=True)):
        if told := difference(one, two):
            return Verdict("different", f"after step {turn + 1}: {told}")
    return Verdict("right")


def difference(one: Any, two: Any) -> str:
    """Where two nested structures are not the same bits; nothing if they are."""
    ones, twos = tree.flatten(one)[0], tree.flatten(two)[0]
    if [leaf.where for leaf in ones] != [leaf.where for leaf in twos]:
        return "other entries"
    for a, b in zip(ones, twos, strict=True):
        if not _same(a.value, b.value):
            return a.where
    return ""


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return repr(one) == repr(two)
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    ones, twos = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two))
    return torch.equal(ones, twos)


def main() -> None:
    """Run all, print the table, save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="optimizers whose name contains this")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-save", action="store_true", help="only print")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torchvision_shim.install()  # timm and transformers import torchvision
    rows, left_out = [], 0
    for configuration in (*of_torch(), *of_timm(), *of_transformers()):
        if options.only.lower() not in configuration.name.lower():
            continue
        found = verdict(configuration, options.steps)
        left_out += found is None
        if found is not None:
            print(f"{configuration.source} {configuration.name} ({configuration.settings}): {found.outcome} {found.reason}", flush=True)
            row = {"library": configuration.source, "optimizer": configuration.name, "settings": configuration.settings}
            rows.append(row | {"outcome": found.outcome, "reason": portable(found.reason)})
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("right", "refused", "different", "raised")}
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    notes = (f"{len(rows)} configurations: {said}", f"{left_out} more are left out, which eager PyTorch does not run in this loop")
    results = Results("optimizers_db", "Optimizers: captured against eager, bit for bit", tuple(rows[0]), tuple(rows), notes)
    results.print()
    if not options.no_save and not options.only:
        print("saved", results.save())


if __name__ == "__main__":
    main()
