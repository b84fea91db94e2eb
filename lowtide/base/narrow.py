"""What must hold of what a graph says, told to whoever reads on and to mypy: an error where it does not, also under `python -O`."""

from __future__ import annotations

from typing import TypeVar

from lowtide.errors import CheckError

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
