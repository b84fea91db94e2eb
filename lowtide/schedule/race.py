"""Of several problems the one of least peak: what a problem cannot win is not searched for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.problems.order import OrderProblem
from lowtide.schedule.base import Schedule, Solver, answers


def schedule_all(problems: Sequence[OrderProblem], solver: Solver) -> list[Schedule]:
    """An order of each problem, searched for as long as it may turn out to be the one of least peak of all, of equal ones the first.

    The problems are searched by turns. One whose proven bound says that it cannot win any more is left with what was found until then: it
    costs little more than its simple orders and cuts. The best of all is what solving each of them would give.
    """
    searches = [_OrderSearch(index, answers(problem, solver)) for index, problem in enumerate(problems)]
    open_ = searches
    while open_:
        open_ = [search for search in open_ if search.go_on()]
        best = min(searches, key=_OrderSearch.rank)
        open_ = [search for search in open_ if search is best or (search.found.lower_bound_bytes, search.index) < best.rank()]
    return [search.found for search in searches]


class _OrderSearch:
    """The search for an order of one problem."""

    def __init__(self, index: int, said: Iterator[Schedule]) -> None:
        self.index = index
        self.found = next(said)
        self._said = said

    def go_on(self) -> bool:
        """A little more search; False where it had come to its end."""
        later = next(self._said, None)
        self.found = later or self.found
        return later is not None

    def rank(self) -> tuple[int, int]:
        """Less is better."""
        return self.found.peak_bytes, self.index
