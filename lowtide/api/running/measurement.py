"""What one run of a step took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredStep:
    """What one step took, as the allocator counts; each number means what the plan's of the same name does."""

    peak_bytes: int  # with what is resident
    resident_bytes: int  # of it what the caller holds throughout: parameters, buffers, optimizer state, the batch
    end_bytes: int  # what the step left, with its results, beside what was there

    @property
    def above_bytes(self) -> int:
        """The peak above what is resident."""
        return self.peak_bytes - self.resident_bytes
