"""What a function returns, as text and back: nested tuples, lists and dictionaries of tensors and plain values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lowtide.errors import FormatError, StepError

Result: TypeAlias = Callable[[Sequence[Any]], Any]
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}


def said_of(result: Result, count: int) -> Any:
    """What a file says of a result with so many tensors. Raises StepError for one of other kinds of containers."""
    tensors = [object() for _ in range(count)]
    try:
        made = result(tensors)
    except Exception as error:  # of a class of the caller's own, which takes tensors alone
        raise StepError(_REFUSED.format(type(error).__name__)) from error
    return _said(made, {id(each): at for at, each in enumerate(tensors)})


def _said(item: Any, tensors: dict[int, int]) -> dict[str, Any]:
    if id(item) in tensors:
        return {"tensor": tensors[id(item)]}
    if type(item) in _PLAIN:
        return {"value": item}
    name = type(item).__name__
    if type(item) is _SEQUENCES.get(name):
        return {name: [_said(each, tensors) for each in item]}
    if type(item) is _MAPPINGS.get(name) and all(type(key) in (str, int) for key in item):
        return {name: [[key, _said(each, tensors)] for key, each in item.items()]}
    raise StepError(_REFUSED.format(type(item).__name__))


def result_of(said: Any, count: int) -> Result:
    """The result that a file says, of so many tensors. Raises FormatError for what can be none."""
    try:
        made = _made(said, list(range(count)))
    except RecursionError:
        raise FormatError("expected a result of a few containers, got one nested deeper than Python goes") from None
    return lambda tensors: made(tensors)


def _made(said: Any, places: Sequence[int]) -> Result:
    match said:
        case {"tensor": int(at), **more} if not more and at in places and type(at) is int:
            return lambda tensors: tensors[at]
        case {"value": value, **more} if not more and type(value) in _PLAIN:
            return lambda tensors: value
        case {"tuple": list(items), **more} if not more:
            parts = [_made(item, places) for item in items]
            return lambda tensors: tuple([part(tensors) for part in parts])
        case {"list": list(items), **more} if not more:
            parts = [_made(item, places) for item in items]
            return lambda tensors: [part(tensors) for part in parts]
        case {"dict": list(pairs), **more} | {"OrderedDict": list(pairs), **more} if not more and all(map(_is_pair, pairs)):
            kind, named = _MAPPINGS[next(iter(said))], [(key, _made(item, places)) for key, item in pairs]
            return lambda tensors: kind([(key, part(tensors)) for key, part in named])
    raise FormatError(f"expected a result of tensors, plain values, tuples, lists and dictionaries, got {str(said)[:80]}")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)


_REFUSED = (
    "save_frozen: expected a result of tensors, plain values, tuples, lists and dictionaries, which a process without the model can make, "
    "got a {}: have a module around the model return one of these, such as `return self.model(ids).logits`"
)
