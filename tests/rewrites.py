"""Random rewrites of random ordering problems."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from bench.rewrites import Source
from lowtide.problems.order import Task
from tests.problems import Case, cases


class RewrittenCase(NamedTuple):
    """A case, another that was made of it, and what became of each node."""

    old: Case
    new: Case
    moved: tuple[int, ...]


@st.composite
def rewritten_cases(draw: st.DrawFn, max_nodes: int = 5) -> RewrittenCase:
    """One tensor is recomputed or swapped for some of its readers; the case as it was where none can be."""
    old = draw(cases(max_nodes=max_nodes))
    source = Source(old.tensor_bytes, old.tasks, tuple(sorted(old.kept)), old.resident_bytes)
    made = [tensor for task in old.tasks for tensor in task.makes if old.readers(tensor)]
    if not made:
        return RewrittenCase(old, old, tuple(range(len(old.tasks))))
    tensor = draw(st.sampled_from(made))
    late = draw(st.sets(st.sampled_from(sorted(old.readers(tensor))), min_size=1))
    rewritten = draw(st.sampled_from([source.recompute, source.swap]))(tensor, late)
    if rewritten is None:
        return RewrittenCase(old, old, tuple(range(len(old.tasks))))
    made_of = Source.of(rewritten.problem)
    new = Case(made_of.tensor_bytes, made_of.tasks, frozenset(made_of.kept), made_of.resident_bytes)
    return _renumbered(RewrittenCase(old, new, tuple(rewritten.moved.tolist())), draw(st.permutations(range(len(new.tasks)))))


@st.composite
def unrelated_cases(draw: st.DrawFn, max_nodes: int = 6) -> RewrittenCase:
    """Two cases that have nothing in common but that nodes of one are said to be nodes of the other."""
    old, new = draw(cases(max_nodes=max_nodes)), draw(cases(max_nodes=max_nodes))
    count = len(old.tasks)
    targets = draw(st.permutations([*range(len(new.tasks)), *[-1] * count]))
    return RewrittenCase(old, new, tuple(targets[:count]))


def _renumbered(rewritten: RewrittenCase, places: list[int]) -> RewrittenCase:
    """The same with the new nodes in another order."""
    old, new, moved = rewritten
    tasks: dict[int, Task] = {
        places[node]: replace(task, after=tuple(places[before] for before in task.after)) for node, task in enumerate(new.tasks)
    }
    ordered = tuple(tasks[place] for place in range(len(places)))
    return RewrittenCase(old, replace(new, tasks=ordered), tuple(places[node] for node in moved))
