"""Ways to do the same work as networks that can be timed beside each other, and what they are kept by.

takes   the stages of a network, and variants of some of them
leaves  one source with a network for each variant; a key for each that says all that its time depends on but the machine
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.cpu.codegen.source import kernel_text, text_of
from lowtide.cpu.codegen.text import ElementOffsets, by_columns
from lowtide.cpu.packed import Target
from lowtide.cpu.stages import Stage

Variant = tuple[Stage, ...]


@dataclass(frozen=True)
class Trial:
    """Variants of a network's stages."""

    columns: Collection[Stage]  # the stages of which threads share columns
    target: Target
    _texts: dict[Stage, str] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Sequence[Stage], target: Target) -> Trial:
        return cls(by_columns(stages, target), target)

    def key(self, variant: Variant) -> str:
        """The same for the same kernels one after the other, wherever they stand and whatever they read."""
        texts = [self._text(stage) for stage in variant]
        return hashlib.sha256("\0".join([*texts, str(self.target)]).encode()).hexdigest()[:32]

    def _text(self, stage: Stage) -> str:
        if stage not in self._texts:
            self._texts[stage] = kernel_text(stage, stage in self.columns, self.target)
        return self._texts[stage]

    def source(self, variants: Mapping[str, Variant], addresses: ElementOffsets) -> str:
        stages = list(dict.fromkeys(stage for variant in variants.values() for stage in variant))
        number = {stage: at for at, stage in enumerate(stages)}
        runs = [[number[stage] for stage in variant] for variant in variants.values()]
        return text_of(stages, self.columns, addresses, self.target, runs)
