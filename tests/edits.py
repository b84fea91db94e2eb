"""Random edits of what JSON holds."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_ENTRIES = st.sampled_from(
    [None, True, 0, 1, -1, 7, 19, 2**31, 2**63 - 1, 10**400, 0.5, float("nan"), float("inf"), "", "x", "optimal", [], {}]
)
_NESTED = (
    _ENTRIES
    | st.integers()
    | st.lists(_ENTRIES, max_size=3)
    | st.just([[[[]]]])
    | st.dictionaries(st.sampled_from(["step", "a"]), _ENTRIES)
)


def edited(entry: Any, data: st.DataObject) -> Any:
    """A JSON value with one place in it deleted, replaced, inserted or changed within."""
    if isinstance(entry, str) and entry:
        start, end = sorted((data.draw(st.integers(0, len(entry))), data.draw(st.integers(0, len(entry)))))
        return (
            entry[:start] + data.draw(st.text(max_size=3) | st.sampled_from(["9" * 500, "aten.", "(" * 60, "x", ", ", "4"])) + entry[end:]
        )
    if not isinstance(entry, (dict, list)) or not entry or data.draw(st.integers(0, 9)) == 0:
        return data.draw(_NESTED)
    copy = entry.copy()
    key = data.draw(st.sampled_from(sorted(entry))) if isinstance(entry, dict) else data.draw(st.integers(0, len(entry) - 1))
    deed = data.draw(st.sampled_from(["within", "within", "within", "delete", "insert"]))
    if deed == "delete":
        del copy[key]
    elif deed == "within":
        copy[key] = edited(entry[key], data)
    elif isinstance(copy, dict):
        copy[data.draw(st.sampled_from(["peak", "seconds", "", "format"]))] = data.draw(_NESTED)
    else:
        copy.insert(key, data.draw(_NESTED))
    return copy
