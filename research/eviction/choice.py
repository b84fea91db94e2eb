"""Which tensor to evict, and how it is to come back: what costs least for the bytes that it saves and for the steps until it is read.

    score = microseconds to come back / (bytes saved * steps until the next use),   the least is evicted first

Bytes saved are exact numbers here, as the sizes are known by now: a tensor's own, less those of what has to stay for its regeneration and
would otherwise be gone by then. Where it can be reloaded, that saves all of them and costs the copies there and back, which nothing
overlaps as the decision comes when the room is wanted.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.remat.problem import RematProblem
from research.eviction.compile_time import Compiled, Regeneration
from research.eviction.live import Decision, Live


class Victim(NamedTuple):
    """A tensor that may be evicted, with the best way back."""

    score: float
    tensor: int
    decision: Decision


@dataclass(frozen=True, eq=False)
class Choice:
    """The analysis that follows when the limit is about to be passed."""

    compiled: Compiled
    problem: RematProblem
    live: Live
    stored: Container[int]  # tensors of which a copy is on the host

    def victims(self, locked: Container[int]) -> list[Victim]:
        """All that may be evicted, each with its best way back."""
        candidates = (self.victim(tensor) for tensor in range(len(self.live.there)) if tensor not in locked)
        return [each for each in candidates if each is not None]

    def victim(self, tensor: int) -> Victim | None:
        """A tensor with its best way back; None where it may not be evicted."""
        live = self.live
        if not live.there[tensor] or live.bytes[tensor] == 0 or live.kept[tensor] or live.producer[tensor] < 0:
            return None
        return min(self._options(tensor), default=None, key=lambda each: each.score)

    def _options(self, tensor: int) -> Iterator[Victim]:
        live = self.live
        wanted, latest = live.next_use(tensor), live.latest_use(tensor)
        steps = wanted - live.position
        if steps <= 0:
            return
        for each in self._regenerations(tensor):
            saved = self._saved_bytes(tensor, each, wanted, latest)
            if each.until >= latest and saved > 0:
                cost_us = sum(float(self.problem.cost_us[node]) for node in each.nodes)
                cost_us += sum(live.decisions[read].cost_us for read in each.reads if not live.there[read])
                yield Victim(cost_us / (saved * steps), tensor, Decision(each.nodes, each.reads, each.until, wanted, latest, cost_us))
        links = self.problem.links
        if links is not None and links.storable[tensor]:
            cost_us = float(links.load_us[tensor]) + (0.0 if tensor in self.stored else float(links.store_us[tensor]))
            yield Victim(cost_us / (live.bytes[tensor] * steps), tensor, Decision((), (), live.bare.node_count, wanted, latest, cost_us))

    def _regenerations(self, tensor: int) -> tuple[Regeneration, ...]:
        """What was found for its next use; after the last one, when only regenerations read it, for that."""
        use = min(self.live.own_use(tensor), len(self.live.uses[tensor]) - 1)
        return self.compiled.regenerations.get((tensor, use), ())

    def _saved_bytes(self, tensor: int, regeneration: Regeneration, wanted: int, latest: int) -> int:
        """What is free until then; 0 where something that the regeneration reads is gone, or cannot be back by then."""
        live = self.live
        away = [live.decisions.get(read) for read in regeneration.reads if not live.there[read]]
        if any(decision is None or decision.until < latest for decision in away):
            return 0
        extended = (read for read in regeneration.reads if live.there[read] and live.last_use(read) < wanted)
        return live.bytes[tensor] - sum(live.bytes[read] for read in extended)
