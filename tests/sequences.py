"""Small remat problems and sequences, drawn at random: with repeated runs, and with links to a host."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lowtide.problems.order import OrderProblem, Rows, Task
from lowtide.remat.eviction import EvictionResult, ScoreWeights, attempt
from lowtide.remat.problem import Links, RematProblem
from tests.problems import cases, topological_orders

# Rules under which eviction swaps.
RULES = [
    ScoreWeights(1, 1, 0.4, above, cap, weight, lead) for above, cap, weight, lead in ((0, 1, 0.1, 2), (0.5, 9, 0.02, 1), (3, 3, 1, 4))
]


@st.composite
def repeating(draw):
    """A case, its remat problem with some nodes that may not be repeated, and a sequence in some order with some nodes again."""
    case = draw(cases(max_nodes=6))
    n = len(case.tasks)
    makes = np.array([bool(task.makes) for task in case.tasks], np.bool_)
    problem = RematProblem(
        problem=case.problem,
        cost_us=np.array(draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)), np.float64),
        is_view=np.zeros(n, np.bool_),
        repeatable=makes & np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_),
        limits=Rows.of(
            [sorted(draw(st.sets(st.integers(0, n - 1), max_size=1)) - {node}) if draw(st.booleans()) else [] for node in range(n)]
        ),
    )
    order = next(topological_orders(case), ())
    sequence = list(order)
    for _ in range(draw(st.integers(0, 4)) if n else 0):
        place = draw(st.integers(1, len(sequence)))
        wanted = sequence[draw(st.integers(0, place - 1))]
        if makes[wanted]:
            sequence.insert(place, wanted)
    return case, problem, order, sequence


@st.composite
def linked(draw):
    """A remat problem with links to a host, and an order of its nodes. What is there from the start and kept may be offloaded."""
    case = draw(cases(max_nodes=7))
    n, m = len(case.tasks), len(case.tensor_bytes)
    times = st.integers(1, 9)
    maker = {tensor: node for node, task in enumerate(case.tasks) for tensor in task.makes}
    storable = [(tensor in maker) != (tensor in case.kept) and case.tensor_bytes[tensor] > 0 and draw(st.booleans()) for tensor in range(m)]
    offloaded = {tensor for tensor in range(m) if storable[tensor] and tensor not in maker}
    order = next(topological_orders(case), ())
    written = {tensor: draw(st.sampled_from(order)) for tensor in sorted(offloaded) if order and draw(st.booleans())}
    writes = [[tensor for tensor in sorted(case.tasks[node].reads) if written.get(tensor) == node] for node in range(n)]
    problem = RematProblem(
        problem=case.problem,
        cost_us=np.array(draw(st.lists(times, min_size=n, max_size=n)), np.float64),
        is_view=np.zeros(n, np.bool_),
        repeatable=np.array([bool(task.makes) and draw(st.booleans()) for task in case.tasks], np.bool_),
        limits=Rows.of([()] * n),
        links=Links(
            np.array(storable, np.bool_),
            np.array(draw(st.lists(times, min_size=m, max_size=m)), np.float64),
            np.array(draw(st.lists(times, min_size=m, max_size=m)), np.float64),
        ),
        writes=Rows.of(writes),
    )
    return case, problem, order


def evict(*given: Any, **options: Any) -> EvictionResult | None:
    """What an eviction has found."""
    return attempt(*given, **options).result


def stored_chain(length):
    """Forward and backward over a chain of equal layers whose results nobody can make again."""
    tasks = [Task(f"f{i}", makes=(i,), reads=(i - 1,) if i else ()) for i in range(length)]
    tasks += [Task(f"b{i}", makes=(length + i,), reads=(i, *([length + i + 1] if i + 1 < length else []))) for i in reversed(range(length))]
    problem = OrderProblem.of([100] * length + [1] * length, tasks, kept=[length])
    n, m = len(tasks), 2 * length
    links = Links(np.arange(m) < length, np.full(m, 1.0), np.full(m, 1.0))
    return RematProblem(
        problem,
        np.full(n, 10.0),
        np.zeros(n, np.bool_),
        np.zeros(n, np.bool_),
        Rows.of([()] * n),
        links,
    )


def layered(count: int, writers: int = 0) -> RematProblem:
    """A random graph in which each node reads several before it, near and far, so that what goes is dear to make again.

    Behind them so many nodes that write over what one of them reads, and wait for its first run alone.
    """
    rng = random.Random(0)
    reads: list[tuple[int, ...]] = [()]
    for node in range(1, count):
        reads.append(tuple({rng.randint(max(0, node - 40), node - 1) for _ in range(rng.randint(2, 6))}))
    tasks = [Task(str(node), (node,), reads[node]) for node in range(count)]
    over = [rng.randrange(count) for _ in range(writers)]
    tasks += [Task(f"over {node}", after=(node,)) for node in over]
    base = OrderProblem.of([rng.randint(1, 800) for _ in range(count)], tasks)
    return RematProblem(
        problem=base,
        cost_us=np.array([float(rng.randint(1, 1000)) for _ in tasks]),
        is_view=np.zeros(len(tasks), np.bool_),
        repeatable=np.arange(len(tasks)) < count,
        limits=Rows.of([[count + place for place, each in enumerate(over) if each == node] for node in range(len(tasks))]),
    )
