"""Every module of torch's own test database, with every sample: two steps of training by eager and by lowtide, bit for bit.

    python -m bench.module_db [--only NAME ...] [--missing] [--dtype float32] [--samples 2] [--no-save]

`--dtype autocast` is float32 under autocast to bfloat16. A module without parameters is given its first float input times a parameter of
ones, so that there is something to train.
Compared are losses, parameters, buffers and the random generator. One row a module; "right", "refused", "different", "raised" and
"dead" are counts of samples. Each row goes into the saved table as soon as it is known,
and rows of others stay. Needs expecttest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import lowtide
from bench.sweep import Row
from bench.torch_db.database import Database, main, precision
from bench.torch_db.trial import Verdict, verdict

COLUMNS = ("module", "samples", "right", "refused", "different", "raised", "dead", "why")
_COUNTED = ("right", "refused", "different", "raised", "dead")


def summary(rows: list[Row]) -> tuple[str, ...]:
    """Samples by what became of them."""
    counts = {what: sum(row.get(what) or 0 for row in rows) for what in _COUNTED}
    return (f"of {sum(counts.values())} samples: " + ", ".join(f"{count} {what}" for what, count in counts.items()),)


def rows(info: Any, dtype: str, most: int) -> Iterator[Row]:
    """All samples of a module."""
    torch.manual_seed(0)
    kind, autocast = precision(dtype)
    try:
        samples = info.module_inputs_func(info, device="cpu", dtype=kind, requires_grad=False, training=True)
    except Exception as error:
        yield {"samples": 0, "why": f"no samples: {type(error).__name__}"}
        return
    verdicts = [tried(info, sample, autocast) for sample in (samples[:most] if most else samples)]
    counts = Counter(each.what for each in verdicts)
    reasons = dict.fromkeys(each.why for each in verdicts if each.what in ("refused", "raised", "different"))
    found = {"samples": sum(counts[what] for what in _COUNTED)} | {what: counts[what] for what in _COUNTED}
    yield found | {"why": " | ".join(filter(None, reasons))[:400]}


def tried(info: Any, sample: Any, autocast: bool) -> Verdict:
    """One sample."""
    return verdict(lambda: trained(info, sample, autocast, captured=False), lambda: trained(info, sample, autocast, captured=True))


class Trainable(nn.Module):
    """A module, and a parameter of ones to multiply its first float input by where it has none of its own."""

    def __init__(self, inner: nn.Module, inputs: list[torch.Tensor], autocast: bool) -> None:
        super().__init__()
        self.inner, self.autocast = inner, autocast
        trains = any(parameter.requires_grad for parameter in inner.parameters())
        self.ones = nn.ParameterList([] if trains else [torch.ones_like(each) for each in inputs if each.is_floating_point()][:1])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's result."""
        ones = iter(self.ones)

        def scaled(item: Any) -> Any:
            floats = isinstance(item, torch.Tensor) and item.is_floating_point()
            one = next(ones, None) if floats else None
            return item if one is None else item * one

        args, kwargs = tree_map(scaled, (args, kwargs))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.inner(*args, **kwargs)


def trained(info: Any, sample: Any, autocast: bool, captured: bool) -> Any:
    """All that two steps leave."""
    torch.manual_seed(0)
    inner = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train()
    if isinstance(inner, nn.modules.lazy.LazyModuleMixin):
        inner(*sample.forward_input.args, **sample.forward_input.kwargs)
    args, kwargs = tree_map(_detached, (sample.forward_input.args, sample.forward_input.kwargs))
    model = Trainable(inner, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)], autocast)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    # Dictionaries go as keyword arguments: a batch is the one or the other.
    batch = kwargs if kwargs and not args else args
    call = loss if not (args and kwargs) else _with_both(kwargs)
    step = (
        lowtide.optimize(model, batch, loss=call, optimizer=optimizer, planning=lowtide.Planning(workspaces=False, progress=False))
        if captured
        else None
    )
    torch.manual_seed(1)
    values = [
        _eager(model, batch, call, optimizer) if step is None else step(**batch) if isinstance(batch, dict) else step(*batch)
        for _ in range(2)
    ]
    return values, dict(model.state_dict()), torch.get_rng_state()


def _with_both(kwargs: dict[str, Any]) -> Any:
    return lambda model, *args: loss(model, *args, **kwargs)


def _eager(model: nn.Module, batch: Any, call: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    value = call(model, **batch) if isinstance(batch, dict) else call(model, *batch)
    value.backward()
    optimizer.step()
    return value.detach()


def loss(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A weighted sum of all results that have a gradient: no two elements count alike."""
    parts = [part for part in tree_leaves(model(*args, **kwargs)) if isinstance(part, torch.Tensor) and part.requires_grad]
    weights = [torch.linspace(0.3, 1.7, part.numel()).reshape(part.shape) for part in parts]
    return torch.stack([(part * weight).sum() for part, weight in zip(parts, weights, strict=True)]).sum()


def _detached(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


DATABASE = Database(
    program="bench.module_db",
    source="common_modules",
    columns=COLUMNS,
    entries=lambda module: module.module_db,
    name_of=lambda info: str(info.name),
    rows=rows,
    dead={"dead": 1},
    summary=summary,
    batch=10,
    limit_seconds=300.0,
)

if __name__ == "__main__":
    main(DATABASE, __doc__)
