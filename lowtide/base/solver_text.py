"""Solvers as text: of schedulers and placers alike, whose settings are the fields of a dataclass."""

from __future__ import annotations

import dataclasses


def described(solver: object) -> str:
    """A solver with those of its settings that are not what they are by default: "Exact(max_states=1000)"."""
    if not dataclasses.is_dataclass(solver):
        return repr(solver)
    settings = [(each.name, getattr(solver, each.name)) for each in dataclasses.fields(solver) if each.repr and _is_changed(solver, each)]
    return f"{type(solver).__name__}({', '.join(f'{name}={described(value)}' for name, value in settings)})"


def _is_changed(solver: object, each: dataclasses.Field[object]) -> bool:
    default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
    return bool(getattr(solver, each.name) != default)
