"""What lowtide raises. Every message says what was expected, what came, where, and what to do.

LowtideError
├── CaptureError      the program cannot become a graph: operator and source line
├── BatchError        a batch unlike the captured one: which argument, expected and got
├── StepError         the model or optimizer no longer is what was captured, or cannot run here
├── FormatError       a file or text that does not read: line, or node, and what was expected
├── ShapeError        a size, or an expression over dimensions, that cannot be
├── BudgetError       a limit that no plan meets: the smallest peak found, and what stands in the way
└── CheckError        a graph, order or plan that breaks a rule: its verdict and where
"""

from __future__ import annotations

from typing import TypeVar


class LowtideError(Exception):
    """Base of all errors that lowtide raises on purpose."""


class CaptureError(LowtideError):
    """The program cannot be captured as one graph of operators."""


class BatchError(LowtideError, ValueError):
    """A batch whose structure, shape, dtype or device is not the captured one."""


class StepError(LowtideError, RuntimeError):
    """A step that cannot run: the model or optimizer changed under it, or has no memory behind it."""


class FormatError(LowtideError, ValueError):
    """A file or text that does not follow its format."""


class ShapeError(LowtideError, ValueError):
    """Sizes over dimensions that make no sense: a dimension that is unknown or out of its range, a size that is no whole number."""


class BudgetError(LowtideError):
    """No plan was found within the memory that was asked for, or there can be none."""

    def __init__(self, message: str, smallest_peak_bytes: int, searched: bool = True, smallest_host_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_host_bytes = smallest_host_bytes  # that would have to be pinned; None where it is not the host that is short
        self.smallest_peak_bytes = (
            smallest_peak_bytes  # that was found, with what is resident; where nothing was searched, no plan takes less
        )
        self.searched = searched

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int, bool, int | None]]:
        # So that it survives the way back from a worker process.
        return type(self), (str(self), self.smallest_peak_bytes, self.searched, self.smallest_host_bytes)


class CheckError(LowtideError):
    """A graph, order or plan that an independent check refused."""


T = TypeVar("T")


def of_kind(kind: type[T], thing: object) -> T:
    """The thing. Raises CheckError where it is of another kind; a yes or no is no number."""
    if isinstance(thing, kind) and (kind is bool or not isinstance(thing, bool)):
        return thing
    raise CheckError(f"expected {kind.__name__}, got {type(thing).__name__} {thing!r:.80}")


def there(thing: T | None) -> T:
    """The thing. Raises CheckError where there is none."""
    if thing is None:
        raise CheckError("expected something here, got None")
    return thing
