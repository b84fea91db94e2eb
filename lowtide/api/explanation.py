"""What `explain` hands back: where the peak is and what stands there, what would help and by how much."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.base.units import bytes_text, time_text
from lowtide.ir.graph import Kind
from lowtide.plan.alike import pattern
from lowtide.plan.cost_report import FrontierPoint
from lowtide.plan.kinds import kind_text
from lowtide.plan.snapshot import Snapshot
from lowtide.plan.summary import snapshot_lines

_MODULES = 6  # that are named


@dataclass(frozen=True)
class Remedy:
    """One thing that would help, and how much."""

    what: str  # "order alone", "eviction, +10% time at most"
    peak_bytes: int
    slower: float | None  # than without it, as a share of the time: 0.1; None where that is not known
    arguments: str  # to give to `optimize` for it, "latency=1.1"; "" for none


@dataclass(frozen=True, eq=False)
class Explanation:
    """The peak of a program as it stands, before any optimisation, and what would lower it. No step was run for it."""

    peak: Snapshot  # of eager PyTorch; its tensors, largest first, are those that live then
    resident_bytes: int  # the caller's own, throughout
    time_us: float  # of the program as it stands
    remedies: tuple[Remedy, ...]  # from the cheapest to the leanest; what rounds otherwise, a split loss and micro-batches, comes last
    frontier: tuple[FrontierPoint, ...]  # of all that was found best at something, leanest first
    memory_bytes: int | None  # what it is to fit in, if that was told
    within: Remedy | None  # the fastest way to that, if any was found
    device: str  # whose rates times are by
    training: bool
    workspaces: bool  # temporaries within operators are counted, as these were tried
    dimensions: str  # those along which most is made, by name: "batch (2 to 512; 1.20 GiB), heads of h.*.attn (12; 90.00 MiB)"

    @property
    def peak_bytes(self) -> int:
        """The peak of eager PyTorch, with what is resident."""
        return self.peak.footprint_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the program fits as it stands; None where no memory was told."""
        return None if self.memory_bytes is None else self.peak_bytes <= self.memory_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by what they are for, the most first: "parameters", "optimizer state", "activations", "gradients"..."""
        return {kind_text(kind): nbytes for kind, nbytes in self.peak.by_kind.items() if nbytes}

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes of activations at the peak by the module that made them, the most first."""
        return self.peak.by_module(Kind.ACTIVATION)

    def call(self, remedy: Remedy) -> str:
        return f"lowtide.optimize({', '.join(filter(None, ('model, batch', self._program, remedy.arguments)))})"

    @property
    def verdict(self) -> str:
        """Whether it fits in the memory that was told, and how; "" where none was."""
        if self.memory_bytes is None:
            return ""
        limit, least = bytes_text(self.memory_bytes), min(self.remedies, key=lambda remedy: remedy.peak_bytes)
        if self.fits:
            return f"it fits in {limit} as it stands"
        if self.within is None:
            return f"nothing was found that fits in {limit}; the least is {bytes_text(least.peak_bytes)}, with {self.call(least)}"
        return f"it fits in {limit} by {self.within.what}{_slower(self.within, ', ')}: {self.call(self.within)}"

    def figures(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak_bytes,
            "resident_bytes": self.resident_bytes,
            "time_us": self.time_us,
            "device": self.device,
            "dimensions": self.dimensions,
            "peak": asdict(self.peak),
            "by_kind": self.by_kind,
            "by_module": self.by_module,
            "remedies": [self._remedy_figures(remedy) for remedy in self.remedies],
            "frontier": self.frontier,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "within": None if self.within is None else self._remedy_figures(self.within),
        }

    def _remedy_figures(self, remedy: Remedy) -> dict[str, Any]:
        return asdict(remedy) | {"call": self.call(remedy)}

    def __str__(self) -> str:
        rows = [("what would help", "peak", "", "time", ""), *self.remedy_rows()]
        table = [f"{what:<34}{peak:>12}{share:>10}{time:>9}  {arguments}".rstrip() for what, peak, share, time, arguments in rows]
        return "\n".join([self.headline, *snapshot_lines(self.peak), *self.part_lines(), "", *table, "", *self.foot_lines()])

    @property
    def headline(self) -> str:
        share = f"{bytes_text(self.resident_bytes)} of it the caller's own throughout"
        return f"as it stands: peak {bytes_text(self.peak_bytes)}, {share}; {time_text(self.time_us)} a call"

    def foot_lines(self) -> list[str]:
        """What the figures do not count, and the verdict."""
        notes = ["eviction: tensors are let go while still needed and restored later; numbers stay the same to the last bit"]
        notes = notes if any("eviction" in remedy.what for remedy in self.remedies) else []
        nothing = f"nothing was run: times are by the rates of {self.device}, and temporaries within operators are not counted"
        notes += ["no step was run: times and temporaries are those of operators tried on made-up data" if self.workspaces else nothing]
        return [*notes, *([self.verdict] if self.verdict else [])]

    def part_lines(self) -> list[str]:
        """Who holds the memory at the peak, and along what the program's operators can be cut."""
        kinds = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in self.by_kind.items())
        modules = [f"{name} {bytes_text(nbytes)}" for name, nbytes in self.top_modules.items()]
        more = f", and {len(modules) - _MODULES} more" if len(modules) > _MODULES else ""
        lines = [f"by kind: {kinds}", *([f"activations by module: {', '.join(modules[:_MODULES])}{more}"] if any(self.by_module) else [])]
        return [*lines, *([f"made along dimensions: {self.dimensions}"] if self.dimensions else [])]

    def remedy_rows(self) -> list[tuple[str, str, str, str, str]]:
        """What would help: its name, the peak, how much less that is, how much more time it takes, what to give to `optimize`."""
        rows = []
        for remedy in self.remedies:
            share = f"{1 - remedy.peak_bytes / self.peak_bytes:.0%} less" if self.peak_bytes else ""
            rows.append((remedy.what, bytes_text(remedy.peak_bytes), share, _slower(remedy), remedy.arguments))
        return rows

    @property
    def top_modules(self) -> dict[str, int]:
        """The same by module, those of repeated blocks together ("blocks.*.mlp")."""
        total: Counter[str] = Counter()
        for module, nbytes in self.by_module.items():
            total[pattern(module) or "no module"] += nbytes
        return dict(total.most_common())

    @property
    def _program(self) -> str:
        return "loss=loss, optimizer=optimizer" if self.training else ""


def _slower(remedy: Remedy, before: str = "") -> str:
    return "" if remedy.slower is None else f"{before}{remedy.slower:+.1%}"
