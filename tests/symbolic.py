"""Random ordering problems over two dimensions, small enough for brute force at every point."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from lowtide.cost.symbolic import SymbolicProblem
from lowtide.ir.shapes.dimension import Dimension, Dimensions
from lowtide.ir.sizes import Size
from tests.problems import Case, cases
from tests.ranges import S0, S1, value

_COUNTS = st.sampled_from([0, 0, 0, 1, 2, 5])


@dataclass(frozen=True)
class Symbolic:
    """A case whose sizes are expressions: equal ones stay equal, so that the same reuses are permitted."""

    case: Case
    dimensions: Dimensions
    size_of: dict[int, Size]  # by the case's own number

    @property
    def problem(self) -> SymbolicProblem:
        return SymbolicProblem(
            self.dimensions,
            self.case.problem,
            tuple(self.size_of[each] for each in self.case.tensor_bytes),
            (self.size_of[self.case.resident_bytes],),
        )

    def at(self, point: dict[str, int]) -> Case:
        """The case of numbers at a point, by sympy; without workspaces, which are known by measurement alone."""
        number = {each: int(value(size, point)) for each, size in self.size_of.items()}
        tasks = tuple(replace(task, workspace_bytes=0) for task in self.case.tasks)
        return Case(tuple(number[each] for each in self.case.tensor_bytes), tasks, self.case.kept, number[self.case.resident_bytes])


@st.composite
def symbolic_cases(draw: st.DrawFn, max_nodes: int = 6, most: int = 3) -> Symbolic:
    """Sums of a number, of multiples of either dimension, and of products and squares."""
    case = draw(cases(max_nodes))
    parts = (1, S0, S1, S0 * S1, S0**2)
    numbers = {*case.tensor_bytes, case.resident_bytes}
    size_of = {each: sum((draw(_COUNTS) * part for part in parts), start=0) for each in sorted(numbers)}
    leasts = [draw(st.integers(1, 4)) for _ in range(2)]
    dimensions = tuple(Dimension(f"s{place}", least, least + draw(st.integers(0, most))) for place, least in enumerate(leasts))
    return Symbolic(case, dimensions, size_of)
