"""Random little programs of views, writes in place and arithmetic: what capture must get right, whatever a user writes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide.problems.order import OrderProblem
from lowtide.schedule.base import Schedule, scheduled

Op = Callable[[Tensor, Tensor, int], Any]  # two tensors and a number; a tensor, several, or None

VIEWS: dict[str, Op] = {
    "transpose": lambda a, b, n: a.transpose(0, -1),
    "select": lambda a, b, n: a[n % a.shape[0]],
    "select_last": lambda a, b, n: a.select(-1, n % a.shape[-1]),
    "narrow": lambda a, b, n: a.narrow(-1, n % a.shape[-1], 1),
    "tail": lambda a, b, n: a[1:],
    "every_other": lambda a, b, n: a[..., ::2],
    "flat": lambda a, b, n: a.view(-1),
    "reshape": lambda a, b, n: a.reshape(2, -1),
    "unsqueeze": lambda a, b, n: a.unsqueeze(n % 2),
    "squeeze": lambda a, b, n: a.squeeze(),
    "expand": lambda a, b, n: a.unsqueeze(0).expand(2, *a.shape),
    "chunk": lambda a, b, n: a.chunk(2, -1),
    "split": lambda a, b, n: a.split([1, a.shape[0] - 1]),
    "unbind": lambda a, b, n: a.unbind(n % a.dim()),
    "diagonal": lambda a, b, n: a.diagonal(),
    "detach": lambda a, b, n: a.detach(),
    "as_strided": lambda a, b, n: a.as_strided((2, 2), (1, 2), n % 3),
    "unfold": lambda a, b, n: a.unfold(-1, 2, 2),
    "view_as": lambda a, b, n: a.view_as(b),
    "real_pairs": lambda a, b, n: a.view(torch.int32),
}
WRITES: dict[str, Op] = {
    "add_": lambda a, b, n: a.add_(b, alpha=n),
    "sub_number": lambda a, b, n: a.sub_(n),
    "mul_": lambda a, b, n: a.mul_(b),
    "copy_": lambda a, b, n: a.copy_(b),
    "assign": lambda a, b, n: a.__setitem__(0, b[0]),
    "assign_number": lambda a, b, n: a.__setitem__((..., n % a.shape[-1]), float(n)),
    "zero_": lambda a, b, n: a.zero_(),
    "fill_": lambda a, b, n: a.fill_(n),
    "fill_tensor": lambda a, b, n: a.fill_(b.sum()),
    "sigmoid_": lambda a, b, n: a.sigmoid_(),
    "relu_": lambda a, b, n: a.relu_(),
    "clamp_": lambda a, b, n: a.clamp_(-n, n),
    "addcmul_": lambda a, b, n: a.addcmul_(b, b, value=n),
    "lerp_": lambda a, b, n: a.lerp_(b, 0.25),
    "masked_fill_": lambda a, b, n: a.masked_fill_(b > 0, n),
    "index_put_": lambda a, b, n: a.__setitem__(torch.tensor([0, a.shape[0] - 1]), b[:2]),
    "index_add_": lambda a, b, n: a.index_add_(0, torch.tensor([0, 0]), b[:2]),
    "mask_assign": lambda a, b, n: a.__setitem__((b > n / 4)[:], 0.5),  # not of a number: that would be control flow
    "out": lambda a, b, n: torch.add(a, b, out=a),
    "out_other": lambda a, b, n: torch.mul(b, n, out=a),
    "bernoulli_": lambda a, b, n: a.bernoulli_(0.5),
    "normal_": lambda a, b, n: a.normal_(),
    "cumsum_": lambda a, b, n: a.cumsum_(0),
    "transpose_": lambda a, b, n: a.transpose_(0, -1),
}
ARITHMETIC: dict[str, Op] = {
    "add": lambda a, b, n: a + b,
    "mul": lambda a, b, n: a * b,
    "rsub": lambda a, b, n: n - a,
    "tanh": lambda a, b, n: torch.tanh(a),
    "sum": lambda a, b, n: a.sum(-1),
    "matmul": lambda a, b, n: a @ b.transpose(0, -1),
    "cat": lambda a, b, n: torch.cat([a, b]),
    "clone": lambda a, b, n: a.clone(),
    "contiguous": lambda a, b, n: a.contiguous(),
    "where": lambda a, b, n: torch.where(a > 0, a, b),
    "flip": lambda a, b, n: a.flip(0),
    "dropout": lambda a, b, n: nn.functional.dropout(a, 0.5),
    "maximum": lambda a, b, n: torch.maximum(a, b),
    "max": lambda a, b, n: a.max(-1),
    "zeros": lambda a, b, n: torch.zeros_like(a),
    "empty_copy": lambda a, b, n: torch.empty_like(a).copy_(b),
    "literal": lambda a, b, n: a * torch.tensor([0.5, n])[n % 2],
    "double": lambda a, b, n: a.double() + b,
    "half": lambda a, b, n: a.to(torch.bfloat16),
}
OPS = {**VIEWS, **WRITES, **ARITHMETIC}


@dataclass(frozen=True)
class Line:
    """`env += OPS[op](env[a], env[b], number)`; picks are taken modulo what is there."""

    op: str
    a: int
    b: int
    number: int
    no_grad: bool

    def run(self, env: list[Tensor]) -> None:
        a, b = env[self.a % len(env)], env[self.b % len(env)]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            made = OPS[self.op](a, b, self.number)
        parts = (made,) if isinstance(made, Tensor) else tuple(made or ())
        env.extend(part for part in parts if part.numel())


@dataclass(frozen=True)
class Script:
    """Lines, and which tensors are given back at the end."""

    lines: tuple[Line, ...]
    results: tuple[int, ...]

    def run(self, env: list[Tensor]) -> list[Tensor]:
        for line in self.lines:
            line.run(env)
        return [env[index % len(env)] for index in self.results]


class Scripted(nn.Module):
    """A module that runs a script on its parameters, its buffers (of which two share a storage), a constant and its batch."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.p = nn.Parameter(_ramp(3, 4))
        self.q = nn.Parameter(_ramp(4) - 1)
        self.register_buffer("c", _ramp(3, 4) + 0.5)
        self.register_buffer("d", _ramp(8))
        self.register_buffer("window", self.d[2:6].view(2, 2))
        self.constant = [_ramp(4, 3)]

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        env = [x, y, self.p, self.q, self.c, self.d, self.window, self.constant[0], self.p * 1.0, x + self.q]
        return self.script.run(env)

    def twin(self) -> Scripted:
        """Another with the same content and the same sharing."""
        return copy.deepcopy(self)


