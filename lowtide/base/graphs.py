"""What graphs of numbers are asked: which numbers belong together, and an order for what waits for one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush


def connected(count: int, joined: Iterable[Sequence[int]]) -> list[int]:
    """For each number below `count` the component that it is in, from 0 as they are met; numbers that are joined are in one."""
    leader = list(range(count))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    for numbers in joined:
        leaders = set(map(find, numbers))
        for each in leaders:
            leader[each] = min(leaders)
    names: dict[int, int] = {}
    return [names.setdefault(find(number), len(names)) for number in range(count)]


def in_turn(waits: Mapping[int, Iterable[int]], turn: Mapping[int, int] | Sequence[int]) -> Iterator[int]:
    """Items behind those that they wait for, otherwise by their turns. Raises graphlib.CycleError where they wait for one another."""
    sorter = TopologicalSorter(waits)
    sorter.prepare()
    ready = [(turn[item], item) for item in sorter.get_ready()]
    heapify(ready)
    while ready:
        item = heappop(ready)[1]
        yield item
        sorter.done(item)
        for other in sorter.get_ready():
            heappush(ready, (turn[other], other))
