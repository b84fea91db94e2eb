"""Every operator of torch's own test database, with every sample: called, and trained through, by eager and by lowtide, bit for bit.

    python -m bench.op_db [--only NAME ...] [--missing] [--dtype float32] [--samples 6] [--no-save]
    python -m bench.op_db --dtype autocast --samples 2

`autocast` is float32 under autocast to bfloat16. After the database come operators that are composite or known to autocast, by overload,
with calls made up from their schemas. Training wraps the sample's float inputs as parameters and takes one step of SGD on a weighted sum
of the results. "right", "refused",
"different", "raised" and "dead" are counts of samples; "idle" counts those for which eager differs from itself as soon as a dispatch
mode that does nothing is active: where ATen takes another formula. Operators that give memory as they find it are left out.
Each row goes into the saved table as soon as it is known, and rows of others stay. Needs expecttest; samples of some operators need scipy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import lowtide
from bench.in_values import in_values
from bench.sweep import Row
from bench.torch_db.database import Database, main, precision
from bench.torch_db.made_up import made_up
from bench.torch_db.trial import Verdict, alike, verdict

COLUMNS = ("operator", "mode", "samples", "right", "refused", "different", "raised", "dead", "idle", "why")
MEMORY_AS_FOUND = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_COUNTED = ("right", "refused", "different", "raised", "dead")


def summary(rows: list[Row]) -> tuple[str, ...]:
    """Operators and samples by what became of them, and the reasons for refusals."""
    notes = []
    for mode in ("inference", "training"):
        of = [row for row in rows if row.get("mode") == mode]
        ops = {what: len({row["operator"] for row in of if row.get(what)}) for what in (*_COUNTED, "idle")}
        samples = {what: sum(row.get(what) or 0 for row in of) for what in _COUNTED}
        notes.append(
            f"{mode}: of {len({row['operator'] for row in of})} operators, with at least one sample {_list(ops)}; samples: {_list(samples)}"
        )
    return tuple(notes)


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def entries(database: ModuleType) -> Iterable[Any]:
    """All operators."""
    vars(database)["wrapper_set_seed"] = _called  # it seeds within the call, which no captured step would do
    return [*database.op_db, *made_up()]


def _called(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def full_name(info: Any) -> str:
    """Its name with that of its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def rows(info: Any, dtype: str, most: int) -> Iterator[Row]:
    """All samples of an operator: a row for each mode."""
    yield row(info, dtype, training=False, most=most)
    yield row(info, dtype, training=True, most=most)


def row(info: Any, precise: str, training: bool, most: int) -> Row:
    """All samples of an operator in one mode."""
    dtype, under_autocast = precision(precise)
    autocast = torch.bfloat16 if under_autocast else None
    found: Row = {"mode": "training" if training else "inference", "samples": 0}
    if info.name in MEMORY_AS_FOUND:
        return found | {"why": "gives memory as it finds it"}
    supported = info.supported_backward_dtypes("cpu") if training and info.supports_autograd else info.dtypes
    if dtype not in supported or (training and not info.supports_autograd):
        return found
    try:
        samples = list(info.sample_inputs("cpu", dtype, requires_grad=training))
    except Exception as error:
        return found | {"why": f"no samples: {type(error).__name__}"}
    verdicts = [tried(info, sample, training, autocast) for sample in (samples[:most] if most else samples)]
    counts = Counter(each.what for each, _ in verdicts)
    reasons = dict.fromkeys(each.why for each, _ in verdicts if each.what in ("refused", "raised", "different"))
    found |= {what: counts[what] for what in _COUNTED}
    found["samples"] = sum(counts[what] for what in _COUNTED)
    return found | {"idle": sum(idle for _, idle in verdicts), "why": " | ".join(filter(None, reasons))[:400]}


def tried(info: Any, sample: Any, training: bool, autocast: torch.dtype | None) -> tuple[Verdict, bool]:
    """One sample, and whether an idle mode changes eager's bits."""
    program = Program(info, sample, training, autocast)
    found = verdict(program.eager, program.ours)
    if found.what == "not in eager":
        return found, False
    try:
        return found, not alike(program.eager(), program.idle())
    except Exception:
        return found, True


class Idle(TorchDispatchMode):
    """Does nothing but be active."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Sample(nn.Module):
    """A call of an operator: its differentiable inputs are parameters, its other tensors buffers."""

    def __init__(self, info: Any, sample: Any, training: bool, autocast: torch.dtype | None, device: str = "cpu") -> None:
        super().__init__()
        self.op, self.autocast, self.device = info.op, autocast, device
        self.leaves, self.spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.leaves = list(self.leaves)
        for at, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                held = leaf.detach().clone()
                if training and leaf.requires_grad:
                    self.register_parameter(f"p{at}", nn.Parameter(held))
                else:
                    self.register_buffer(f"b{at}", held)
                self.leaves[at] = None
        self.frozen = tuple(self.leaves)
        self.leaves = None

    def forward(self) -> Any:
        """The operator's results."""
        held = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        leaves = [held.get(f"p{at}", held.get(f"b{at}", leaf)) for at, leaf in enumerate(self.frozen)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            return self.op(*args, **kwargs)


class Program:
    """One sample as a program."""

    def __init__(self, info: Any, sample: Any, training: bool, autocast: torch.dtype | None) -> None:
        self.training, self.given = training, (info, sample, training, autocast)

    def eager(self) -> Any:
        """All that eager leaves."""
        model = Sample(*self.given)
        torch.manual_seed(0)
        if not self.training:
            with torch.no_grad():
                return _copied(model()), _state(model)
        value = loss(model)
        value.backward()
        torch.optim.SGD(model.parameters(), 0.5, foreach=False).step()
        return _copied(value), _state(model)

    def idle(self) -> Any:
        """The same under an idle mode."""
        with Idle():
            return self.eager()

    def ours(self) -> Any:
        """All that lowtide leaves."""
        model = Sample(*self.given)
        given: dict[str, Any] = {"workspaces": False, "progress": False}
        if self.training:
            given |= {"loss": loss, "optimizer": torch.optim.SGD(model.parameters(), 0.5, foreach=False)}
        torch.manual_seed(0)
        step = lowtide.optimize(model, (), **in_values(**given))
        torch.manual_seed(0)
        return _copied(step()), _state(model)


def loss(model: nn.Module) -> torch.Tensor:
    """A weighted sum of all results that have a gradient: no two elements count alike."""
    parts = [part for part in tree_flatten(model())[0] if isinstance(part, torch.Tensor) and part.requires_grad]
    return torch.stack([_weighted(part).to(torch.float64) for part in parts]).sum()


def _weighted(part: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(part) if part.is_complex() else part
    weights = torch.linspace(0.3, 1.7, real.numel(), dtype=torch.float64, device=real.device).reshape(real.shape).to(real.dtype)
    return (real * weights).sum()


def _copied(result: Any) -> Any:
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_flatten(result)[0]]


def _state(model: nn.Module) -> Any:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


DATABASE = Database(
    program="bench.op_db",
    source="common_methods_invocations",
    columns=COLUMNS,
    entries=entries,
    name_of=full_name,
    rows=rows,
    dead={"mode": "training", "dead": 1},
    summary=summary,
    batch=25,
    limit_seconds=240.0,
)

if __name__ == "__main__":
    main(DATABASE, __doc__)