def batch(turn: int = 0) -> tuple[Tensor, Tensor]:
    """Two tensors, the second not contiguous."""
    return _ramp(3, 4) * (turn + 1) - 1, (_ramp(4, 3) - turn).t()


def loss(model: Scripted, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A scalar of all results, and the results."""
    results = model(x, y)
    scalar = sum((result.float().sum() * (place + 1) for place, result in enumerate(results)), start=(model.p * 0.5).sum())
    return (scalar, *results)


@st.composite
def scripts(draw: st.DrawFn, training: bool, max_lines: int = 12) -> Script:
    """Scripts that eager PyTorch runs and whose meaning it defines. Lines that it refuses are left out."""
    picks = st.integers(0, 40)
    ops = st.one_of(st.sampled_from(sorted(VIEWS)), st.sampled_from(sorted(WRITES)), st.sampled_from(sorted(ARITHMETIC)))
    lines = draw(st.lists(st.builds(Line, ops, picks, picks, st.integers(0, 3), st.booleans()), min_size=1, max_size=max_lines))
    results = tuple(draw(st.lists(picks, min_size=1, max_size=3)))
    return Script(_accepted(lines, training), results)


@dataclass(frozen=True)
class RandomOrder:
    """A solver that takes any topological order: each is right, so each must compute the same."""

    seed: int

    def solve(self, problem: OrderProblem) -> Schedule:
        generator = np.random.default_rng(self.seed)
        before = _predecessors(problem)
        left, order = set(range(problem.node_count)), []
        while left:
            ready = sorted(node for node in left if not before[node] & left)
            order.append(int(generator.choice(ready)))
            left.remove(order[-1])
        return scheduled(problem, order, self)


def _predecessors(problem: OrderProblem) -> list[set[int]]:
    pointers, ids = problem.preds
    return [set(ids[pointers[node] : pointers[node + 1]].tolist()) for node in range(problem.node_count)]


def _accepted(lines: Sequence[Line], training: bool) -> tuple[Line, ...]:
    """The lines that run, each after those before it. A refused line may leave a trace, so each trial starts afresh."""
    kept: list[Line] = []
    for line in lines:
        if _runs((*kept, line), training):
            kept.append(line)
    return tuple(kept)


def _runs(lines: tuple[Line, ...], training: bool) -> bool:
    probe = _Probe(lines, ())
    try:
        with torch.set_grad_enabled(training), warnings.catch_warnings():
            warnings.simplefilter("error")
            model = Scripted(probe)
            model(*batch(0)), model(*batch(1))  # the first call may leave something that the second does not stand
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, UserWarning, ZeroDivisionError, _UndefinedError):
        return False
    return True


class _UndefinedError(Exception):
    """PyTorch does not say what such a write does."""


class _Probe(Script):
    """Runs a script and refuses writes whose order of elements would matter."""

    def run(self, env: list[Tensor]) -> list[Tensor]:
        for line in self.lines:
            if line.op in WRITES:
                a, b = env[line.a % len(env)], env[line.b % len(env)]
                places = _places(a)
                same = (a.shape, a.stride(), a.data_ptr()) == (b.shape, b.stride(), b.data_ptr())
                if len(places) < a.numel() or (not same and set(places) & set(_places(b))):
                    raise _UndefinedError
            line.run(env)
        return []


def _places(tensor: Tensor) -> set[int]:
    """The addresses of a tensor's elements."""
    offsets = torch.zeros((), dtype=torch.int64)
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(extent) * stride
    return {tensor.data_ptr() + int(offset) * tensor.element_size() for offset in offsets.flatten()}


def _ramp(*shape: int) -> Tensor:
    count = int(np.prod(shape))
    return torch.linspace(-1, 2, count).reshape(shape)
