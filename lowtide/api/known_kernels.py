"""Fake kernels believed while the real ones are tried: a capture waits for no trial, and is made again where one shows them to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowtide.cost.lab.laboratory import Call, Laboratory
from lowtide.ir.graph import Node
from lowtide.ir.result_specs import Results, differ


@dataclass(frozen=True)
class KnownKernels:
    """Waits for the trial of each call that is not known: a `Really`."""

    laboratory: Laboratory

    def __call__(self, node: Node, before: Sequence[Node], makes_bytes: int, thought: Results | None) -> Results | None:
        return self.laboratory.results(Call(node, before, makes_bytes))


@dataclass(frozen=True)
class BelievedKernels(KnownKernels):
    """Waits only where nobody has an idea of what a call gives; all others are tried meanwhile."""

    _thoughts: list[tuple[Call, Results]] = field(default_factory=list)

    def __call__(self, node: Node, before: Sequence[Node], makes_bytes: int, thought: Results | None) -> Results | None:
        """What the call really gives, where that is known."""
        call = Call(node, before, makes_bytes)
        if thought is None or not self.laboratory.begin(call):
            return self.laboratory.results(call)
        self._thoughts.append((Call(node), thought))  # without what came before, which may hold on to fakes
        return None

    def rightly(self) -> bool:
        """Whether all that was believed is so; waits for the trials."""
        return not any(differ(thought, real) for call, thought in self._thoughts if (real := self.laboratory.results(call)) is not None)
