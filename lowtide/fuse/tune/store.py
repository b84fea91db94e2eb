"""What kernels took when they were measured, kept on disk by machine and kernel, and shared between networks.

A kernel's key is what its source follows from: operators, shapes, strides, scheme, threads; no names. The first measurement of a key stays,
so that the same kernels are chosen as long as the file is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.cost.cache import Cache
from lowtide.fuse.reform.chains import Part
from lowtide.fuse.reform.join import Costs
from lowtide.fuse.reform.schemes import Scheme, Shape
from lowtide.ir.graph import Arg, Node, Value

_MOST_NS = 3600 * 10**9


def key_of(parts: Sequence[Part], scheme: Scheme | None, threads: int) -> str:
    """What a kernel is, in 32 hexadecimal digits: the same for the same operators on tensors of the same shapes."""
    nodes = [node for part in parts for node in part.nodes]
    number: dict[Value, int] = {}
    text = ";".join(_spelt(node, number) for node in nodes)
    borders = [len(part.nodes) for part in parts]
    return hashlib.sha256(f"{text}|{borders}|{scheme and scheme.name}|{threads}".encode()).hexdigest()[:32]


def _spelt(node: Node, number: dict[Value, int]) -> str:
    def arg(each: Arg) -> str:
        if isinstance(each, Value):
            at = number.setdefault(each, len(number))
            return f"v{at}:{each.dtype}{list(each.shape)}{list(each.stride)}{each.storage.kind.value}"
        return f"({','.join(map(arg, each))})" if isinstance(each, tuple) else repr(each)

    kwargs = ",".join(f"{name}={arg(value)}" for name, value in node.kwargs)
    return f"{node.op}({arg(node.args)},{kwargs})->{','.join(map(arg, node.outputs))}"


@dataclass
class Store:
    """Measured times; what is not there can be measured and added."""

    circumstances: tuple[str, ...]  # processor, compiler and its settings, version of the generator
    known: dict[str, int] = field(default_factory=dict)  # nanoseconds by key

    @property
    def cache(self) -> Cache:
        """The file."""
        return Cache("kernel_times", self.circumstances, 1, _MOST_NS)

    def load(self) -> Store:
        """With what the file holds."""
        self.known = {**self.known, **self.cache.load()}
        return self

    def add(self, times_ns: Mapping[str, int]) -> None:
        """Keep measurements; where a key is known, by this process or another, the first stays."""
        self.known = {**times_ns, **self.known, **self.cache.merge({**times_ns, **self.known})}


@dataclass(frozen=True)
class Measured:
    """Costs that were measured where they are known, else predicted: a `Costs` of `reform`. What is asked for and not known is noted.

    Prediction and measurement are not mixed within one choice: `Measured` scales a prediction by the factor that the part alone was off.
    """

    model: Costs
    store: Store
    threads: int = 1
    exists: Callable[[Sequence[Part], Scheme], bool] = lambda parts, scheme: True  # whether there is such a kernel
    asked: dict[str, tuple[tuple[Part, ...], Scheme | None]] = field(default_factory=dict)

    def alone_us(self, part: Part) -> float:
        """Measured, or predicted."""
        found = self._known((part,), None)
        return self.model.alone_us(part) if found is None else found

    def joined_us(self, parts: Sequence[Part], shape: Shape) -> float | None:
        """Measured, or predicted and scaled; None where there is no kernel."""
        if not self.exists(parts, shape.scheme):
            return None
        found, predicted = self._known(parts, shape.scheme), self.model.joined_us(parts, shape)
        if found is not None or predicted is None:
            return found
        apart = sum(map(self.model.alone_us, parts))
        return predicted * sum(map(self.alone_us, parts)) / apart if apart else predicted

    def _known(self, parts: Sequence[Part], scheme: Scheme | None) -> float | None:
        key = key_of(parts, scheme, self.threads)
        if key in self.store.known:
            return self.store.known[key] / 1e3
        self.asked.setdefault(key, (tuple(parts), scheme))
        return None
